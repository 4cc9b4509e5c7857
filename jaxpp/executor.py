"""What runs: one SPMD train step, a scan over the ticks of a schedule.

Inside `shard_map`, manual over all axes but `tensor`, every rank walks the schedule's tables. A tick is

    backward send of the last tick's B, in flight during the F slot -> forward send of its result, during the B slot

A slot is a branch: nothing where it is idle. What a table says alike for all ticks and ranks is no branch: on one stage
none is left. Backward is explicit: `jax.vjp` of one layer at a time, its
residuals in a ring of static size, so memory does not grow with the number of microbatches (gpipe apart). There is no
collective over the pipe inside a slot.

Legend: B microbatch size, T sequence, D model, V vocabulary; S stages, C chunks a stage, K places a chunk,
M microbatches. "stream" is what blocks hand on (a pytree, usually x_BTD); "outer" is embedding and head.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpp import partition, remat, sharding, slots, trees, wire
from jaxpp.losses import token_loss, with_metrics
from jaxpp.mesh import CONTEXT, MANUAL, PIPE, ROWS, TENSOR, count
from jaxpp.partition import Placed, Rest
from jaxpp.precision import Precision, resolve
from jaxpp.schedules import IDLE, Schedule, Slots
from jaxpp.slots import Context, Pipeline, Shapes

Tree = Any


class Result(NamedTuple):
    """What a step computes.

    loss: float32 [], sum over valid tokens / their global count. grads: like the parameters, float32.
    microbatch_losses: float32 [M], the loss's sum over each microbatch's valid tokens / the same global count.
    workspace: the ring, to be donated to the next step. metrics: what the loss function returned beside the loss, over
    the same count, float32.
    """

    loss: jax.Array
    grads: Placed
    microbatch_losses: jax.Array
    workspace: Tree
    metrics: dict[str, jax.Array]


def value_and_grad(
    schedule: Schedule,
    mesh: Mesh,
    precision: Precision | None = None,
    remat: str = "dots",
    loss: Callable = token_loss,
) -> Callable[..., tuple[jax.Array, Placed]]:
    """Loss and gradients of a pipelined model.

    Args: schedule, of `schedules.build`; mesh, of `make_mesh`; precision, default float32 throughout;
    remat, what F keeps for B: "full" the chunk's input, "none" everything, else a policy (see `remat.policy_names`);
    loss(head, embed, stream, microbatch) -> its sum over valid tokens, float32 [], or a pair of it and a dict of
    metrics, sums over valid tokens too.
    Returns: a function (params, batch, key=None) -> (loss, grads), for use under `jax.jit`. params: of
    `partition.place`. batch: a dict of arrays [M, R*B, T] with R the ranks of data and expert, among them tokens and
    labels (-100: no loss).
    Raises ValueError, when traced, where schedule, mesh, parameters and batch do not fit each other.
    """
    pipeline = Pipeline(schedule, mesh, precision or resolve(), remat, loss)

    def run(params: Placed, batch: dict[str, jax.Array], key: jax.Array | None = None) -> tuple[jax.Array, Placed]:
        result = train_step(pipeline, params, batch, key)
        return result.loss, result.grads

    return run


def train_step(
    pipeline: Pipeline,
    params: Placed,
    batch: dict[str, jax.Array],
    key: jax.Array | None = None,
    workspace: Tree | None = None,
    scale: jax.Array | None = None,
    frozen: Placed | None = None,
    tables: tuple[Slots, Slots] | None = None,
    start: Callable | None = None,
) -> Result:
    """One forward and backward of a global batch; arguments as in `value_and_grad`.

    workspace: the previous step's, donated, so that the ring is not allocated anew; default a fresh one.
    scale: float32 [], what the loss is multiplied with before its gradients are taken, and they are divided by after.
    frozen: the parameters that have no gradients, where `params` are the others of `partition.split`.
    tables, start: to measure slots by themselves. Others than the schedule's, alike where those are `constants`, whose
    columns may be traced; and what the buffers hold at first, in place of `trees.blank`.
    """
    _check(pipeline, params, batch)
    if workspace is None:
        workspace = new_workspace(pipeline, params, batch, key, frozen)
    else:
        try:
            wire.check(workspace_struct(pipeline, params, batch, key, frozen), workspace, "workspace")
        except ValueError as error:
            raise ValueError(f"the workspace is of another batch or pipeline: {error}") from None
    own = pipeline.schedule.forward, pipeline.schedule.backward
    varying = tuple(_varying(one, given) for one, given in zip(own, tables or own, strict=True))
    ring_spec = jax.tree.map(lambda _: PartitionSpec(MANUAL), workspace)
    grads_spec = jax.tree.map(lambda r: partition.manual(r.grad), _rest(pipeline, params))
    out_specs = (PartitionSpec(), grads_spec, ring_spec)
    step = _mapped(pipeline, partial(_train, start or trees.blank), out_specs)
    losses, grads, workspace = step(params, batch, varying, (key, scale), workspace, frozen)
    if scale is not None:
        grads = jax.tree.map(lambda g: g / scale, grads)
    return Result(jnp.sum(losses["loss"]), grads, losses["loss"], workspace, losses["metrics"])


def eval_step(pipeline: Pipeline, params: Placed, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Forward only, through the same pipeline: loss summed over valid tokens, and their count, float32 [] both."""
    _check(pipeline, params, batch)
    forward = _varying(pipeline.schedule.forward, pipeline.schedule.forward)
    tables = (jax.tree.map(lambda a: a[: _forward_ticks(pipeline.schedule)], forward),)
    specs = (PartitionSpec(), PartitionSpec())
    return _mapped(pipeline, _evaluate, specs)(params, batch, tables, (None, None), None)


