"""Learning rate, optimizer, gradient norm: optax, told which parameters decay.

Norms are over the whole placed tree, so they do not depend on the number of stages; empty places add zeros.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax

Tree = Any
FIRST_SCALE, LARGEST_SCALE, GROW_AFTER = 2.0**15, 2.0**24, 1000


def learning_rate(style: str, peak: float, least: float, warmup: int, steps: int) -> Callable[[Any], jax.Array]:
    """The learning rate of a step (0-based), float32 [].

    Linear warm-up to `peak` over `warmup` steps, then by style: none and constant stay; linear and cosine reach
    `least` at the last step; inverse-square-root falls as sqrt(warmup / step), not below `least`.
    """
    span = max(1, steps - 1 - warmup)
    after = {
        "none": optax.constant_schedule(peak),
        "constant": optax.constant_schedule(peak),
        "linear": optax.linear_schedule(peak, least, span),
        "cosine": lambda t: least + (peak - least) * 0.5 * (1 + jnp.cos(jnp.pi * jnp.clip(t / span, 0, 1))),
        "inverse-square-root": lambda t: jnp.maximum(least, peak * jnp.sqrt(max(warmup, 1) / (t + max(warmup, 1)))),
    }[style]

    def rate(step: Any) -> jax.Array:
        step = jnp.asarray(step, jnp.float32)
        warming = peak * (step + 1) / max(warmup, 1)
        return jnp.where(step < warmup, warming, after(step - warmup)).astype(jnp.float32)

    return rate


def decays(path: tuple, _: Any) -> bool:
    """Whether weight decay applies to a parameter: not to biases and the scales of norms, told by their names."""
    names = [str(getattr(part, "name", getattr(part, "key", ""))) for part in path]
    name = next((n for n in reversed(names) if n and n != "value"), "")
    return not (name in ("scale", "bias") or name.startswith("b"))


def make(
    name: str, rate: Callable, weight_decay: float, clip: float, betas: tuple[float, float] = (0.9, 0.95)
) -> optax.GradientTransformation:
    """An optimizer: clip by global norm (0: not), then adamw or sgd with decoupled weight decay."""
    mask = lambda tree: jax.tree_util.tree_map_with_path(decays, tree)
    steps = [optax.clip_by_global_norm(clip)] if clip else []
    if name == "adamw":
        steps.append(optax.scale_by_adam(*betas, eps=1e-8))
    steps += [optax.add_decayed_weights(weight_decay, mask), optax.scale_by_learning_rate(rate)]
    return optax.chain(*steps)


class LossScale(NamedTuple):
    """State of `with_loss_scale`. scale: float32 [], what the loss is multiplied with. good: int32 [], steps since it
    changed. skipped: int32 [], steps in a row whose gradients were not finite. inner: the optimizer's own state."""

    scale: jax.Array
    good: jax.Array
    skipped: jax.Array
    inner: Any


def with_loss_scale(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """An optimizer that skips steps whose gradients are not finite, and says what to scale the loss with.

    Dynamic loss scaling (Micikevicius et al. 2018, arXiv:1710.03740): half as much after a step that is skipped, twice
    as much after `GROW_AFTER` good ones. The gradients that it is given are no longer scaled.
    """

    def init(params: Any) -> LossScale:
        zero = jnp.zeros((), jnp.int32)
        return LossScale(jnp.asarray(FIRST_SCALE, jnp.float32), zero, zero, inner.init(params))

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, LossScale]:
        finite = jnp.isfinite(global_norm(grads))
        updates, after = inner.update(grads, state.inner, params)
        keep = lambda new, old: jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)
        good = jnp.where(finite, state.good + 1, 0)
        grown = jnp.where(good == GROW_AFTER, jnp.minimum(state.scale * 2, LARGEST_SCALE), state.scale)
        scale = jnp.where(finite, grown, jnp.maximum(state.scale / 2, 1.0))
        skipped = jnp.where(finite, 0, state.skipped + 1)
        nothing = jax.tree.map(jnp.zeros_like, updates)
        return keep(updates, nothing), LossScale(scale, good % GROW_AFTER, skipped, keep(after, state.inner))

    return optax.GradientTransformation(init, cast(Any, update))


def global_norm(grads: Tree) -> jax.Array:
    """Euclidean norm of all gradients, computed in float32 whatever their dtype, float32 []."""
    squares = [jnp.sum(jnp.square(g.astype(jnp.float32))) for g in jax.tree.leaves(grads)]
    return jnp.sqrt(sum(squares, jnp.zeros(())))
