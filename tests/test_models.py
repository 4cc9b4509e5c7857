"""GPT-2, the layers that all models share, and the presets; test_attention.py has attention.

Legend: B microbatch size, T sequence, D model, N heads, K kv heads, H head dim, V vocabulary.
"""

import dataclasses
import math
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

import models
from models.attention import dropout
from models.dense import project
from models.lora import LoraSpec
from models.mlp import gelu
from models.norm import LayerNorm, RMSNorm

SMALL = models.GPT2Config(vocab_size=61, positions=12, layers=3, dim=24, heads=3)
TOKENS_BT = np.random.default_rng(0).integers(0, SMALL.vocab_size, (2, 10))
COUNTS = {
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_630_071_296,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "gpt2-tiny": 1_651_968,
}


@cache
def make(config: models.GPT2Config = SMALL) -> models.GPT2:
    return jax.jit(lambda: models.GPT2(jax.random.key(0), config))()


def shapes(config: models.ModelConfig) -> Any:
    return jax.eval_shape(lambda: models.build(jax.random.key(0), config))


def perturbed(config: models.GPT2Config = SMALL) -> models.GPT2:
    """A model none of whose parameters has a special value: biases not 0, scales not 1."""
    rng = np.random.default_rng(1)
    return jax.tree.map(lambda a: a + rng.normal(size=a.shape).astype(np.float32) * 0.2, jax.device_get(make(config)))


@jax.jit
def logits(model: Any, tokens_BT: Any = TOKENS_BT, key: jax.Array | None = None) -> jax.Array:
    keys = [None] * (len(model.blocks) + 1) if key is None else jax.random.split(key, len(model.blocks) + 1)
    microbatch = {"tokens": jnp.asarray(tokens_BT)}
    x_BTD = model.embed(microbatch, keys[0])
    for block, k in zip(model.blocks, keys[1:], strict=True):
        x_BTD = block(x_BTD, microbatch, k)
    return model.head(x_BTD, model.embed)


def numpy_gpt2(model: models.GPT2, tokens_BT: np.ndarray) -> np.ndarray:
    """GPT-2 as the paper has it, one head and one row at a time, in float64."""
    get = lambda param: np.asarray(param[...], np.float64)

    def norm(layer: LayerNorm, x: np.ndarray) -> np.ndarray:
        mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
        return (x - mean) / np.sqrt(variance + 1e-5) * get(layer.scale) + get(layer.bias)

    def attention(layer: Any, x_TD: np.ndarray) -> np.ndarray:
        y_TD = np.tile(get(layer.bo), (len(x_TD), 1))
        for n in range(layer.wq.shape[1]):
            q = x_TD @ get(layer.wq)[:, n] + get(layer.bq)[n]
            k = x_TD @ get(layer.wkv)[:, 0, n] + get(layer.bkv)[0, n]
            v = x_TD @ get(layer.wkv)[:, 1, n] + get(layer.bkv)[1, n]
            for t in range(len(x_TD)):
                weight = np.exp(q[t] @ k[: t + 1].T / np.sqrt(q.shape[-1]))
                y_TD[t] += weight / weight.sum() @ v[: t + 1] @ get(layer.wo)[n]
        return y_TD

    def mlp(layer: Any, x: np.ndarray) -> np.ndarray:
        h = x @ get(layer.wi) + get(layer.bi)
        h = h * (1 + np.tanh(np.sqrt(2 / np.pi) * (h + 0.044715 * h**3))) / 2
        return h @ get(layer.wo) + get(layer.bo)

    rows = []
    for tokens_T in tokens_BT:
        x = get(model.embed.tokens)[tokens_T] + get(model.embed.positions)[: len(tokens_T)]
        for block in model.blocks:
            x = x + attention(block.attention, norm(block.norm1, x))
            x = x + mlp(block.mlp, norm(block.norm2, x))
        table = get(model.embed.tokens if model.head.tied else model.head.table)
        rows.append(norm(model.head.norm, x) @ table.T)
    return np.stack(rows)


