"""Causal self-attention.

Query and key-value weights carry heads as dims of their own (wkv is [D, 2, K, H]), so that sharding over heads never
splits a fused weight in the middle.

Legend: B microbatch size, T sequence, D model, N heads, K kv heads, H head dim.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from models.dense import normal, project


def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Inverted dropout; the identity where the rate is 0 or the key None."""
    if key is None or rate == 0.0:
        return x
    keep = jax.random.bernoulli(key, 1.0 - rate, x.shape)
    return jnp.where(keep, x / (1.0 - rate), jnp.zeros((), x.dtype))


def attend(
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    rate: float = 0.0,
    key: jax.Array | None = None,
    cudnn: bool = False,
) -> jax.Array:
    """Causal softmax attention, softmax in float32; [B, T, N, H] in the queries' dtype.

    rate, key: dropout of the attention weights, which only the plain path can do. cudnn: use cuDNN's fused attention
    where it can be, in half precision on a GPU. On the CPU the plain path takes half the time of
    `jax.nn.dot_product_attention`, whose layout [B, T, N, H] makes its batched products slow there.
    """
    dropping = key is not None and rate > 0.0
    if cudnn and q_BTNH.dtype.itemsize == 2 and q_BTNH.shape[-1] <= 128 and not dropping:
        return jax.nn.dot_product_attention(q_BTNH, k_BTKH, v_BTKH, is_causal=True, implementation="cudnn")
    batch, length, heads, head_dim = q_BTNH.shape
    groups = heads // k_BTKH.shape[2]
    k_BTNH, v_BTNH = (jnp.repeat(a, groups, axis=2) if groups > 1 else a for a in (k_BTKH, v_BTKH))
    # Z is batch x heads.
    q_ZTH, k_ZTH, v_ZTH = (a.swapaxes(1, 2).reshape(-1, length, head_dim) for a in (q_BTNH, k_BTNH, v_BTNH))
    scores_ZTS = jnp.einsum("zth,zsh->zts", q_ZTH, k_ZTH, preferred_element_type=jnp.float32)
    causal_TS = jnp.tril(jnp.ones((length, length), bool))
    scores_ZTS = jnp.where(causal_TS, scores_ZTS * head_dim**-0.5, -jnp.inf)
    weights_ZTS = dropout(jax.nn.softmax(scores_ZTS, axis=-1), rate, key).astype(q_BTNH.dtype)
    y_ZTH = jnp.einsum("zts,zsh->zth", weights_ZTS, v_ZTH)
    return y_ZTH.reshape(batch, heads, length, head_dim).swapaxes(1, 2)


class Attention(nnx.Module):
    """Multi-head attention with optional biases.

    Args: dim D; heads N; kv_heads K, dividing N; head_dim H; bias, on all four projections; std, of initial
    weights; out_std, of the output projection's; rate, dropout of the attention weights.
    """

    def __init__(
        self,
        key: jax.Array,
        dim: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        bias: bool,
        std: float,
        out_std: float,
        rate: float = 0.0,
        cudnn: bool = False,
    ) -> None:
        q, kv, out = jax.random.split(key, 3)
        self.wq = nnx.Param(normal(q, (dim, heads, head_dim), std))
        self.wkv = nnx.Param(normal(kv, (dim, 2, kv_heads, head_dim), std))
        self.wo = nnx.Param(normal(out, (heads, head_dim, dim), out_std))
        if bias:
            self.bq = nnx.Param(jnp.zeros((heads, head_dim)))
            self.bkv = nnx.Param(jnp.zeros((2, kv_heads, head_dim)))
            self.bo = nnx.Param(jnp.zeros(dim))
        self.bias = bias
        self.rate = rate
        self.cudnn = cudnn

    def __call__(self, x_BTD: jax.Array, key: jax.Array | None) -> jax.Array:
        q_BTNH = project(x_BTD, self.wq[...])
        kv_BTCKH = project(x_BTD, self.wkv[...])
        if self.bias:
            q_BTNH, kv_BTCKH = q_BTNH + self.bq[...], kv_BTCKH + self.bkv[...]
        y_BTNH = attend(q_BTNH, kv_BTCKH[:, :, 0], kv_BTCKH[:, :, 1], self.rate, key, self.cudnn)
        y_BTD = project(y_BTNH, self.wo[...], summed=2)
        return y_BTD + self.bo[...] if self.bias else y_BTD
