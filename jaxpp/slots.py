"""What a slot does: a chunk's forward, and its backward with loss and embedding, as one rank sees them.

`jax.vjp` is taken one layer at a time inside a slot; what F must keep for B goes into the ring. There is no collective
inside a slot, since neighbours may take different branches.

Legend: B microbatch size, T sequence, D model, V vocabulary; S stages, C chunks a stage, K places a chunk,
M microbatches. "stream" is what blocks hand on (a pytree, usually x_BTD); "outer" is embedding and head.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from jaxpp import partition, probe, remat, sharding, wire
from jaxpp.losses import count_valid, token_loss, with_metrics
from jaxpp.mesh import CONTEXT, MANUAL, PIPE, ROWS, count
from jaxpp.partition import Placed, Rest, join
from jaxpp.precision import Precision
from jaxpp.probe import Probe
from jaxpp.schedules import IDLE, Schedule
from jaxpp.trees import at, blank, cast, cast_like, put

Tree = Any
# Where each slot of the ring is an array of its own, chosen by a branch: nothing is copied, while a GPU copies a
# microbatch's residuals in and out of a stack of them. A CPU copies the whole ring in every branch instead.
SWITCHED = ("gpu",)


@dataclass(frozen=True)
class Pipeline:
    """How a step is run; see `value_and_grad` for the fields.

    zero_stage: see `partition.rest`. zero_gather: when parameters that rest split over the replicas are gathered,
    "step", or "layer": each layer's in every slot that runs it. sequence_parallel: see `sharding`.
    """

    schedule: Schedule
    mesh: Mesh
    precision: Precision
    remat: str = "dots"
    loss: Callable = token_loss
    zero_stage: int = 0
    zero_gather: str = "step"
    sequence_parallel: bool = False
    probe: Probe | None = None  # needs remat="none": a policy would run a layer, and its taps, twice

    @property
    def banks(self) -> int:
        """Arrays that the ring is made of: one a slot, or one stack of all slots; a ring of inputs alone is small."""
        platform = "" if isinstance(self.mesh, AbstractMesh) else self.mesh.devices.flat[0].platform
        return self.schedule.ring_slots if platform in SWITCHED and self.remat != "full" else 1

    @property
    def wire(self) -> wire.Wire:
        """The transfers between this pipeline's stages."""
        s, p = self.schedule, self.precision
        return wire.Wire(PIPE, s.stages, p.wire, p.grad_wire, wrap=s.chunks > 1)


class Context(NamedTuple):
    """What every slot of a rank sees; built once a step, before the scan.

    rest: see `partition.rest`. uneven: some places hold no layer. batch: this data rank's [M, B, ...]. key: of the
    step, or None. weights: K modules, leaves [C, ...], outer: embedding and head, both in the compute dtype and whole;
    weights that are gathered by layer are as they rest, see `layer`.
    counts, first: int32 [C], layers of each chunk and the first one's index. count: float32 [], valid tokens of all
    microbatches and data ranks. scale: float32 [], of the loss, or None. frozen: what is not trained, None or a pair
    like (weights, outer); the modules of both are joined where they compute. layer_rest: the `Rest`s of a whole layer.
    """

    pipeline: Pipeline
    rest: Placed
    uneven: bool
    batch: dict[str, jax.Array]
    key: jax.Array | None
    weights: list
    outer: dict
    counts: jax.Array
    first: jax.Array
    count: jax.Array
    scale: jax.Array | None
    frozen: tuple[list, dict] | None
    layer_rest: Any

    def chunk_weights(self, c: jax.Array) -> list:
        return at(self.weights, c)

    def layer(self, block: Any, frozen: Any) -> Any:
        """A layer as it computes, from its halves in `chunk_weights` and `known`."""
        whole = join(block, frozen)
        if self.pipeline.zero_gather == "step":
            return whole
        return jax.tree.map(partial(fetch, self.pipeline), whole, self.layer_rest)

    def known(self, c: jax.Array, m: jax.Array) -> list:
        """(microbatch, key, frozen half) for the layer of each place: what the B slot can build again."""
        microbatch = at(self.batch, m)
        frozen = [None] * len(self.weights) if self.frozen is None else at(self.frozen[0], c)
        layers = ((self.first[c] + k, half) for k, half in enumerate(frozen))
        return [(probe.mark(self.pipeline.probe, microbatch, m, i), self.layer_key(m, i), half) for i, half in layers]

    def whole(self, outer: dict) -> dict:
        """Embedding and head with what is frozen of them."""
        return outer if self.frozen is None else {name: join(outer[name], self.frozen[1][name]) for name in outer}

    def layer_key(self, m: jax.Array, layer: jax.Array | int) -> jax.Array | None:
        """The key of one layer (-1: the embedding) for one microbatch: the same for any number of stages."""
        if self.key is None:
            return None
        mesh = self.pipeline.mesh
        row = m * count(mesh, ROWS) + jax.lax.axis_index(ROWS)
        key = jax.random.fold_in(jax.random.fold_in(self.key, row), layer + 1)
        # Parts of a sequence draw each for itself; with one part the draw is that of no parts.
        return jax.random.fold_in(key, jax.lax.axis_index(CONTEXT)) if mesh.shape[CONTEXT] > 1 else key

    def note_embed(self, m: jax.Array, direction: str, tree: Tree) -> Tree:
        if self.pipeline.probe is None:
            return tree
        marked = probe.mark(self.pipeline.probe, at(self.batch, m), m, -1)
        return probe.note(self.pipeline.probe, "embed", direction, marked, tree)

    @jax.named_scope("embed")
    def embed(self, m: jax.Array, embed: Any) -> Tree:
        whole = self.whole({"embed": embed})["embed"]
        return _embed(self.pipeline, whole, at(self.batch, m), self.layer_key(m, -1))


