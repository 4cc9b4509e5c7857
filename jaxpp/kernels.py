"""Kernels for GPUs, by Pallas: what the compiler does in several passes over large arrays, in fewer.

Each has a plain form elsewhere, which is what other devices run and what it is tested against.

Legend: N tokens, V vocabulary, D model, P programs.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

# Of the loss: logits that a program has in registers, and its warps. Few rows are at work at a time, so that they stay
# in the L2 cache from the first look at them to the second.
BLOCK, WARPS = 2048, 8
# Of a norm's backward: programs, each with sums of its own over its rows; elements that one has in registers.
PROGRAMS, ELEMENTS = 1056, 4096


def cross_entropy_and_gradient(
    logits_NV: jax.Array, labels_N: jax.Array, ignore: int, vocab: int, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """The loss of each token and its gradient with respect to the logits, which it takes the place of in memory.

    The logits are read from memory once: a program's row is small enough to be found in the cache the second time.

    Args: logits_NV, of any float; labels_N, int; those equal to `ignore` have no loss and no gradient. vocab: how many
    columns are tokens; those behind only pad. interpret: run without a GPU.
    Returns: float32 [N], and [N, V] in the logits' dtype.
    """
    tokens, columns = logits_NV.shape
    blocks = pl.cdiv(columns, BLOCK)

    def row(logits_V: Any, label_1: Any, loss_1: Any, g_V: Any) -> None:
        label = label_1[0]
        valid = label != ignore

        def block(i: jax.Array) -> tuple[jax.Array, jax.Array]:
            place = i * BLOCK + jnp.arange(BLOCK)
            x = triton.load(logits_V.at[place], mask=place < columns, other=-jnp.inf)
            return place, jnp.where(place < vocab, x.astype(jnp.float32), -jnp.inf)

        def add(i: jax.Array, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            top, total = sums  # of each place in a block by itself: there is no sum over threads until the end
            _, x = block(i)
            above = jnp.maximum(top, x)
            base = jnp.where(above == -jnp.inf, 0.0, above)  # -inf - -inf is no number
            return above, total * jnp.exp(top - base) + jnp.exp(x - base)

        start = jnp.full(BLOCK, -jnp.inf), jnp.zeros(BLOCK)
        tops, totals = jax.lax.fori_loop(0, blocks, add, start)
        top = jnp.max(tops)
        norm = top + jnp.log(jnp.sum(totals * jnp.exp(tops - top)))
        chosen = logits_V[jnp.where(valid, label, 0)].astype(jnp.float32)
        loss_1[0] = jnp.where(valid, norm - chosen, 0.0)

        def subtract(i: jax.Array, _: None) -> None:
            place, x = block(i)
            g = jnp.where(valid, jnp.exp(x - norm) - (place == label).astype(jnp.float32), 0.0)
            triton.store(g_V.at[place], g.astype(g_V.dtype), mask=place < columns)

        jax.lax.fori_loop(0, blocks, subtract, None)

    one, whole = pl.BlockSpec((1,), lambda i: (i,)), pl.BlockSpec((None, columns), lambda i: (i, 0))
    loss_N, g_NV = pl.pallas_call(
        row,
        grid=(tokens,),
        in_specs=[whole, one],
        out_specs=[one, whole],
        out_shape=[jax.ShapeDtypeStruct((tokens,), jnp.float32), logits_NV],
        input_output_aliases={0: 1},
        compiler_params=triton.CompilerParams(num_warps=WARPS, num_stages=1),
        interpret=interpret,
        name="cross_entropy_and_gradient",
    )(logits_NV, labels_N)
    return loss_N, g_NV


def norm_backward(
    x_ND: jax.Array,
    g_ND: jax.Array,
    scale_D: jax.Array,
    mean_N: jax.Array | None,
    rstd_N: jax.Array,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of a norm, y = (x - mean) * rstd * scale + bias, in one pass over x and g.

    Args: x_ND, the input; g_ND, the gradient of y; mean_N (None: y = x * rstd * scale) and rstd_N, float32, x's.
    Returns: of x, in its dtype; of the scale and of the bias, float32 [D].
    """
    tokens, dim = x_ND.shape
    width = pl.next_power_of_2(dim)
    rows = max(1, ELEMENTS // width)
    programs = min(PROGRAMS, pl.cdiv(tokens, rows))
    turns = pl.cdiv(tokens, programs * rows)
    centred = mean_N is not None

    def program(x_NW: Any, g_NW: Any, scale: Any, mean: Any, rstd: Any, dx_NW: Any, dscale: Any, dbias: Any) -> None:
        me, at = pl.program_id(0), jnp.arange(width)
        scale_W = triton.load(scale.at[at], mask=at < dim, other=0.0).astype(jnp.float32)

        def turn(i: jax.Array, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            row_R = (i * programs + me) * rows + jnp.arange(rows)
            inside_RW = (row_R < tokens)[:, None] & (at < dim)[None, :]
            place = row_R[:, None], at[None, :]
            x_RW, g_RW = (triton.load(a.at[place], mask=inside_RW, other=0.0).astype(jnp.float32) for a in (x_NW, g_NW))
            known = lambda a: triton.load(a.at[row_R], mask=row_R < tokens, other=0.0)[:, None]
            rstd_R1 = known(rstd)
            normal_RW = (x_RW - known(mean)) * rstd_R1 if centred else x_RW * rstd_R1
            wide_RW = g_RW * scale_W
            along_R1 = jnp.sum(wide_RW * normal_RW, axis=1, keepdims=True) / dim
            across_R1 = jnp.sum(wide_RW, axis=1, keepdims=True) / dim if centred else 0.0
            dx_RW = rstd_R1 * (wide_RW - across_R1 - normal_RW * along_R1)
            triton.store(dx_NW.at[place], dx_RW.astype(dx_NW.dtype), mask=inside_RW)
            return sums[0] + jnp.sum(g_RW * normal_RW, axis=0), sums[1] + jnp.sum(g_RW, axis=0)

        found = jax.lax.fori_loop(0, turns, turn, (jnp.zeros(width), jnp.zeros(width)))
        for ref, sum_W in zip((dscale, dbias), found, strict=True):
            triton.store(ref.at[me, at], sum_W, mask=at < dim)

    sums = jax.ShapeDtypeStruct((programs, dim), jnp.float32)
    dx_ND, dscale_PD, dbias_PD = pl.pallas_call(
        program,
        grid=(programs,),
        out_shape=[jax.ShapeDtypeStruct(x_ND.shape, x_ND.dtype), sums, sums],
        compiler_params=triton.CompilerParams(num_warps=4 if width < ELEMENTS else 8, num_stages=1),
        interpret=interpret,
        name="norm_backward",
    )(x_ND, g_ND, scale_D, rstd_N if mean_N is None else mean_N, rstd_N)
    return dx_ND, dscale_PD.sum(0), dbias_PD.sum(0)
