"""Products with weights, initial weights, dropout."""

import math

import jax
import jax.numpy as jnp

from jaxpp.mesh import TENSOR
from jaxpp.sharding import constrain, ways


def normal(key: jax.Array, shape: tuple[int, ...], std: float) -> jax.Array:
    """Normal weights, float32."""
    return jax.random.normal(key, shape) * std


def project(x: jax.Array, w: jax.Array, summed: int = 1) -> jax.Array:
    """Multiply activations [B, T, ...] by a weight, over the last `summed` dims of x and the first of w.

    As one product of matrices: on the CPU the gradient of a weight over two summed dims (batch and sequence) takes
    twice as long as over one. Not where dims are split over ranks, whose parts it would mix.
    """
    if ways(TENSOR) > 1:
        return jnp.tensordot(x, w, summed)
    inner = math.prod(w.shape[:summed])
    y = x.reshape(-1, inner) @ w.reshape(inner, -1)
    return y.reshape(*x.shape[: x.ndim - summed], *w.shape[summed:])


def logits(x_BTD: jax.Array, table_VD: jax.Array, vocab: int) -> jax.Array:
    """Logits of a table's rows, [B, T, V]. Those that only pad the vocabulary (see `sharding.padding`) are -inf."""
    logits_BTV = constrain(project(x_BTD, table_VD.T), None, None, "vocab")
    if len(table_VD) == vocab:
        return logits_BTV
    return jnp.where(jnp.arange(len(table_VD)) < vocab, logits_BTV, -jnp.inf)


def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Inverted dropout; the identity where the rate is 0 or the key None."""
    if key is None or rate == 0.0:
        return x
    keep = jax.random.bernoulli(key, 1.0 - rate, x.shape)
    return jnp.where(keep, x / (1.0 - rate), jnp.zeros((), x.dtype))
