"""Attention against JAX's own and against what it must not see.

Legend: B microbatch size, T sequence, D model, N heads, K kv heads, H head dim.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.attention import Attention, AttentionSpec, Cache, attend, kernel
from models.rope import Rope

SPEC = AttentionSpec(dim=16, heads=4, kv_heads=2, head_dim=8, std=0.3, out_std=0.3, rope=Rope())


def heads(spec: AttentionSpec = SPEC, length: int = 7, dtype: str = "float32", seed: int = 0) -> list[jax.Array]:
    """Random queries, keys and values of two rows."""
    rng = np.random.default_rng(seed)
    counts = (spec.heads, spec.kv_heads, spec.kv_heads)
    return [jnp.asarray(rng.normal(size=(2, length, n, spec.head_dim)), dtype) for n in counts]


@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("bfloat16", 1e-2)])
def test_attend_against_jax(kv_heads: int, dtype: str, tolerance: float, window: int | None) -> None:
    spec = replace(SPEC, kv_heads=kv_heads, window=window)
    q, k, v = heads(spec, dtype=dtype)
    got = attend(spec, q, k, v)
    assert (got.shape, got.dtype) == (q.shape, q.dtype)
    local = None if window is None else (window - 1, 0)
    want = jax.nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=local, implementation="xla")
    np.testing.assert_allclose(got.astype(float), want.astype(float), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("window", [None, 2])
def test_packed_documents_are_as_alone(window: int | None) -> None:
    """Documents of 3 and 4 tokens in one row, the positions beginning anew: each as in a row of its own."""
    spec = replace(SPEC, window=window)
    layer = Attention(jax.random.key(0), spec)
    x_BTD = jnp.asarray(np.random.default_rng(0).normal(size=(2, 7, 16)), jnp.float32)
    positions = jnp.asarray([[0, 1, 2, 0, 1, 2, 3]] * 2)
    packed = layer(x_BTD, {"positions": positions, "segments": jnp.asarray([[0] * 3 + [1] * 4] * 2)}, None)
    parts = [layer(x_BTD[:, :3], {}, None), layer(x_BTD[:, 3:], {}, None)]
    np.testing.assert_allclose(packed, jnp.concatenate(parts, axis=1), rtol=1e-5, atol=1e-6)


def test_attention_sees_only_distances() -> None:
    """Rotary positions shifted by any number give the same result."""
    layer = Attention(jax.random.key(0), SPEC)
    x_BTD = jnp.asarray(np.random.default_rng(0).normal(size=(2, 7, 16)), jnp.float32)
    shifted = layer(x_BTD, {"positions": 100 + jnp.broadcast_to(jnp.arange(7), (2, 7))}, None)
    np.testing.assert_allclose(shifted, layer(x_BTD, {}, None), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"window": 3}, {"bias": True, "qk_norm": 1e-6}, {"rope": None}])
@pytest.mark.parametrize("parts", [(1,) * 7, (5, 2), (7,)])
def test_the_cache_gives_the_same(options: dict, parts: tuple[int, ...]) -> None:
    """Token by token, or some at once, into a cache with room to spare."""
    layer = Attention(jax.random.key(0), replace(SPEC, **options))
    x_BTD = jnp.asarray(np.random.default_rng(0).normal(size=(2, 7, 16)), jnp.float32)
    cache = Cache(*(jnp.full((2, 10, 2, 8), 1e3) for _ in range(2)))  # what is not yet written must not be seen
    found, start = [], 0
    for part in parts:
        y_BTD, cache = layer.extend(x_BTD[:, start : start + part], cache, jnp.asarray(start))
        found.append(y_BTD)
        start += part
    np.testing.assert_allclose(jnp.concatenate(found, axis=1), layer(x_BTD, {}, None), rtol=1e-5, atol=1e-6)


def test_softmax_in_float32() -> None:
    """Scores of 300 and 301 are one number in bfloat16 and two in float32."""
    spec = AttentionSpec(dim=2, heads=1, kv_heads=1, head_dim=2)
    q = jnp.asarray([[[[1.0, 1.0]], [[1.0, 1.0]]]], jnp.bfloat16) * 2**0.5
    k = jnp.asarray([[[[300.0, 0.0]], [[300.0, 1.0]]]], jnp.bfloat16)
    v = jnp.asarray([[[[0.0, 0.0]], [[1.0, 1.0]]]], jnp.bfloat16)
    assert float(attend(spec, q, k, v)[0, 1, 0, 0]) == pytest.approx(1 / (1 + np.exp(-1)), abs=5e-3)


def test_dropout_needs_key_and_rate() -> None:
    plain = attend(SPEC, *heads())
    dropping = replace(SPEC, dropout=0.5)
    np.testing.assert_array_equal(attend(dropping, *heads()), plain)
    np.testing.assert_array_equal(attend(SPEC, *heads(), key=jax.random.key(0)), plain)
    assert jnp.any(attend(dropping, *heads(), key=jax.random.key(0)) != plain)


@pytest.mark.parametrize(
    ("dtype", "options", "key", "want"),
    [
        ("bfloat16", {"cudnn": True}, None, "cudnn"),
        ("bfloat16", {"cudnn": False}, None, "plain"),
        ("float32", {"cudnn": True}, None, "plain"),
        ("bfloat16", {"cudnn": True, "head_dim": 256}, None, "plain"),
        ("bfloat16", {"cudnn": True, "dropout": 0.1}, 0, "plain"),
        ("bfloat16", {"cudnn": True, "dropout": 0.1}, None, "cudnn"),
    ],
)
def test_cudnn_is_used_where_it_can_be(
    monkeypatch: pytest.MonkeyPatch, dtype: str, options: dict, key: int | None, want: str
) -> None:
    used: list[dict] = []
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda q, *_, **options: (used.append(options), q)[1])
    spec = replace(SPEC, **options)
    attend(spec, *heads(spec, dtype=dtype), key=None if key is None else jax.random.key(key))
    assert used == ([{"is_causal": True, "implementation": "cudnn"}] if want == "cudnn" else [])
    dropping = key is not None and spec.dropout > 0
    assert kernel(spec, jnp.dtype(dtype), dropping) == want


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("segments", [None, [0, 0, 0, 1, 1, 1, 1]])
def test_what_is_asked_of_cudnn_is_what_the_plain_one_does(
    monkeypatch: pytest.MonkeyPatch, window: int | None, segments: list[int] | None
) -> None:
    real = jax.nn.dot_product_attention

    def on_cpu(*args: Any, **options: Any) -> jax.Array:
        return real(*args, **(options | {"implementation": "xla"}))

    monkeypatch.setattr(jax.nn, "dot_product_attention", on_cpu)
    spec = replace(SPEC, window=window)
    documents = None if segments is None else jnp.asarray([segments] * 2)
    run = partial(attend, segments_BT=documents)
    fused = run(replace(spec, cudnn=True), *heads(dtype="bfloat16"))
    plain = run(spec, *heads(dtype="bfloat16"))
    np.testing.assert_allclose(fused.astype(float), plain.astype(float), rtol=1e-2, atol=1e-2)
