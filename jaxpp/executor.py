"""What runs: one SPMD train step, a scan over the ticks of a schedule.

Inside `shard_map`, manual over `data` and `pipe`, every rank walks the schedule's tables. A tick is

    F slot (cond) -> forward send -> B slot (cond) -> backward send

so the forward wire is in flight while the B slot computes. Backward is explicit: `jax.vjp` of one layer at a time, its
residuals in a ring of static size, so memory does not grow with the number of microbatches (gpipe apart). There is no
collective inside a slot.

Legend: B microbatch size, T sequence, D model, V vocabulary; S stages, C chunks a stage, K places a chunk,
M microbatches. "stream" is what blocks hand on (a pytree, usually x_BTD); "outer" is embedding and head.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpp import partition, remat, wire
from jaxpp.losses import count_valid, token_loss
from jaxpp.mesh import DATA, PIPE
from jaxpp.partition import Placed
from jaxpp.precision import Precision, resolve
from jaxpp.schedules import IDLE, Schedule, Slots

Tree = Any


class Result(NamedTuple):
    """What a step computes.

    loss: float32 [], sum over valid tokens / their global count. grads: like the parameters, float32.
    microbatch_losses: float32 [M], the loss's sum over each microbatch's valid tokens / the same global count.
    workspace: the ring, to be donated to the next step.
    """

    loss: jax.Array
    grads: Placed
    microbatch_losses: jax.Array
    workspace: Tree


@dataclass(frozen=True)
class Pipeline:
    """How a step is run; see `value_and_grad` for the fields."""

    schedule: Schedule
    mesh: Mesh
    precision: Precision
    remat: str = "dots"
    loss: Callable = token_loss

    @property
    def wire(self) -> wire.Wire:
        """The transfers between this pipeline's stages."""
        s, p = self.schedule, self.precision
        return wire.Wire(PIPE, s.stages, p.wire, p.grad_wire, wrap=s.chunks > 1)


def value_and_grad(
    schedule: Schedule,
    mesh: Mesh,
    precision: Precision | None = None,
    remat: str = "dots",
    loss: Callable = token_loss,
) -> Callable[..., tuple[jax.Array, Placed]]:
    """Loss and gradients of a pipelined model.

    Args: schedule, of `schedules.build`; mesh, with axes data and pipe; precision, default float32 throughout;
    remat, what F keeps for B: "full" the chunk's input, "none" everything, else a policy (see `remat.policy_names`);
    loss(head, embed, stream, microbatch) -> its sum over valid tokens, float32 [].
    Returns: a function (params, batch, key=None) -> (loss, grads), for use under `jax.jit`. params: of
    `partition.place`. batch: a dict of arrays [M, DP*B, T], among them tokens and labels (-100: no loss).
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
) -> Result:
    """One forward and backward of a global batch; arguments as in `value_and_grad`.

    workspace: the previous step's, donated, so that the ring is not allocated anew; default a fresh one.
    """
    _check(pipeline, params, batch)
    if workspace is None:
        workspace = new_workspace(pipeline, params, batch, key)
    tables = (_by_name(pipeline.schedule.forward), _by_name(pipeline.schedule.backward))
    ring_spec = jax.tree.map(lambda _: PartitionSpec((DATA, PIPE)), workspace)
    out_specs = (PartitionSpec(), PartitionSpec(), partition.specs(params), ring_spec)
    results = _mapped(pipeline, _train, out_specs)(params, batch, tables, _chunk_table(params), key, workspace)
    total, microbatch_losses, grads, workspace = results
    return Result(total, grads, microbatch_losses, workspace)


def eval_step(pipeline: Pipeline, params: Placed, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Forward only, through the same pipeline: loss summed over valid tokens, and their count, float32 [] both."""
    _check(pipeline, params, batch)
    forward = _by_name(pipeline.schedule.forward)
    ticks = int(np.flatnonzero((pipeline.schedule.forward.chunk != IDLE).any(axis=1))[-1]) + 1
    tables = (jax.tree.map(lambda a: a[:ticks], forward),)
    specs = (PartitionSpec(), PartitionSpec())
    return _mapped(pipeline, _evaluate, specs)(params, batch, tables, _chunk_table(params), None, None)


