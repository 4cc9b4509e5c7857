"""The parts of several_gpus.py that run JAX, each in a process of its own; see there for what they are for.

A part is a function (devices, scale, note) that calls note(key, values) for each result as soon as it has it.

Legend: B microbatch size, T sequence, D model; S stages, C chunks a stage, M microbatches.
"""

import dataclasses
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import jax
import jax.numpy as jnp
import numpy as np
import reference
from gpu_wire import permutes
from jax.sharding import NamedSharding, PartitionSpec
from layouts import compiled
from toy import EXACT

import jaxpp
import models
import run as command
from jaxpp import config, executor, mesh, partition, plan, schedules, train, wire
from jaxpp.devices import figures
from models import flops

Note = Callable[[str, dict], None]
DTYPES = ("float32", "bfloat16")


class Shape(NamedTuple):
    """A model to time, and its microbatch: rows B and tokens of a row T."""

    model: models.ModelConfig
    rows: int
    length: int


class Scale(NamedTuple):
    """How large all is. microbatches: the two M that are timed. steps: timed of each. hops: of the wire's two loops."""

    shapes: dict[str, Shape]
    microbatches: tuple[int, int]
    steps: int
    hops: tuple[int, int]


def preset(name: str, **fields: Any) -> models.ModelConfig:
    """A preset with other sizes."""
    return dataclasses.replace(models.config_of(name), **fields)


SCALES = {
    "full": Scale(
        {"llama": Shape(preset("llama3-8b", layers=16), 1, 4096), "gpt2": Shape(preset("gpt2-xl"), 4, 1024)},
        (8, 32),
        4,
        (20, 220),
    ),
    "tiny": Scale(
        {"llama": Shape(preset("llama3-tiny"), 1, 64), "gpt2": Shape(preset("gpt2-tiny"), 1, 64)},
        (8, 16),
        2,
        (2, 22),
    ),
}


class Case(NamedTuple):
    """A training step to time: of which model, its layers, schedule, M, stages and replicas (with ZeRO 1)."""

    key: str
    model: str
    layers: int
    schedule: str
    microbatches: int
    pipe: int
    data: int = 1


def by_schedule(name: str, devices: int, scale: Scale) -> list[list[Case]]:
    """The cases of a model over all devices: every schedule at both M, those that need more memory later."""
    layers = scale.shapes[name].model.layers
    return [
        [Case(f"{name} {kind} M={m}", name, layers, kind, m, devices) for m in scale.microbatches]
        for kind in ("1f1b", "interleaved", "gpipe")
    ]


