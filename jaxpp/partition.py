"""Which layers stand on which stage, and where every parameter rests.

Layers are dealt in order to the global chunks g = c*S + s (chunk c of rank s). A chunk has K **places**, as many as
the largest chunk has layers; a place that holds no layer is zeros and its slot is skipped. Place k is one block module
whose leaves are stacked [S, C, ...] and sharded over the pipe axis. Embedding and head ("outer") are sharded over it
at rest.

Legend: S stages, C chunks a stage, K places a chunk, L layers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpp import sharding
from jaxpp.mesh import EXPERT, MANUAL, PIPE, REPLICAS, TENSOR, count

Tree = Any
SHARD_FROM = 2**14  # leaves with fewer elements are not split further: a collective costs more than they do


class Model(NamedTuple):
    """What the library asks of a model: an embedding, blocks of one kind, a head. Any object with these will do.

    embed(microbatch, key) -> stream; blocks[i](stream, microbatch, key) -> stream, same shapes and dtypes;
    head(stream, embed) -> logits_BTV, with the embedding given so that a tied head can use its table.
    microbatch: the batch's dict of arrays, [B, T] each. key: a JAX key, or None for no randomness.
    """

    embed: Any
    blocks: Sequence[Any]
    head: Any


@dataclass(frozen=True)
class Layout:
    """Layers of each chunk: `layers[g]` for global chunk g = c*S + s."""

    stages: int
    chunks: int
    layers: tuple[int, ...]

    @property
    def places(self) -> int:
        """Places K of a chunk, at least 1."""
        return max(1, *self.layers)

    def counts(self) -> np.ndarray:
        """Layers in each chunk, int32 [S, C]."""
        return np.asarray(self.layers, np.int32).reshape(self.chunks, self.stages).T

    def first_layer(self) -> np.ndarray:
        """Global index of each chunk's first layer, int32 [S, C]."""
        starts = np.cumsum((0, *self.layers[:-1])).astype(np.int32)
        return starts.reshape(self.chunks, self.stages).T

    def where(self, layer: int) -> tuple[int, int, int]:
        """(stage, chunk, place) of a layer."""
        ends = np.cumsum(self.layers)
        g = int(np.searchsorted(ends, layer, side="right"))
        return g % self.stages, g // self.stages, layer - int(ends[g] - self.layers[g])

    def layers_per_stage(self) -> list[int]:
        """Layers of each stage over all its chunks."""
        return [int(n) for n in self.counts().sum(axis=1)]


def split_layers(layers: int, stages: int, chunks: int = 1, layer_split: Sequence[int] | None = None) -> Layout:
    """Deal L layers to S*C chunks in order, as evenly as whole layers allow, the larger first (30 on 4: 8, 8, 7, 7).

    Args: layer_split, the layers of each global chunk instead.
    Raises ValueError for a given split of the wrong length or sum, or more stages than layers.
    """
    total = stages * chunks
    if layer_split is not None:
        if len(layer_split) != total or sum(layer_split) != layers or min(layer_split) < 0:
            words = lambda numbers: " ".join(map(str, numbers))
            raise ValueError(
                f"layer_split={words(layer_split)} must be {total} numbers >= 0, of the layers of each chunk, that sum"
                f" to {layers}: for example {words(split_layers(layers, stages, chunks).layers)}"
            )
        return Layout(stages, chunks, tuple(layer_split))
    if layers < stages:
        raise ValueError(f"pipeline_parallel={stages} is more than the model's {layers} layers: use at most {layers}")
    size, extra = divmod(layers, total)
    return Layout(stages, chunks, tuple(size + (g < extra) for g in range(total)))


@partial(jax.tree_util.register_dataclass, data_fields=["embed", "blocks", "head"], meta_fields=["layout"])
@dataclass(frozen=True)
class Placed:
    """A model's parameters (or gradients, or optimizer moments) in their places.

    embed, head: the model's own modules. blocks: K modules whose leaves are stacked [S, C, ...].
    """

    embed: Any
    blocks: list[Any]
    head: Any
    layout: Layout

    @property
    def outer(self) -> dict[str, Any]:
        """Embedding and head as one tree."""
        return {"embed": self.embed, "head": self.head}


def stack(model: Any, layout: Layout) -> Placed:
    """Put a model's layers in their places. Traceable. Raises ValueError where blocks differ in structure or shape."""
    blocks = list(model.blocks)
    if len(blocks) != sum(layout.layers):
        raise ValueError(f"the layout holds {sum(layout.layers)} layers, the model has {len(blocks)}")
    structure = jax.tree.structure(blocks[0])
    for i, block in enumerate(blocks):
        if jax.tree.structure(block) != structure or _shapes(block) != _shapes(blocks[0]):
            raise ValueError(f"block {i} must have the structure, shapes and dtypes of block 0 to be pipelined")
    empty = jax.tree.map(jnp.zeros_like, blocks[0])
    at = {layout.where(i): block for i, block in enumerate(blocks)}

    def place(k: int) -> Any:
        grid = [[at.get((s, c, k), empty) for c in range(layout.chunks)] for s in range(layout.stages)]
        rows = [jax.tree.map(lambda *leaves: jnp.stack(leaves), *row) for row in grid]
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *rows)

    return Placed(model.embed, [place(k) for k in range(layout.places)], model.head, layout)