def workspace_spec(pipeline: Pipeline, params: Placed, batch: dict, key: Any = None) -> tuple[Tree, Tree]:
    """Shapes of one rank's ring and of the stream; arguments may be abstract, and the mesh too."""
    data = pipeline.mesh.shape[DATA]
    compute = jnp.dtype(pipeline.precision.compute)
    found = []

    def trace(params: Placed, batch: dict, key: Any) -> None:
        weights, outer = jax.tree.map(lambda a: _cast(a, compute), (params.blocks, params.outer))
        weights = jax.tree.map(lambda a: a[0], weights)
        rows = jax.tree.map(lambda a: a[:, : a.shape[1] // data], batch)
        found.append(_shapes(pipeline, weights, outer, rows, key))

    jax.eval_shape(trace, params, batch, key)
    return found[0].ring, found[0].stream


def new_workspace(pipeline: Pipeline, params: Placed, batch: dict, key: Any = None) -> Tree:
    """A ring for `train_step`, zeros [DP*S, slots, ...] sharded over the ranks. Arguments may be abstract."""
    ranks = pipeline.mesh.shape[DATA] * pipeline.mesh.shape[PIPE]
    sharding = NamedSharding(pipeline.mesh, PartitionSpec((DATA, PIPE)))
    ring, _ = workspace_spec(pipeline, params, batch, key)
    make = lambda: jax.tree.map(lambda a: jnp.zeros((ranks, *a.shape), a.dtype), ring)
    return jax.jit(make, out_shardings=jax.tree.map(lambda _: sharding, ring))()


def _mapped(pipeline: Pipeline, body: Callable, out_specs: Tree) -> Callable:
    def run(params: Placed, batch: dict, tables: tuple, chunk_table: dict, key: Any, workspace: Tree) -> Tree:
        in_specs = (
            partition.specs(params),
            jax.tree.map(lambda _: PartitionSpec(None, DATA), batch),
            jax.tree.map(lambda _: PartitionSpec(None, PIPE), tables),
            jax.tree.map(lambda _: PartitionSpec(PIPE), chunk_table),
            PartitionSpec(),
            jax.tree.map(lambda _: PartitionSpec((DATA, PIPE)), workspace),
        )
        mapped = jax.shard_map(
            partial(body, pipeline, partition.resting_dims(params)),
            mesh=pipeline.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names={DATA, PIPE},
            check_vma=False,
        )
        return mapped(params, batch, tables, chunk_table, key, workspace)

    return run


def _by_name(slots: Slots) -> dict[str, jax.Array]:
    return {name: jnp.asarray(getattr(slots, name)) for name in Slots.__dataclass_fields__}


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
    for name, a in batch.items():
        if a.ndim < 2 or a.shape[0] != schedule.microbatches:
            raise ValueError(
                f"batch[{name!r}] has shape {list(a.shape)}, its first dim must be the {schedule.microbatches}"
                f" microbatches of the schedule"
            )
        if a.shape[1] % mesh.shape[DATA]:
            raise ValueError(f"batch[{name!r}]: {a.shape[1]} rows do not divide over data={mesh.shape[DATA]}")


class _Context(NamedTuple):
    """What every slot of a rank sees; built once a step, before the scan.

    uneven: some places hold no layer. batch: this data rank's [M, B, ...]. key: of the step, or None.
    weights: K modules, leaves [C, ...], outer: embedding and head, both in the compute dtype.
    counts, first: int32 [C], layers of each chunk and the first one's index. scale: float32 [], 1 / valid tokens.
    """

    pipeline: Pipeline
    uneven: bool
    batch: dict[str, jax.Array]
    key: jax.Array | None
    weights: list
    outer: dict
    counts: jax.Array
    first: jax.Array
    scale: jax.Array

    def chunk_weights(self, c: jax.Array) -> list:
        if self.pipeline.schedule.chunks == 1:
            return jax.tree.map(lambda a: a[0], self.weights)
        return jax.tree.map(lambda a: _at(a, c), self.weights)

    def known(self, c: jax.Array, m: jax.Array) -> list:
        """(microbatch, key) for the layer of each place: what the B slot can build again."""
        microbatch = _at(self.batch, m)
        return [(microbatch, self.layer_key(m, self.first[c] + k)) for k in range(len(self.weights))]

    def layer_key(self, m: jax.Array, layer: jax.Array | int) -> jax.Array | None:
        """The key of one layer (-1: the embedding) for one microbatch: the same for any number of stages."""
        if self.key is None:
            return None
        row = m * self.pipeline.mesh.shape[DATA] + jax.lax.axis_index(DATA)
        return jax.random.fold_in(jax.random.fold_in(self.key, row), layer + 1)

    def embed(self, m: jax.Array, embed: Any) -> Tree:
        return _embed(self.pipeline, embed, _at(self.batch, m), self.layer_key(m, -1))


def _embed(pipeline: Pipeline, embed: Any, microbatch: dict, key: jax.Array | None) -> Tree:
    stream = embed(microbatch, key)
    residual = pipeline.precision.residual
    return stream if residual == "compute" else jax.tree.map(lambda a: _cast(a, residual), stream)


def _context(pipeline: Pipeline, dims: dict, params: Placed, batch: dict, chunk_table: dict, key: Any) -> _Context:
    """Gather and cast what the slots read. Runs inside the map."""
    compute = jnp.dtype(pipeline.precision.compute)

    def gather(a: jax.Array, dim: int) -> jax.Array:
        a = _cast(a, compute)
        whole = dim == partition.WHOLE or pipeline.schedule.stages == 1
        return a if whole else jax.lax.all_gather(a, PIPE, axis=dim, tiled=True)

    count = jax.lax.psum(count_valid(batch["labels"]), DATA)
    return _Context(
        pipeline=pipeline,
        uneven=len(set(params.layout.layers)) > 1,
        batch=batch,
        key=key,
        weights=jax.tree.map(lambda a: _cast(a[0], compute), params.blocks),
        outer=jax.tree.map(gather, params.outer, dims),
        counts=chunk_table["count"][0],
        first=chunk_table["first"][0],
        scale=1.0 / jnp.maximum(count, 1.0),
    )


class _Shapes(NamedTuple):
    """Static facts about a step, from abstract traces. stream: its spec. templates: one a place. ring: its spec."""

    stream: Tree
    templates: list[remat.Template]
    ring: Tree


def _layer(pipeline: Pipeline) -> Callable:
    return remat.checkpointed(lambda block, stream, known: block(stream, *known), pipeline.remat)


def _shapes(pipeline: Pipeline, weights: list, outer: dict, batch: dict, key: jax.Array | None) -> _Shapes:
    microbatch = jax.eval_shape(lambda b: _at(b, 0), batch)
    stream = jax.eval_shape(partial(_embed, pipeline), outer["embed"], microbatch, key)
    chunk = jax.eval_shape(lambda w: _at(w, 0), weights)
    for k, block in enumerate(chunk):
        out = jax.eval_shape(lambda b, x, *known: b(x, *known), block, stream, microbatch, key)
        wire.check(stream, out, f"with block {k}, which must keep the embedding's shapes and dtypes,")
    templates = [remat.template(_layer(pipeline), block, stream, (microbatch, key)) for block in chunk]
    kept = stream if pipeline.remat == "full" else [t.kept for t in templates]
    slots = pipeline.schedule.ring_slots
    ring = jax.tree.map(lambda a: jax.ShapeDtypeStruct((slots, *a.shape), a.dtype), kept)
    return _Shapes(stream, templates, ring)


def _at(tree: Tree, index: jax.Array | int) -> Tree:
    return jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, index, keepdims=False), tree)


