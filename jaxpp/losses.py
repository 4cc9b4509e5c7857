"""Losses: sums over valid tokens, in float32; the executor divides by the global count once.

Legend: B microbatch size, T sequence, V vocabulary, D model, N tokens or chunks of them, C tokens of a chunk.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxpp import kernels
from jaxpp.mesh import TENSOR
from jaxpp.sharding import constrain, ways

IGNORE = -100  # label of a token that carries no loss
# Tokens whose logits exist at a time: enough that adding a chunk's gradient of the table to the sum, 8 bytes an entry,
# costs little beside the products, 6 C FLOPs an entry. Of no more than FEW they may as well exist whole.
CHUNK, FEW = 8192, 2048


def cross_entropy(logits_BTV: jax.Array, labels_BT: jax.Array) -> jax.Array:
    """Sum over valid tokens of the negative log likelihood, float32 []; labels equal to IGNORE count nothing."""
    logits_BTV = logits_BTV.astype(jnp.float32)
    valid_BT = labels_BT != IGNORE
    # By comparison and not by index, so that a vocabulary split over ranks stays split.
    chosen_BTV = jnp.arange(logits_BTV.shape[-1]) == labels_BT[..., None]
    chosen_BT = jnp.sum(jnp.where(chosen_BTV, logits_BTV, 0.0), axis=-1)
    return jnp.sum(jnp.where(valid_BT, jax.nn.logsumexp(logits_BTV, axis=-1) - chosen_BT, 0.0))


def logits(x_BTD: jax.Array, table_VD: jax.Array) -> jax.Array:
    """Logits of a table's rows, [B, T, V], as one product of matrices where they are not split over ranks."""
    if ways(TENSOR) > 1:
        return constrain(jnp.tensordot(x_BTD, table_VD.T, 1), None, None, "vocab")
    return (x_BTD.reshape(-1, x_BTD.shape[-1]) @ table_VD.T).reshape(*x_BTD.shape[:-1], -1)


def mask_padding(logits: jax.Array, vocab: int) -> jax.Array:
    """Logits [..., V] with -inf for those that only pad the vocabulary, see `sharding.padding`."""
    columns = logits.shape[-1]
    return logits if columns == vocab else jnp.where(jnp.arange(columns) < vocab, logits, -jnp.inf)


def cross_entropy_and_gradient(logits_NV: jax.Array, labels_N: jax.Array, vocab: int) -> tuple[jax.Array, jax.Array]:
    """`cross_entropy` of the first `vocab` logits, and its gradient with respect to all of them in their dtype."""
    wide_NV, valid_N = mask_padding(logits_NV.astype(jnp.float32), vocab), labels_N != IGNORE
    chosen_NV = jnp.arange(logits_NV.shape[-1]) == labels_N[:, None]
    norm_N = jax.nn.logsumexp(wide_NV, axis=-1)
    loss_N = norm_N - jnp.sum(jnp.where(chosen_NV, wide_NV, 0.0), axis=-1)
    g_NV = jnp.where(valid_N[:, None], jnp.exp(wide_NV - norm_N[:, None]) - chosen_NV, 0.0)
    return jnp.sum(jnp.where(valid_N, loss_N, 0.0)), g_NV.astype(logits_NV.dtype)


def token_loss(head: Any, embed: Any, stream: Any, microbatch: dict[str, jax.Array]) -> jax.Array:
    """The default loss: cross entropy of the head's logits against the labels, summed over valid tokens.

    Of more than FEW tokens gradients are computed beside the loss, a chunk of them at a time, if the head has
    `factors(stream, embed)` -> (x_BTD, table), the operands of its last product, and `vocab`, how many of the table's
    rows are tokens.
    """
    labels_BT = microbatch["labels"]
    if not in_chunks(head, stream, labels_BT.size):
        return cross_entropy(head(stream, embed), labels_BT)
    x_BTD, table_VD = head.factors(stream, embed)
    return chunked_cross_entropy(x_BTD, table_VD, labels_BT, head.vocab)


