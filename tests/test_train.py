"""The training step against an unpipelined loop, and the promises of its running."""

import warnings
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference

from jaxpp import config, executor, feeds, mesh, optim, partition, train
from models import GPT2, GPT2Config

MODEL = GPT2Config(vocab_size=97, positions=16, layers=4, dim=32, heads=2, std=0.1)
OPTIONS = {"dtype": "float32", "batch_size": 2, "total_batch_size": 3 * 2 * 2 * 16, "sequence_length": 16}


def build(key: jax.Array, dropout: float = 0.0) -> GPT2:
    return GPT2(key, replace(MODEL, dropout=dropout))


def make(**options: Any) -> train.Run:
    """A run with 4 rows in each of 3 microbatches on two replicas."""
    chosen = config.Config(**OPTIONS, data_parallel=2, num_iteration=10, warmup_iterations=0, **options)
    sizes = config.sizes(chosen, MODEL.layers, MODEL.positions)
    return train.make_run(chosen, sizes, mesh.make_mesh(**sizes.mesh), MODEL.layers)


def batch(run: train.Run, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.integers(0, 97, spec.shape, np.int32) for name, spec in run.batch_spec().items()}


@pytest.mark.parametrize("optimizer", config.OPTIMIZERS)
@pytest.mark.parametrize("pipe", [1, 3, 4])
def test_three_steps_equal_an_unpipelined_loop(optimizer: str, pipe: int) -> None:
    """Tied embedding, clipping and weight decay included: each counted once whatever the number of stages."""
    run = make(optimizer=optimizer, pipeline_parallel=pipe, clip_grad=0.5, learning_rate=1e-2)
    state, step = train.initial_state(run, build), train.make_step(run)
    model = build(jax.random.key(0))
    want = partition.Model(model.embed, list(model.blocks), model.head)
    plain = optim.make(optimizer, run.rate, run.config.weight_decay, clip=0.5)
    opt_state = plain.init(want)
    for i in range(3):
        data = batch(run, i)
        found = reference.value_and_grad(want, jax.tree.map(jnp.asarray, data))
        state, metrics = step(state, train.put_batch(run, data))
        assert float(metrics["loss"]) == pytest.approx(float(found.loss), rel=1e-5)
        assert float(metrics["grad_norm"]) == pytest.approx(float(optax.tree.norm(found.grads)), rel=1e-5)
        grads = jax.tree.map(lambda p, g: jnp.asarray(g), want, partition.Model(*found.grads))
        updates, opt_state = plain.update(grads, opt_state, want)
        want = optax.apply_updates(want, updates)
    got = partition.unstack(state.params)
    away = total = 0.0
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(tuple(got)), jax.tree.leaves(tuple(want)), strict=True):
        if "bkv" in jax.tree_util.keystr(path):
            # A key's bias has no gradient but rounding (softmax ignores a shift), whose sign is Adam's step.
            a, b = a[1], b[1]
        away, total = away + float(jnp.sum((a - b) ** 2)), total + float(jnp.sum(b**2))
    assert away**0.5 <= 1e-5 * total**0.5


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_step_needs_nothing_from_the_host(dropout: float) -> None:
    run = make(pipeline_parallel=2, dropout=dropout)
    state, step = train.initial_state(run, partial(build, dropout=dropout)), train.make_step(run)
    placed = train.put_batch(run, batch(run, 0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state, _ = step(state, placed)
        with jax.transfer_guard("disallow"):
            after, _ = step(state, placed)
    assert all(a.is_deleted() for a in jax.tree.leaves((state.params, state.opt_state, state.workspace)))
    assert int(after.step) == 2


def test_validation_is_the_mean_over_all_tokens() -> None:
    run = make(pipeline_parallel=4)
    tokens = np.random.default_rng(0).integers(0, 97, 700).astype(np.uint16)
    batches = list(feeds.evaluation_batches(run.config, run.sizes, feeds.Corpus((), (tokens,), "", None), 8))
    state = train.initial_state(run, build)
    model = build(jax.random.key(0))
    whole = {name: jnp.concatenate([b[name] for b in batches]) for name in batches[0]}
    want = reference.value_and_grad(partition.Model(model.embed, list(model.blocks), model.head), whole)
    assert (whole["labels"] == -100).any()
    found = train.make_eval(run)(state.params, batches)
    assert found.loss == pytest.approx(float(want.loss), rel=1e-6)
    assert found.perplexity == pytest.approx(np.exp(float(want.loss)), rel=1e-5)
    assert found.tokens == (whole["labels"] != -100).sum()


@pytest.mark.parametrize(("most", "factor"), [(1.0, 0.2), (10.0, 1.0), (0.0, 1.0)])
def test_clipping_is_by_the_norm_over_all_stages(monkeypatch: pytest.MonkeyPatch, most: float, factor: float) -> None:
    """Pitfall 10: gradients of norm 3 on one stage and 4 on the other are 5 together; 0 does not clip."""
    options = {"optimizer": "sgd", "weight_decay": 0.0, "learning_rate": 1.0, "lr_decay_style": "none"}
    run = make(pipeline_parallel=2, clip_grad=most, **options)
    state = train.initial_state(run, build)
    before = jax.device_get(state.params)
    grads = jax.tree.map(np.zeros_like, before)
    gradient = np.zeros_like(before.blocks[0].mlp.wi[...])
    gradient[0, 0, 0, 0], gradient[1, 0, 0, 0] = 3, 4  # [S, C, D, F]
    grads.blocks[0].mlp.wi[...] = gradient

    def given(pipeline: Any, params: Any, batch: Any, key: Any, workspace: Any, *_: Any) -> executor.Result:
        return executor.Result(jnp.zeros(()), grads, jnp.zeros(3), workspace, {})

    monkeypatch.setattr(executor, "train_step", given)
    after, metrics = train.make_step(run)(state, train.put_batch(run, batch(run, 0)))
    assert float(metrics["grad_norm"]) == pytest.approx(5, rel=1e-6)
    moved = before.blocks[0].mlp.wi[...] - np.asarray(after.params.blocks[0].mlp.wi[...])
    np.testing.assert_allclose(moved, factor * gradient, rtol=1e-6, atol=1e-7)


def test_dropout_is_repeated_by_the_seed_alone() -> None:
    """Another step gives another loss for the same weights and batch; the same step the same, bit by bit."""

    def losses(dropout: float, steps: int) -> list[float]:
        run = make(pipeline_parallel=2, learning_rate=0.0, dropout=dropout)
        state, step = train.initial_state(run, partial(build, dropout=dropout)), train.make_step(run)
        found = []
        for _ in range(steps):
            state, metrics = step(state, train.put_batch(run, batch(run, 0)))
            found.append(float(metrics["loss"]))
        return found

    first, second = losses(0.2, 2)
    assert losses(0.2, 1) == [first]
    assert len({first, second, *losses(0.0, 2)}) == 3
