"""Qwen3 (Yang et al. 2025, arXiv:2505.09388), the dense ones: queries and keys normalised by head, H not D / N."""

from dataclasses import dataclass

from models.decoder import Decoder, DecoderConfig
from models.rope import Rope


@dataclass(frozen=True)
class Qwen3Config(DecoderConfig):
    """Sizes of a Qwen3; see `DecoderConfig`."""

    head_dim: int | None = 128
    qk_norm: bool = True
    epsilon: float = 1e-6


class Qwen3(Decoder):
    """A Qwen3."""


def _preset(layers: int, dim: int, heads: int, hidden: int, tied: bool = False) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=151_936,
        positions=40_960,
        layers=layers,
        dim=dim,
        heads=heads,
        kv_heads=8,
        hidden=hidden,
        rope=Rope(theta=1_000_000.0),
        tied=tied,
    )


PRESETS = {
    "qwen3-tiny": Qwen3Config(
        vocab_size=256,
        positions=256,
        layers=8,
        dim=128,
        heads=4,
        kv_heads=2,
        hidden=384,
        head_dim=48,
        rope=Rope(theta=1_000_000.0),
        tied=True,
        std=0.05,
    ),
    "qwen3-0.6b": _preset(28, 1024, 16, 3072, tied=True),
    "qwen3-1.7b": _preset(28, 2048, 16, 6144, tied=True),
    "qwen3-4b": _preset(36, 2560, 32, 9728, tied=True),
    "qwen3-8b": _preset(36, 4096, 32, 12_288),
    "qwen3-14b": _preset(40, 5120, 40, 17_408),
    "qwen3-32b": _preset(64, 5120, 64, 25_600),
}
