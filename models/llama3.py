"""LLaMA 3 (Grattafiori et al. 2024, arXiv:2407.21783): grouped queries, rotary positions with base 500,000."""

from dataclasses import dataclass

from models.decoder import Decoder, DecoderConfig
from models.rope import Rope


@dataclass(frozen=True)
class Llama3Config(DecoderConfig):
    """Sizes of a LLaMA 3; see `DecoderConfig`."""


class Llama3(Decoder):
    """A LLaMA 3."""


_ROPE = Rope(theta=500_000.0)
_ROPE_31 = Rope(theta=500_000.0, kind="llama3", factor=8.0)
_ROPE_32 = Rope(theta=500_000.0, kind="llama3", factor=32.0)


def _preset(layers: int, dim: int, heads: int, hidden: int, rope: Rope, tied: bool = False) -> Llama3Config:
    return Llama3Config(
        vocab_size=128_256,
        positions=8192 if rope.kind == "default" else 131_072,
        layers=layers,
        dim=dim,
        heads=heads,
        kv_heads=8,
        hidden=hidden,
        rope=rope,
        tied=tied,
    )


PRESETS = {
    "llama3-tiny": Llama3Config(
        vocab_size=256, positions=256, layers=8, dim=128, heads=4, kv_heads=2, hidden=384, rope=_ROPE, std=0.05
    ),
    "llama3-8b": _preset(32, 4096, 32, 14_336, _ROPE),
    "llama3-70b": _preset(80, 8192, 64, 28_672, _ROPE),
    "llama3.1-8b": _preset(32, 4096, 32, 14_336, _ROPE_31),
    "llama3.1-70b": _preset(80, 8192, 64, 28_672, _ROPE_31),
    "llama3.2-1b": _preset(16, 2048, 32, 8192, _ROPE_32, tied=True),
    "llama3.2-3b": _preset(28, 3072, 24, 8192, _ROPE_32, tied=True),
}
