"""What a run will cost, from shapes alone: nothing is allocated on a device and no device is needed.

Legend: S stages, C chunks a stage, T ticks.
"""

from dataclasses import replace
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxpp import costs, executor, losses, partition, render, schedules, wire
from jaxpp.mesh import count
from jaxpp.partition import Placed
from jaxpp.train import Build, Run, halves_spec, parameter_count, placed_spec

UNIT = {"forward_cost": 1, "backward_cost": 2}  # a backward is two products for each one of the forward


def _bytes(tree: Any, dtype: str | None = None) -> int:
    return sum(prod(a.shape) * jnp.dtype(dtype or a.dtype).itemsize for a in jax.tree.leaves(tree))


def make_plan(run: Run, build: Build, per_host: int = 8) -> dict[str, Any]:
    """The plan as plain data.

    Args: per_host, devices of a host.
    Keys: ticks; bubble_fraction, with a backward of twice a forward; in_flight, microbatches of each rank, in units of
    the rank's whole share of layers; layers_per_stage; parameters, and the trained ones of them; wire_dtype;
    wire_bytes_per_hop, of one send; mesh, sizes of its axes; hosts; across_hosts, the axes whose neighbours are on
    different hosts; bytes_per_device, see `bytes_per_device`.
    """
    pipeline, schedule = run.pipeline, run.pipeline.schedule
    spec, base = halves_spec(run, build)
    ring, stream = executor.workspace_spec(pipeline, spec, run.batch_spec(), run.key_spec(), base)
    on_wire = wire.on_wire(pipeline.wire, stream)
    cost = dict(UNIT, backward_cost=3) if pipeline.remat == "full" else UNIT
    simulation = schedules.simulate(schedule, **cost)
    mesh, parts = run.sizes.mesh, run.sizes.tensor if run.config.sequence_parallel else 1
    reach = dict(zip(mesh, (prod(list(mesh.values())[i:]) for i in range(len(mesh))), strict=True))
    return {
        "schedule": schedule.name,
        "stages": run.sizes.pipe,
        "chunks": schedule.chunks,
        "data_parallel": run.sizes.data,
        "mesh": mesh,
        "hosts": -(-prod(mesh.values()) // per_host),
        "across_hosts": [axis for axis, n in mesh.items() if n > 1 and reach[axis] > per_host],
        "microbatches": run.sizes.microbatches,
        "tokens_per_step": run.sizes.tokens,
        "ticks": schedule.ticks,
        "bubble_fraction": simulation.bubble_fraction,
        "in_flight": [n / schedule.chunks for n in schedule.in_flight()],
        "layers_per_stage": run.layout.layers_per_stage(),
        "parameters": parameter_count(placed_spec(run, build)),
        "trained_parameters": parameter_count(spec),
        "wire_dtype": pipeline.precision.wire,
        "wire_bytes_per_hop": _bytes(on_wire) // parts,
        "bytes_per_device": bytes_per_device(run, spec, base, ring, stream),
    }


def measured(run: Run, build: Build, found: costs.Costs) -> dict[str, Any]:
    """What a step takes, from measured costs, and with the layers balanced by them; as plain data.

    Keys: device; costs_ms, see `costs.Costs`; step_ms and bubble_fraction, without the optimizer, and as if transfers
    took no longer than the slots beside them; balanced, the same with layer_split and bytes_per_device, the total.
    """
    schedule = run.pipeline.schedule
    layout = costs.balanced(schedule, sum(run.layout.layers), found)
    spec, base = halves_spec(other := replace(run, layout=layout), build)
    shapes = executor.workspace_spec(other.pipeline, spec, other.batch_spec(), other.key_spec(), base)
    return {
        "device": jax.devices()[0].device_kind,
        "costs_ms": {
            name: slot._asdict() if isinstance(slot, costs.Slot) else slot for name, slot in found._asdict().items()
        },
        **costs.predict(schedule, run.layout, found),
        "balanced": {
            "layer_split": list(layout.layers),
            **costs.predict(schedule, layout, found),
            "bytes_per_device": bytes_per_device(other, spec, base, *shapes)["total"],
        },
    }


def bytes_per_device(run: Run, spec: Placed, base: Placed | None, ring: Any, stream: Any) -> dict[str, int]:
    """Where a device's memory goes.

    parameters: float32, a frozen base in the compute dtype, at rest. compute_weights: their copy in the compute dtype,
    which of a frozen one is made only where it has to be gathered, and of one chunk alone where layers are gathered as
    they run (XLA gathers a slot's layers ahead of their use). gradients: accumulators of those that are trained.
    optimizer: its moments. activations: the ring and the buffers in front of it. slot: the slot of the ring that is in
    use, beside it. logits: of a microbatch, or of a chunk of its tokens where the loss is taken so, and their
    gradients, float32, in chunks with the table's. total: all of these.

    Args: spec and base, of `train.halves_spec`; ring and stream, of one rank, see `executor.workspace_spec`.
    """
    pipeline, schedule, tensor = run.pipeline, run.pipeline.schedule, run.sizes.tensor
    trained, frozen = (
        jax.tree.leaves(partition.rest(half, run.mesh, run.config.zero_stage)) if half is not None else []
        for half in (spec, base)
    )
    parts = tensor if run.config.sequence_parallel else 1
    elements = lambda r, of: prod(r.shape) // _ways(getattr(r, of), run.mesh)
    held = lambda of, rests=trained: sum(elements(r, of) for r in rests)
    by_layer = pipeline.zero_gather == "layer"
    share = schedule.chunks if by_layer else 1
    gathered = [r for r in frozen if _ways(r.param, run.mesh) > _ways(r.computed, run.mesh)]
    computed = sum(elements(r, "computed") // (1 if r.outer else share) for r in (*trained, *gathered))
    summed = sum(elements(r, "grad" if by_layer and not r.outer else "computed") for r in trained)
    streams = {tuple(a.shape) for a in jax.tree.leaves(stream)}
    # What has the stream's shape is whole on every rank of tensor, all else is split over them.
    split = lambda a: _bytes(a) // (parts if tuple(a.shape[1:]) in streams else tensor)
    buffers = schedule.forward_inbox * _bytes(wire.on_wire(pipeline.wire, stream))
    buffers += (schedule.backward_inbox + schedule.output_slots) * _bytes(stream)
    whole = partition.join(spec, base)
    logits = jax.eval_shape(lambda head, embed, x: head(x, embed), whole.head, whole.embed, stream)
    tokens, vocab = prod(logits.shape[:-1]), logits.shape[-1]
    in_chunks = losses.in_chunks(whole.head, stream, tokens)
    # Beside a chunk's logits the sum of the table's gradient, as large as the table.
    summed_table = prod(jax.eval_shape(_table, whole, stream).shape) if in_chunks and base is None else 0
    moments = {"adamw": 2, "sgd": 0}[run.config.optimizer]
    size = {name: jnp.dtype(getattr(pipeline.precision, name)).itemsize for name in ("param", "compute", "accumulate")}
    one_slot = sum(map(split, jax.tree.leaves(ring))) // schedule.ring_slots
    held_by_ring = one_slot * schedule.ring_slots if schedule.waits else 0
    found = {
        "parameters": held("param") * size["param"] + held("param", frozen) * size["compute"],
        "compute_weights": computed * size["compute"],
        "gradients": summed * size["accumulate"],
        "optimizer": moments * held("moment") * size["param"],
        "activations": held_by_ring + buffers // parts,
        # A ring of one slot is not updated in place: as it is written, and as it is read.
        "slot": one_slot * (2 if schedule.waits and schedule.ring_slots == 1 else 1),
        "logits": 4 * (2 * (min(tokens, losses.CHUNK) if in_chunks else tokens) * vocab + summed_table) // tensor,
    }
    return found | {"total": sum(found.values())}


def _table(model: Placed, stream: Any) -> Any:
    return model.head.factors(stream, model.embed)[1]


def _ways(spec: PartitionSpec, mesh: Any) -> int:
    return count(mesh, [axis for entry in spec for axis in partition.axes_of(entry)])


def as_text(run: Run, plan: dict[str, Any], width: int | None, color: bool) -> str:
    """The plan for a terminal: the schedule's picture, then a line for each quantity."""
    per_device = plan["bytes_per_device"]
    rows = [
        ("layers per stage", ", ".join(map(str, plan["layers_per_stage"]))),
        ("parameters", f"{plan['parameters']:,}" + _trained(plan)),
        ("tokens a step", f"{plan['tokens_per_step']:,} in {plan['microbatches']} microbatches"),
        ("bubble", f"{plan['bubble_fraction']:.1%} of the step (a backward taken as twice a forward)"),
        ("microbatches in flight", ", ".join(f"{n:g}" for n in plan["in_flight"]) + " (by rank)"),
        ("mesh", " x ".join(f"{axis} {n}" for axis, n in plan["mesh"].items())),
        (
            "hosts",
            f"{plan['hosts']}" + (f", between them: {', '.join(plan['across_hosts'])}" if plan["hosts"] > 1 else ""),
        ),
        ("wire", f"{_size(plan['wire_bytes_per_hop'])} a hop, {plan['wire_dtype']}"),
        ("bytes per device", _size(per_device["total"])),
        *((f"  {name.replace('_', ' ')}", _size(per_device[name])) for name in per_device if name != "total"),
        *(_measured_rows(plan["measured"]) if "measured" in plan else ()),
    ]
    wide = max(len(name) for name, _ in rows)
    picture = render.as_text(run.pipeline.schedule, width=width, color=color)
    return picture + "\n\n" + "\n".join(f"{name:{wide}}  {value}" for name, value in rows)


def _measured_rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    slot = lambda name: "F {forward:.2f} ms, B {backward:.2f} ms".format(**found["costs_ms"][name])
    step = lambda of: f"{of['step_ms']:.1f} ms, of its slots {of['bubble_fraction']:.1%} bubble"
    best = found["balanced"]
    split = " ".join(map(str, best["layer_split"]))
    return [
        ("a layer", f"{slot('layer')}, on {found['device']}"),
        ("embedding", slot("embed")),
        ("head and loss", slot("head")),
        ("an idle tick", f"{found['costs_ms']['tick']:.2f} ms"),
        ("beside the ticks", f"{found['costs_ms']['beside']:.1f} ms, and the optimizer"),
        ("step", step(found)),
        ("balanced", f"{step(best)}, {_size(best['bytes_per_device'])} per device: --layer_split {split}"),
    ]


def _trained(plan: dict[str, Any]) -> str:
    trained = plan["trained_parameters"]
    return f", of which {trained:,} are trained" if trained < plan["parameters"] else ""


def _size(count: int) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count} bytes"