def _put(tree: Tree, index: jax.Array, value: Tree) -> Tree:
    """Write `value` at `index` of the first dim; a buffer of one slot is simply replaced."""
    return jax.tree.map(
        lambda a, v: v[None] if a.shape[0] == 1 else jax.lax.dynamic_update_index_in_dim(a, v, index, 0), tree, value
    )


def _blank(spec: Tree, slots: int | None = None) -> Tree:
    """What stands where nothing was computed. It is never read into a result: a test fills it with NaN."""
    lead = () if slots is None else (slots,)
    return jax.tree.map(lambda a: jnp.zeros((*lead, *a.shape), a.dtype), spec)


def _cast(a: jax.Array, dtype: Any) -> jax.Array:
    return a.astype(dtype) if jnp.issubdtype(a.dtype, jnp.floating) else a


def _cast_like(tree: Tree, spec: Tree) -> Tree:
    return jax.tree.map(lambda a, s: a.astype(s.dtype), tree, spec)


def _chunk_forward(ctx: _Context, weights: list, known: list, count: jax.Array, stream: Tree) -> tuple[Tree, list]:
    """Run a chunk's layers; returns the new stream and what each place keeps."""
    layer, kept = _layer(ctx.pipeline), []
    for block, had in zip(weights, known, strict=True):

        def run(block: Any, stream: Tree, had: tuple) -> tuple[Tree, list]:
            out, arrays, _ = remat.forward(layer, block, stream, had)
            return out, arrays

        if ctx.uneven:

            def skip(block: Any, stream: Tree, had: tuple, run: Callable = run) -> tuple[Tree, list]:
                _, arrays = jax.eval_shape(run, block, stream, had)
                return stream, _blank(arrays)

            stream, arrays = jax.lax.cond(len(kept) < count, run, skip, block, stream, had)
        else:
            stream, arrays = run(block, stream, had)
        kept.append(arrays)
    return stream, kept


