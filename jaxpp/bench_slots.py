"""What each slot of a pipeline costs on each rank, measured on one GPU where the others are not there.

A rank's program is compiled with its device at its place in the pipe and mocked neighbours, whose transfers take no
time and bring nothing. The step's tables are arguments, so that one program runs all slots, the F slots alone, the B
slots alone, and none: differences are the slots' times. A second program has more ticks, all idle: what they take is
the overhead of a tick. Inputs that neighbours would send are random numbers.

On emulated devices the others are there, with idle tables.

Legend: S stages, M microbatches, T ticks.
"""

import dataclasses
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpp import costs, executor, hlo, mesh, partition, remat, train
from jaxpp.config import Config
from jaxpp.schedules import IDLE, Schedule, Slots
from jaxpp.slots import Pipeline

Tree = Any
MakeRun = Callable[[Any], train.Run]  # mesh -> run
KINDS = {"all": ("forward", "backward"), "forward": ("forward",), "backward": ("backward",), "none": ()}
RUNS = 5
IDLE_TICKS = 64  # of the second program, more than the schedule has


def check(config: Config) -> None:
    """Check that a stage of a run is one device, and its model all trained. Raises ValueError."""
    for name in ("tensor_parallel", "context_parallel", "expert_parallel"):
        if getattr(config, name) > 1:
            raise ValueError(
                f"{name}={getattr(config, name)}: slots are measured with one device a stage: use --{name} 1"
            )
    if config.lora_rank:
        raise ValueError(f"lora_rank={config.lora_rank}: slots are measured of whole models: use --lora_rank 0")


def mock_neighbours(stages: int) -> None:
    """Let JAX's one GPU be the first of so many; before its first operation."""
    jax.config.update("mock_num_gpu_processes", stages)
    # Otherwise the compiler waits for the others' share of the tuning.
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_shard_autotuning=false"


def devices_with(rank: int, stages: int) -> list[Any]:
    """The devices of a pipe, this process's own at its rank."""
    found = jax.devices()[:stages]
    mine = next(d for d in found if d.process_index == jax.process_index())
    others = [d for d in found if d is not mine]
    return [*others[:rank], mine, *others[rank:]] if jax.process_count() > 1 else found


def keeping_inputs(schedule: Schedule) -> Schedule:
    """A schedule whose arrivals go where nothing is read, so that inputs stay what they were at first."""
    slots_of = {"forward": schedule.forward_inbox, "backward": schedule.backward_inbox}
    tables = {
        kind: dataclasses.replace(table, arrive=np.full_like(table.arrive, slots_of[kind]))
        for kind, table in (("forward", schedule.forward), ("backward", schedule.backward))
    }
    return dataclasses.replace(schedule, **tables)


def with_idle_ticks(schedule: Schedule, more: int) -> Schedule:
    """A schedule with so many ticks after its last, all idle."""

    def longer(table: Slots) -> Slots:
        columns = {f.name: getattr(table, f.name) for f in dataclasses.fields(table)}
        ends = {k: np.full((more, schedule.stages), IDLE, a.dtype) for k, a in columns.items()}
        ends["arrive"] = np.repeat(table.arrive[-1:], more, axis=0)
        return Slots(**{k: np.concatenate([a, ends[k]]) for k, a in columns.items()})

    return dataclasses.replace(schedule, forward=longer(schedule.forward), backward=longer(schedule.backward))


def tables_of(schedule: Schedule, rank: int, kinds: Sequence[str]) -> tuple[Slots, Slots]:
    """The schedule's tables with all idle but one rank's slots of some kinds."""

    def one(kind: str) -> Slots:
        table = getattr(schedule, kind)
        stays = np.zeros_like(table.chunk, bool)
        stays[:, rank] = kind in kinds
        columns = {f.name: np.where(stays, getattr(table, f.name), IDLE) for f in dataclasses.fields(table)}
        return Slots(**columns | {"arrive": table.arrive})

    return one("forward"), one("backward")


def random_like(spec: Tree, slots: int | None = None) -> Tree:
    """`trees.blank` with normal numbers: products of zeros take less power, and so less time."""
    lead = () if slots is None else (slots,)
    draw = lambda a: jax.random.normal(jax.random.key(0), (*lead, *a.shape), jnp.float32).astype(a.dtype)
    return jax.tree.map(draw, spec)


