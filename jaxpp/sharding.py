"""Which mesh axis each named dim of a parameter or an activation is split over: one table.

A model names the dims of its parameters, `nnx.Param(array, axes=("vocab", None))`, and of a few activations,
`constrain(x, None, None, "ff")`. What the compiler does with them under `tensor` is Megatron's (Shoeybi et al. 2019,
arXiv:1909.08053; Korthikanti et al. 2022, arXiv:2205.05198): columns, rows and vocabulary split, sums after each
branch; under sequence parallelism what stands between the branches is split over the sequence.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from jaxpp.mesh import EXPERT, TENSOR

Tree = Any
RULES = {"vocab": TENSOR, "heads": TENSOR, "kv_heads": TENSOR, "ff": TENSOR, "experts": EXPERT}
SEQUENCE = {"sequence": TENSOR}  # under sequence parallelism
PADDED = ("vocab",)  # dims that are padded, inside the step alone, where their axis does not divide them
# They are then also whole tiles of a GPU's products (GPT-2's 50257 tokens), if that is little of them.
TILE, SHORT = 128, 2**13
_rules: ContextVar[dict[str, str]] = ContextVar("rules", default=RULES)


@contextmanager
def use(sequence: bool) -> Iterator[None]:
    """While tracing inside: with or without sequence parallelism."""
    token = _rules.set(RULES | SEQUENCE if sequence else RULES)
    try:
        yield
    finally:
        _rules.reset(token)


def names_of(tree: Tree) -> Tree:
    """For each leaf its dims' names, as a `PartitionSpec` of names; an empty one where the model gave none."""

    def names(leaf: Any) -> Any:
        given = leaf.get_metadata().get("axes", ()) if isinstance(leaf, nnx.Variable) else ()
        return jax.tree.map(lambda _: PartitionSpec(*given), leaf)

    return jax.tree.map(names, tree, is_leaf=lambda a: isinstance(a, nnx.Variable))


def axis_of(name: str | None, size: int, mesh: Any) -> str | None:
    """The mesh axis that a dim is split over, or None: it has no name, or the axis does not divide it."""
    axis = RULES.get(name or "")
    return axis if axis is not None and mesh.shape[axis] > 1 and size % mesh.shape[axis] == 0 else None


def padding(names: PartitionSpec, shape: tuple[int, ...], mesh: Any) -> list[tuple[int, int]]:
    """How far each dim is padded inside the step, as `jnp.pad` takes it."""
    ways = lambda name, n: mesh.shape[RULES[name]] * (TILE if n >= SHORT else 1) if name in PADDED else 1
    return [(0, -n % ways(name, n)) for name, n in named(names, shape)]


def named(names: PartitionSpec, shape: tuple[int, ...]) -> list[tuple[str | None, int]]:
    """(name, size) of each dim; the names stand for the last dims, those before have none."""
    lead = len(shape) - len(names)
    return list(zip([None] * lead + list(names), shape, strict=True))


def ways(axis: str) -> int:
    """The size of a mesh axis in the step that is being traced: 1 outside of a pipeline's step."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty else mesh.shape.get(axis, 1)


def constrain(x: jax.Array, *names: str | None) -> jax.Array:
    """Split an activation over the tensor axis by its dims' names; the identity where there is no such axis."""
    parts, rules = ways(TENSOR), _rules.get()
    if parts == 1:
        return x
    split = lambda name, n: TENSOR if rules.get(name) == TENSOR and n % parts == 0 else None
    spec = [split(name, n) for name, n in zip(names, x.shape, strict=True)]
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*spec))


def constrain_leaf(x: jax.Array, names: PartitionSpec) -> jax.Array:
    """`constrain` of a parameter, or of its stack over chunks, by the names that the model gave."""
    return constrain(x, *(name for name, _ in named(names, x.shape)))


def pad(x: jax.Array, names: PartitionSpec, mesh: Any) -> jax.Array:
    """Pad dims with zeros where `padding` says so."""
    widths = padding(names, x.shape, mesh)
    return jnp.pad(x, widths) if any(after for _, after in widths) else x


def cond(which: Any, yes: Callable, no: Callable, *args: Any) -> Any:
    """`jax.lax.cond`, decided here where `which` is known while tracing; otherwise as `switch`."""
    if isinstance(which, bool):
        return yes(*args) if which else no(*args)
    return switch(jnp.asarray(which, jnp.int32), [no, yes], *args)


def switch(which: Any, branches: Sequence[Callable], *args: Any) -> Any:
    """`jax.lax.switch` whose branches may split their results differently.

    XLA refuses branches that end in different sharding annotations; behind a barrier it settles on one for all.
    """
    if ways(TENSOR) == 1:
        return jax.lax.switch(which, branches, *args)
    behind = lambda branch: lambda *args: jax.lax.optimization_barrier(branch(*args))
    return jax.lax.switch(which, [behind(branch) for branch in branches], *args)
