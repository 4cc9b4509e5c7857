"""The loss in chunks of tokens against the loss of whole logits.

Legend: B microbatch size, T sequence, D model, V vocabulary.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import toy

import models
from jaxpp import losses

B, T, D, V = 3, 14, 8, 29


def arrays(dtype: str = "float32", rows: int = B) -> tuple[jax.Array, jax.Array, jax.Array]:
    """x_BTD, table_VD and labels with some that count nothing."""
    rng = np.random.default_rng(0)
    labels_BT = rng.integers(0, V, (rows, T))
    labels_BT[rng.random((rows, T)) < 0.2] = losses.IGNORE
    x_BTD, table_VD = (jnp.asarray(rng.normal(size=size), dtype) for size in ((rows, T, D), (V, D)))
    return x_BTD, table_VD, jnp.asarray(labels_BT, jnp.int32)


def whole(x_BTD: jax.Array, table_VD: jax.Array, labels_BT: jax.Array, vocab: int = V) -> jax.Array:
    return losses.cross_entropy(losses.mask_padding(losses.logits(x_BTD, table_VD), vocab), labels_BT)


def chunked(x_BTD: Any, table_VD: Any, labels_BT: Any, size: int, vocab: int = V) -> jax.Array:
    return losses.chunked_cross_entropy(x_BTD, table_VD, labels_BT, vocab, size)


@pytest.mark.parametrize("size", [1, 5, 6, 41, 42, 1000])  # of 42 tokens; most do not divide them
@pytest.mark.parametrize("vocab", [V, V - 3])
def test_loss_and_gradients_are_those_of_whole_logits(size: int, vocab: int) -> None:
    x_BTD, table_VD, labels_BT = arrays()
    labels_BT = jnp.minimum(labels_BT, vocab - 1)
    scaled = lambda loss: lambda x, table: 0.3 * loss(x, table, labels_BT, vocab=vocab)
    want = jax.value_and_grad(scaled(whole), argnums=(0, 1))(x_BTD, table_VD)
    got = jax.jit(jax.value_and_grad(scaled(partial(chunked, size=size)), argnums=(0, 1)))(x_BTD, table_VD)
    assert reference.error(got, want) <= 1e-6
    alone = jax.jit(partial(chunked, size=size, vocab=vocab))(x_BTD, table_VD, labels_BT)  # as an evaluation does
    assert float(alone) == pytest.approx(float(want[0]) / 0.3, rel=1e-6)


def test_a_frozen_table_costs_nothing() -> None:
    x_BTD, table_VD, labels_BT = arrays()
    want = jax.grad(whole)(x_BTD, table_VD, labels_BT)
    of_x = jax.grad(partial(chunked, size=5))
    assert reference.error(of_x(x_BTD, table_VD, labels_BT), want) <= 1e-6
    step = jax.make_jaxpr(of_x)(x_BTD, table_VD, labels_BT)
    scans = [e for e in toy.equations(step) if e.primitive.name == "scan"]
    assert scans and not any(v.aval.shape == (V, D) for e in scans for v in e.outvars)


def test_bfloat16_is_as_near_as_with_whole_logits() -> None:
    exact = jax.grad(whole, argnums=(0, 1))(*arrays())
    x_BTD, table_VD, labels_BT = arrays("bfloat16")
    of = lambda loss: jax.jit(jax.grad(loss, argnums=(0, 1)), compiler_options=toy.EXACT)(x_BTD, table_VD, labels_BT)
    plain, got = of(whole), of(partial(chunked, size=10))
    assert [a.dtype for a in got] == [jnp.bfloat16] * 2
    assert reference.error(got, exact) <= 1.05 * reference.error(plain, exact)


@pytest.mark.parametrize("grad", [False, True])
def test_logits_never_exist_whole(grad: bool) -> None:
    """Temporary bytes of the compiled loss: of whole logits several times their size, of chunks less than it."""
    rows, vocab = 64, 1000
    x_BTD, _, labels_BT = arrays(rows=rows)
    table_VD = jnp.zeros((vocab, D))

    def temporary(loss: Any) -> int:
        run = jax.value_and_grad(loss, argnums=(0, 1)) if grad else loss
        analysis: Any = jax.jit(run).lower(x_BTD, table_VD, labels_BT).compile().memory_analysis()
        return analysis.temp_size_in_bytes

    size = 4 * rows * T * vocab
    assert temporary(partial(whole, vocab=vocab)) >= size
    assert temporary(partial(chunked, size=64, vocab=vocab)) < size / 4


FAMILIES = {
    "gpt2": models.GPT2Config(vocab_size=61, positions=16, layers=4, dim=24, heads=4, std=0.2),
    "mixtral": models.MixtralConfig(61, 16, 4, 24, 4, 2, 40, head_dim=8, std=0.2, experts=4, balance_loss=0.05),
}


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(
    "options",
    [
        {"stages": 2},
        {"stages": 2, "tensor": 2, "sequence_parallel": True},
        {"stages": 1, "tensor": 2, "data": 2, "zero_stage": 3},
        {"stages": 2, "context": 2},
    ],
    ids=str,
)
def test_models_train_by_it(name: str, options: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tied and padded vocabulary, split over ranks, and losses beside it."""
    config, rows = FAMILIES[name], options.get("data", 1)
    model = jax.jit(lambda: models.build(jax.random.key(0), config))()
    batch, loss = toy.batch(3, rows, vocab=61), models.training_loss(config)
    want = reference.value_and_grad(model, batch, rows, loss=loss)
    calls, plain = [], losses.chunked_cross_entropy
    monkeypatch.setattr(losses, "FEW", 5)
    monkeypatch.setattr(losses, "CHUNK", 5)
    monkeypatch.setattr(losses, "chunked_cross_entropy", lambda *args: calls.append(1) or plain(*args))
    got = toy.run(model, batch, loss=loss, **options)
    assert calls
    errors = reference.leaf_errors(got.grads, want.grads)
    assert max(errors.values()) <= 5e-6, errors
    assert float(got.loss) == pytest.approx(float(want.loss), rel=5e-6)