def _chunk_backward(
    ctx: _Context, shapes: _Shapes, c: jax.Array, weights: list, known: list, kept: list, grads: list, cotangent: Tree
) -> tuple[list, Tree]:
    """Walk a chunk's layers backward; returns the gradient accumulators with this chunk's added, and the stream's."""
    grads = list(grads)
    for k in reversed(range(len(weights))):

        def run(total: Any, cotangent: Tree, block: Any, had: tuple, arrays: list, k: int = k) -> tuple[Any, Tree]:
            found, cotangent = remat.backward(shapes.templates[k], block, had, arrays, cotangent)
            return jax.tree.map(lambda a, g: _accumulate(a, c, g), total, found), cotangent

        def skip(total: Any, cotangent: Tree, *_: Any) -> tuple[Any, Tree]:
            return total, cotangent

        args = (grads[k], cotangent, weights[k], known[k], kept[k])
        grads[k], cotangent = jax.lax.cond(k < ctx.counts[c], run, skip, *args) if ctx.uneven else run(*args)
    return grads, cotangent


def _accumulate(total: jax.Array, c: jax.Array, found: jax.Array) -> jax.Array:
    """Add a chunk's gradient to its accumulator [C, ...] in the accumulator's dtype."""
    found = found.astype(total.dtype)
    return total + found if total.shape[0] == 1 else total.at[c].add(found)


def _train(
    pipeline: Pipeline, dims: dict, params: Placed, batch: dict, tables: tuple, chunk_table: dict, key: Any, ring: Tree
) -> tuple[jax.Array, jax.Array, Placed, Tree]:
    """The step as one rank sees it: prepare, scan the ticks, reduce."""
    ctx = _context(pipeline, dims, params, batch, chunk_table, key)
    shapes = _shapes(pipeline, ctx.weights, ctx.outer, batch, key)
    schedule, link = pipeline.schedule, pipeline.wire
    on_wire = wire.on_wire(link, shapes.stream)
    accumulators = jax.tree.map(lambda a: jnp.zeros(a.shape, pipeline.precision.accumulate), (ctx.weights, ctx.outer))
    carry = {
        "ring": jax.tree.map(lambda a: a[0], ring),
        "outputs": _blank(shapes.stream, schedule.output_slots),
        "arrived": _blank(on_wire, schedule.forward_inbox),
        "returned": _blank(shapes.stream, schedule.backward_inbox),
        "blocks": accumulators[0],
        "outer": accumulators[1],
        "losses": jnp.zeros(schedule.microbatches, jnp.float32),
    }

    def tick(carry: dict, row: tuple[dict, dict]) -> tuple[dict, None]:
        f, b = jax.tree.map(lambda a: a[0], row)
        carry = dict(carry)
        carry["ring"], carry["outputs"], out = _forward_slot(ctx, shapes, f, carry)
        arrival = wire.forward_send(link, shapes.stream, out)
        slot_of = ("blocks", "outer", "losses")
        *totals, cotangent = _backward_slot(ctx, shapes, b, carry)
        carry |= dict(zip(slot_of, totals, strict=True))
        carry["arrived"] = _put(carry["arrived"], f["arrive"], arrival)
        returned = wire.backward_send(link, shapes.stream, cotangent)
        carry["returned"] = _put(carry["returned"], b["arrive"], returned)
        return carry, None

    carry, _ = jax.lax.scan(tick, carry, tables)
    losses = jax.lax.psum(carry["losses"], (DATA, PIPE))
    grads = _reduce(pipeline, dims, params, carry["blocks"], carry["outer"])
    return jnp.sum(losses), losses, grads, jax.tree.map(lambda a: a[None], carry["ring"])