def measure_rank(run: train.Run, build: train.Build, rank: int, batch: dict[str, np.ndarray]) -> dict[str, Any]:
    """Times of one rank's slots, milliseconds, and facts of its program.

    Args: run, of a pipeline whose mesh has this process's device at the rank; batch, of the run, one for all steps.
    Returns: step_ms, by `KINDS`; forward_ms, backward_ms, of a slot; tick_ms, of an idle tick; fixed_ms, of what a step
    does beside its ticks; predicted_ms, the step's from the slots'; temporary_bytes; copies and overlaps, see `hlo`;
    compile_seconds.
    """
    own = run.pipeline.schedule
    where = partition.shardings(train.placed_spec(run, build), run.mesh)
    place = jax.jit(lambda key: partition.stack(build(key), run.layout), out_shardings=where)
    params, data = place(jax.random.key(0)), train.put_batch(run, batch)
    pipeline = dataclasses.replace(run.pipeline, schedule=keeping_inputs(own))
    longer = dataclasses.replace(pipeline, schedule=with_idle_ticks(pipeline.schedule, IDLE_TICKS))
    held = [executor.new_workspace(pipeline, params, data)]

    def compiled(pipeline: Pipeline) -> tuple[Any, Callable]:
        def step(params: Tree, ring: Tree, data: Tree, tables: Tree) -> tuple[Tree, Tree]:
            result = executor.train_step(
                pipeline, params, data, None, ring, tables=(Slots(**tables[0]), Slots(**tables[1])), start=random_like
            )
            return result.workspace, (result.loss, result.grads)

        tables = lambda kinds: tuple(map(vars, tables_of(pipeline.schedule, rank, kinds)))
        program = jax.jit(step, donate_argnums=1).lower(params, held[0], data, tables(KINDS["all"])).compile()

        def run_once(table: Tree) -> Tree:
            held[0], rest = program(params, held[0], data, table)
            return held[0], rest

        return program, lambda kinds: _median_ms(partial(run_once, tables(kinds)))

    start = time.perf_counter()
    program, milliseconds = compiled(pipeline)
    seconds = time.perf_counter() - start
    found = {name: milliseconds(kinds) for name, kinds in KINDS.items()}
    tick = (compiled(longer)[1](KINDS["none"]) - found["none"]) / IDLE_TICKS
    counts = {kind: int((getattr(own, kind).chunk[:, rank] != IDLE).sum()) for kind in KINDS["all"]}
    text, analysis = program.as_text() or "", program.memory_analysis()
    slots_ms = {f"{kind}_ms": (found[kind] - found["none"]) / n for kind, n in counts.items()}
    return {
        "rank": rank,
        "step_ms": found,
        **slots_ms,
        "tick_ms": tick,
        "fixed_ms": found["none"] - tick * own.ticks,
        "predicted_ms": found["none"] + sum(slots_ms[f"{kind}_ms"] * n for kind, n in counts.items()),
        "temporary_bytes": analysis.temp_size_in_bytes if analysis else 0,
        "copies": hlo.large_copies(text),
        "overlaps": hlo.overlaps(text),
        "compile_seconds": seconds,
    }


def measure_bare(run: train.Run, build: train.Build, batch: dict[str, np.ndarray]) -> float:
    """Milliseconds a microbatch of one chunk's forward and backward in a plain loop that adds up gradients: what the
    slots of a rank between the first and the last would take if the pipeline cost nothing. Runs on one device."""
    pipeline = run.pipeline
    _, spec = executor.workspace_spec(pipeline, train.placed_spec(run, build), run.batch_spec())
    block = jax.eval_shape(build, jax.random.key(0)).blocks[0]
    layer = remat.checkpointed(lambda weights, x, known: weights(x, known, None), pipeline.remat)

    def draw() -> tuple[list, Tree, Tree]:
        weights = [random_like(block) for _ in range(run.layout.places)]
        small = lambda a: (0.02 * a).astype(pipeline.precision.compute)
        return jax.tree.map(small, weights), random_like(spec), random_like(spec)

    def loop(weights: list, stream: Tree, cotangent: Tree, micro: dict) -> Tree:
        def chunk(weights: list, x: Tree, known: dict) -> Tree:
            for one in weights:
                x = layer(one, x, known)
            return x

        def add(total: Tree, known: dict) -> tuple[Tree, Tree]:
            _, vjp = jax.vjp(lambda w, x: chunk(w, x, known), weights, stream)
            found, dx = vjp(cotangent)
            return jax.tree.map(lambda a, g: a + g.astype(a.dtype), total, found), dx

        zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, pipeline.precision.accumulate), weights)
        return jax.lax.scan(add, zeros, micro)

    micro = {name: jnp.asarray(a[:, : run.config.batch_size]) for name, a in batch.items()}
    args = (*jax.jit(draw)(), micro)
    compiled = jax.jit(loop).lower(*args).compile()
    return _median_ms(lambda: compiled(*args)) / len(micro["tokens"])


