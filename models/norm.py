"""Normalisation, its statistics in float32 whatever the stream's dtype.

Legend: B microbatch size, T sequence, D model.
"""

import jax
import jax.numpy as jnp
from flax import nnx


class LayerNorm(nnx.Module):
    """Layer normalisation with scale and bias (Ba et al. 2016, arXiv:1607.06450); returns the weights' dtype."""

    def __init__(self, dim: int, epsilon: float = 1e-5) -> None:
        self.scale = nnx.Param(jnp.ones(dim))
        self.bias = nnx.Param(jnp.zeros(dim))
        self.epsilon = epsilon

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        wide_BTD = x_BTD.astype(jnp.float32)
        centred_BTD = wide_BTD - wide_BTD.mean(-1, keepdims=True)
        normal_BTD = centred_BTD * jax.lax.rsqrt(jnp.square(centred_BTD).mean(-1, keepdims=True) + self.epsilon)
        scale, bias = self.scale[...], self.bias[...]
        return (normal_BTD * scale.astype(jnp.float32) + bias.astype(jnp.float32)).astype(scale.dtype)


class RMSNorm(nnx.Module):
    """Root mean square normalisation with a scale (Zhang and Sennrich 2019, arXiv:1910.07467), over the last dim."""

    def __init__(self, dim: int, epsilon: float = 1e-5) -> None:
        self.scale = nnx.Param(jnp.ones(dim))
        self.epsilon = epsilon

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        wide_BTD = x_BTD.astype(jnp.float32)
        normal_BTD = wide_BTD * jax.lax.rsqrt(jnp.square(wide_BTD).mean(-1, keepdims=True) + self.epsilon)
        scale = self.scale[...]
        return (normal_BTD * scale.astype(jnp.float32)).astype(scale.dtype)
