"""Causal self-attention: grouped queries, rotary positions, packed documents, sliding windows, a cache.

Query and key-value weights carry heads as dims of their own (wkv is [D, 2, K, H]), so that sharding over heads never
splits a fused weight in the middle.

Legend: B microbatch size, T sequence (of the queries), S sequence (of the keys), D model, N heads, K kv heads,
H head dim.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from jaxpp import exchange
from jaxpp.mesh import CONTEXT, TENSOR
from jaxpp.probe import tap
from jaxpp.remat import keep
from jaxpp.sharding import constrain, ways
from models import lora
from models.dense import dropout, normal, project
from models.lora import Dims, LoraSpec
from models.norm import RMSNorm
from models.rope import Rope, rotate


@dataclass(frozen=True)
class AttentionSpec:
    """Sizes and kinds of an attention layer.

    heads N; kv_heads K, dividing N; head_dim H. bias: on all four projections. std: of initial weights, out_std: of the
    output projection's. rope: rotary positions, or None. qk_norm: epsilon of a norm over each head of queries and keys,
    or None. window: how many positions are seen, the own one included, or None for all before. dropout: of the
    attention weights. cudnn: use cuDNN's fused attention where it can be, which needs a GPU. lora: adapters, or None.
    """

    dim: int
    heads: int
    kv_heads: int
    head_dim: int
    bias: bool = False
    std: float = 0.02
    out_std: float = 0.02
    rope: Rope | None = None
    qk_norm: float | None = None
    window: int | None = None
    dropout: float = 0.0
    cudnn: bool = False
    lora: LoraSpec | None = None


class Cache(NamedTuple):
    """Keys and values of the positions so far, [B, S, K, H]; S is the room, of which the first ones are filled."""

    k: jax.Array
    v: jax.Array


def seen(queries: jax.Array, keys: jax.Array, window: int | None) -> jax.Array:
    """Which keys a query sees by their positions in the sequence, int [T] and [S]: bool [T, S]."""
    behind_TS = queries[:, None] - keys[None, :]
    return (behind_TS >= 0) if window is None else (behind_TS >= 0) & (behind_TS < window)


def kernel(spec: AttentionSpec, dtype: jnp.dtype, dropping: bool = False) -> str:
    """Which attention runs: "cudnn" in half precision on a GPU, "plain" elsewhere. The one place that chooses.

    Only the plain one can drop attention weights. On the CPU it takes half the time of `jax.nn.dot_product_attention`,
    whose layout [B, T, N, H] makes its batched products slow there.
    """
    fits = spec.cudnn and jnp.dtype(dtype).itemsize == 2 and spec.head_dim <= 128
    return "cudnn" if fits and not dropping else "plain"


def attend(
    spec: AttentionSpec,
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    segments_BT: jax.Array | None = None,
    key: jax.Array | None = None,
) -> jax.Array:
    """Causal softmax attention of a sequence to itself, softmax in float32; [B, T, N, H] in the queries' dtype.

    segments_BT: int, the document of each token; tokens see their own document alone. key: for dropout of the weights.
    In a step whose layers or sequences are split over ranks, all arguments are this rank's part.
    """
    over_context, over_tensor = ways(CONTEXT) > 1, ways(TENSOR) > 1
    if over_context:
        q_BTNH, k_BTKH, v_BTKH, segments_BT = whole_sequences(q_BTNH, k_BTKH, v_BTKH, segments_BT)
    run = partial(_over_tensor, spec) if over_tensor else partial(_attend, spec)
    y_BTNH = run(q_BTNH, k_BTKH, v_BTKH, segments_BT, key)
    return exchange.to_sequence(y_BTNH) if over_context else y_BTNH


def whole_sequences(
    q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, segments_BT: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """Some of the heads over all tokens, from all heads over this rank's T neighbouring ones: then the work is even
    however the mask lies (Jacobs et al. 2023, arXiv:2309.14509)."""
    copies = kv_copies(k_BTKH.shape[2], ways(CONTEXT), ways(TENSOR), q_BTNH.shape[2])
    k_BTKH, v_BTKH = (repeat_heads(a, copies) for a in (k_BTKH, v_BTKH))
    q_BTNH, k_BTKH, v_BTKH = (exchange.to_heads(a) for a in (q_BTNH, k_BTKH, v_BTKH))
    if segments_BT is not None:
        segments_BT = jax.lax.all_gather(segments_BT, CONTEXT, axis=1, tiled=True)
    return q_BTNH, k_BTKH, v_BTKH, segments_BT


def kv_copies(kv_heads: int, context: int, tensor: int, heads: int) -> int:
    """How often kv heads are repeated so that each rank of both axes gets whole ones."""
    if kv_heads % tensor:
        return heads // kv_heads
    return context // math.gcd(kv_heads // tensor, context)


def repeat_heads(x_BTKH: jax.Array, copies: int) -> jax.Array:
    """Each head several times, the copies next to each other."""
    return jnp.repeat(x_BTKH, copies, axis=2) if copies > 1 else x_BTKH


def _over_tensor(spec: AttentionSpec, q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, *others: Any) -> Any:
    """Each rank of tensor calls the kernel for its heads: the compiler cannot split a kernel."""
    copies = kv_copies(k_BTKH.shape[2], 1, ways(TENSOR), q_BTNH.shape[2])
    k_BTKH, v_BTKH = (repeat_heads(a, copies) for a in (k_BTKH, v_BTKH))
    heads, whole = PartitionSpec(None, None, TENSOR, None), PartitionSpec()

    def mine(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None, key: jax.Array | None) -> jax.Array:
        key = key if key is None else jax.random.fold_in(key, jax.lax.axis_index(TENSOR))
        return _attend(spec, q, k, v, segments, key)

    specs = (heads, heads, heads, whole, whole)
    run = jax.shard_map(mine, in_specs=specs, out_specs=heads, axis_names={TENSOR}, check_vma=False)
    return run(q_BTNH, k_BTKH, v_BTKH, *others)


def _attend(
    spec: AttentionSpec,
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    segments_BT: jax.Array | None,
    key: jax.Array | None,
) -> jax.Array:
    same_BTS = None if segments_BT is None else segments_BT[:, :, None] == segments_BT[:, None, :]
    dropping = key is not None and spec.dropout > 0.0
    if kernel(spec, q_BTNH.dtype, dropping) == "cudnn":
        options: dict = {"is_causal": True, "implementation": "cudnn"}
        if spec.window is not None:
            options["local_window_size"] = (spec.window - 1, 0)
        if same_BTS is not None:
            options["mask"] = same_BTS[:, None]
        return jax.nn.dot_product_attention(q_BTNH, k_BTKH, v_BTKH, **options)
    places = jnp.arange(q_BTNH.shape[1])
    mask = seen(places, places, spec.window)
    if same_BTS is not None:
        mask = (mask & same_BTS)[:, None]
    return plain_attend(q_BTNH, k_BTKH, v_BTKH, mask, spec.dropout, key)


def plain_attend(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    mask: jax.Array,
    rate: float = 0.0,
    key: jax.Array | None = None,
) -> jax.Array:
    """Softmax attention in batched products. mask: bool [T, S] or [B, 1, T, S], where True is seen."""
    k_BSNH, v_BSNH = (repeat_heads(a, q_BTNH.shape[2] // a.shape[2]) for a in (k_BSKH, v_BSKH))
    q_BNTH, k_BNSH, v_BNSH = (a.swapaxes(1, 2) for a in (q_BTNH, k_BSNH, v_BSNH))
    scores_BNTS = jnp.einsum("bnth,bnsh->bnts", q_BNTH, k_BNSH, preferred_element_type=jnp.float32)
    scores_BNTS = jnp.where(mask, scores_BNTS * q_BTNH.shape[-1] ** -0.5, -jnp.inf)
    weights_BNTS = dropout(jax.nn.softmax(scores_BNTS, axis=-1), rate, key).astype(q_BTNH.dtype)
    return jnp.einsum("bnts,bnsh->bnth", weights_BNTS, v_BNSH).swapaxes(1, 2)


class Attention(nnx.Module):
    """An attention layer. In a microbatch it reads `positions` (int [B, T], default 0..T-1) and `segments`."""

    def __init__(self, key: jax.Array, spec: AttentionSpec) -> None:
        q, kv, out = jax.random.split(key, 3)
        dim, heads, kv_heads, head_dim = spec.dim, spec.heads, spec.kv_heads, spec.head_dim
        self.wq = nnx.Param(normal(q, (dim, heads, head_dim), spec.std), axes=(None, "heads", None))
        self.wkv = nnx.Param(normal(kv, (dim, 2, kv_heads, head_dim), spec.std), axes=(None, None, "kv_heads", None))
        self.wo = nnx.Param(normal(out, (heads, head_dim, dim), spec.out_std), axes=("heads", None, None))
        if spec.bias:
            self.bq = nnx.Param(jnp.zeros((heads, head_dim)), axes=("heads", None))
            self.bkv = nnx.Param(jnp.zeros((2, kv_heads, head_dim)), axes=(None, "kv_heads", None))
            self.bo = nnx.Param(jnp.zeros(dim))
        if spec.qk_norm is not None:
            self.q_norm = RMSNorm(head_dim, spec.qk_norm)
            self.k_norm = RMSNorm(head_dim, spec.qk_norm)
        q, kv = ((heads, head_dim), ("heads", None)), ((kv_heads, head_dim), ("kv_heads", None))
        places = {name: Dims((dim,), outs, (None,), names) for name, (outs, names) in (("q", q), ("k", kv), ("v", kv))}
        places["qkv"] = Dims((dim,), (3, heads, head_dim), (None,), (None, "heads", None))
        places["out"] = Dims((heads, head_dim), (dim,), ("heads", None), (None,))
        self.lora = lora.make(key, spec.lora, places)
        self.spec = spec

    def __call__(
        self,
        x_BTD: jax.Array,
        microbatch: dict[str, jax.Array],
        key: jax.Array | None,
        lora_key: jax.Array | None = None,
    ) -> jax.Array:
        positions = microbatch.get("positions", jnp.arange(x_BTD.shape[1]))
        q_BTNH, k_BTKH, v_BTKH = self._heads(constrain(x_BTD, None, None, None), positions, lora_key)
        q_BTNH = constrain(q_BTNH, None, None, "heads", None)
        k_BTKH, v_BTKH = (constrain(a, None, None, "kv_heads", None) for a in (k_BTKH, v_BTKH))
        q_BTNH, k_BTKH, v_BTKH = keep((q_BTNH, k_BTKH, v_BTKH))
        y_BTNH = tap("attention.heads", attend(self.spec, q_BTNH, k_BTKH, v_BTKH, microbatch.get("segments"), key))
        return constrain(self._out(y_BTNH, lora_key), None, "sequence", None)

    def extend(self, x_BTD: jax.Array, cache: Cache, start: jax.Array) -> tuple[jax.Array, Cache]:
        """Attention of T new tokens at positions start, start+1, ... to themselves and the cache, which gets them."""
        positions = start + jnp.arange(x_BTD.shape[1])
        q_BTNH, k_BTKH, v_BTKH = self._heads(x_BTD, positions)
        write = lambda old, new: jax.lax.dynamic_update_slice_in_dim(old, new.astype(old.dtype), start, axis=1)
        cache = Cache(write(cache.k, k_BTKH), write(cache.v, v_BTKH))
        mask_TS = seen(positions, jnp.arange(cache.k.shape[1]), self.spec.window)
        return self._out(plain_attend(q_BTNH, cache.k, cache.v, mask_TS)), cache

    def _heads(
        self, x_BTD: jax.Array, positions: jax.Array, lora_key: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        bq, bkv = (self.bq[...], self.bkv[...]) if self.spec.bias else (None, None)
        q_BTNH = lora.added(self.lora, project(x_BTD, self.wq[...], bias=bq), x_BTD, lora_key, "q")
        kv_BTCKH = lora.added(self.lora, project(x_BTD, self.wkv[...], bias=bkv), x_BTD, lora_key, "k", "v")
        if self.lora is not None and "qkv" in self.lora.places:
            low_BTCNH = self.lora.one("qkv", x_BTD, lora_key)
            q_BTNH, kv_BTCKH = q_BTNH + low_BTCNH[:, :, 0], kv_BTCKH + low_BTCNH[:, :, 1:]
        q_BTNH, kv_BTCKH = tap("attention.q", q_BTNH), tap("attention.kv", kv_BTCKH)
        k_BTKH, v_BTKH = kv_BTCKH[:, :, 0], kv_BTCKH[:, :, 1]
        if self.spec.qk_norm is not None:
            q_BTNH, k_BTKH = self.q_norm(q_BTNH), self.k_norm(k_BTKH)
        if self.spec.rope is not None:
            q_BTNH, k_BTKH = (rotate(a, positions, self.spec.rope) for a in (q_BTNH, k_BTKH))
        return q_BTNH, k_BTKH, v_BTKH

    def _out(self, y_BTNH: jax.Array, lora_key: jax.Array | None = None) -> jax.Array:
        y_BTD = lora.added(self.lora, project(y_BTNH, self.wo[...], summed=2), y_BTNH, lora_key, "out")
        return tap("attention.output", y_BTD + self.bo[...] if self.spec.bias else y_BTD)