def workspace_spec(
    pipeline: Pipeline, params: Placed, batch: dict, key: Any = None, frozen: Placed | None = None
) -> tuple[Tree, Tree]:
    """Shapes of one rank's ring and of the stream; arguments may be abstract, and the mesh too."""
    found = []

    def body(ctx: Context, shapes: Shapes, tables: tuple, ring: None) -> jax.Array:
        found.append(shapes)
        return ctx.count

    trace = lambda p, b, k, f: _mapped(pipeline, body, PartitionSpec())(p, b, (), (k, None), None, f)
    jax.eval_shape(trace, params, batch, key, frozen)
    return found[0].ring, found[0].stream


def workspace_struct(
    pipeline: Pipeline, params: Placed, batch: dict, key: Any = None, frozen: Placed | None = None
) -> Tree:
    """Shapes and shardings of a ring for `train_step`, [ranks, slots, ...] over the ranks. Arguments may be abstract.

    None where layers are split over the tensor axis, when the compiler places the ring itself, inside the step, and
    where nothing waits in it from tick to tick.
    """
    if pipeline.mesh.shape[TENSOR] > 1 or not pipeline.schedule.waits:
        return None
    ranks = count(pipeline.mesh, MANUAL)
    where = NamedSharding(pipeline.mesh, PartitionSpec(MANUAL))
    ring, _ = workspace_spec(pipeline, params, batch, key, frozen)
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct((ranks, *a.shape), a.dtype, sharding=where), ring)


def new_workspace(
    pipeline: Pipeline, params: Placed, batch: dict, key: Any = None, frozen: Placed | None = None
) -> Tree:
    """A ring of zeros, see `workspace_struct`."""
    spec = workspace_struct(pipeline, params, batch, key, frozen)
    make = lambda: jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), spec)
    return jax.jit(make, out_shardings=jax.tree.map(lambda a: a.sharding, spec))()


def _forward_ticks(schedule: Schedule) -> int:
    """Ticks until the last F has run."""
    return int(np.flatnonzero((schedule.forward.chunk != IDLE).any(axis=1))[-1]) + 1


def _rest(pipeline: Pipeline, params: Placed) -> Placed:
    return partition.rest(params, pipeline.mesh, pipeline.zero_stage)


