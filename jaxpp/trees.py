"""Trees of arrays: what stands at a place of their first dim, casts, and what stands where nothing was computed."""

from typing import Any

import jax
import jax.numpy as jnp

Tree = Any


def at(tree: Tree, index: jax.Array | int) -> Tree:
    """What stands at `index` of the first dim; in a buffer of one slot, all that there is."""
    return jax.tree.map(
        lambda a: a[0] if a.shape[0] == 1 else jax.lax.dynamic_index_in_dim(a, index, keepdims=False), tree
    )


def put(tree: Tree, index: jax.Array, value: Tree) -> Tree:
    """Write `value` at `index` of the first dim; a buffer of one slot is simply replaced."""
    return jax.tree.map(
        lambda a, v: v[None] if a.shape[0] == 1 else jax.lax.dynamic_update_index_in_dim(a, v, index, 0), tree, value
    )


def blank(spec: Tree, slots: int | None = None) -> Tree:
    """What stands where nothing was computed. It is never read into a result: a test fills it with NaN."""
    lead = () if slots is None else (slots,)
    return jax.tree.map(lambda a: jnp.zeros((*lead, *a.shape), a.dtype), spec)


def cast(a: jax.Array, dtype: Any) -> jax.Array:
    return a.astype(dtype) if jnp.issubdtype(a.dtype, jnp.floating) else a


def cast_like(tree: Tree, spec: Tree) -> Tree:
    return jax.tree.map(lambda a, s: a.astype(s.dtype), tree, spec)
