"""The unpipelined oracle: one `jax.value_and_grad` of the whole model, microbatch after microbatch."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from toy import EXACT

import jaxpp
from jaxpp.losses import count_valid, token_loss, with_metrics


class Reference(NamedTuple):
    """loss, microbatch_losses [M] and grads as `jaxpp.executor.Result` has them, grads layer by layer."""

    loss: jax.Array
    grads: jaxpp.Model
    microbatch_losses: jax.Array


def layer_key(key: jax.Array | None, row: Any, layer: int) -> jax.Array | None:
    """The documented key of a layer (-1: the embedding) for row m*DP + data_rank."""
    return None if key is None else jax.random.fold_in(jax.random.fold_in(key, row), layer + 1)


def value_and_grad(
    model: jaxpp.Model,
    batch: dict[str, jax.Array],
    data: int = 1,
    key: jax.Array | None = None,
    compute: str = "float32",
    loss: Callable = token_loss,
    residual: str | None = None,
) -> Reference:
    """Loss and gradients of a batch [M, DP*B, T]: float32, parameters cast to `compute` inside, and what the embedding
    returns to `residual`."""
    parts = jaxpp.Model(model.embed, list(model.blocks), model.head)
    value, grads = _value_and_grad(data, compute, loss, residual, parts, batch, key)
    return jax.device_get(Reference(value[0], grads, value[1]))


@partial(jax.jit, static_argnums=(0, 1, 2, 3), compiler_options=EXACT)
def _value_and_grad(
    data: int, compute: str, loss: Callable, residual: str | None, model: jaxpp.Model, batch: dict, key: Any
) -> tuple:
    microbatches = len(batch["labels"])
    rows = jax.tree.map(lambda a: a.reshape(microbatches * data, -1, *a.shape[2:]), batch)

    def one(master: jaxpp.Model, row: tuple[jax.Array, dict]) -> jax.Array:
        at, arrays = row
        cast = lambda a: a.astype(compute) if jnp.issubdtype(a.dtype, jnp.floating) else a
        net = jax.tree.map(cast, master)
        stream = net.embed(arrays, layer_key(key, at, -1))
        stream = jax.tree.map(lambda a: a.astype(residual or a.dtype), stream)
        for i, block in enumerate(net.blocks):
            stream = block(stream, arrays, layer_key(key, at, i))
        return with_metrics(loss(net.head, net.embed, stream, arrays))[0]

    def total(master: jaxpp.Model) -> tuple[jax.Array, jax.Array]:
        sums = jax.lax.map(partial(one, master), (jnp.arange(microbatches * data), rows))
        losses = sums.reshape(microbatches, data).sum(axis=1) / count_valid(batch["labels"])
        return losses.sum(), losses

    return jax.value_and_grad(total, has_aux=True)(model)


def leaf_errors(got: Any, want: Any) -> dict[str, float]:
    """Relative norm of the difference of every leaf, by its path."""
    pairs = zip(jax.tree_util.tree_leaves_with_path(got), jax.tree_util.tree_leaves_with_path(want), strict=True)
    return {jax.tree_util.keystr(path): error([a], [b]) for (path, a), (_, b) in pairs}


def error(got: Any, want: Any) -> float:
    """Relative norm of the difference of two trees as one vector."""
    return norm(jax.tree.map(lambda a, b: np.asarray(a, float) - np.asarray(b, float), got, want)) / (norm(want) or 1.0)


def norm(tree: Any) -> float:
    """Euclidean norm of a tree as one vector, in float64."""
    return float(np.sqrt(sum(np.sum(np.square(np.asarray(a, float))) for a in jax.tree.leaves(tree))))