def _reduce(pipeline: Pipeline, dims: dict, params: Placed, blocks: list, outer: dict) -> Placed:
    """Sum gradients over data and, for the outer, over the pipe: once a step, in the reduce dtype."""
    stages = pipeline.schedule.stages

    def over_data(a: jax.Array) -> jax.Array:
        return jax.lax.psum(a.astype(pipeline.precision.reduce), DATA) if pipeline.mesh.shape[DATA] > 1 else a

    def over_pipe(a: jax.Array, dim: int) -> jax.Array:
        if stages == 1:
            return a
        if dim == partition.WHOLE:
            return jax.lax.psum(a, PIPE)
        return jax.lax.psum_scatter(a, PIPE, scatter_dimension=dim, tiled=True)

    outer = jax.tree.map(lambda a, dim: over_data(over_pipe(a, dim)), outer, dims)
    blocks = jax.tree.map(lambda a: over_data(a)[None], blocks)
    return Placed(outer["embed"], blocks, outer["head"], params.layout)


def _input(ctx: _Context, shapes: _Shapes, f: dict, m: jax.Array, arrived: Tree) -> Tree:
    """A chunk's input: the embedding's output on the first chunk, elsewhere what arrived, in the stream's dtype."""
    return jax.lax.cond(
        f["read"] == IDLE,
        lambda: ctx.embed(m, ctx.outer["embed"]),
        lambda: _cast_like(_at(arrived, f["read"]), shapes.stream),
    )


def _forward_slot(ctx: _Context, shapes: _Shapes, f: dict, carry: dict) -> tuple[Tree, Tree, Tree]:
    """F: run a chunk forward, keep its residuals in the ring. Returns ring, outputs, and what is sent."""
    full = ctx.pipeline.remat == "full"
    c, m, last = f["chunk"], f["microbatch"], f["output"] != IDLE

    def run(ring: Tree, outputs: Tree, arrived: Tree) -> tuple[Tree, Tree, Tree]:
        stream = _input(ctx, shapes, f, m, arrived)
        if full:
            # B runs the chunk again from its input, so on the last chunk there is nothing to do here.
            out = jax.lax.cond(last, lambda x: x, lambda x: _plain(ctx, c, m, x), stream)
            return _put(ring, f["ring"], stream), outputs, out
        out, kept = _chunk_forward(ctx, ctx.chunk_weights(c), ctx.known(c, m), ctx.counts[c], stream)
        outputs = jax.lax.cond(last, lambda: _put(outputs, f["output"], out), lambda: outputs)
        return _put(ring, f["ring"], kept), outputs, out

    def idle(ring: Tree, outputs: Tree, arrived: Tree) -> tuple[Tree, Tree, Tree]:
        return ring, outputs, _blank(shapes.stream)

    return jax.lax.cond(c != IDLE, run, idle, carry["ring"], carry["outputs"], carry["arrived"])


def _plain(ctx: _Context, c: jax.Array, m: jax.Array, stream: Tree) -> Tree:
    """A chunk's forward that keeps nothing."""
    for k, (block, known) in enumerate(zip(ctx.chunk_weights(c), ctx.known(c, m), strict=True)):
        if ctx.uneven:
            run = lambda b, x, had: b(x, *had)
            stream = jax.lax.cond(k < ctx.counts[c], run, lambda b, x, had: x, block, stream, known)
        else:
            stream = block(stream, *known)
    return stream