def by_stages(devices: int, scale: Scale) -> list[list[Case]]:
    """Fewer stages with as many layers each, and as many replicas as devices with the whole batch."""
    layers, most = scale.shapes["llama"].model.layers, scale.microbatches[1]
    stages = [s for s in (1, 2, 4) if s < devices]
    fewer = [Case(f"PP={s}", "llama", layers // devices * s, "1f1b", most, s) for s in stages]
    return [fewer, [Case(f"DP={devices}", "llama", layers, "1f1b", most // devices, 1, devices)]]


def ours(devices: int, scale: Scale) -> list[list[Case]]:
    """The case that a peer is held against."""
    return [by_schedule("llama", devices, scale)[0][1:]]


def on_gpus() -> bool:
    """Whether the devices are GPUs."""
    return jax.default_backend() == "gpu"


def described(case: Case, scale: Scale) -> tuple[train.Run, models.ModelConfig]:
    """The run and the model of a case, bfloat16."""
    shape = scale.shapes[case.model]
    model = dataclasses.replace(shape.model, layers=case.layers, cudnn=on_gpus())
    chosen = config.Config(
        pipeline_parallel=case.pipe,
        virtual_pipeline_parallel=2 if case.schedule == "interleaved" else 1,
        schedule=case.schedule,
        data_parallel=case.data,
        zero_stage=int(case.data > 1),
        batch_size=shape.rows,
        sequence_length=shape.length,
        total_batch_size=case.microbatches * case.data * shape.rows * shape.length,
    )
    sizes = config.sizes(chosen, model.layers, model.positions)
    grid = mesh.make_mesh(sizes.pipe, sizes.data)
    return train.make_run(chosen, sizes, grid, model.layers, loss=models.training_loss(model)), model


def bubbles(run: train.Run, model: models.ModelConfig) -> dict[str, float]:
    """The simulator's part of a step that is bubble: by the FLOPs of each chunk, and with all chunks taken as equal.

    A backward is two forwards; the head runs, forward and backward, beside the last chunk's backward.
    """
    one, two = (flops.per_token(dataclasses.replace(model, layers=n), run.sizes.length) for n in (1, 2))
    block, head = (two - one) // 3, (2 * one - two) // 3
    table, forward_SC = run.pipeline.schedule, run.layout.counts().astype(int) * block
    backward_SC = 2 * forward_SC
    backward_SC[-1, -1] += 3 * head
    return {
        "bubble_simulated": schedules.simulate(table, forward_SC, backward_SC).bubble_fraction,
        "bubble_equal_chunks": schedules.simulate(table, **plan.UNIT).bubble_fraction,
    }


def quick_weights(spec: partition.Placed, at_rest: partition.Placed) -> partition.Placed:
    """Weights made in no time, for steps that are only timed: sines of the place."""

    def leaf(a: jax.ShapeDtypeStruct) -> jax.Array:
        places = [jax.lax.broadcasted_iota(jnp.float32, a.shape, dim) * (1.3 + 0.7 * dim) for dim in range(a.ndim)]
        return 0.03 * jnp.sin(sum(places, jnp.zeros(a.shape)))

    return jax.jit(lambda: jax.tree.map(leaf, spec), out_shardings=at_rest)()


def text(run: train.Run, vocab: int) -> dict[str, jax.Array]:
    """A batch of random tokens [M, DP*B, T], on the devices."""
    rng = np.random.default_rng(0)
    return train.put_batch(run, {k: rng.integers(0, vocab, a.shape, np.int32) for k, a in run.batch_spec().items()})


def timed(run: train.Run, model: models.ModelConfig, step: jax.stages.Compiled, steps: int) -> dict[str, Any]:
    """Run a compiled step: once, then `steps` times by the clock."""
    state, batch, seconds, metrics = (
        train.initial_state(run, command.builder(model), quick_weights),
        text(run, model.vocab_size),
        [],
        {},
    )
    for _ in range(1 + steps):
        start = time.perf_counter()
        state, metrics = step(state, batch)
        jax.block_until_ready(metrics)
        seconds.append(time.perf_counter() - start)
    rate = run.sizes.tokens / statistics.median(seconds[1:])
    told = figures(list(run.mesh.devices.flat), rate * flops.per_token(model, run.sizes.length))
    return {"tokens_per_second": rate, "step_seconds": seconds[1:], "loss": float(metrics["loss"])} | {
        {"peak_bytes_in_use": "peak_bytes_so_far"}.get(name, name): value for name, value in told.items()
    }


def compile_case(case: Case, scale: Scale) -> tuple[train.Run, models.ModelConfig, jax.stages.Compiled, dict]:
    """Compile a case, and say what is known before it runs. Raises ValueError where it would not fit."""
    run, model = described(case, scale)
    planned = plan.make_plan(run, command.builder(model))["bytes_per_device"]["total"]
    room = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", np.inf)
    if planned > room:
        raise ValueError(f"not run: the plan is {planned / 2**30:.0f} GiB a device, there are {room / 2**30:.0f}")
    start = time.perf_counter()
    step = compiled(run, model)
    analysis: Any = step.memory_analysis()
    held = analysis.argument_size_in_bytes + analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    known = {
        "schedule": case.schedule,
        "microbatches": case.microbatches,
        "layers": case.layers,
        "devices": case.pipe * case.data,
        "compile_seconds": time.perf_counter() - start,
        "planned_bytes": planned,
        "compiler_bytes": held + analysis.temp_size_in_bytes,
    }
    return run, model, step, known | bubbles(run, model)


def time_cases(waves: Iterable[list[Case]], scale: Scale, note: Note) -> None:
    """Time cases, wave after wave: those of a wave are compiled side by side before any of them runs."""
    for wave in waves:
        with ThreadPoolExecutor(len(wave)) as pool:
            waiting = [pool.submit(compile_case, case, scale) for case in wave]
        for case, future in zip(wave, waiting, strict=True):
            try:
                run, model, step, known = future.result()
                note(case.key, known | timed(run, model, step, scale.steps))
            except Exception as error:  # one that fails does not stop the others
                note(case.key, {"error": f"{type(error).__name__}: {error}"[:500]})


def layouts_of(devices: int) -> dict[str, dict[str, int]]:
    """The layouts whose gradients are checked: options by name."""
    half = devices // 2
    return {
        f"PP {devices}": {"pipeline_parallel": devices},
        f"PP {half} x DP 2": {"pipeline_parallel": half, "data_parallel": 2},
        f"PP {half} x TP 2": {"pipeline_parallel": half, "tensor_parallel": 2},
        f"PP {devices} x 2 chunks": {"pipeline_parallel": devices, "virtual_pipeline_parallel": 2},
    }


class Placed(NamedTuple):
    """A layout that is ready to be compiled and run: its run, and its parameters and batch on the devices."""

    run: train.Run
    params: partition.Placed
    batch: dict[str, jax.Array]


def lay_out(options: dict, dtype: str, net: Any, model: models.ModelConfig, batch: dict[str, np.ndarray]) -> Placed:
    """Place a model and a batch in a layout."""
    rows, length = batch["tokens"].shape[1:]
    full = {"data_parallel": 1, "sequence_length": length, "total_batch_size": batch["tokens"].size} | options
    chosen = config.Config(dtype=dtype, batch_size=rows // full["data_parallel"], **full)
    sizes = config.sizes(chosen, model.layers, model.positions)
    grid = mesh.make_mesh(sizes.pipe, sizes.data, tensor=sizes.tensor)
    run = train.make_run(chosen, sizes, grid, model.layers, loss=models.training_loss(model))
    return Placed(run, jaxpp.place(net, grid, chosen.virtual_pipeline_parallel), train.put_batch(run, batch))


def compile_layout(placed: Placed) -> jax.stages.Compiled:
    """Compile forward and backward in a layout: (params, batch) -> (loss, grads)."""
    step = lambda params, batch: executor.train_step(placed.run.pipeline, params, batch)[:2]
    return jax.jit(step, compiler_options=EXACT).lower(placed.params, placed.batch).compile()


def errors(loss: Any, grads: Any, want: reference.Reference) -> dict[str, float]:
    """Relative norms: of the loss, of all gradients as one vector, and of the worst leaf."""
    return {
        "loss_error": reference.error([loss], [want.loss]),
        "gradient_error": reference.error(grads, want.grads),
        "leaf_error": max(reference.leaf_errors(grads, want.grads).values()),
    }


def correctness(devices: int, scale: Scale, note: Note) -> None:
    """Loss and gradients of each layout against the unpipelined float32 model on one device, and the permutes.

    The unpipelined model in bfloat16 is noted too: what that dtype alone costs. Programs are compiled side by side and
    run one by one. A CPU's text is not read: it widens what it permutes.
    """
    jax.config.update("jax_default_matmul_precision", "highest")  # float32 is not to be TensorFloat32
    model = preset("llama3-tiny", layers=2 * devices, cudnn=on_gpus())
    net, rng = models.build(jax.random.key(0), model), np.random.default_rng(0)
    made = rng.integers(0, model.vocab_size, (2 * devices, 2, 129), np.int32)
    batch = {"tokens": made[..., :-1], "labels": made[..., 1:]}
    whole = {name: jnp.asarray(a) for name, a in batch.items()}
    want = reference.value_and_grad(net, whole)
    cases = [(name, given, dtype) for name, given in layouts_of(devices).items() for dtype in DTYPES]
    with ThreadPoolExecutor(len(cases)) as pool:
        placed = [lay_out(given, dtype, net, model, batch) for _, given, dtype in cases]
        waiting = [pool.submit(compile_layout, each) for each in placed]
    for (name, _, dtype), each, future in zip(cases, placed, waiting, strict=True):
        try:
            step = future.result()
            loss, grads = jax.device_get(step(each.params, each.batch))
            values: dict[str, Any] = {**errors(loss, jaxpp.unstack(grads), want)}
            if on_gpus():
                values["permutes"] = dict(Counter(permutes(step.as_text() or "")))
        except Exception as error:  # one that fails does not stop the others
            values = {"error": f"{type(error).__name__}: {error}"[:500]}
        note(f"{name}, {dtype}", values)
    alone = reference.value_and_grad(net, whole, compute="bfloat16")
    note("unpipelined, bfloat16", errors(alone.loss, alone.grads, want))


def hop_seconds(dtype: str, devices: int, shape: tuple[int, ...], hops: tuple[int, int]) -> float:
    """Seconds of one send of the library's wire, each rank to the next: the slope between two numbers of hops."""
    grid, link = mesh.make_mesh(devices), wire.Wire(mesh.PIPE, devices, dtype, dtype)
    spec, ranks = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)), PartitionSpec(mesh.PIPE)

    def many(x_BTD: jax.Array, count: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, count, lambda _, x: wire.forward_send(link, spec, x), x_BTD)

    send = jax.jit(jax.shard_map(many, mesh=grid, in_specs=(ranks, PartitionSpec()), out_specs=ranks, check_vma=False))
    whole = jnp.ones((devices * shape[0], *shape[1:]), dtype)
    x, found = jax.device_put(whole, NamedSharding(grid, ranks)), []
    for count in hops:
        seconds = []
        for _ in range(6):
            start = time.perf_counter()
            send(x, jnp.int32(count)).block_until_ready()
            seconds.append(time.perf_counter() - start)
        found.append(statistics.median(seconds[1:]))
    return (found[1] - found[0]) / (hops[1] - hops[0])


def hops(devices: int, scale: Scale, note: Note) -> None:
    """The time of a hop of the stream of each model, by dtype."""
    for name, shape in scale.shapes.items():
        stream = (shape.rows, shape.length, shape.model.dim)
        for dtype in DTYPES:
            seconds, size = hop_seconds(dtype, devices, stream, scale.hops), prod(stream) * jnp.dtype(dtype).itemsize
            values = {"seconds": seconds, "bytes": size, "bytes_per_second": size / seconds}
            note(f"{name} {dtype}", values)


PARTS: dict[str, Callable[[int, Scale, Note], None]] = {
    "correctness": correctness,
    "llama": lambda devices, scale, note: time_cases(by_schedule("llama", devices, scale), scale, note),
    "ours": lambda devices, scale, note: time_cases(ours(devices, scale), scale, note),
    "scaling": lambda devices, scale, note: time_cases(by_stages(devices, scale), scale, note),
    "wire": hops,
    "gpt2": lambda devices, scale, note: time_cases(by_schedule("gpt2", devices, scale), scale, note),
}