@pytest.mark.parametrize("tied", [True, False])
def test_forward_against_numpy(tied):
    model = perturbed(dataclasses.replace(SMALL, tied=tied))
    want = numpy_gpt2(model, TOKENS_BT)
    assert np.abs(want).max() > 1
    np.testing.assert_allclose(logits(model), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("position", [0, 4, 9])
def test_causality(position):
    """Another token changes its own logits and all later ones, and none before, bit by bit."""
    changed_BT = TOKENS_BT.copy()
    changed_BT[:, position] = (changed_BT[:, position] + 1) % SMALL.vocab_size
    model = perturbed()
    differs_BT = np.asarray(logits(model) != logits(model, changed_BT)).any(-1)
    assert not differs_BT[:, :position].any()
    assert differs_BT[:, position:].all()


def test_rows_do_not_mix():
    changed_BT = np.stack([TOKENS_BT[0], TOKENS_BT[1][::-1]])
    model = perturbed()
    np.testing.assert_array_equal(logits(model)[0], logits(model, changed_BT)[0])


@pytest.mark.parametrize("name", COUNTS)
def test_parameter_counts(name):
    config = models.config_of(name)
    spec = shapes(config)
    assert sum(a.size for a in jax.tree.leaves(spec)) == COUNTS[name]
    if config.tied:
        untied = shapes(dataclasses.replace(config, tied=False))
        assert sum(a.size for a in jax.tree.leaves(untied)) == COUNTS[name] + config.vocab_size * config.dim


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", models.PRESETS)
def test_every_preset_traces(name, dtype):
    """Blocks keep the stream's shapes and dtypes, and logits are in its dtype."""
    config = dataclasses.replace(models.config_of(name), layers=1)  # blocks are alike
    length = min(config.positions, 64)

    def run(tokens_BT: jax.Array) -> tuple[Any, Any, jax.Array]:
        model = jax.tree.map(lambda a: a.astype(dtype), models.build(jax.random.key(0), config))
        microbatch = {"tokens": tokens_BT}
        stream = model.embed(microbatch, None)
        return stream, model.blocks[-1](stream, microbatch, None), model.head(stream, model.embed)

    stream, out, logits_BTV = jax.eval_shape(run, jax.ShapeDtypeStruct((2, length), jnp.int32))
    assert out == stream
    x_BTD = stream["x"] if isinstance(stream, dict) else stream
    assert (x_BTD.shape, x_BTD.dtype) == ((2, length, config.dim), dtype)
    assert (logits_BTV.shape, logits_BTV.dtype) == ((2, length, config.vocab_size), dtype)


def test_tied_head_follows_the_embedding():
    """Doubling the table in the head alone doubles the logits where tied and changes nothing where untied."""
    for tied, factor in ((True, 2), (False, 1)):
        model = perturbed(dataclasses.replace(SMALL, tied=tied))
        x_BTD = jnp.asarray(np.random.default_rng(0).normal(size=(1, 3, SMALL.dim)), jnp.float32)
        before = model.head(x_BTD, model.embed)
        doubled = jax.tree.map(lambda a: 2 * a, model.embed)
        np.testing.assert_allclose(model.head(x_BTD, doubled), factor * before, rtol=1e-6)


CHANGES = {
    "vocab_size": 62,
    "positions": 11,
    "layers": 4,
    "dim": 48,
    "heads": 4,
    "hidden": 50,
    "dropout": 0.5,
    "tied": False,
    "std": 0.03,
    "epsilon": 0.1,
    "lora": LoraSpec(2, 2.0, targets=("c_attn",)),
}


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(models.GPT2Config) if f.name != "cudnn"])
def test_every_field_of_the_config_counts(field):
    """Pitfall 31: a field that nothing reads."""
    changed = dataclasses.replace(SMALL, **{field: CHANGES[field]})
    key = jax.random.key(3) if field == "dropout" else None
    if field in ("vocab_size", "positions", "layers", "dim", "hidden", "tied", "lora"):
        assert [a.shape for a in jax.tree.leaves(shapes(SMALL))] != [a.shape for a in jax.tree.leaves(shapes(changed))]
    if field in ("layers", "heads", "dropout", "tied", "std", "epsilon"):
        assert float(jnp.abs(logits(make(), key=key) - logits(make(changed), key=key)).max()) > 1e-4


def test_initial_weights():
    """std of matrices, less for those that write into the residual stream, so that it does not grow with depth."""
    model = make(dataclasses.replace(SMALL, dim=240, layers=8, vocab_size=500, positions=100))
    deviation = lambda param: float(jnp.std(param[...]))
    block = model.blocks[5]
    for param in (block.attention.wq, block.attention.wkv, block.mlp.wi, model.embed.tokens):
        assert deviation(param) == pytest.approx(0.02, rel=0.02)
    for param in (block.attention.wo, block.mlp.wo):
        assert deviation(param) == pytest.approx(0.02 / 4, rel=0.02)
    assert deviation(model.embed.positions) == pytest.approx(0.01, rel=0.02)
    assert not jnp.any(block.attention.bkv[...])
    assert deviation(block.attention.wq) != deviation(model.blocks[4].attention.wq)