def _median_ms(call: Callable[[], Any]) -> float:
    times = []
    for _ in range(1 + RUNS):
        begun = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - begun)
    return 1e3 * statistics.median(times[1:])


def predict(schedule: Schedule, ranks: Sequence[dict[str, Any]]) -> dict[str, float]:
    """`costs.step` of the whole pipeline from its ranks' slots, with their ticks and what a step does beside them."""
    forward, backward = (np.array([[rank[f"{kind}_ms"]] for rank in ranks]) for kind in KINDS["all"])
    overhead = max(rank["tick_ms"] * schedule.ticks + rank["fixed_ms"] for rank in ranks)
    return costs.step(schedule, forward, backward, overhead)


def random_batch(run: train.Run, vocab: int) -> dict[str, np.ndarray]:
    """A batch of random tokens, int32 [M, B, T] each."""
    shape = (run.sizes.microbatches, run.sizes.rows, run.sizes.length + 1)
    tokens = np.random.default_rng(run.config.seed).integers(0, vocab, shape, np.int32)
    return {"tokens": tokens[..., :-1], "labels": tokens[..., 1:]}


def measure_ranks(
    make_run: MakeRun, build: train.Build, stages: int, ranks: Sequence[int], vocab: int
) -> Iterator[dict[str, Any]]:
    """`measure_rank` of one rank after another; arguments as in `measure`."""
    for rank in ranks:
        run = make_run(mesh.make_mesh(stages, devices=devices_with(rank, stages)))
        yield measure_rank(run, build, rank, random_batch(run, vocab))


def measure(make_run: MakeRun, build: train.Build, stages: int, ranks: Sequence[int], vocab: int) -> dict[str, Any]:
    """Measure ranks of a pipeline one after another, and the plain loop.

    Args: make_run, a mesh -> the run; stages S; ranks, those to measure; vocab, tokens that there are.
    Returns: ranks, of `measure_rank`; bare_ms, of `measure_bare`; and of `predict`, where all ranks were measured.
    """
    found: dict[str, Any] = {"ranks": []}
    for one in measure_ranks(make_run, build, stages, ranks, vocab):
        found["ranks"].append(one)
        print(f"rank {one['rank']}: {_line(one)}", flush=True)
    run = make_run(mesh.make_mesh(stages, devices=jax.devices()))
    found["bare_ms"] = measure_bare(run, build, random_batch(run, vocab))
    print(f"a plain loop over the chunk: {found['bare_ms']:.2f} ms a microbatch", flush=True)
    if list(ranks) == list(range(stages)):
        found |= predict(run.pipeline.schedule, found["ranks"])
        print(f"the pipeline's step, as the simulator says: {found['step_ms']:.1f} ms", flush=True)
    return found | {"sizes": dataclasses.asdict(run.sizes), "device": jax.devices()[0].device_kind}


def _line(rank: dict[str, Any]) -> str:
    step = rank["step_ms"]["all"]
    copies = [f"{count} of {size / 1e6:.0f} MB" for size, count in Counter(rank["copies"]["others"]).items()]
    overlaps, addends = rank["overlaps"], len(rank["copies"]["addends"])
    return (
        f"F {rank['forward_ms']:.2f} ms, B {rank['backward_ms']:.2f}, idle tick {rank['tick_ms']:.3f}, beside the ticks"
        f" {rank['fixed_ms']:.1f}; step {step:.1f} ms, {step / rank['predicted_ms']:.3f} of what its slots say;"
        f" temporary {rank['temporary_bytes'] / 2**30:.2f} GiB; copies in the loop: {', '.join(copies) or 'none'}, and"
        f" {addends} that products add to; sends that overlap a slot {sum(overlaps)} of {len(overlaps)}; compiled in"
        f" {rank['compile_seconds']:.0f} s"
    )