def _mapped(pipeline: Pipeline, body: Callable, out_specs: Tree) -> Callable:
    """body(context, shapes, tables, ring) on every rank, of (params, batch, tables, (key, scale), workspace, frozen);
    frozen, where given, as in `train_step`."""

    def run(
        params: Placed, batch: dict, tables: tuple, given: tuple, workspace: Tree, frozen: Placed | None = None
    ) -> Tree:
        rests = _rest(pipeline, params), None if frozen is None else _rest(pipeline, frozen)

        def rank(halves: tuple, batch: dict, tables: tuple, chunks: dict, given: tuple, ring: Tree) -> Tree:
            ctx = slots.make_context(pipeline, rests, halves, batch, chunks, *given)
            return body(ctx, slots.make_shapes(ctx), tables, ring)

        in_specs = (
            jax.tree.map(lambda r: partition.manual(r.param), rests),
            jax.tree.map(lambda a: PartitionSpec(None, ROWS, *(CONTEXT,) * (len(a.shape) > 2)), batch),
            jax.tree.map(lambda _: PartitionSpec(None, PIPE), tables),
            PartitionSpec(PIPE),
            PartitionSpec(),
            jax.tree.map(lambda _: PartitionSpec(MANUAL), workspace),
        )
        mapped = jax.shard_map(
            rank,
            mesh=pipeline.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            # Nothing is left to the compiler where nothing is split: JAX then needs no jit around it.
            axis_names={*MANUAL, *(() if pipeline.mesh.shape[TENSOR] > 1 else (TENSOR,))},
            check_vma=False,
        )
        with sharding.use(pipeline.sequence_parallel):
            return mapped((params, frozen), batch, tables, _chunk_table(params), given, workspace)

    return run


def _varying(table: Slots, given: Slots) -> dict[str, jax.Array]:
    """Those columns of `given` that in a table are not the same everywhere; the others are its `constants`."""
    return {k: jnp.asarray(getattr(given, k)) for k in Slots.__dataclass_fields__ if k not in table.constants()}


def _chunk_table(params: Placed) -> dict[str, jax.Array]:
    layout = params.layout
    return {"count": jnp.asarray(layout.counts()), "first": jnp.asarray(layout.first_layer())}


def _check(pipeline: Pipeline, params: Placed, batch: dict[str, jax.Array]) -> None:
    schedule, mesh, layout = pipeline.schedule, pipeline.mesh, params.layout
    remat.check_remat(pipeline.remat)
    if mesh.shape[PIPE] != schedule.stages:
        raise ValueError(f"the mesh has {mesh.shape[PIPE]} stages, the schedule {schedule.stages}: make them equal")
    if (layout.stages, layout.chunks) != (schedule.stages, schedule.chunks):
        raise ValueError(
            f"parameters are placed on {layout.stages} stages of {layout.chunks} chunks, the schedule has"
            f" {schedule.stages} of {schedule.chunks}: place them with chunks={schedule.chunks}"
        )
    if "labels" not in batch:
        raise ValueError(f"batch has {', '.join(batch)} but no labels: the loss needs batch['labels']")
    for name, a in batch.items():
        if a.ndim < 2 or a.shape[0] != schedule.microbatches:
            raise ValueError(
                f"batch[{name!r}] has shape {list(a.shape)}, its first dim must be the {schedule.microbatches}"
                f" microbatches of the schedule"
            )
        for dim, axes, what in ((1, ROWS, "rows"), (2, (CONTEXT,), "tokens of a row")):
            if a.ndim > dim and a.shape[dim] % count(mesh, axes):
                split = " x ".join(f"{axis}={mesh.shape[axis]}" for axis in axes if mesh.shape[axis] > 1)
                raise ValueError(f"batch[{name!r}]: {a.shape[dim]} {what} do not divide over {split}")


