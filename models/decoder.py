"""The decoder that LLaMA 3, Qwen3 and Mixtral share: rotary positions, RMS norms before each branch, gated MLPs.

Legend: B microbatch size, T sequence, D model, V vocabulary.
"""

from dataclasses import dataclass, field
from typing import Any

import jax
from flax import nnx

from jaxpp.remat import keep
from jaxpp.sharding import constrain
from models.attention import Attention, AttentionSpec, Cache, dropout
from models.dense import normal
from models.head import Head
from models.lora import LoraSpec
from models.mlp import GatedMLP
from models.norm import RMSNorm
from models.rope import Rope


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes of a decoder.

    positions: the longest sequence. head_dim: default dim / heads. hidden: of the MLP. rope: rotary positions.
    tied: the head uses the embedding's table. attention_bias, mlp_bias: biases of those projections. qk_norm: normalise
    each head of queries and keys. window: positions that a token sees, the own one included, or None for all before.
    dropout: of attention weights and of both branches of a block, while training. std: of initial weights.
    epsilon: of the norms. cudnn: use its attention where it can be, which needs a GPU. lora: adapters, or None.
    """

    vocab_size: int
    positions: int
    layers: int
    dim: int
    heads: int
    kv_heads: int
    hidden: int
    head_dim: int | None = None
    rope: Rope = field(default_factory=Rope)
    tied: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    window: int | None = None
    dropout: float = 0.0
    std: float = 0.02
    epsilon: float = 1e-5
    cudnn: bool = False
    lora: LoraSpec | None = None

    @property
    def attention(self) -> AttentionSpec:
        """The attention of a block."""
        return AttentionSpec(
            dim=self.dim,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim or self.dim // self.heads,
            bias=self.attention_bias,
            std=self.std,
            out_std=self.std / (2 * self.layers) ** 0.5,
            rope=self.rope,
            qk_norm=self.epsilon if self.qk_norm else None,
            window=self.window,
            dropout=self.dropout,
            cudnn=self.cudnn,
            lora=self.lora,
        )


class Embed(nnx.Module):
    """Token embeddings."""

    def __init__(self, key: jax.Array, config: DecoderConfig) -> None:
        self.tokens = nnx.Param(normal(key, (config.vocab_size, config.dim), config.std), axes=("vocab", None))

    def __call__(self, microbatch: dict[str, jax.Array], key: jax.Array | None) -> Any:
        return constrain(self.tokens[...][microbatch["tokens"]], None, "sequence", None)


class Block(nnx.Module):
    """Attention and MLP, each after a norm and added to the residual stream."""

    def __init__(self, key: jax.Array, config: DecoderConfig) -> None:
        attention, mlp = jax.random.split(key)
        spec = config.attention
        self.norm1, self.norm2 = (RMSNorm(config.dim, config.epsilon) for _ in range(2))
        self.attention = Attention(attention, spec)
        self.mlp = self.make_mlp(mlp, config, spec)
        self.rate = config.dropout

    def make_mlp(self, key: jax.Array, config: DecoderConfig, spec: AttentionSpec) -> Any:
        """The block's feed-forward part."""
        return GatedMLP(key, config.dim, config.hidden, config.mlp_bias, spec.std, spec.out_std, spec.lora)

    def keys(self, key: jax.Array | None) -> Any:
        """Keys of the attention weights' dropout and of both branches'; adapters make theirs of the block's own."""
        return (None, None, None) if key is None or self.rate == 0.0 else jax.random.split(key, 3)

    def __call__(self, x_BTD: Any, microbatch: dict[str, jax.Array], key: jax.Array | None) -> Any:
        keys = self.keys(key)
        y_BTD = dropout(self.attention(self.norm1(x_BTD), microbatch, keys[0], key), self.rate, keys[1])
        x_BTD = keep(x_BTD + y_BTD)
        return x_BTD + dropout(self.mlp(self.norm2(x_BTD), key), self.rate, keys[2])

    def extend(self, x_BTD: Any, cache: Cache, start: jax.Array) -> tuple[Any, Cache]:
        """The block for T new tokens at position start, without dropout; see `Attention.extend`."""
        y_BTD, cache = self.attention.extend(self.norm1(x_BTD), cache, start)
        x_BTD = x_BTD + y_BTD
        return x_BTD + self.mlp(self.norm2(x_BTD)), cache


class Decoder(nnx.Module):
    """The whole model: `embed`, `blocks`, `head`, as the library asks of a model; subclasses name other parts."""

    PARTS: tuple[type, type, type] = (Embed, Block, Head)

    def __init__(self, key: jax.Array, config: DecoderConfig) -> None:
        make_embed, make_block, make_head = self.PARTS
        embed, head, blocks = jax.random.split(key, 3)
        self.embed = make_embed(embed, config)
        self.blocks = nnx.List([make_block(jax.random.fold_in(blocks, i), config) for i in range(config.layers)])
        self.head = make_head(head, config, RMSNorm)
