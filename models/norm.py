"""Normalisation, its statistics in float32 whatever the stream's dtype.

Legend: B microbatch size, T sequence, D model, N tokens (all dims but the last).
"""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpp import kernels
from jaxpp.mesh import TENSOR
from jaxpp.remat import keep
from jaxpp.sharding import ways


class LayerNorm(nnx.Module):
    """Layer normalisation with scale and bias (Ba et al. 2016, arXiv:1607.06450); returns the weights' dtype."""

    def __init__(self, dim: int, epsilon: float = 1e-5) -> None:
        self.scale = nnx.Param(jnp.ones(dim))
        self.bias = nnx.Param(jnp.zeros(dim))
        self.epsilon = epsilon

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        return normalise(x_BTD, self.scale[...], self.bias[...], self.epsilon)


class RMSNorm(nnx.Module):
    """Root mean square normalisation with a scale (Zhang and Sennrich 2019, arXiv:1910.07467), over the last dim."""

    def __init__(self, dim: int, epsilon: float = 1e-5) -> None:
        self.scale = nnx.Param(jnp.ones(dim))
        self.epsilon = epsilon

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        return normalise(x_BTD, self.scale[...], None, self.epsilon)


def normalise(x_BTD: jax.Array, scale_D: jax.Array, bias_D: jax.Array | None, epsilon: float) -> jax.Array:
    """Layer normalisation of the last dim, or without a bias RMS normalisation; returns the scale's dtype."""
    dtype = scale_D.dtype

    def forward(x_BTD: jax.Array, scale_D: jax.Array, bias_D: jax.Array | None) -> tuple[jax.Array, tuple]:
        wide_BTD, mean_BT1 = x_BTD.astype(jnp.float32), None
        if bias_D is not None:
            mean_BT1 = keep(wide_BTD.mean(-1, keepdims=True))
            wide_BTD = wide_BTD - mean_BT1
        rstd_BT1 = keep(jax.lax.rsqrt(jnp.square(wide_BTD).mean(-1, keepdims=True) + epsilon))
        y_BTD = wide_BTD * rstd_BT1 * scale_D.astype(jnp.float32)
        y_BTD = y_BTD if bias_D is None else y_BTD + bias_D.astype(jnp.float32)
        return y_BTD.astype(dtype), (x_BTD, scale_D, mean_BT1, rstd_BT1)

    def backward(kept: tuple, g_BTD: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        x_BTD, scale_D, mean_BT1, rstd_BT1 = kept
        by_platform = _plain_backward if ways(TENSOR) > 1 else _backward
        dx_BTD, dscale_D, dbias_D = by_platform(x_BTD, g_BTD, scale_D, mean_BT1, rstd_BT1)
        return dx_BTD, dscale_D.astype(dtype), None if mean_BT1 is None else dbias_D.astype(dtype)

    run = jax.custom_vjp(lambda *args: forward(*args)[0])
    run.defvjp(forward, backward)
    return run(x_BTD, scale_D, bias_D)


def _backward(
    x_BTD: jax.Array, g_BTD: jax.Array, scale_D: jax.Array, mean_BT1: jax.Array | None, rstd_BT1: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """By `kernels.norm_backward` on a GPU."""

    def kernel(
        x: jax.Array, g: jax.Array, scale_D: jax.Array, mean: jax.Array | None, rstd: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        x_ND, g_ND = (a.reshape(-1, a.shape[-1]) for a in (x, g))
        mean_N = None if mean is None else mean.reshape(-1)
        dx_ND, dscale_D, dbias_D = kernels.norm_backward(x_ND, g_ND, scale_D, mean_N, rstd.reshape(-1))
        return dx_ND.reshape(x.shape), dscale_D, dbias_D

    args = (x_BTD, g_BTD, scale_D, mean_BT1, rstd_BT1)
    return jax.lax.platform_dependent(*args, cuda=kernel, default=_plain_backward)


def _plain_backward(
    x_BTD: jax.Array, g_BTD: jax.Array, scale_D: jax.Array, mean_BT1: jax.Array | None, rstd_BT1: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    x, g = x_BTD.astype(jnp.float32), g_BTD.astype(jnp.float32)
    normal = (x if mean_BT1 is None else x - mean_BT1) * rstd_BT1
    wide = g * scale_D.astype(jnp.float32)
    dx = wide - normal * (wide * normal).mean(-1, keepdims=True)
    dx = dx if mean_BT1 is None else dx - wide.mean(-1, keepdims=True)
    rows = tuple(range(x.ndim - 1))
    return (rstd_BT1 * dx).astype(x_BTD.dtype), (g * normal).sum(rows), g.sum(rows)