@pytest.mark.parametrize("rate", [0.1, 0.5])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dropout_keeps_the_mean(rate, dtype):
    x = jnp.ones(100_000, dtype)
    y = np.asarray(dropout(x, rate, jax.random.key(0)), np.float64)
    assert set(np.unique(y)) == {0.0, float(jnp.asarray(1 / (1 - rate), dtype))}
    assert np.mean(y == 0) == pytest.approx(rate, abs=0.005)
    assert y.mean() == pytest.approx(1, abs=0.01)
    assert dropout(x, rate, jax.random.key(0)).dtype == x.dtype


def test_dropout_draws_anew_for_every_key_and_place():
    config = dataclasses.replace(SMALL, dropout=0.5)
    model = make(config)
    first, second = (logits(model, key=jax.random.key(i)) for i in range(2))
    assert jnp.any(first != second)
    np.testing.assert_array_equal(first, logits(model, key=jax.random.key(0)))
    np.testing.assert_array_equal(logits(model), logits(make()))


@pytest.mark.parametrize("summed", [1, 2])
def test_project_is_a_tensor_product(summed):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 3, *(4, 5)[2 - summed :])).astype(np.float32)
    w = rng.normal(size=(*(4, 5)[2 - summed :], 6, 2)).astype(np.float32)
    got = project(jnp.asarray(x), jnp.asarray(w), summed)
    np.testing.assert_allclose(got, np.tensordot(x, w, summed), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("summed", [1, 2])
def test_project_adds_a_bias(summed):
    rng = np.random.default_rng(0)
    x, w, bias = (jnp.asarray(rng.normal(size=n), jnp.float32) for n in ((2, 3, 4, 5)[: 2 + summed], (4, 5, 6)[:3], 6))
    w = w if summed == 2 else w[:, 0]
    np.testing.assert_allclose(project(x, w, summed, bias), np.tensordot(x, w, summed) + bias, rtol=1e-5, atol=1e-5)


def test_gelu_is_the_tanh_form():
    x = jnp.linspace(-12, 12, 1001)
    wide, inner = np.asarray(x, np.float64), math.sqrt(2 / math.pi)
    half = 0.5 * (1 + np.tanh(inner * (wide + 0.044715 * wide**3)))
    slope = half + 2 * half * (1 - half) * wide * inner * (1 + 3 * 0.044715 * wide**2)
    for got, want in zip(jax.vmap(jax.value_and_grad(gelu))(x), (wide * half, slope), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("kind", [LayerNorm, RMSNorm])
def test_gradients_of_norms_are_those_of_their_definition(kind):
    rng = np.random.default_rng(0)
    norm = jax.tree.map(lambda a: a + rng.normal(size=a.shape).astype(np.float32), kind(24))
    x, g = (jnp.asarray(rng.normal(size=(2, 3, 24)) + 1, jnp.float32) for _ in range(2))

    def defined(norm, x):
        x = x - x.mean(-1, keepdims=True) if kind is LayerNorm else x
        y = x / jnp.sqrt(jnp.square(x).mean(-1, keepdims=True) + norm.epsilon) * norm.scale[...]
        return y + norm.bias[...] if kind is LayerNorm else y

    want, got = (jax.vjp(f, norm, x) for f in (defined, lambda norm, x: norm(x)))
    assert reference.error((got[0], got[1](g)), (want[0], want[1](g))) <= 1e-6


def test_norm_statistics_are_float32():
    """A mean of 256 and a spread of 1: in bfloat16 the squares lose the spread."""
    x = jnp.asarray([[[256.0, 258.0] * 8]], jnp.bfloat16)
    norm = jax.tree.map(lambda a: a.astype(jnp.bfloat16), LayerNorm(16))
    y = norm(x)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_allclose(y.astype(float), np.asarray([[[-1.0, 1.0] * 8]]), rtol=1e-4)


@pytest.mark.parametrize(("name", "near"), [("gpt2-tny", "gpt2-tiny"), ("gpt-2-xl", "gpt2-xl"), ("zzz", None)])
def test_unknown_preset(name, near):
    with pytest.raises(ValueError, match="gpt2-tiny, gpt2, gpt2-medium") as error:
        models.config_of(name)
    assert (f"did you mean {near!r}" in str(error.value)) if near else ("did you mean" not in str(error.value))