def _embed(pipeline: Pipeline, embed: Any, microbatch: dict, key: jax.Array | None) -> Tree:
    stream = embed(microbatch, key)
    residual = pipeline.precision.residual
    return stream if residual == "compute" else jax.tree.map(lambda a: cast(a, residual), stream)


def make_context(
    pipeline: Pipeline,
    rests: tuple[Placed, Placed | None],
    halves: tuple[Placed, Placed | None],
    batch: dict,
    chunk_table: dict,
    key: Any,
    scale: Any,
) -> Context:
    """Gather and cast what the slots read. Runs inside the map. halves: trained and frozen; rests: theirs."""
    compute, mesh = jnp.dtype(pipeline.precision.compute), pipeline.mesh

    def ready(a: jax.Array, r: Rest) -> jax.Array:
        a = sharding.pad(gather(cast(a, compute), r), r.names, mesh)
        return sharding.constrain_leaf(a if r.outer else a[0], r.names)

    valid = jax.lax.psum(count_valid(batch["labels"]), (*ROWS, CONTEXT))
    if mesh.shape[CONTEXT] > 1 and "positions" not in batch:
        length = batch["labels"].shape[-1]
        places = jax.lax.axis_index(CONTEXT) * length + jnp.arange(length)
        batch = batch | {"positions": jnp.broadcast_to(places, batch["labels"].shape)}

    def half(placed: Placed, rest: Placed) -> tuple[list, dict]:
        of_block = ready if pipeline.zero_gather == "step" else lambda a, _: a[0]
        return jax.tree.map(of_block, placed.blocks, rest.blocks), jax.tree.map(ready, placed.outer, rest.outer)

    (params, frozen), (rest, frozen_rest) = halves, rests
    weights, outer = half(params, rest)
    return Context(
        pipeline=pipeline,
        rest=rest,
        uneven=len(set(params.layout.layers)) > 1,
        batch=batch,
        key=key,
        weights=weights,
        outer=outer,
        counts=chunk_table["count"][0],
        first=chunk_table["first"][0],
        count=valid,
        scale=scale,
        frozen=None if frozen is None or frozen_rest is None else half(frozen, frozen_rest),
        layer_rest=join(rest.blocks[0], None if frozen_rest is None else frozen_rest.blocks[0]),
    )


def gather(a: jax.Array, r: Rest) -> jax.Array:
    """A parameter as the step computes with it, from the part that rests on this rank."""
    for dim, over in gathered(r):
        a = jax.lax.all_gather(a, over, axis=dim, tiled=True)
    return a


