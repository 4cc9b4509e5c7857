"""GPT-2 (Radford et al. 2019): learned positions, pre-norm blocks, tied embedding and head.

Legend: B microbatch size, T sequence, D model, V vocabulary.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpp.remat import keep
from jaxpp.sharding import constrain
from models.attention import Attention, AttentionSpec, Cache, dropout
from models.dense import normal
from models.head import Head
from models.lora import LoraSpec
from models.mlp import GeluMLP
from models.norm import LayerNorm


@dataclass(frozen=True)
class GPT2Config:
    """Sizes of a GPT-2.

    hidden: of the MLP, default 4 times dim. dropout: of embeddings, attention weights and both branches of a block,
    while training. tied: the head uses the embedding's table. std: of initial weights. epsilon: of the norms.
    cudnn: use its attention where it can be, which needs a GPU. lora: adapters, or None.
    """

    vocab_size: int = 50257
    positions: int = 1024
    layers: int = 12
    dim: int = 768
    heads: int = 12
    hidden: int | None = None
    dropout: float = 0.0
    tied: bool = True
    std: float = 0.02
    epsilon: float = 1e-5
    cudnn: bool = False
    lora: LoraSpec | None = None

    @property
    def attention(self) -> AttentionSpec:
        """The attention of a block."""
        head_dim, out_std = self.dim // self.heads, self.std / (2 * self.layers) ** 0.5
        sizes, more = (self.dim, self.heads, self.heads, head_dim), {"cudnn": self.cudnn, "lora": self.lora}
        return AttentionSpec(*sizes, True, self.std, out_std, dropout=self.dropout, **more)


PRESETS = {
    "gpt2-tiny": GPT2Config(vocab_size=256, positions=256, layers=8, dim=128, heads=4, std=0.05),
    "gpt2": GPT2Config(),
    "gpt2-medium": GPT2Config(layers=24, dim=1024, heads=16),
    "gpt2-large": GPT2Config(layers=36, dim=1280, heads=20),
    "gpt2-xl": GPT2Config(layers=48, dim=1600, heads=25),
}


class Embed(nnx.Module):
    """Token and position embeddings."""

    def __init__(self, key: jax.Array, config: GPT2Config) -> None:
        tokens, positions = jax.random.split(key)
        self.tokens = nnx.Param(normal(tokens, (config.vocab_size, config.dim), config.std), axes=("vocab", None))
        self.positions = nnx.Param(normal(positions, (config.positions, config.dim), config.std / 2))
        self.rate = config.dropout

    def __call__(self, microbatch: dict[str, jax.Array], key: jax.Array | None) -> jax.Array:
        tokens_BT = microbatch["tokens"]
        # Looked up for each row by itself: a sum over rows, its gradient otherwise, made XLA lay out the whole stream
        # with rows last, and transpose it before every product.
        places_BT = microbatch.get("positions", jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape))
        x_BTD = self.tokens[...][tokens_BT] + self.positions[...][places_BT]
        x_BTD = constrain(x_BTD, None, "sequence", None)
        return dropout(x_BTD, self.rate, key)


class Block(nnx.Module):
    """Attention and MLP, each after a norm and added to the residual stream."""

    def __init__(self, key: jax.Array, config: GPT2Config) -> None:
        attention, mlp = jax.random.split(key)
        spec = config.attention
        self.norm1, self.norm2 = (LayerNorm(config.dim, config.epsilon) for _ in range(2))
        self.attention = Attention(attention, spec)
        # Less for what writes into the residual stream, so that its variance does not grow with depth.
        self.mlp = GeluMLP(mlp, config.dim, config.hidden or 4 * config.dim, spec.std, spec.out_std, spec.lora)
        self.rate = config.dropout

    def __call__(self, x_BTD: jax.Array, microbatch: dict[str, jax.Array], key: jax.Array | None) -> jax.Array:
        keys = (None, None, None) if key is None or self.rate == 0.0 else jax.random.split(key, 3)
        y_BTD = dropout(self.attention(self.norm1(x_BTD), microbatch, keys[0], key), self.rate, keys[1])
        x_BTD = keep(x_BTD + y_BTD)
        return x_BTD + dropout(self.mlp(self.norm2(x_BTD), key), self.rate, keys[2])

    def extend(self, x_BTD: jax.Array, cache: Cache, start: jax.Array) -> tuple[jax.Array, Cache]:
        """The block for T new tokens at position start, without dropout; see `Attention.extend`."""
        y_BTD, cache = self.attention.extend(self.norm1(x_BTD), cache, start)
        x_BTD = x_BTD + y_BTD
        return x_BTD + self.mlp(self.norm2(x_BTD)), cache


class GPT2(nnx.Module):
    """The whole model: `embed`, `blocks`, `head`, as the library asks of a model."""

    def __init__(self, key: jax.Array, config: GPT2Config) -> None:
        embed, head, blocks = jax.random.split(key, 3)
        self.embed = Embed(embed, config)
        self.blocks = nnx.List([Block(jax.random.fold_in(blocks, i), config) for i in range(config.layers)])
        self.head = Head(head, config, LayerNorm)
