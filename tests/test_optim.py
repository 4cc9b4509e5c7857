"""Learning rate, weight decay, update and norm against closed forms and numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import models
from jaxpp import optim, partition
from jaxpp.config import DECAY_STYLES

PEAK, LEAST, WARMUP, STEPS = 2e-3, 2e-4, 10, 110

SPAN = STEPS - 1 - WARMUP  # steps from the peak to the last one, where the decay ends
CLOSED_FORM = {
    "none": lambda t: PEAK,
    "constant": lambda t: PEAK,
    "linear": lambda t: PEAK + (LEAST - PEAK) * t,
    "cosine": lambda t: LEAST + (PEAK - LEAST) * (1 + np.cos(np.pi * t)) / 2,
}


def rate(style: str, step: int, **changed: float) -> float:
    options = {"peak": PEAK, "least": LEAST, "warmup": WARMUP, "steps": STEPS} | changed
    value = optim.learning_rate(style, **options)(step)
    assert (value.shape, value.dtype) == ((), jnp.float32)
    return float(value)


@pytest.mark.parametrize("style", DECAY_STYLES)
def test_warm_up_is_linear_and_ends_at_the_peak(style):
    found = [rate(style, step) for step in range(WARMUP + 1)]
    np.testing.assert_allclose(found, PEAK * np.minimum(np.arange(1, WARMUP + 2) / WARMUP, 1), rtol=1e-6)


@pytest.mark.parametrize("style", CLOSED_FORM)
def test_decay_from_the_peak(style):
    found = [rate(style, WARMUP + t) for t in range(0, SPAN + 1, 9)]
    np.testing.assert_allclose(found, [CLOSED_FORM[style](t / SPAN) for t in range(0, SPAN + 1, 9)], rtol=1e-5)


@pytest.mark.parametrize("style", ["linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, WARMUP])
def test_decay_reaches_the_least_rate_at_the_last_step_and_stays(style, warmup):
    assert rate(style, STEPS - 1, warmup=warmup) == pytest.approx(LEAST, rel=1e-5)
    assert rate(style, 10 * STEPS, warmup=warmup) == pytest.approx(LEAST, rel=1e-5)


@pytest.mark.parametrize("style", ["none", "constant"])
def test_no_decay_stays_at_the_peak(style):
    assert rate(style, STEPS - 1) == pytest.approx(PEAK, rel=1e-6)


@pytest.mark.parametrize(("step", "share"), [(10, 1.0), (40, 0.5), (90, 1 / 3), (160, 0.25), (10**6, LEAST / PEAK)])
def test_inverse_square_root(step, share):
    assert rate("inverse-square-root", step) == pytest.approx(PEAK * share, rel=1e-6)


@pytest.mark.parametrize("style", DECAY_STYLES)
def test_without_warm_up_the_first_step_is_at_the_peak(style):
    assert rate(style, 0, warmup=0) == pytest.approx(PEAK, rel=1e-6)


@pytest.mark.parametrize("style", DECAY_STYLES)
def test_run_shorter_than_its_warm_up(style):
    assert rate(style, 2, steps=3) == pytest.approx(PEAK * 0.3, rel=1e-6)


def test_decay_mask_of_a_model():
    """Matrices and embeddings decay, biases of every name and norms do not; placing changes nothing."""
    config = models.GPT2Config(vocab_size=8, positions=4, layers=2, dim=4, heads=2, tied=False)
    model = jax.jit(lambda: models.GPT2(jax.random.key(0), config))()
    for tree in (model, partition.stack(model, partition.split_layers(2, 2))):
        found = {}
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            names = [n for p in path if (n := str(getattr(p, "name", getattr(p, "key", "")))) not in ("", "value")]
            found.setdefault(names[-1], set()).add(optim.decays(path, leaf))
        assert found == {name: {True} for name in ("tokens", "positions", "table", "wq", "wkv", "wo", "wi")} | {
            name: {False} for name in ("bq", "bkv", "bi", "bo", "scale", "bias")
        }


def one_step(name: str, clip: float = 0.0) -> tuple[dict, dict, dict]:
    """Parameters, gradients and the parameters after one step with rate 0.1 and decay 0.5."""
    rng = np.random.default_rng(0)
    params = {"w": rng.normal(size=(3, 4)), "bias": rng.normal(size=4)}
    grads = {"w": rng.normal(size=(3, 4)), "bias": rng.normal(size=4)}
    params, grads = (jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), t) for t in (params, grads))
    optimizer = optim.make(name, lambda step: 0.1, 0.5, clip)
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    return jax.device_get((params, grads, jax.tree.map(jnp.add, params, updates)))


def test_sgd_against_numpy():
    params, grads, after = one_step("sgd")
    np.testing.assert_allclose(after["w"], params["w"] - 0.1 * (grads["w"] + 0.5 * params["w"]), rtol=1e-6)
    np.testing.assert_allclose(after["bias"], params["bias"] - 0.1 * grads["bias"], rtol=1e-6)


def test_adamw_against_numpy():
    """The first step's bias correction makes the moments g and g**2; the decay is beside them, not in them."""
    params, grads, after = one_step("adamw")
    direction = {k: g / (np.abs(g) + 1e-8) for k, g in grads.items()}
    np.testing.assert_allclose(
        after["w"], params["w"] - 0.1 * (direction["w"] + 0.5 * params["w"]), rtol=1e-5, atol=1e-7
    )
    np.testing.assert_allclose(after["bias"], params["bias"] - 0.1 * direction["bias"], rtol=1e-5, atol=1e-6)