def fetch(pipeline: Pipeline, a: jax.Array, r: Rest) -> jax.Array:
    """`gather` of one layer's parameter, cast to the compute dtype; its gradient is summed to where the parameter
    rests, in the reduce dtype."""
    compute, reduce = jnp.dtype(pipeline.precision.compute), pipeline.precision.reduce
    lead = len(r.shape) - a.ndim
    layer = replace(r, shape=r.shape[lead:], param=PartitionSpec(*r.param[lead:]))

    @jax.custom_vjp
    def whole(a: jax.Array) -> jax.Array:
        return sharding.constrain_leaf(gather(cast(a, compute), layer), r.names)

    def back(_: None, g: jax.Array) -> tuple[jax.Array]:
        g = g.astype(reduce)
        for dim, over in gathered(layer):
            g = jax.lax.psum_scatter(g, over, scatter_dimension=dim, tiled=True)
        return (g.astype(a.dtype),)

    whole.defvjp(lambda a: (whole(a), None), back)
    return whole(a)


def gathered(r: Rest) -> list[tuple[int, tuple[str, ...]]]:
    """(dim, manual axes) over which a parameter that rests in parts is gathered."""
    owners = lambda dim: (r.owner(dim), None if r.outer else PIPE)
    over = lambda dim, entry: tuple(x for x in partition.axes_of(entry) if x in MANUAL and x not in owners(dim))
    return [(dim, axes) for dim, entry in enumerate(r.param) if (axes := over(dim, entry))]


class Shapes(NamedTuple):
    """Static facts about a step, from abstract traces. stream: its spec. templates: one a place. ring: its spec.
    metrics: those of the loss, float32."""

    stream: Tree
    templates: list[remat.Template]
    ring: Tree
    metrics: dict[str, Any]


def _layer(ctx: Context) -> Callable:
    def layer(block: Any, stream: Tree, known: tuple) -> Tree:
        microbatch, key, frozen = known
        return probe.call(ctx.pipeline.probe, ctx.layer(block, frozen), stream, microbatch, key)

    return remat.checkpointed(layer, ctx.pipeline.remat)


def make_shapes(ctx: Context) -> Shapes:
    """The shapes of a step, from abstract traces. Raises ValueError where a block or the stream is not as asked."""
    pipeline, weights, outer, key = ctx.pipeline, ctx.weights, ctx.outer, ctx.key
    microbatch = jax.eval_shape(lambda b: at(b, 0), ctx.batch)
    stream = jax.eval_shape(partial(_embed, pipeline), ctx.whole(outer)["embed"], microbatch, key)
    for leaf in jax.tree.leaves(stream):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ValueError(
                f"the stream holds {leaf.dtype}{list(leaf.shape)}, and only floating tensors have gradients: leave"
                f" integers in the microbatch, which every stage is given"
            )
    frozen = [None] * len(weights) if ctx.frozen is None else ctx.frozen[0]
    chunk, frozen = jax.eval_shape(lambda w: at(w, 0), (weights, frozen))
    for k, pair in enumerate(zip(chunk, frozen, strict=True)):
        out = jax.eval_shape(lambda b, f, x, *known: ctx.layer(b, f)(x, *known), *pair, stream, microbatch, key)
        wire.check(stream, out, f"of block {k} (a block keeps the shapes and dtypes of its input)")
    marked, pairs = probe.mark_spec(pipeline.probe, microbatch), zip(chunk, frozen, strict=True)
    templates = [remat.template(_layer(ctx), block, stream, (marked, key, half)) for block, half in pairs]
    kept = stream if pipeline.remat == "full" else [t.kept for t in templates]
    banks = pipeline.banks
    slots = pipeline.schedule.ring_slots // banks
    ring = [jax.tree.map(lambda a: jax.ShapeDtypeStruct((slots, *a.shape), a.dtype), kept)] * banks
    loss = lambda outer, out, batch: with_metrics(pipeline.loss(outer["head"], outer["embed"], out, batch))[1]
    metrics = jax.eval_shape(loss, ctx.whole(outer), stream, microbatch)
    return Shapes(stream, templates, ring, metrics)