def unstack(placed: Placed) -> Model:
    """The model of placed parameters, layer by layer in order: the inverse of `stack`."""
    layout = placed.layout

    def layer(i: int) -> Any:
        s, c, k = layout.where(i)
        return jax.tree.map(lambda a: a[s, c], placed.blocks[k])

    return Model(placed.embed, [layer(i) for i in range(sum(layout.layers))], placed.head)


def split(tree: Tree, trained: type | None) -> tuple[Tree, Tree]:
    """Two trees of one structure: what is trained, and the frozen rest, with None where the other has a variable.

    Args: trained, a type of NNX variables; None: all of them, and nothing is frozen: then the second tree is None.
    """
    if trained is None:
        return tree, None
    keep = lambda which: jax.tree.map(lambda v: v if isinstance(v, trained) == which else None, tree, is_leaf=_variable)
    return keep(True), keep(False)


def join(trained: Tree, frozen: Tree) -> Tree:
    """The tree that `split` was given; `frozen` may be None, where nothing is."""
    if frozen is None:
        return trained
    either = lambda a, b: b if a is None else a
    return jax.tree.map(either, trained, frozen, is_leaf=lambda a: a is None or _variable(a))


def _variable(a: Any) -> bool:
    return isinstance(a, nnx.Variable)


def _shapes(tree: Tree) -> list[tuple]:
    return [(jnp.shape(a), jnp.result_type(a)) for a in jax.tree.leaves(tree)]


@dataclass(frozen=True)
class Rest:
    """Where one parameter, its gradient and its optimizer moments rest.

    shape: of the whole. names: of its dims. param, grad, moment: their `PartitionSpec`s. outer: of embedding or head.
    """

    shape: tuple[int, ...]
    names: PartitionSpec
    param: PartitionSpec
    grad: PartitionSpec
    moment: PartitionSpec
    outer: bool

    def owner(self, dim: int) -> str | None:
        """The manual axis whose ranks own different parts of a dim also while a step computes: experts."""
        name, _ = sharding.named(self.names, self.shape)[dim]
        return EXPERT if name and sharding.RULES.get(name) == EXPERT else None

    @property
    def computed(self) -> PartitionSpec:
        """Its `PartitionSpec` while a step computes, gathered but for what stages, experts and tensor ranks own."""
        owners = lambda dim: {self.owner(dim), TENSOR, None if self.outer else PIPE}
        kept = ([axis for axis in axes_of(entry) if axis in owners(d)] for d, entry in enumerate(self.param))
        return PartitionSpec(*(axes[0] if axes else None for axes in kept))

    def summed(self, mesh: Any) -> tuple[str, ...]:
        """The manual axes over which gradients are summed."""
        owners = {self.owner(d) for d in range(len(self.shape))}
        axes = ((PIPE,) if self.outer else ()) + tuple(axis for axis in REPLICAS if axis not in owners)
        return tuple(axis for axis in axes if mesh.shape[axis] > 1)


def rest(placed: Placed, mesh: Any, zero_stage: int = 0) -> Placed:
    """The `Rest` of every leaf of placed parameters (concrete or abstract).

    zero_stage: 1 splits moments over the replicas, 2 gradients too, 3 parameters too (Rajbhandari et al. 2020,
    arXiv:1910.02054).
    """

    def one(a: Any, names: PartitionSpec, outer: bool) -> Rest:
        axes: list = [sharding.axis_of(name, n, mesh) for name, n in sharding.named(names, a.shape)]
        if outer:
            axes = _split(axes, a.shape, (PIPE,), mesh)
        else:
            axes[0] = PIPE
        base = PartitionSpec(*axes)
        taken = {EXPERT} & set(axes)
        split = PartitionSpec(*_split(axes, a.shape, tuple(x for x in REPLICAS if x not in taken), mesh))
        param, grad, moment = (split if zero_stage >= stage else base for stage in (3, 2, 1))
        return Rest(tuple(a.shape), names, param, grad, moment, outer)

    map_ = lambda tree, outer: jax.tree.map(partial(one, outer=outer), tree, sharding.names_of(tree))
    return Placed(map_(placed.embed, True), map_(placed.blocks, False), map_(placed.head, True), placed.layout)


def _split(axes: list, shape: tuple[int, ...], over: tuple[str, ...], mesh: Any) -> list:
    """Split one more dim of a leaf: the largest free one, else one that is split over the pipe, else none."""
    over = tuple(axis for axis in over if mesh.shape[axis] > 1)
    if not over or np.prod(shape) < SHARD_FROM:
        return axes
    ways, size = count(mesh, over), lambda d: shape[d]
    added: Any = over[0] if len(over) == 1 else over
    free = [d for d, axis in enumerate(axes) if axis is None and shape[d] % ways == 0]
    shared = [d for d, axis in enumerate(axes) if axis == PIPE and shape[d] % (ways * mesh.shape[PIPE]) == 0]
    found = list(axes)
    if free:
        found[max(free, key=size)] = added
    elif shared:
        found[max(shared, key=size)] = (PIPE, *over)
    return found


