"""Every model through every schedule, against itself unpipelined; side losses included.

Legend: B microbatch size, T sequence; S stages, M microbatches, E experts.
"""

import dataclasses
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import toy

import jaxpp
import models
from jaxpp.losses import token_loss, with_metrics
from models.mixtral import training_loss

SMALL = {"vocab_size": 61, "positions": 16, "layers": 4, "dim": 24}
GROUPED = SMALL | {"heads": 4, "kv_heads": 2, "hidden": 40, "head_dim": 8}
CONFIGS: dict[str, models.ModelConfig] = {
    "gpt2": models.GPT2Config(**SMALL, heads=3),
    "llama3": models.Llama3Config(**GROUPED),
    "qwen3": models.Qwen3Config(**GROUPED, tied=True),
    "mixtral": models.MixtralConfig(**GROUPED, experts=4, balance_loss=0.05, z_loss=0.01),
}
TIGHT = 2e-6
M = 3


@cache
def make(name: str) -> Any:
    return jax.jit(lambda: models.build(jax.random.key(0), dataclasses.replace(CONFIGS[name], std=0.2)))()


def batch(data: int = 1, seed: int = 0) -> dict[str, jax.Array]:
    found = toy.batch(M, data, vocab=SMALL["vocab_size"], seed=seed)
    return {k: v[..., : SMALL["positions"]] for k, v in found.items()}


def loss_of(name: str) -> Any:
    return models.training_loss(CONFIGS[name])


@cache
def oracle(name: str, data: int = 1) -> reference.Reference:
    return reference.value_and_grad(make(name), batch(data), data, loss=loss_of(name))


def assert_equal(got: Any, want: reference.Reference) -> None:
    assert got.loss == pytest.approx(float(want.loss), rel=TIGHT)
    errors = reference.leaf_errors(got.grads, want.grads)
    assert max(errors.values()) <= TIGHT, errors


@pytest.mark.parametrize(
    ("schedule", "stages", "chunks"),
    [
        ("1f1b", 1, 1),
        ("1f1b", 2, 1),
        ("1f1b", 4, 1),
        ("interleaved", 1, 2),
        ("interleaved", 2, 2),
        ("interleaved", 4, 1),
    ],
)
@pytest.mark.parametrize("name", CONFIGS)
def test_every_model_under_every_schedule(name: str, schedule: str, stages: int, chunks: int) -> None:
    got = toy.run(make(name), batch(), name=schedule, stages=stages, chunks=chunks, loss=loss_of(name))
    assert_equal(got, oracle(name))


@pytest.mark.parametrize("remat", ["full", "none"])
def test_mixtral_over_replicas_with_every_remat(remat: str) -> None:
    got = toy.run(make("mixtral"), batch(2), stages=2, data=2, remat=remat, loss=loss_of("mixtral"))
    assert_equal(got, oracle("mixtral", 2))


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved"])
def test_the_side_losses_reach_the_router(name: str) -> None:
    """Pitfall 12: what a coefficient adds to the gradients is what it adds to the oracle's, for every schedule."""
    config = dataclasses.replace(CONFIGS["mixtral"], balance_loss=0.0, z_loss=0.0)
    options = {"name": name, "stages": 2, "chunks": 2 if name == "interleaved" else 1}
    without = toy.run(make("mixtral"), batch(), loss=training_loss(config), **options)
    plain = reference.value_and_grad(make("mixtral"), batch(), loss=training_loss(config))
    with_both = toy.run(make("mixtral"), batch(), loss=loss_of("mixtral"), **options)
    want = oracle("mixtral")
    for i in range(SMALL["layers"]):
        router = lambda result, i=i: np.asarray(result.grads.blocks[i].mlp.router[...], float)
        added, wanted = router(with_both) - router(without), router(want) - router(plain)
        assert np.linalg.norm(wanted) > 1e-3
        assert np.linalg.norm(added - wanted) <= 1e-4 * np.linalg.norm(wanted)  # a difference of near numbers


def test_metrics_of_the_side_losses() -> None:
    """Means over all tokens: the same from the pipeline as from the model itself, microbatch by microbatch."""
    got = toy.run(make("mixtral"), batch(2), stages=4, data=2, loss=loss_of("mixtral")).metrics
    arrays, sums, count = batch(2), [], 0
    model = make("mixtral")
    for m in range(M):
        for rank in range(2):
            rows = {k: v[m, rank * toy.B : (rank + 1) * toy.B] for k, v in arrays.items()}
            stream = model.embed(rows, None)
            for block in model.blocks:
                stream = block(stream, rows, None)
            sums.append(with_metrics(loss_of("mixtral")(model.head, model.embed, stream, rows))[1])
            count += int((rows["labels"] != -100).sum())
    want = jax.tree.map(lambda *parts: sum(parts) / count, *sums)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), got, want)
    assert np.sum(got["expert_load"]) == pytest.approx(1, rel=1e-5)
    assert got["balance_loss"] >= CONFIGS["mixtral"].chosen * 0.99  # its least value is at equal loads


def test_the_loss_is_its_parts() -> None:
    got = toy.run(make("mixtral"), batch(), loss=loss_of("mixtral"))
    m, c = got.metrics, CONFIGS["mixtral"]
    want = m["cross_entropy"] + c.balance_loss * m["balance_loss"] + c.z_loss * m["z_loss"]
    assert got.loss == pytest.approx(float(want), rel=1e-6)
    entropy = toy.run(make("mixtral"), batch(), loss=token_loss).loss
    assert m["cross_entropy"] == pytest.approx(float(entropy), rel=1e-6)


@pytest.mark.parametrize("name", CONFIGS)
def test_bfloat16_traces_with_one_dtype_on_the_wire(name: str) -> None:
    """The router's float32 sums too."""
    pipeline, params = toy.set_up(make(name), batch(), precision=jaxpp.resolve("bfloat16"), loss=loss_of(name))
    sent = toy.permutes(toy.step_jaxpr(pipeline, params, batch()))
    assert {operand.dtype for operand, _ in sent} == {jnp.dtype("bfloat16")}
    assert len(sent) == (4 if name == "mixtral" else 2)
