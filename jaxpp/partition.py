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
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpp.mesh import PIPE

Tree = Any
WHOLE = -1  # in place of a dim: the leaf is whole on every rank
SHARD_FROM = 2**14  # outer leaves with fewer elements stay whole on every rank: a collective costs more than they do


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


def split_layers(layers: int, stages: int, chunks: int = 1, by_hand: Sequence[int] | None = None) -> Layout:
    """Deal L layers to S*C chunks in order, as evenly as whole layers allow, the larger first (30 on 4: 8, 8, 7, 7).

    Args: by_hand, the layers of each global chunk instead.
    Raises ValueError for a hand-made split of the wrong length or sum, or more stages than layers.
    """
    total = stages * chunks
    if by_hand is not None:
        if len(by_hand) != total or sum(by_hand) != layers or min(by_hand) < 0:
            raise ValueError(
                f"layers per chunk {list(by_hand)} must be {total} numbers >= 0 that sum to {layers},"
                f" for example {list(split_layers(layers, stages, chunks).layers)}"
            )
        return Layout(stages, chunks, tuple(by_hand))
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


def _shapes(tree: Tree) -> list[tuple]:
    return [(jnp.shape(a), jnp.result_type(a)) for a in jax.tree.leaves(tree)]


def resting_dim(shape: tuple[int, ...], stages: int) -> int:
    """The dim along which an outer leaf is sharded over the pipe at rest, the largest that S divides, or WHOLE."""
    fits = [d for d, n in enumerate(shape) if n % stages == 0]
    if not fits or np.prod(shape) < SHARD_FROM:
        return WHOLE
    return max(fits, key=lambda d: shape[d])


def resting_dims(placed: Placed) -> dict[str, Any]:
    """`resting_dim` of every leaf of the outer."""
    return jax.tree.map(lambda a: resting_dim(a.shape, placed.layout.stages), placed.outer)


def specs(placed: Placed) -> Placed:
    """The `PartitionSpec` of every leaf of placed parameters (concrete or abstract)."""
    spec = lambda dim: PartitionSpec() if dim == WHOLE else PartitionSpec(*[None] * dim, PIPE)
    outer = jax.tree.map(spec, resting_dims(placed))
    blocks = jax.tree.map(lambda _: PartitionSpec(PIPE), placed.blocks)
    return Placed(outer["embed"], blocks, outer["head"], placed.layout)


def shardings(placed: Placed, mesh: Mesh) -> Placed:
    """The `NamedSharding` of every leaf of placed parameters on a mesh."""
    is_spec = lambda a: isinstance(a, PartitionSpec)
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs(placed), is_leaf=is_spec)


def place(model: Any, mesh: Mesh, chunks: int = 1, by_hand: Sequence[int] | None = None) -> Placed:
    """Put a model's parameters on a mesh.

    Args: model, see `Model`; mesh, with a `pipe` axis; chunks a stage; by_hand, layers of each global chunk.
    Raises ValueError as `split_layers` and `stack` do.
    """
    layout = split_layers(len(model.blocks), mesh.shape[PIPE], chunks, by_hand)
    parts = Model(model.embed, list(model.blocks), model.head)
    build = partial(stack, layout=layout)
    return jax.jit(build, out_shardings=shardings(jax.eval_shape(build, parts), mesh))(parts)


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