def in_chunks(head: Any, stream: Any, tokens: int) -> bool:
    """Whether `token_loss` takes a microbatch of `tokens` tokens in chunks. In float16 it does not: a gradient would be
    rounded before it is scaled."""
    half = any(a.dtype == jnp.float16 for a in jax.tree.leaves(stream))
    return tokens > FEW and hasattr(head, "factors") and not half


def chunked_cross_entropy(
    x_BTD: jax.Array, table_VD: jax.Array, labels_BT: jax.Array, vocab: int, size: int | None = None
) -> jax.Array:
    """`cross_entropy` of x_BTD @ table_VD.T, of which the first `vocab` count, `size` tokens after another (default
    CHUNK).

    Gradients are computed beside the loss, so that a chunk's logits serve both and are then forgotten; the table's is
    summed in float32.
    """
    count = -(-labels_BT.size // (size or CHUNK))
    length = -(-labels_BT.size // count)  # as even as they come
    after = count * length - labels_BT.size
    labels_NC = jnp.pad(labels_BT.reshape(-1), (0, after), constant_values=IGNORE).reshape(count, length)
    x_NCD = jnp.pad(x_BTD.reshape(-1, x_BTD.shape[-1]), ((0, after), (0, 0))).reshape(count, length, -1)

    @jax.custom_vjp
    def total(x_NCD: jax.Array, table_VD: jax.Array) -> jax.Array:
        def add(found: jax.Array, chunk: tuple) -> tuple[jax.Array, None]:
            logits_1CV = mask_padding(logits(chunk[0][None], table_VD), vocab)
            return found + cross_entropy(logits_1CV, chunk[1][None]), None

        return jax.lax.scan(add, jnp.zeros(()), (x_NCD, labels_NC))[0]

    def forward(x: Any, table: Any) -> tuple[jax.Array, tuple]:
        def add(sums: tuple, chunk: tuple) -> tuple[tuple, jax.Array]:
            value, g_CV = _by_platform(logits(chunk[0][None], table.value)[0], chunk[1], vocab)
            # In float32 as it comes, so that a product can be added to the sum by what computes it.
            found = [a + jax.lax.dot(g_CV.T, chunk[0], preferred_element_type=jnp.float32) for a in sums[1]]
            return (sums[0] + value, found), g_CV @ table.value

        start = jnp.zeros(()), [jnp.zeros(table_VD.shape, jnp.float32)] * int(table.perturbed)
        (found, of_table), of_x = jax.lax.scan(add, start, (x.value, labels_NC))
        return found, (of_x, of_table)

    def backward(kept: tuple, cotangent: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        of_x, of_table = kept
        dtable = (of_table[0] * cotangent).astype(table_VD.dtype) if of_table else None
        return (of_x * cotangent).astype(x_BTD.dtype), dtable

    total.defvjp(forward, backward, symbolic_zeros=True)  # a frozen table costs nothing
    return total(x_NCD, table_VD)


def _by_platform(logits_NV: jax.Array, labels_N: jax.Array, vocab: int) -> tuple[jax.Array, jax.Array]:
    """`cross_entropy_and_gradient`, on a GPU by a kernel, unless the vocabulary is split over ranks."""
    plain = partial(cross_entropy_and_gradient, vocab=vocab)
    if ways(TENSOR) > 1:
        return plain(logits_NV, labels_N)

    def kernel(logits_NV: jax.Array, labels_N: jax.Array) -> tuple[jax.Array, jax.Array]:
        loss_N, g_NV = kernels.cross_entropy_and_gradient(logits_NV, labels_N, IGNORE, vocab)
        return jnp.sum(loss_N), g_NV

    return jax.lax.platform_dependent(logits_NV, labels_N, cuda=kernel, default=plain)


def with_metrics(loss: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
    """What a loss function returned, as (loss, metrics): it may return the loss alone."""
    return loss if isinstance(loss, tuple) else (loss, {})


def count_valid(labels: jax.Array) -> jax.Array:
    """Number of labels that carry a loss, float32 []."""
    return jnp.sum(labels != IGNORE).astype(jnp.float32)
