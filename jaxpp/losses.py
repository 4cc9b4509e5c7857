"""Losses: sums over valid tokens, in float32; the executor divides by the global count once.

Legend: B microbatch size, T sequence, V vocabulary, D model, N tokens (B x T), C tokens of a chunk.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

IGNORE = -100  # label of a token that carries no loss
# Tokens whose logits exist at a time: enough that adding a chunk's gradient of the table to the sum, 8 bytes an entry,
# costs little beside the products, 6 C FLOPs an entry.
CHUNK = 4096


def cross_entropy(logits_BTV: jax.Array, labels_BT: jax.Array) -> jax.Array:
    """Sum over valid tokens of the negative log likelihood, float32 []; labels equal to IGNORE count nothing."""
    logits_BTV = logits_BTV.astype(jnp.float32)
    valid_BT = labels_BT != IGNORE
    # By comparison and not by index, so that a vocabulary split over ranks stays split.
    chosen_BTV = jnp.arange(logits_BTV.shape[-1]) == labels_BT[..., None]
    chosen_BT = jnp.sum(jnp.where(chosen_BTV, logits_BTV, 0.0), axis=-1)
    return jnp.sum(jnp.where(valid_BT, jax.nn.logsumexp(logits_BTV, axis=-1) - chosen_BT, 0.0))


def token_loss(head: Any, embed: Any, stream: Any, microbatch: dict[str, jax.Array]) -> jax.Array:
    """The default loss: cross entropy of the head's logits against the labels, summed over valid tokens.

    Of more than CHUNK tokens the logits never exist whole, if the head has `factors(stream, embed)` -> (x_BTD, table),
    all that comes before its last product, and `logits(x_BTD, table)`, that product.
    """
    labels_BT = microbatch["labels"]
    if not in_chunks(head, stream, labels_BT.size):
        return cross_entropy(head(stream, embed), labels_BT)
    x_BTD, table_VD = head.factors(stream, embed)
    return chunked_cross_entropy(head.logits, x_BTD, table_VD, labels_BT)


def in_chunks(head: Any, stream: Any, tokens: int) -> bool:
    """Whether `token_loss` takes a microbatch of `tokens` tokens in chunks. In float16 it does not: a gradient would be
    rounded before it is scaled."""
    half = any(a.dtype == jnp.float16 for a in jax.tree.leaves(stream))
    return tokens > CHUNK and hasattr(head, "factors") and not half


def chunked_cross_entropy(
    logits: Callable, x_BTD: jax.Array, table_VD: jax.Array, labels_BT: jax.Array, size: int | None = None
) -> jax.Array:
    """`cross_entropy` of logits(x_BTD, table_VD), `size` tokens after another (default CHUNK).

    Gradients are computed beside the loss, so that a chunk's logits serve both and are then forgotten; the table's is
    summed in float32.
    """
    count = -(-labels_BT.size // (size or CHUNK))
    length = -(-labels_BT.size // count)  # as even as they come
    after = count * length - labels_BT.size
    labels_NC = jnp.pad(labels_BT.reshape(-1), (0, after), constant_values=IGNORE).reshape(count, 1, length)
    x_NCD = jnp.pad(x_BTD.reshape(-1, x_BTD.shape[-1]), ((0, after), (0, 0))).reshape(count, 1, length, -1)

    def loss(x_1CD: jax.Array, table_VD: jax.Array, labels_1C: jax.Array) -> jax.Array:
        return cross_entropy(logits(x_1CD, table_VD), labels_1C)

    @jax.custom_vjp
    def total(x_NCD: jax.Array, table_VD: jax.Array) -> jax.Array:
        add = lambda found, chunk: (found + loss(chunk[0], table_VD, chunk[1]), None)
        return jax.lax.scan(add, jnp.zeros(()), (x_NCD, labels_NC))[0]

    def forward(x: Any, table: Any) -> tuple[jax.Array, tuple]:
        trained = (0, 1) if table.perturbed else (0,)

        def add(sums: tuple, chunk: tuple) -> tuple[tuple, jax.Array]:
            value, (dx, *dtable) = jax.value_and_grad(loss, argnums=trained)(chunk[0], table.value, chunk[1])
            return (sums[0] + value, [a + d.astype(jnp.float32) for a, d in zip(sums[1], dtable, strict=True)]), dx

        start = jnp.zeros(()), [jnp.zeros(table_VD.shape, jnp.float32)] * (len(trained) - 1)
        (found, of_table), of_x = jax.lax.scan(add, start, (x.value, labels_NC))
        return found, (of_x, of_table)

    def backward(kept: tuple, cotangent: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        of_x, of_table = kept
        dtable = (of_table[0] * cotangent).astype(table_VD.dtype) if of_table else None
        return (of_x * cotangent).astype(x_BTD.dtype), dtable

    total.defvjp(forward, backward, symbolic_zeros=True)  # a frozen table costs nothing
    return total(x_NCD, table_VD)


def with_metrics(loss: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
    """What a loss function returned, as (loss, metrics): it may return the loss alone."""
    return loss if isinstance(loss, tuple) else (loss, {})


def count_valid(labels: jax.Array) -> jax.Array:
    """Number of labels that carry a loss, float32 []."""
    return jnp.sum(labels != IGNORE).astype(jnp.float32)