def test_adamw_betas_over_two_steps():
    optimizer = optim.make("adamw", lambda step: 1.0, 0.0, 0.0)
    state = optimizer.init({"w": jnp.zeros(1)})
    _, state = optimizer.update({"w": jnp.full(1, 1.0)}, state, {"w": jnp.zeros(1)})
    update, _ = optimizer.update({"w": jnp.full(1, 3.0)}, state, {"w": jnp.zeros(1)})
    mean = (0.1 * 0.9 * 1 + 0.1 * 3) / (1 - 0.9**2)
    square = (0.05 * 0.95 * 1 + 0.05 * 9) / (1 - 0.95**2)
    assert float(update["w"][0]) == pytest.approx(-mean / np.sqrt(square), rel=1e-5)


def test_make_clips_when_asked():
    params, grads, after = one_step("sgd", clip=0.5)
    norm = np.sqrt(sum(np.sum(g**2) for g in grads.values()))
    assert norm > 0.5
    np.testing.assert_allclose(after["bias"], params["bias"] - 0.1 * grads["bias"] * 0.5 / norm, rtol=1e-5)


def test_global_norm_of_bfloat16_gradients_is_computed_in_float32():
    """257 ones: a bfloat16 sum stops at 256; 1 + 2**-7 squared is not a bfloat16."""
    grads = {"a": jnp.ones(257, jnp.bfloat16), "b": jnp.full(1000, 1 + 2**-7, jnp.bfloat16)}
    norm = optim.global_norm(grads)
    assert norm.dtype == jnp.float32
    assert float(norm) == pytest.approx(np.sqrt(257 + 1000 * (1 + 2**-7) ** 2), rel=1e-6)


def test_global_norm_of_no_gradients_is_zero():
    assert float(optim.global_norm({})) == 0.0


def test_loss_scale_skips_and_grows(monkeypatch):
    """A step that is not finite changes nothing but the scale; good ones are those of the optimizer itself."""
    monkeypatch.setattr(optim, "GROW_AFTER", 3)
    inner = optim.make("adamw", lambda step: 0.1, 0.0, 0.0)
    scaled = optim.with_loss_scale(inner)
    params = {"w": jnp.array([1.0, 2.0])}
    state, plain = scaled.init(params), inner.init(params)
    good, bad = {"w": jnp.array([0.5, -0.5])}, {"w": jnp.array([1.0, jnp.inf])}
    seen = []
    for grads in (good, bad, bad, good, good, good, good):
        updates, state = scaled.update(grads, state, params)
        if grads is good:
            want, plain = inner.update(grads, plain, params)
            np.testing.assert_array_equal(updates["w"], want["w"])
        else:
            np.testing.assert_array_equal(updates["w"], 0)
        seen.append((float(state.scale) / optim.FIRST_SCALE, int(state.skipped)))
    assert seen == [(1, 0), (0.5, 1), (0.25, 2), (0.25, 0), (0.25, 0), (0.5, 0), (0.5, 0)]
    for a, b in zip(jax.tree.leaves(state.inner), jax.tree.leaves(plain), strict=True):
        np.testing.assert_array_equal(a, b)