def axes_of(entry: Any) -> tuple[str, ...]:
    """The mesh axes of one entry of a `PartitionSpec`."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def manual(spec: PartitionSpec) -> PartitionSpec:
    """The part of a spec that `shard_map` is told: what the compiler splits by itself is left out."""
    entries = [tuple(axis for axis in axes_of(entry) if axis in MANUAL) for entry in spec]
    return PartitionSpec(*(entry if len(entry) > 1 else entry[0] if entry else None for entry in entries))


def shardings(placed: Placed, mesh: Any, zero_stage: int = 0, of: str = "param") -> Placed:
    """The `NamedSharding` of every leaf of placed parameters on a mesh; of: "param", "grad" or "moment"."""
    return jax.tree.map(lambda r: NamedSharding(mesh, getattr(r, of)), rest(placed, mesh, zero_stage))


def place(
    model: Any, mesh: Mesh, chunks: int = 1, layer_split: Sequence[int] | None = None, zero_stage: int = 0
) -> Placed:
    """Put a model's parameters on a mesh.

    Args: model, see `Model`; mesh, with a `pipe` axis; chunks a stage; layer_split, layers of each global chunk;
    zero_stage, of `rest`.
    Raises ValueError as `split_layers` and `stack` do.
    """
    layout = split_layers(len(model.blocks), mesh.shape[PIPE], chunks, layer_split)
    parts = Model(model.embed, list(model.blocks), model.head)
    build = partial(stack, layout=layout)
    return jax.jit(build, out_shardings=shardings(jax.eval_shape(build, parts), mesh, zero_stage))(parts)


def assemble(spec: Placed, at_rest: Placed, weight: Callable[[str, str, int | None], np.ndarray]) -> Placed:
    """Build placed parameters from one weight at a time, each device's part by itself.

    Args: spec, shapes and dtypes; at_rest, shardings; weight(part, path, layer), a whole parameter of "embed" or "head"
    (layer None), or of layer i of "block", by its dotted path. Places that hold no layer are zeros.
    """
    layout = spec.layout
    layer_at = {layout.where(i): i for i in range(sum(layout.layers))}

    def outer(part: str, path: tuple, a: Any, where: NamedSharding) -> jax.Array:
        whole = weight(part, path_name(path), None)
        return _from_parts(a.shape, where, lambda index: whole[index].astype(a.dtype, copy=False))

    def block(k: int, path: tuple, a: Any, where: NamedSharding) -> jax.Array:
        def part(index: tuple) -> np.ndarray:
            stages, chunks = (range(*i.indices(n)) for i, n in zip(index[:2], a.shape[:2], strict=True))
            inner = [len(range(*i.indices(n))) for i, n in zip(index[2:], a.shape[2:], strict=True)]
            found = np.zeros([len(stages), len(chunks), *inner], a.dtype)
            for (x, s), (y, c) in product(enumerate(stages), enumerate(chunks)):
                if (s, c, k) in layer_at:
                    found[x, y] = weight("block", path_name(path), layer_at[s, c, k])[index[2:]]
            return found

        return _from_parts(a.shape, where, part)

    trees = {name: (getattr(spec, name), getattr(at_rest, name)) for name in ("embed", "head")}
    map_ = jax.tree_util.tree_map_with_path
    # The largest tensors first, while little else is there.
    made = {name: map_(partial(outer, name), *pair) for name, pair in trees.items()}
    pairs = enumerate(zip(spec.blocks, at_rest.blocks, strict=True))
    return Placed(made["embed"], [map_(partial(block, k), *pair) for k, pair in pairs], made["head"], layout)


def _from_parts(shape: tuple[int, ...], where: NamedSharding, part: Callable[[tuple], np.ndarray]) -> jax.Array:
    """An array from part(index), called once for each part that a device of this process holds, and not kept."""
    devices: dict[tuple, list] = {}
    for device, index in where.addressable_devices_indices_map(shape).items():
        known = tuple(
            i.indices(n)[:2] for i, n in zip(index or (), shape, strict=True)
        )  # slices cannot be keys in 3.11
        devices.setdefault(known, []).append(device)
    arrays = []
    for known, those in devices.items():
        found = part(tuple(slice(*i) for i in known))
        arrays += [jax.device_put(found, device) for device in those]
        jax.block_until_ready(arrays)  # before the next part is read
    return jax.make_array_from_single_device_arrays(shape, where, arrays)


def path_name(path: tuple) -> str:
    """A path of `jax.tree_util` as dotted names, without the `value` that an NNX variable adds."""
    names = [str(getattr(part, "name", getattr(part, "key", getattr(part, "idx", "")))) for part in path]
    return ".".join(name for name in names if name != "value")
