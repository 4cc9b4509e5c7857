"""FLOPs of a model against counts by hand."""

from dataclasses import replace

import jax
import pytest

from jaxpp import partition, train
from models import PRESETS, build, flops


def test_gpt2_by_hand() -> None:
    """124M: of a block two norms, qkv, the output, two projections; the final norm; the tied table once."""
    block = 2 * 2 * 768 + (768 + 1) * 3 * 768 + (768 + 1) * 768 + (768 + 1) * 3072 + (3072 + 1) * 768
    active = 12 * block + 2 * 768 + 50257 * 768
    assert active == 124_439_808 - 1024 * 768  # the published number of parameters, without positions
    assert flops.active_parameters(PRESETS["gpt2"]) == active
    assert flops.per_token(PRESETS["gpt2"], 1024) == 6 * active + 12 * 12 * 1024 * 12 * 64 == 855_166_464
    assert flops.per_token_causal(PRESETS["gpt2"], 1024) == 6 * active + 6 * 12 * 1024 * 12 * 64


def test_mixtral_by_hand() -> None:
    """8x7B: two of eight experts; 12.9B active parameters are published, the embedding among them."""
    attention = 4096 * 4096 * 2 + 4096 * 1024 * 2
    block = 2 * 4096 + attention + 4096 * 8 + 2 * 3 * 4096 * 14_336
    active = 32 * block + 4096 + 32_000 * 4096
    assert flops.active_parameters(PRESETS["mixtral-8x7b"]) == active == 12_879_925_248 - 32_000 * 4096
    assert flops.per_token(PRESETS["mixtral-8x7b"], 4096) == 6 * active + 12 * 32 * 4096 * 32 * 128


@pytest.mark.parametrize("name", ["llama3-tiny", "llama3.2-1b", "qwen3-0.6b", "gpt2-tiny"])
def test_all_but_the_embeddings(name: str) -> None:
    """As many as the real arrays, less a look-up's tables."""
    config = PRESETS[name]
    spec = jax.eval_shape(
        lambda: partition.stack(build(jax.random.key(0), config), partition.split_layers(config.layers, 1))
    )
    looked_up = 0 if config.tied else config.vocab_size * config.dim
    looked_up += config.positions * config.dim if name.startswith("gpt2") else 0
    assert flops.active_parameters(config) == train.parameter_count(spec) - looked_up


def test_a_window_bounds_attention() -> None:
    config = PRESETS["llama3-tiny"]
    near = replace(config, window=64)
    assert flops.per_token(near, 32) == flops.per_token(config, 32)
    assert flops.per_token(near, 256) == flops.per_token(config, 64)


def test_a_causal_window() -> None:
    """Of 256 tokens the first 64 see 1 to 64, the others 64 each: by pairs, and by the formula to half a token."""
    config = replace(PRESETS["llama3-tiny"], window=64)
    spec = config.attention
    pairs = sum(min(i + 1, 64) - 0.5 for i in range(256)) / 256
    attention = flops.per_token_causal(config, 256) - 6 * flops.active_parameters(config)
    each = 12 * config.layers * spec.heads * spec.head_dim
    assert attention / each == pytest.approx(pairs, abs=0.5)
    assert flops.per_token_causal(config, 32) == flops.per_token_causal(PRESETS["llama3-tiny"], 32)
