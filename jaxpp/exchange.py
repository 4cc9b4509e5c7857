"""What the ranks of one stage exchange inside a layer, where the compiler does not see to it.

All run inside the step, in slots too: all ranks of a stage take the same branch. No permute may stand there.

Legend: B microbatch size, T tokens of a sequence on one rank of the context axis, N heads, H head dim.
"""

import jax

from jaxpp.mesh import CONTEXT, EXPERT, TENSOR
from jaxpp.sharding import constrain, ways


def to_heads(x_BTNH: jax.Array) -> jax.Array:
    """From some tokens of all heads to all tokens of some heads: [B, T*C, N/C, H] over C ranks of context.

    The heads of each rank of `tensor` are dealt out among themselves, so that none of them changes that rank.
    """
    (b, t, n, h), parts, tensor = x_BTNH.shape, ways(CONTEXT), _tensor(x_BTNH.shape[2])
    x = x_BTNH.reshape(b, t, tensor, parts, n // (tensor * parts), h)
    x = jax.lax.all_to_all(x, CONTEXT, split_axis=3, concat_axis=1, tiled=True)
    return constrain(x.reshape(b, t * parts, n // parts, h), None, None, "heads", None)


def to_sequence(x_BTNH: jax.Array) -> jax.Array:
    """The inverse of `to_heads`."""
    (b, t, n, h), parts, tensor = x_BTNH.shape, ways(CONTEXT), _tensor(x_BTNH.shape[2])
    x = x_BTNH.reshape(b, t, tensor, 1, n // tensor, h)
    x = jax.lax.all_to_all(x, CONTEXT, split_axis=1, concat_axis=3, tiled=True)
    return constrain(x.reshape(b, t // parts, n * parts, h), None, None, "heads", None)


def swap(x: jax.Array) -> jax.Array:
    """x[r] goes to rank r of the experts, and what it had for this rank comes back in its place."""
    return jax.lax.all_to_all(x, EXPERT, split_axis=0, concat_axis=0, tiled=True)


def _tensor(heads: int) -> int:
    parts = ways(TENSOR)
    assert heads % parts == 0, (heads, parts)
    return parts