def _train(start: Callable, ctx: Context, shapes: Shapes, tables: tuple, ring: Tree) -> tuple[dict, Placed, Tree]:
    """The step as one rank sees it: scan the ticks, reduce."""
    pipeline, rest = ctx.pipeline, ctx.rest
    schedule, link = pipeline.schedule, pipeline.wire
    on_wire = wire.on_wire(link, shapes.stream)
    zeros = lambda a, r: sharding.constrain_leaf(jnp.zeros(a.shape, pipeline.precision.accumulate), r.names)
    accumulators = jax.tree.map(zeros, (ctx.weights, ctx.outer), (rest.blocks, rest.outer))
    held = {"ring": start(shapes.ring), "outputs": start(shapes.stream, schedule.output_slots)}
    if ring is not None:
        held["ring"] = jax.tree.map(lambda a: a[0], ring)
    carry = (held if schedule.waits else {}) | {
        "arrived": start(on_wire, schedule.forward_inbox),
        "arrival": start(on_wire),
        "cotangent": start(shapes.stream),
        "returned": start(shapes.stream, schedule.backward_inbox),
        "blocks": accumulators[0],
        "outer": accumulators[1],
        "losses": {
            "loss": jnp.zeros(schedule.microbatches, jnp.float32),
            "metrics": jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.float32), shapes.metrics),
        },
    }

    def tick(before: dict, row: tuple[dict, dict]) -> tuple[dict, None]:
        f, b = (known | jax.tree.map(lambda a: a[0], one) for known, one in zip(constants, row, strict=True))
        carry = held | before
        # What arrives is read in the next tick at the earliest: nothing in this one waits for the forward send.
        carry["arrived"] = trees.put(carry["arrived"], f["arrive"], carry["arrival"])
        returned = wire.backward_send(link, shapes.stream, carry["cotangent"])
        carry["ring"], carry["outputs"], out = slots.forward_slot(ctx, shapes, f, carry)
        carry["returned"] = trees.put(carry["returned"], b["arrive"], returned)
        carry["arrival"] = wire.forward_send(link, shapes.stream, out)
        *totals, carry["cotangent"] = slots.backward_slot(ctx, shapes, b, carry)
        carry |= dict(zip(("blocks", "outer", "losses"), totals, strict=True))
        return {name: carry[name] for name in before}, None

    constants = (schedule.forward.constants(), schedule.backward.constants())
    carry, _ = jax.lax.scan(tick, carry, tables, length=schedule.ticks)
    losses = jax.lax.psum(carry["losses"], MANUAL)
    reduce = partial(_reduce, pipeline)
    blocks = jax.tree.map(reduce, carry["blocks"], rest.blocks)
    outer = jax.tree.map(reduce, carry["outer"], rest.outer)
    workspace = None if ring is None else jax.tree.map(lambda a: a[None], carry["ring"])
    return losses, Placed(outer["embed"], blocks, outer["head"], rest.layout), workspace


def _reduce(pipeline: Pipeline, a: jax.Array, r: Rest) -> jax.Array:
    """Sum a gradient over the ranks that share its parameter, once a step, in the reduce dtype, to where it rests."""
    a = a.astype(pipeline.precision.reduce)
    a = a if r.outer else a[None]
    padding = sharding.padding(r.names, r.shape, pipeline.mesh)
    a = a[tuple(slice(n - after) for n, (_, after) in zip(a.shape, padding, strict=True))]
    # A layer's gradient that was summed where the layer was gathered has its part already.
    done = r.param if pipeline.zero_gather == "layer" and not r.outer else ()
    left = tuple(x for x in r.summed(pipeline.mesh) if not any(x in partition.axes_of(entry) for entry in done))
    for dim, entry in enumerate(r.grad):
        for axis in partition.axes_of(entry):
            if axis in left:
                a = jax.lax.psum_scatter(a, axis, scatter_dimension=dim, tiled=True)
                left = tuple(x for x in left if x != axis)
    return jax.lax.psum(a, left) if left else a


def _evaluate(ctx: Context, shapes: Shapes, tables: tuple, ring: None) -> tuple[jax.Array, jax.Array]:
    """Forward only, as one rank sees it: the F slots, and the loss where the last chunk ends."""
    pipeline = ctx.pipeline
    link = pipeline.wire
    on_wire = wire.on_wire(link, shapes.stream)

    def tick(carry: tuple[Tree, Tree, jax.Array], row: tuple[dict]) -> tuple[tuple[Tree, Tree, jax.Array], None]:
        arrived, arrival, total = carry
        f = constants | jax.tree.map(lambda a: a[0], row[0])
        arrived = trees.put(arrived, f["arrive"], arrival)
        c, m = f["chunk"], f["microbatch"]

        @jax.named_scope("forward_slot")
        def run(total: jax.Array) -> tuple[jax.Array, Tree]:
            out = slots.plain_forward(ctx, c, m, slots.chunk_input(ctx, shapes, f, m, arrived))
            outer, microbatch = ctx.outer, trees.at(ctx.batch, m)
            loss = lambda: with_metrics(pipeline.loss(outer["head"], outer["embed"], out, microbatch))[0]
            return total + sharding.cond(f["output"] != IDLE, loss, lambda: jnp.zeros(())), out

        total, out = sharding.cond(c != IDLE, run, lambda total: (total, trees.blank(shapes.stream)), total)
        return (arrived, wire.forward_send(link, shapes.stream, out), total), None

    constants = pipeline.schedule.forward.constants()
    start = (trees.blank(on_wire, pipeline.schedule.forward_inbox), trees.blank(on_wire), jnp.zeros(()))
    (*_, total), _ = jax.lax.scan(tick, start, tables, length=_forward_ticks(pipeline.schedule))
    return jax.lax.psum(total, MANUAL), ctx.count
