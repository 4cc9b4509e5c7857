"""What a run will cost, from shapes alone: nothing is allocated on a device and no device is needed.

Legend: S stages, C chunks a stage, T ticks.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxpp import executor, partition, render, schedules, wire
from jaxpp.mesh import DATA, PIPE
from jaxpp.train import Build, Run, parameter_count, placed_spec

UNIT = {"forward_cost": 1, "backward_cost": 2}  # a backward is two products for each one of the forward


def _bytes(tree: Any, dtype: str | None = None) -> int:
    return sum(math.prod(a.shape) * jnp.dtype(dtype or a.dtype).itemsize for a in jax.tree.leaves(tree))


def abstract_mesh(pipe: int, data: int) -> jax.sharding.AbstractMesh:
    """A mesh of shapes only, of any size."""
    return jax.sharding.AbstractMesh((data, pipe), (DATA, PIPE), axis_types=(jax.sharding.AxisType.Auto,) * 2)


def make_plan(run: Run, build: Build) -> dict[str, Any]:
    """The plan as plain data.

    Keys: ticks; bubble_fraction, with a backward of twice a forward; in_flight, microbatches of each rank, in units of
    the rank's whole share of layers; layers_per_stage; parameters; wire_dtype; wire_bytes_per_hop, of one send;
    bytes_per_device: parameters (float32), compute_weights (their copy in the compute dtype), gradients, optimizer,
    activations (the ring and the buffers in front of it), total.
    """
    pipeline, schedule = run.pipeline, run.pipeline.schedule
    spec = placed_spec(run, build)
    ring, stream = executor.workspace_spec(pipeline, spec, run.batch_spec(), run.key_spec())
    on_wire = wire.on_wire(pipeline.wire, stream)
    cost = dict(UNIT, backward_cost=3) if pipeline.remat == "full" else UNIT
    simulation = schedules.simulate(schedule, **cost)
    stages = run.sizes.pipe
    dims = partition.resting_dims(spec)
    outer = jax.tree.map(lambda a, dim: _bytes(a) // (1 if dim == partition.WHOLE else stages), spec.outer, dims)
    parameters = _bytes(spec.blocks) // stages + sum(jax.tree.leaves(outer))
    buffers = schedule.forward_inbox * _bytes(on_wire)
    buffers += (schedule.backward_inbox + schedule.output_slots) * _bytes(stream)
    moments = {"adamw": 2, "sgd": 0}[run.config.optimizer]
    per_device = {
        "parameters": parameters,
        "compute_weights": _bytes(spec.blocks, pipeline.precision.compute) // stages
        + _bytes(spec.outer, pipeline.precision.compute),
        "gradients": _bytes(spec.blocks, pipeline.precision.accumulate) // stages
        + _bytes(spec.outer, pipeline.precision.accumulate),
        "optimizer": moments * parameters,
        "activations": _bytes(ring) + buffers,
    }
    return {
        "schedule": schedule.name,
        "stages": stages,
        "chunks": schedule.chunks,
        "data_parallel": run.sizes.data,
        "microbatches": run.sizes.microbatches,
        "tokens_per_step": run.sizes.tokens,
        "ticks": schedule.ticks,
        "bubble_fraction": simulation.bubble_fraction,
        "in_flight": [n / schedule.chunks for n in schedule.in_flight()],
        "layers_per_stage": run.layout.layers_per_stage(),
        "parameters": parameter_count(spec),
        "wire_dtype": pipeline.precision.wire,
        "wire_bytes_per_hop": _bytes(on_wire),
        "bytes_per_device": per_device | {"total": sum(per_device.values())},
    }


def as_text(run: Run, plan: dict[str, Any], width: int | None, color: bool) -> str:
    """The plan for a terminal: the schedule's picture, then a line for each quantity."""
    per_device = plan["bytes_per_device"]
    rows = [
        ("layers per stage", ", ".join(map(str, plan["layers_per_stage"]))),
        ("parameters", f"{plan['parameters']:,}"),
        ("tokens a step", f"{plan['tokens_per_step']:,} in {plan['microbatches']} microbatches"),
        ("bubble", f"{plan['bubble_fraction']:.1%} of the step (a backward taken as twice a forward)"),
        ("microbatches in flight", ", ".join(f"{n:g}" for n in plan["in_flight"]) + " (by rank)"),
        ("wire", f"{_size(plan['wire_bytes_per_hop'])} a hop, {plan['wire_dtype']}"),
        ("bytes per device", _size(per_device["total"])),
        *((f"  {name.replace('_', ' ')}", _size(per_device[name])) for name in per_device if name != "total"),
    ]
    wide = max(len(name) for name, _ in rows)
    picture = render.as_text(run.pipeline.schedule, width=width, color=color)
    return picture + "\n\n" + "\n".join(f"{name:{wide}}  {value}" for name, value in rows)


def _size(count: int) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count} bytes"