def _backward_slot(ctx: _Context, shapes: _Shapes, b: dict, carry: dict) -> tuple[list, dict, jax.Array, Tree]:
    """B: a chunk's backward; on the last chunk also head and loss, on the first also the embedding.

    Returns the accumulators of blocks and outer, the losses, and the cotangent that is sent.
    """
    c, m = b["chunk"], b["microbatch"]

    def run(blocks: list, outer: dict, losses: jax.Array, carry: dict) -> tuple[list, dict, jax.Array, Tree]:
        weights, known = ctx.chunk_weights(c), ctx.known(c, m)
        kept = _at(carry["ring"], b["ring"])
        if ctx.pipeline.remat == "full":
            out, kept = _chunk_forward(ctx, weights, known, ctx.counts[c], kept)
        else:
            out = _at(carry["outputs"], jnp.maximum(b["output"], 0))
        outer, losses, cotangent = jax.lax.cond(
            b["output"] != IDLE,
            partial(_head_backward, ctx, m),
            lambda outer, losses, out: (outer, losses, _at(carry["returned"], jnp.maximum(b["read"], 0))),
            *(outer, losses, out),
        )
        blocks, cotangent = _chunk_backward(ctx, shapes, c, weights, known, kept, blocks, cotangent)
        first = (c == 0) & (jax.lax.axis_index(PIPE) == 0)
        outer = jax.lax.cond(first, partial(_embed_backward, ctx, m), lambda o, _: o, outer, cotangent)
        return blocks, outer, losses, cotangent

    def idle(blocks: list, outer: dict, losses: jax.Array, carry: dict) -> tuple[list, dict, jax.Array, Tree]:
        return blocks, outer, losses, _blank(shapes.stream)

    return jax.lax.cond(c != IDLE, run, idle, carry["blocks"], carry["outer"], carry["losses"], carry)


def _head_backward(ctx: _Context, m: jax.Array, outer: dict, losses: jax.Array, out: Tree) -> tuple[dict, Any, Tree]:
    """Loss of a microbatch and its gradients, from the last chunk's output."""
    microbatch = _at(ctx.batch, m)

    def loss(weights: dict, out: Tree) -> jax.Array:
        return ctx.pipeline.loss(weights["head"], weights["embed"], out, microbatch) * ctx.scale

    value, (found, cotangent) = jax.value_and_grad(loss, argnums=(0, 1))(ctx.outer, out)
    outer = jax.tree.map(lambda a, g: a + g.astype(a.dtype), outer, found)
    return outer, losses.at[m].set(value), cotangent


def _embed_backward(ctx: _Context, m: jax.Array, outer: dict, cotangent: Tree) -> dict:
    """Gradients of the embedding from the first chunk's cotangent; the lookup is run again."""
    _, vjp = jax.vjp(partial(ctx.embed, m), ctx.outer["embed"])
    (found,) = vjp(cotangent)
    return outer | {"embed": jax.tree.map(lambda a, g: a + g.astype(a.dtype), outer["embed"], found)}


def _evaluate(
    pipeline: Pipeline, dims: dict, params: Placed, batch: dict, tables: tuple, chunk_table: dict, key: Any, _: None
) -> tuple[jax.Array, jax.Array]:
    """Forward only, as one rank sees it: the F slots, and the loss where the last chunk ends."""
    ctx = _context(pipeline, dims, params, batch, chunk_table, key)
    shapes = _shapes(pipeline, ctx.weights, ctx.outer, batch, key)
    link = pipeline.wire
    on_wire = wire.on_wire(link, shapes.stream)

    def tick(carry: tuple[Tree, jax.Array], row: tuple[dict]) -> tuple[tuple[Tree, jax.Array], None]:
        arrived, total = carry
        f = jax.tree.map(lambda a: a[0], row[0])
        c, m = f["chunk"], f["microbatch"]

        def run(total: jax.Array) -> tuple[jax.Array, Tree]:
            out = _plain(ctx, c, m, _input(ctx, shapes, f, m, arrived))
            outer, microbatch = ctx.outer, _at(ctx.batch, m)
            loss = lambda: pipeline.loss(outer["head"], outer["embed"], out, microbatch)
            return total + jax.lax.cond(f["output"] != IDLE, loss, lambda: jnp.zeros(())), out

        total, out = jax.lax.cond(c != IDLE, run, lambda total: (total, _blank(shapes.stream)), total)
        arrival = wire.forward_send(link, shapes.stream, out)
        return (_put(arrived, f["arrive"], arrival), total), None

    start = (_blank(on_wire, pipeline.schedule.forward_inbox), jnp.zeros(()))
    (_, total), _ = jax.lax.scan(tick, start, tables)
    return jax.lax.psum(total, (DATA, PIPE)), 1.0 / ctx.scale
