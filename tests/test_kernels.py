"""Kernels, interpreted, against their plain forms.

Legend: N tokens, V vocabulary, D model.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import toy

from jaxpp import kernels, losses
from models import norm

RNG = np.random.default_rng(0)


def normal(*shape: int, dtype: str = "float32") -> jax.Array:
    return jnp.asarray(RNG.normal(size=shape) * 3, dtype)


@pytest.mark.parametrize(("columns", "vocab", "block"), [(96, 96, 32), (96, 91, 32), (90, 90, 64), (90, 51, 128)])
def test_loss_and_gradient_of_logits(monkeypatch: pytest.MonkeyPatch, columns: int, vocab: int, block: int) -> None:
    """Columns that are no tokens hold numbers that would show; a label is the last token, and one is ignored."""
    monkeypatch.setattr(kernels, "BLOCK", block)
    logits_NV = normal(5, columns).at[:, vocab:].set(50.0).at[3].add(1000.0)
    labels_N = jnp.asarray([3, losses.IGNORE, vocab - 1, 7, 0], jnp.int32)
    want, want_g_NV = losses.cross_entropy_and_gradient(logits_NV, labels_N, vocab)
    loss_N, g_NV = kernels.cross_entropy_and_gradient(logits_NV, labels_N, losses.IGNORE, vocab, interpret=True)
    assert float(loss_N.sum()) == pytest.approx(float(want), rel=1e-6)
    assert loss_N[1] == 0.0
    assert reference.error(g_NV, want_g_NV) <= 1e-6
    assert not g_NV[:, vocab:].any() and not g_NV[1].any()


def test_the_plain_form_is_the_derivative_of_the_loss() -> None:
    logits_NV, labels_N = normal(6, 40), jnp.asarray([3, losses.IGNORE, 36, 7, 0, 1], jnp.int32)
    whole = lambda a: losses.cross_entropy(losses.mask_padding(a, 37)[None], labels_N[None])
    want = jax.value_and_grad(whole)(logits_NV)
    assert reference.error(losses.cross_entropy_and_gradient(logits_NV, labels_N, 37), want) <= 1e-6


@pytest.mark.parametrize(("tokens", "dim"), [(17, 96), (1, 128), (40, 64)])
@pytest.mark.parametrize("centred", [True, False])
def test_backward_of_norms(monkeypatch: pytest.MonkeyPatch, tokens: int, dim: int, centred: bool) -> None:
    monkeypatch.setattr(kernels, "PROGRAMS", 3)
    monkeypatch.setattr(kernels, "ELEMENTS", 512)
    x_ND, g_ND, scale_D = normal(tokens, dim) + 1, normal(tokens, dim), normal(dim)
    mean_N1 = x_ND.mean(-1, keepdims=True) if centred else None
    spread = x_ND - (0 if mean_N1 is None else mean_N1)
    rstd_N1 = jax.lax.rsqrt(jnp.square(spread).mean(-1, keepdims=True))
    want = norm._plain_backward(x_ND, g_ND, scale_D, mean_N1, rstd_N1)
    mean_N = None if mean_N1 is None else mean_N1[:, 0]
    got = kernels.norm_backward(x_ND, g_ND, scale_D, mean_N, rstd_N1[:, 0], interpret=True)
    assert reference.error(got[:2], want[:2]) <= 1e-6
    assert not centred or reference.error(got[2], want[2]) <= 1e-6


def _loss(table_VD: Any, x_BTD: Any, labels_BT: Any) -> jax.Array:
    return losses.chunked_cross_entropy(x_BTD, table_VD, labels_BT, 500, size=8)


def _norm(x_BTD: Any, scale_D: Any) -> jax.Array:
    return norm.normalise(x_BTD, scale_D, scale_D, 1e-5).sum()


@pytest.mark.parametrize(
    ("function", "shapes", "name"),
    [
        (_loss, [((512, 64), "bfloat16"), ((2, 8, 64), "bfloat16"), ((2, 8), "int32")], "cross_entropy_and_gradient"),
        (_norm, [((2, 8, 96), "float32"), ((96,), "float32")], "norm_backward"),
    ],
)
def test_they_are_traced_for_gpus_and_a_cpu_runs_none(function: Any, shapes: list, name: str) -> None:
    traced = jax.jit(jax.grad(function)).trace(*(jax.ShapeDtypeStruct(*pair) for pair in shapes))
    calls = [e for e in toy.equations(traced.jaxpr) if e.primitive.name == "pallas_call"]
    assert calls and all(name in str(e) for e in calls)
    assert name not in traced.lower().as_text()
