"""Mixture of experts: every token goes to its top k experts, none is dropped.

Legend: B microbatch size, T sequence, D model, F feed-forward, E experts, N tokens (B x T), K experts of a token.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpp.probe import tap
from models.dense import normal, project
from models.mlp import gate


class Routing(NamedTuple):
    """What a router says of N tokens, in float32: load [E], the share of tokens that chose an expert (sums to K);
    probability [E], its mean probability; z [], the mean squared log-sum-exp of the logits."""

    load: jax.Array
    probability: jax.Array
    z: jax.Array


class MoE(nnx.Module):
    """Experts with gated MLPs, their outputs weighted by the router's probabilities renormalised over the chosen
    (Jiang et al. 2024, arXiv:2401.04088). wi is [E, D, 2, F], gate first."""

    def __init__(
        self, key: jax.Array, dim: int, hidden: int, experts: int, chosen: int, std: float, out_std: float
    ) -> None:
        router, up, down = jax.random.split(key, 3)
        self.router = nnx.Param(normal(router, (dim, experts), std))
        self.wi = nnx.Param(normal(up, (experts, dim, 2, hidden), std))
        self.wo = nnx.Param(normal(down, (experts, hidden, dim), out_std))
        self.chosen = chosen

    def __call__(self, x_BTD: jax.Array) -> tuple[jax.Array, Routing]:
        experts, dim = self.wi.shape[0], x_BTD.shape[-1]
        logits_NE = tap("mlp.router", project(x_BTD, self.router[...])).reshape(-1, experts).astype(jnp.float32)
        chance_NE = jax.nn.softmax(logits_NE, axis=-1)
        weight_NK, expert_NK = jax.lax.top_k(chance_NE, self.chosen)
        weight_NK = weight_NK / weight_NK.sum(axis=-1, keepdims=True)
        y_ND = self._experts(x_BTD.reshape(-1, dim), weight_NK, expert_NK)
        count_E = jax.nn.one_hot(expert_NK, experts, dtype=jnp.float32).sum(axis=(0, 1))
        z = jnp.square(jax.nn.logsumexp(logits_NE, axis=-1)).mean()
        y_BTD = tap("mlp.output", y_ND.reshape(x_BTD.shape))
        return y_BTD, Routing(count_E / len(logits_NE), chance_NE.mean(axis=0), z)

    def _experts(self, x_ND: jax.Array, weight_NK: jax.Array, expert_NK: jax.Array) -> jax.Array:
        """Sort the N*K (token, expert) pairs by expert, run each expert on its run of them, and sort back."""
        experts, _, _, hidden = self.wi.shape
        flat = expert_NK.reshape(-1)
        order = jnp.argsort(flat, stable=True)
        sizes_E = jnp.bincount(flat, length=experts).astype(jnp.int32)
        sorted_PD = x_ND[order // self.chosen]
        wi_EDF = self.wi[...].reshape(experts, -1, 2 * hidden)
        h_PCF = jax.lax.ragged_dot(sorted_PD, wi_EDF, sizes_E).reshape(-1, 2, hidden)
        y_PD = jax.lax.ragged_dot(gate(h_PCF[:, 0], h_PCF[:, 1]), self.wo[...], sizes_E)
        y_NKD = y_PD[jnp.argsort(order)].reshape(*weight_NK.shape, -1)
        return jnp.einsum("nkd,nk->nd", y_NKD.astype(jnp.float32), weight_NK).astype(x_ND.dtype)
