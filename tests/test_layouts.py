"""Every dimension at once: tensor, sequence, context, expert and data parallelism, ZeRO and the pipeline together,
against the unpipelined oracle.

Legend: B microbatch size, T sequence, V vocabulary; M microbatches.
"""

import dataclasses
import re
from functools import cache, partial
from itertools import combinations
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
import toy

import jaxpp
import models
from jaxpp import executor, partition
from jaxpp.mesh import PIPE, TENSOR

SMALL = {"vocab_size": 61, "positions": 16, "layers": 4, "dim": 24}  # 61 divides by nothing: the vocabulary is padded
GROUPED = SMALL | {"heads": 4, "kv_heads": 2, "hidden": 40, "head_dim": 8}
CONFIGS: dict[str, models.ModelConfig] = {
    "gpt2": models.GPT2Config(**SMALL, heads=4),
    "llama3": models.Llama3Config(**GROUPED),
    "mixtral": models.MixtralConfig(**GROUPED, experts=4, balance_loss=0.05, z_loss=0.01),
}
FEATURES = {
    "PP": {"stages": 2},
    "VPP": {"stages": 2, "chunks": 2, "name": "interleaved"},
    "TP": {"tensor": 2},
    "SP": {"tensor": 2, "sequence_parallel": True},
    "CP": {"context": 2},
    "DP": {"data": 2},
    "ZeRO 1": {"data": 2, "zero_stage": 1},
    "ZeRO 2": {"data": 2, "zero_stage": 2},
    "ZeRO 3": {"data": 2, "zero_stage": 3},
    "EP": {"expert": 2},
}
MIXTRAL = [
    ("PP", "TP", "EP"),
    ("VPP", "SP", "EP"),
    ("VPP", "CP", "EP"),
    ("PP", "DP", "EP"),
    ("VPP", "ZeRO 1", "EP"),
    ("PP", "ZeRO 2", "EP"),
    ("TP", "ZeRO 3", "EP"),
    ("SP", "CP", "EP"),
]
OTHERS = [
    ("gpt2", ("PP", "TP", "ZeRO 1")),
    ("gpt2", ("VPP", "SP", "ZeRO 2")),
    ("gpt2", ("PP", "CP", "ZeRO 3")),
    ("gpt2", ("SP", "CP", "DP")),
    ("gpt2", ("VPP", "TP", "CP")),
    ("llama3", ("PP", "SP", "ZeRO 3")),
    ("llama3", ("VPP", "TP", "DP")),
    ("llama3", ("TP", "CP", "ZeRO 2")),
    ("llama3", ("VPP", "CP", "ZeRO 1")),
    ("llama3", ("PP", "SP", "CP")),
    ("llama3", ("VPP", "ZeRO 3")),
    ("llama3", ("PP", "SP", "ZeRO 1")),
    ("llama3", ("PP", "DP")),
]
CASES = [("mixtral", case) for case in MIXTRAL] + OTHERS
M, TIGHT = 3, 5e-6  # the bound is 1e-5; sums over ranks come in another order than the oracle's


def ids(case: tuple) -> str:
    return f"{case[0]}-{'-'.join(case[1])}".replace(" ", "")


def options_of(features: tuple[str, ...]) -> dict[str, Any]:
    return {name: value for feature in features for name, value in FEATURES[feature].items()}


def replicas(options: dict) -> int:
    return options.get("data", 1) * options.get("expert", 1)


@cache
def make(name: str) -> Any:
    return jax.jit(lambda: models.build(jax.random.key(0), dataclasses.replace(CONFIGS[name], std=0.2)))()


@cache
def batch(rows: int) -> dict[str, jax.Array]:
    return toy.batch(M, rows, vocab=SMALL["vocab_size"])


def loss_of(name: str) -> Any:
    return models.training_loss(CONFIGS[name])


@cache
def oracle(name: str, rows: int, compute: str = "float32") -> reference.Reference:
    return reference.value_and_grad(make(name), batch(rows), rows, loss=loss_of(name), compute=compute)


@pytest.fixture(autouse=True)
def small_leaves_are_split_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition, "SHARD_FROM", 64)


def test_every_pair_is_covered() -> None:
    covered = {frozenset(pair) for _, case in CASES for pair in combinations(case, 2)}
    same = [{"PP", "VPP"}, {"TP", "SP"}, {"DP", "ZeRO 1", "ZeRO 2", "ZeRO 3"}]  # of one kind: one at a time
    for pair in map(frozenset, combinations(FEATURES, 2)):
        assert pair in covered or any(pair <= kind for kind in same), pair


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_loss_and_every_gradient_equal_the_oracles(case: tuple[str, tuple[str, ...]]) -> None:
    name, options = case[0], options_of(case[1])
    rows = replicas(options)
    got, want = toy.run(make(name), batch(rows), loss=loss_of(name), **options), oracle(name, rows)
    assert got.loss == pytest.approx(float(want.loss), rel=TIGHT)
    assert reference.error(got.microbatch_losses, want.microbatch_losses) <= TIGHT
    errors = reference.leaf_errors(got.grads, want.grads)
    assert max(errors.values()) <= TIGHT, errors


@pytest.mark.parametrize("case", [CASES[i] for i in (1, 4, 6, 7, 8, 9, 13, 15)], ids=ids)
def test_bfloat16_is_about_as_near_as_the_unpipelined_model(case: tuple[str, tuple[str, ...]]) -> None:
    name, options = case[0], options_of(case[1])
    rows = replicas(options)
    options["precision"] = jaxpp.resolve("bfloat16")
    got = toy.run(make(name), batch(rows), loss=loss_of(name), **options)
    plain, exact = oracle(name, rows, "bfloat16"), oracle(name, rows)
    assert reference.error(got.grads, exact.grads) <= 1.25 * reference.error(plain.grads, exact.grads)
