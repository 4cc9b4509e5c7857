"""Mixture of experts: every token goes to its top k experts, none is dropped.

Legend: B microbatch size, T sequence, D model, F feed-forward, E experts, N tokens (B x T), K experts of a token,
P pairs of token and expert, R ranks that share the experts.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpp import exchange
from jaxpp.mesh import CONTEXT, EXPERT
from jaxpp.probe import tap
from jaxpp.sharding import constrain, ways
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
        self.wi = nnx.Param(normal(up, (experts, dim, 2, hidden), std), axes=("experts", None, None, "ff"))
        self.wo = nnx.Param(normal(down, (experts, hidden, dim), out_std), axes=("experts", "ff", None))
        self.chosen = chosen

    def __call__(self, x_BTD: jax.Array) -> tuple[jax.Array, Routing]:
        (dim, experts), local = self.router.shape, self.wi.shape[0]
        x_BTD = constrain(x_BTD, None, None, None)
        logits_NE = tap("mlp.router", project(x_BTD, self.router[...])).reshape(-1, experts).astype(jnp.float32)
        chance_NE = jax.nn.softmax(logits_NE, axis=-1)
        weight_NK, expert_NK = jax.lax.top_k(chance_NE, self.chosen)
        weight_NK = weight_NK / weight_NK.sum(axis=-1, keepdims=True)
        run = self._experts if local == experts else self._elsewhere
        y_BTD = run(x_BTD.reshape(-1, dim), weight_NK, expert_NK).reshape(x_BTD.shape)
        count_E = jax.nn.one_hot(expert_NK, experts, dtype=jnp.float32).sum(axis=(0, 1))
        z = jnp.square(jax.nn.logsumexp(logits_NE, axis=-1)).mean()
        routing = Routing(count_E / len(logits_NE), chance_NE.mean(axis=0), z)
        if ways(CONTEXT) > 1:  # of the whole sequence
            routing = jax.lax.pmean(routing, CONTEXT)
        return tap("mlp.output", constrain(y_BTD, None, "sequence", None)), routing

    def _experts(self, x_ND: jax.Array, weight_NK: jax.Array, expert_NK: jax.Array) -> jax.Array:
        """Sort the N*K (token, expert) pairs by expert, run each expert on its run of them, and sort back.

        A pair whose expert is `len(wi)` is no expert's here: it comes last and counts nothing.
        """
        wi_EDCF, wo_EFD = self.wi[...], self.wo[...]
        flat = expert_NK.reshape(-1)
        order = jnp.argsort(flat, stable=True)
        sizes_E = jnp.bincount(flat, length=len(wi_EDCF) + 1)[:-1].astype(jnp.int32)
        sorted_PD = x_ND[order // self.chosen]
        # Gate and up each by itself: as one product the split over F would cut across them.
        gate_PF, up_PF = (jax.lax.ragged_dot(sorted_PD, wi_EDCF[:, :, c], sizes_E) for c in range(2))
        h_PF = constrain(gate(gate_PF, up_PF), None, "ff")
        y_PD = constrain(jax.lax.ragged_dot(h_PF, wo_EFD, sizes_E), None, None)
        here_P = jnp.arange(len(flat)) < sizes_E.sum()
        y_PD = jnp.where(here_P[:, None], y_PD, 0)
        y_NKD = y_PD[jnp.argsort(order)].reshape(*weight_NK.shape, -1)
        return jnp.einsum("nkd,nk->nd", y_NKD.astype(jnp.float32), weight_NK).astype(x_ND.dtype)

    def _elsewhere(self, x_ND: jax.Array, weight_NK: jax.Array, expert_NK: jax.Array) -> jax.Array:
        """Send each token to the ranks of its experts, run those that came here, and sum what comes back.

        Every rank has room for every token of every other: shapes are fixed, and none is dropped.
        """
        local, owners = len(self.wi[...]), jnp.arange(ways(EXPERT))
        theirs_RNK = expert_NK // local == owners[:, None, None]
        x_RND = jnp.where(theirs_RNK.any(-1, keepdims=True), x_ND, 0)
        weight_RNK, expert_RNK = jnp.where(theirs_RNK, weight_NK, 0), jnp.where(theirs_RNK, expert_NK % local, local)
        came = [exchange.swap(a).reshape(-1, a.shape[-1]) for a in (x_RND, weight_RNK, expert_RNK)]
        back_RND = exchange.swap(self._experts(*came).reshape(x_RND.shape))
        return back_RND.astype(jnp.float32).sum(axis=0).astype(x_ND.dtype)
