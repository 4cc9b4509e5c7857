"""Losses: sums over valid tokens, in float32; the executor divides by the global count once.

Legend: B microbatch size, T sequence, V vocabulary.
"""

from typing import Any

import jax
import jax.numpy as jnp

IGNORE = -100  # label of a token that carries no loss


def cross_entropy(logits_BTV: jax.Array, labels_BT: jax.Array) -> jax.Array:
    """Sum over valid tokens of the negative log likelihood, float32 []; labels equal to IGNORE count nothing."""
    logits_BTV = logits_BTV.astype(jnp.float32)
    valid_BT = labels_BT != IGNORE
    # By comparison and not by index, so that a vocabulary split over ranks stays split.
    chosen_BTV = jnp.arange(logits_BTV.shape[-1]) == labels_BT[..., None]
    chosen_BT = jnp.sum(jnp.where(chosen_BTV, logits_BTV, 0.0), axis=-1)
    return jnp.sum(jnp.where(valid_BT, jax.nn.logsumexp(logits_BTV, axis=-1) - chosen_BT, 0.0))


def token_loss(head: Any, embed: Any, stream: Any, microbatch: dict[str, jax.Array]) -> jax.Array:
    """The default loss: cross entropy of the head's logits against the labels, summed over valid tokens."""
    return cross_entropy(head(stream, embed), microbatch["labels"])


def with_metrics(loss: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
    """What a loss function returned, as (loss, metrics): it may return the loss alone."""
    return loss if isinstance(loss, tuple) else (loss, {})


def count_valid(labels: jax.Array) -> jax.Array:
    """Number of labels that carry a loss, float32 []."""
    return jnp.sum(labels != IGNORE).astype(jnp.float32)
