"""The feed-forward part of a block.

Legend: B microbatch size, T sequence, D model, F feed-forward.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpp.probe import tap
from jaxpp.remat import keep
from jaxpp.sharding import constrain
from models import lora
from models.dense import normal, project
from models.lora import Dims, LoraSpec


def in_float32(function: Callable, x: jax.Array) -> jax.Array:
    """An activation function computed in float32: rounding each of its steps to bfloat16 costs accuracy, and on the
    CPU five times the time."""
    return function(x.astype(jnp.float32)).astype(x.dtype)


def gelu(x: jax.Array) -> jax.Array:
    """The tanh form of GELU (Hendrycks and Gimpel 2016, arXiv:1606.08415), as (1 + tanh u) / 2 = sigmoid(2 u)."""
    return x * jax.nn.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))


class GeluMLP(nnx.Module):
    """Two projections with biases and the tanh form of GELU between them, as in GPT-2."""

    def __init__(
        self, key: jax.Array, dim: int, hidden: int, std: float, out_std: float, adapters: LoraSpec | None = None
    ) -> None:
        up, down = jax.random.split(key)
        self.wi = nnx.Param(normal(up, (dim, hidden), std), axes=(None, "ff"))
        self.bi = nnx.Param(jnp.zeros(hidden), axes=("ff",))
        self.wo = nnx.Param(normal(down, (hidden, dim), out_std), axes=("ff", None))
        self.bo = nnx.Param(jnp.zeros(dim))
        self.lora = lora.make(key, adapters, _places(dim, hidden))

    def __call__(self, x_BTD: jax.Array, lora_key: jax.Array | None = None) -> jax.Array:
        x_BTD = constrain(x_BTD, None, None, None)
        h_BTF = lora.added(self.lora, project(x_BTD, self.wi[...], bias=self.bi[...]), x_BTD, lora_key, "up")
        h_BTF = tap("mlp.hidden", in_float32(gelu, keep(constrain(h_BTF, None, None, "ff"))))
        y_BTD = lora.added(self.lora, project(h_BTF, self.wo[...]), h_BTF, lora_key, "down")
        return tap("mlp.output", constrain(y_BTD, None, "sequence", None) + self.bo[...])


class GatedMLP(nnx.Module):
    """SwiGLU (Shazeer 2020, arXiv:2002.05202): silu(gate) * up, projected back. wi is [D, 2, F], gate first."""

    def __init__(
        self,
        key: jax.Array,
        dim: int,
        hidden: int,
        bias: bool,
        std: float,
        out_std: float,
        adapters: LoraSpec | None = None,
    ) -> None:
        up, down = jax.random.split(key)
        self.wi = nnx.Param(normal(up, (dim, 2, hidden), std), axes=(None, None, "ff"))
        self.wo = nnx.Param(normal(down, (hidden, dim), out_std), axes=("ff", None))
        if bias:
            self.bi = nnx.Param(jnp.zeros((2, hidden)), axes=(None, "ff"))
            self.bo = nnx.Param(jnp.zeros(dim))
        self.bias = bias
        self.lora = lora.make(key, adapters, _places(dim, hidden))

    def __call__(self, x_BTD: jax.Array, lora_key: jax.Array | None = None) -> jax.Array:
        x_BTD = constrain(x_BTD, None, None, None)
        bias = self.bi[...] if self.bias else None
        h_BTCF = lora.added(self.lora, project(x_BTD, self.wi[...], bias=bias), x_BTD, lora_key, "gate", "up")
        h_BTCF = keep(constrain(h_BTCF, None, None, None, "ff"))
        h_BTF = tap("mlp.hidden", gate(h_BTCF[..., 0, :], h_BTCF[..., 1, :]))
        y_BTD = lora.added(self.lora, project(h_BTF, self.wo[...]), h_BTF, lora_key, "down")
        y_BTD = constrain(y_BTD, None, "sequence", None)
        return tap("mlp.output", y_BTD + self.bo[...] if self.bias else y_BTD)


def _places(dim: int, hidden: int) -> dict[str, Dims]:
    up, down = Dims((dim,), (hidden,), (None,), ("ff",)), Dims((hidden,), (dim,), ("ff",), (None,))
    return {"gate": up, "up": up, "down": down}


def gate(gate: jax.Array, up: jax.Array) -> jax.Array:
    """silu(gate) * up, in float32, returned in their dtype."""
    return (jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)).astype(up.dtype)
