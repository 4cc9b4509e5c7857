"""Mixtral (Jiang et al. 2024, arXiv:2401.04088): a LLaMA-like decoder whose MLPs are mixtures of experts.

The load-balancing loss couples all layers: it is E * sum_e f_e P_e, with f and P averaged over layers and tokens
(Fedus et al. 2022, arXiv:2101.03961, eq. 4 to 6). So the stream carries, beside x_BTD, a vector of sums over the layers
so far, which crosses the wire like all else, and the head's loss reads it. f and P are those of one microbatch on one
data rank.

Legend: B microbatch size, T sequence, D model, E experts, L layers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxpp.losses import count_valid, token_loss
from models.attention import AttentionSpec, Cache, dropout
from models.decoder import Block, Decoder, DecoderConfig, Embed
from models.head import Head
from models.moe import MoE, Routing
from models.rope import Rope


@dataclass(frozen=True)
class MixtralConfig(DecoderConfig):
    """Sizes of a Mixtral; see `DecoderConfig`.

    experts, chosen: of each layer, and of them by each token. balance_loss, z_loss: what those losses are multiplied
    with.
    """

    experts: int = 8
    chosen: int = 2
    balance_loss: float = 0.0
    z_loss: float = 0.0


class MixtralEmbed(Embed):
    """The stream's start: x_BTD, and `router` [2E + 1], the sums of `Routing` over layers, in float32."""

    def __init__(self, key: jax.Array, config: MixtralConfig) -> None:
        super().__init__(key, config)
        self.experts = config.experts

    def __call__(self, microbatch: dict[str, jax.Array], key: jax.Array | None) -> dict[str, jax.Array]:
        return {"x": super().__call__(microbatch, key), "router": jnp.zeros(2 * self.experts + 1, jnp.float32)}


class MixtralBlock(Block):
    """Attention and experts, each after a norm and added to the residual stream."""

    def make_mlp(self, key: jax.Array, config: Any, spec: AttentionSpec) -> MoE:
        return MoE(key, config.dim, config.hidden, config.experts, config.chosen, spec.std, spec.out_std)

    def __call__(self, stream: dict, microbatch: dict[str, jax.Array], key: jax.Array | None) -> dict:
        keys, x_BTD = self.keys(key), stream["x"]
        x_BTD = x_BTD + dropout(self.attention(self.norm1(x_BTD), microbatch, keys[0], key), self.rate, keys[1])
        return self._experts(x_BTD, stream["router"], keys[2])

    def extend(self, stream: dict, cache: Cache, start: jax.Array) -> tuple[dict, Cache]:
        y_BTD, cache = self.attention.extend(self.norm1(stream["x"]), cache, start)
        return self._experts(stream["x"] + y_BTD, stream["router"], None), cache

    def _experts(self, x_BTD: jax.Array, router: jax.Array, key: jax.Array | None) -> dict:
        y_BTD, routing = self.mlp(self.norm2(x_BTD))
        sums = jnp.concatenate((routing.load, routing.probability, routing.z[None]))
        return {"x": x_BTD + dropout(y_BTD, self.rate, key), "router": router + sums.astype(router.dtype)}


class MixtralHead(Head):
    """The head reads x_BTD of the stream."""

    def factors(self, stream: dict, embed: Any) -> tuple[jax.Array, jax.Array]:
        return super().factors(stream["x"], embed)


class Mixtral(Decoder):
    """A Mixtral."""

    PARTS = (MixtralEmbed, MixtralBlock, MixtralHead)


def mean_routing(router: jax.Array, layers: int) -> Routing:
    """The means over layers, float32, of the stream's sums `router` [2E + 1]."""
    load_E, probability_E, z = jnp.split(router.astype(jnp.float32) / layers, [len(router) // 2, len(router) - 1])
    return Routing(load_E, probability_E, z[0])


def training_loss(config: MixtralConfig) -> Callable[..., tuple[jax.Array, dict[str, jax.Array]]]:
    """The loss of the last chunk's output: cross entropy, and for every valid token the balance and z losses.

    Its metrics: cross_entropy, balance_loss and z_loss before their coefficients, and expert_load, the share of all
    choices that each expert got [E].
    """

    def loss(head: Any, embed: Any, stream: dict, microbatch: dict) -> tuple[jax.Array, dict[str, jax.Array]]:
        entropy, count = token_loss(head, embed, stream, microbatch), count_valid(microbatch["labels"])
        mean = mean_routing(stream["router"], config.layers)
        balance = count * config.experts * jnp.sum(jax.lax.stop_gradient(mean.load) * mean.probability)
        z = count * mean.z
        metrics = {"cross_entropy": entropy, "balance_loss": balance, "z_loss": z}
        metrics["expert_load"] = count * mean.load / config.chosen
        return entropy + config.balance_loss * balance + config.z_loss * z, metrics

    return loss


PRESETS = {
    "mixtral-tiny": MixtralConfig(
        vocab_size=256,
        positions=256,
        layers=8,
        dim=128,
        heads=4,
        kv_heads=2,
        hidden=192,
        rope=Rope(theta=1_000_000.0),
        std=0.05,
        experts=4,
        balance_loss=0.02,
        z_loss=0.001,
    ),
    "mixtral-8x7b": MixtralConfig(
        vocab_size=32_000,
        positions=32_768,
        layers=32,
        dim=4096,
        heads=32,
        kv_heads=8,
        hidden=14_336,
        rope=Rope(theta=1_000_000.0),
        balance_loss=0.02,
    ),
    "mixtral-8x22b": MixtralConfig(
        vocab_size=32_768,
        positions=65_536,
        layers=56,
        dim=6144,
        heads=48,
        kv_heads=8,
        hidden=16_384,
        rope=Rope(theta=1_000_000.0),
        balance_loss=0.001,
    ),
}
