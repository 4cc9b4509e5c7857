"""GPT-2 and its layers, against numpy and JAX's own attention.

Legend: B microbatch size, T sequence, D model, N heads, K kv heads, H head dim, V vocabulary.
"""

import dataclasses
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import models
from models.attention import attend, dropout
from models.dense import project
from models.norm import LayerNorm

SMALL = models.GPT2Config(vocab_size=61, positions=12, layers=3, dim=24, heads=3)
TOKENS_BT = np.random.default_rng(0).integers(0, SMALL.vocab_size, (2, 10))
COUNTS = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "gpt2-tiny": 1_651_968,
}


@cache
def make(config: models.GPT2Config = SMALL) -> models.GPT2:
    return jax.jit(lambda: models.GPT2(jax.random.key(0), config))()


def shapes(config: models.GPT2Config) -> models.GPT2:
    return jax.eval_shape(lambda: models.GPT2(jax.random.key(0), config))


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
    untied = shapes(dataclasses.replace(config, tied=False))
    assert sum(a.size for a in jax.tree.leaves(untied)) == COUNTS[name] + config.vocab_size * config.dim


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", models.PRESETS)
def test_every_preset_traces(name, dtype):
    """Blocks keep the stream's dtype and logits are in it, for a whole row of positions."""
    config = models.config_of(name)

    def run(tokens_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
        model = jax.tree.map(lambda a: a.astype(dtype), models.GPT2(jax.random.key(0), config))
        microbatch = {"tokens": tokens_BT}
        x_BTD = model.embed(microbatch, None)
        return model.blocks[-1](x_BTD, microbatch, None), model.head(x_BTD, model.embed)

    x_BTD, logits_BTV = jax.eval_shape(run, jax.ShapeDtypeStruct((2, config.positions), jnp.int32))
    assert (x_BTD.shape, x_BTD.dtype) == ((2, config.positions, config.dim), dtype)
    assert (logits_BTV.shape, logits_BTV.dtype) == ((2, config.positions, config.vocab_size), dtype)


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
    "dropout": 0.5,
    "tied": False,
    "std": 0.03,
}


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(models.GPT2Config) if f.name != "cudnn"])
def test_every_field_of_the_config_counts(field):
    """Pitfall 31: a field that nothing reads."""
    changed = dataclasses.replace(SMALL, **{field: CHANGES[field]})
    key = jax.random.key(3) if field == "dropout" else None
    if field in ("vocab_size", "positions", "layers", "dim", "tied"):
        assert [a.shape for a in jax.tree.leaves(shapes(SMALL))] != [a.shape for a in jax.tree.leaves(shapes(changed))]
    if field in ("layers", "heads", "dropout", "tied", "std"):
        assert float(jnp.abs(logits(make(), key=key) - logits(make(changed), key=key)).max()) > 1e-4


@pytest.mark.parametrize(
    ("dtype", "cudnn", "calls"), [("bfloat16", True, 1), ("bfloat16", False, 0), ("float32", True, 0)]
)
def test_cudnn_is_used_where_it_can_be(monkeypatch, dtype, cudnn, calls):
    used = []
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda q, *_, **options: (used.append(options), q)[1])
    q_BTNH = jnp.ones((1, 4, 2, 8), dtype)
    attend(q_BTNH, q_BTNH, q_BTNH, cudnn=cudnn)
    assert used == [{"is_causal": True, "implementation": "cudnn"}] * calls
    model = make(dataclasses.replace(SMALL, cudnn=cudnn))
    assert all(block.attention.cudnn == cudnn for block in model.blocks)


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


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("bfloat16", 1e-2)])
def test_attend_against_jax(kv_heads, dtype, tolerance):
    rng = np.random.default_rng(kv_heads)
    shapes = ((2, 7, 4, 8), (2, 7, kv_heads, 8), (2, 7, kv_heads, 8))
    q, k, v = (jnp.asarray(rng.normal(size=s), dtype) for s in shapes)
    got = attend(q, k, v, 0.0, None)
    assert (got.shape, got.dtype) == (q.shape, q.dtype)
    want = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="xla")
    np.testing.assert_allclose(got.astype(float), want.astype(float), rtol=tolerance, atol=tolerance)


def test_attend_softmax_in_float32():
    """Scores of 300 and 301 are one number in bfloat16 and two in float32."""
    q = jnp.asarray([[[[1.0, 1.0]], [[1.0, 1.0]]]], jnp.bfloat16) * 2**0.5
    k = jnp.asarray([[[[300.0, 0.0]], [[300.0, 1.0]]]], jnp.bfloat16)
    v = jnp.asarray([[[[0.0, 0.0]], [[1.0, 1.0]]]], jnp.bfloat16)
    assert float(attend(q, k, v, 0.0, None)[0, 1, 0, 0]) == pytest.approx(1 / (1 + np.exp(-1)), abs=5e-3)


def test_attend_dropout_needs_key_and_rate():
    q = jnp.asarray(np.random.default_rng(0).normal(size=(1, 6, 2, 4)), jnp.float32)
    plain = attend(q, q, q, 0.0, None)
    np.testing.assert_array_equal(attend(q, q, q, 0.5, None), plain)
    np.testing.assert_array_equal(attend(q, q, q, 0.0, jax.random.key(0)), plain)
    assert jnp.any(attend(q, q, q, 0.5, jax.random.key(0)) != plain)


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
