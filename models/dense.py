"""Products with weights, initial weights, dropout."""

import math

import jax
import jax.numpy as jnp

from jaxpp.mesh import TENSOR
from jaxpp.sharding import ways


def normal(key: jax.Array, shape: tuple[int, ...], std: float) -> jax.Array:
    """Normal weights, float32."""
    return jax.random.normal(key, shape) * std


def project(x: jax.Array, w: jax.Array, summed: int = 1, bias: jax.Array | None = None) -> jax.Array:
    """Multiply activations [B, T, ...] by a weight, over the last `summed` dims of x and the first of w; add a bias.

    As one product of matrices: on the CPU the gradient of a weight over two summed dims (batch and sequence) takes
    twice as long as over one. Not where dims are split over ranks, whose parts it would mix.
    """
    if ways(TENSOR) > 1:
        y = jnp.tensordot(x, w, summed)
        return y if bias is None else y + bias
    inner = math.prod(w.shape[:summed])
    y = x.reshape(-1, inner) @ w.reshape(inner, -1)
    y = y if bias is None else y + bias.reshape(-1)  # here a GPU's product adds it
    return y.reshape(*x.shape[: x.ndim - summed], *w.shape[summed:])


def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Inverted dropout; the identity where the rate is 0 or the key None."""
    if key is None or rate == 0.0:
        return x
    keep = jax.random.bernoulli(key, 1.0 - rate, x.shape)
    return jnp.where(keep, x / (1.0 - rate), jnp.zeros((), x.dtype))
