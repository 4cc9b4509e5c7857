"""The feed-forward part of a block.

Legend: B microbatch size, T sequence, D model, F feed-forward.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpp.probe import tap
from models.dense import normal, project


def in_float32(function: Callable, x: jax.Array) -> jax.Array:
    """An activation function computed in float32: rounding each of its steps to bfloat16 costs accuracy, and on the
    CPU five times the time."""
    return function(x.astype(jnp.float32)).astype(x.dtype)


def gelu(x: jax.Array) -> jax.Array:
    """The tanh form of GELU (Hendrycks and Gimpel 2016, arXiv:1606.08415)."""
    return jax.nn.gelu(x, approximate=True)


class GeluMLP(nnx.Module):
    """Two projections with biases and the tanh form of GELU between them, as in GPT-2."""

    def __init__(self, key: jax.Array, dim: int, hidden: int, std: float, out_std: float) -> None:
        up, down = jax.random.split(key)
        self.wi = nnx.Param(normal(up, (dim, hidden), std))
        self.bi = nnx.Param(jnp.zeros(hidden))
        self.wo = nnx.Param(normal(down, (hidden, dim), out_std))
        self.bo = nnx.Param(jnp.zeros(dim))

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        h_BTF = tap("mlp.hidden", in_float32(gelu, project(x_BTD, self.wi[...]) + self.bi[...]))
        return tap("mlp.output", project(h_BTF, self.wo[...]) + self.bo[...])


class GatedMLP(nnx.Module):
    """SwiGLU (Shazeer 2020, arXiv:2002.05202): silu(gate) * up, projected back. wi is [D, 2, F], gate first."""

    def __init__(self, key: jax.Array, dim: int, hidden: int, bias: bool, std: float, out_std: float) -> None:
        up, down = jax.random.split(key)
        self.wi = nnx.Param(normal(up, (dim, 2, hidden), std))
        self.wo = nnx.Param(normal(down, (hidden, dim), out_std))
        if bias:
            self.bi = nnx.Param(jnp.zeros((2, hidden)))
            self.bo = nnx.Param(jnp.zeros(dim))
        self.bias = bias

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        h_BTCF = project(x_BTD, self.wi[...])
        if self.bias:
            h_BTCF = h_BTCF + self.bi[...]
        h_BTF = tap("mlp.hidden", gate(h_BTCF[..., 0, :], h_BTCF[..., 1, :]))
        y_BTD = project(h_BTF, self.wo[...])
        return tap("mlp.output", y_BTD + self.bo[...] if self.bias else y_BTD)


def gate(gate: jax.Array, up: jax.Array) -> jax.Array:
    """silu(gate) * up, in float32, returned in their dtype."""
    return (jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)).astype(up.dtype)
