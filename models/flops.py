"""FLOPs that a model needs, for its utilization of the devices (MFU)."""

import math
from dataclasses import replace
from typing import Any

import jax

from models import ModelConfig, build
from models.mixtral import MixtralConfig


def _count(tree: Any) -> int:
    return sum(math.prod(a.shape) for a in jax.tree.leaves(tree))


def active_parameters(config: ModelConfig) -> int:
    """Parameters that a token is multiplied with: all but the embeddings, and of the experts those chosen; the head's
    table also where it is the embedding's."""
    one = jax.eval_shape(lambda: build(jax.random.key(0), replace(config, layers=1)))
    block = _count(one.blocks[0])
    if isinstance(config, MixtralConfig):
        experts = _count((one.blocks[0].mlp.wi, one.blocks[0].mlp.wo))
        block -= experts * (config.experts - config.chosen) // config.experts
    tied = config.vocab_size * config.dim if config.tied else 0
    return config.layers * block + _count(one.head) + tied


def _dense(config: ModelConfig) -> int:
    """FLOPs of one token in products with parameters: 6 for each, 4 for a frozen one."""
    frozen = active_parameters(replace(config, lora=None)) if config.lora else 0
    return 6 * active_parameters(config) - 2 * frozen


def per_token(config: ModelConfig, length: int) -> int:
    """FLOPs of one token, forward and backward: 6 N + 12 L T N_heads H.

    N is `active_parameters`. Beside adapters it is 4 N for the frozen base, which has no gradients of weights, and 6 N
    for the adapters. Attention counts all T = `length` positions (or the window's), as if it were not causal,
    and recomputation is left out: the convention of PaLM (Chowdhery et al. 2022, arXiv:2204.02311, appendix B), so that
    figures compare with published ones.
    """
    spec = config.attention
    seen = min(length, spec.window or length)
    return _dense(config) + 12 * config.layers * seen * spec.heads * spec.head_dim


def per_token_causal(config: ModelConfig, length: int) -> int:
    """As `per_token`, but attention counts only what a token may see, on average T / 2: 6 N + 6 L T N_heads H.

    With a window W below T that average is W - W^2 / 2T.
    """
    spec = config.attention
    seen = min(length, spec.window or length)
    return _dense(config) + 6 * config.layers * (2 * seen - seen * seen // length) * spec.heads * spec.head_dim


_N = "N without embeddings, a tied table once, 4 N where frozen"
# Both counts by the names of the MFU that they give, in words and as functions.
COUNTS = {
    "mfu": (f"6 N + 12 L T N_heads H (PaLM, as if not causal), {_N}", per_token),
    "mfu_causal": ("6 N + 6 L T N_heads H (causal), N likewise", per_token_causal),
}
