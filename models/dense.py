"""Products with weights, and initial weights."""

import math

import jax


def normal(key: jax.Array, shape: tuple[int, ...], std: float) -> jax.Array:
    """Normal weights, float32."""
    return jax.random.normal(key, shape) * std


def project(x: jax.Array, w: jax.Array, summed: int = 1) -> jax.Array:
    """Multiply activations [B, T, ...] by a weight, over the last `summed` dims of x and the first of w.

    As one product of matrices: on the CPU the gradient of a weight over two summed dims (batch and sequence) takes
    twice as long as over one.
    """
    inner = math.prod(w.shape[:summed])
    y = x.reshape(-1, inner) @ w.reshape(inner, -1)
    return y.reshape(*x.shape[: x.ndim - summed], *w.shape[summed:])
