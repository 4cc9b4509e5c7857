"""The feed-forward part of a block.

Legend: B microbatch size, T sequence, D model, F feed-forward.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from models.dense import normal, project


class GeluMLP(nnx.Module):
    """Two projections with biases and the tanh form of GELU between them, as in GPT-2."""

    def __init__(self, key: jax.Array, dim: int, hidden: int, std: float, out_std: float) -> None:
        up, down = jax.random.split(key)
        self.wi = nnx.Param(normal(up, (dim, hidden), std))
        self.bi = nnx.Param(jnp.zeros(hidden))
        self.wo = nnx.Param(normal(down, (hidden, dim), out_std))
        self.bo = nnx.Param(jnp.zeros(dim))

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        h_BTF = project(x_BTD, self.wi[...]) + self.bi[...]
        # In float32: rounding each step of GELU to bfloat16 costs accuracy, and on the CPU five times the time.
        h_BTF = jax.nn.gelu(h_BTF.astype(jnp.float32), approximate=True).astype(h_BTF.dtype)
        return project(h_BTF, self.wo[...]) + self.bo[...]