def _chunk_forward(ctx: Context, weights: list, known: list, count: jax.Array, stream: Tree) -> tuple[Tree, list]:
    """Run a chunk's layers; returns the new stream and what each place keeps."""
    layer, kept = _layer(ctx), []
    for block, had in zip(weights, known, strict=True):

        def run(block: Any, stream: Tree, had: tuple) -> tuple[Tree, list]:
            out, arrays, _ = remat.forward(layer, block, stream, had)
            return out, arrays

        if ctx.uneven:

            def skip(block: Any, stream: Tree, had: tuple, run: Callable = run) -> tuple[Tree, list]:
                _, arrays = jax.eval_shape(run, block, stream, had)
                return stream, blank(arrays)

            stream, arrays = sharding.cond(len(kept) < count, run, skip, block, stream, had)
        else:
            stream, arrays = run(block, stream, had)
        kept.append(arrays)
    return stream, kept


def _chunk_backward(
    ctx: Context, shapes: Shapes, c: jax.Array, weights: list, known: list, kept: list, grads: list, cotangent: Tree
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
        grads[k], cotangent = sharding.cond(k < ctx.counts[c], run, skip, *args) if ctx.uneven else run(*args)
    return grads, cotangent


def _accumulate(total: jax.Array, c: jax.Array, found: jax.Array) -> jax.Array:
    """Add a chunk's gradient to its accumulator [C, ...] in the accumulator's dtype."""
    found = found.astype(total.dtype)
    return total + found if total.shape[0] == 1 else total.at[c].add(found)


def chunk_input(ctx: Context, shapes: Shapes, f: dict, m: jax.Array, arrived: Tree) -> Tree:
    """A chunk's input: the embedding's output on the first chunk, elsewhere what arrived, in the stream's dtype."""
    return sharding.cond(
        f["read"] == IDLE,
        lambda: ctx.note_embed(m, probe.FORWARD, ctx.embed(m, ctx.outer["embed"])),
        lambda: cast_like(at(arrived, f["read"]), shapes.stream),
    )


def _run_slot(row: dict, banks: int, run: Callable, idle: Callable, *args: Any) -> Any:
    """idle(*args), or run(bank, slot, *args) with the row's place in the ring: its bank, and its slot there."""
    if banks == 1:
        return sharding.cond(row["chunk"] != IDLE, partial(run, 0, row["ring"]), idle, *args)
    return sharding.switch(row["ring"] - IDLE, [idle, *(partial(run, bank, 0) for bank in range(banks))], *args)


@jax.named_scope("forward_slot")
def forward_slot(ctx: Context, shapes: Shapes, f: dict, carry: dict) -> tuple[Tree, Tree, Tree]:
    """F: run a chunk forward, keep its residuals in the ring. Returns ring, outputs, and what is sent."""
    full = ctx.pipeline.remat == "full"
    c, m, last = f["chunk"], f["microbatch"], f["output"] != IDLE

    def run(bank: int, slot: Any, ring: list, outputs: Tree, arrived: Tree) -> tuple[list, Tree, Tree]:
        stream = chunk_input(ctx, shapes, f, m, arrived)
        if full:
            # B runs the chunk again from its input, so on the last chunk there is nothing to do here.
            kept, out = stream, sharding.cond(last, lambda x: x, lambda x: plain_forward(ctx, c, m, x), stream)
        else:
            out, kept = _chunk_forward(ctx, ctx.chunk_weights(c), ctx.known(c, m), ctx.counts[c], stream)
            outputs = sharding.cond(last, lambda: put(outputs, f["output"], out), lambda: outputs)
        return [put(held, slot, kept) if i == bank else held for i, held in enumerate(ring)], outputs, out

    def idle(ring: list, outputs: Tree, arrived: Tree) -> tuple[list, Tree, Tree]:
        return ring, outputs, blank(shapes.stream)

    return _run_slot(f, len(shapes.ring), run, idle, carry["ring"], carry["outputs"], carry["arrived"])


def plain_forward(ctx: Context, c: jax.Array, m: jax.Array, stream: Tree) -> Tree:
    """A chunk's forward that keeps nothing."""

    def run(block: Any, stream: Tree, had: tuple) -> Tree:
        return ctx.layer(block, had[2])(stream, *had[:2])

    for k, (block, known) in enumerate(zip(ctx.chunk_weights(c), ctx.known(c, m), strict=True)):
        if ctx.uneven:
            stream = sharding.cond(k < ctx.counts[c], run, lambda b, x, had: x, block, stream, known)
        else:
            stream = run(block, stream, known)
    return stream


@jax.named_scope("backward_slot")
def backward_slot(ctx: Context, shapes: Shapes, b: dict, carry: dict) -> tuple[list, dict, dict, Tree]:
    """B: a chunk's backward; on the last chunk also head and loss, on the first also the embedding.

    Returns the accumulators of blocks and outer, the losses and metrics, and the cotangent that is sent.
    """
    c, m = b["chunk"], b["microbatch"]

    def run(bank: int, slot: Any, blocks: list, outer: dict, losses: dict, held: dict) -> tuple[list, dict, dict, Tree]:
        weights, known = ctx.chunk_weights(c), ctx.known(c, m)
        kept = at(held["ring"][bank], slot)
        if ctx.pipeline.remat == "full":
            out, kept = _chunk_forward(ctx, weights, known, ctx.counts[c], kept)
        else:
            out = at(held["outputs"], jnp.maximum(b["output"], 0))
        outer, losses, cotangent = sharding.cond(
            b["output"] != IDLE,
            partial(_head_backward, ctx, m),
            lambda outer, losses, out: (outer, losses, at(held["returned"], jnp.maximum(b["read"], 0))),
            *(outer, losses, out),
        )
        blocks, cotangent = _chunk_backward(ctx, shapes, c, weights, known, kept, blocks, cotangent)
        first = c == 0
        if ctx.pipeline.schedule.stages > 1:
            first &= jax.lax.axis_index(PIPE) == 0
        outer = sharding.cond(first, partial(_embed_backward, ctx, m), lambda o, _: o, outer, cotangent)
        return blocks, outer, losses, cotangent

    def idle(blocks: list, outer: dict, losses: dict, held: dict) -> tuple[list, dict, dict, Tree]:
        return blocks, outer, losses, blank(shapes.stream)

    held = {name: carry[name] for name in ("ring", "outputs", "returned")}  # and not what is being sent
    args = (carry["blocks"], carry["outer"], carry["losses"], held)
    return _run_slot(b, len(shapes.ring), run, idle, *args)


@jax.named_scope("head")
def _head_backward(ctx: Context, m: jax.Array, outer: dict, losses: dict, out: Tree) -> tuple[dict, dict, Tree]:
    """Loss and metrics of a microbatch and the loss's gradients, from the last chunk's output."""
    microbatch, count = at(ctx.batch, m), jnp.maximum(ctx.count, 1.0)

    def loss(weights: dict, out: Tree) -> tuple[jax.Array, dict]:
        with probe.inside(ctx.pipeline.probe, "head", probe.mark(ctx.pipeline.probe, microbatch, m, -1)):
            whole = ctx.whole(weights)
            value, metrics = with_metrics(ctx.pipeline.loss(whole["head"], whole["embed"], out, microbatch))
            value = probe.tap("loss", value, 1) / count
            return value if ctx.scale is None else value * ctx.scale, metrics

    (value, metrics), (found, cotangent) = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(ctx.outer, out)
    value = value if ctx.scale is None else value / ctx.scale
    outer = jax.tree.map(lambda a, g: a + g.astype(a.dtype), outer, found)
    sums = jax.tree.map(lambda a, v: a + v.astype(a.dtype) / count, losses["metrics"], metrics)
    return outer, {"loss": losses["loss"].at[m].set(value), "metrics": sums}, cotangent


@jax.named_scope("embed")
def _embed_backward(ctx: Context, m: jax.Array, outer: dict, cotangent: Tree) -> dict:
    """Gradients of the embedding from the first chunk's cotangent; the lookup is run again."""
    # In the accumulator's dtype, as a token's gradient is a sum over all places where it stands.
    wide = jax.tree.map(partial(cast, dtype=ctx.pipeline.precision.accumulate), ctx.outer["embed"])
    _, vjp = jax.vjp(lambda embed: cast_like(ctx.embed(m, embed), cotangent), wide)
    (found,) = vjp(ctx.note_embed(m, probe.BACKWARD, cotangent))
    return outer | {"embed": jax.tree.map(lambda a, g: a + g.astype(a.dtype), outer["embed"], found)}
