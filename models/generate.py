"""Text from a model, one token at a time, with a cache of keys and values.

Legend: B rows (1), T new tokens, S room of the cache, V vocabulary, K kv heads, H head dim.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models.attention import Cache

Tree = Any
BUCKET = 64  # prompts and caches are padded to multiples of it, so that few programs are compiled


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    temperature: what logits are divided by, 0: the likeliest token. top_k: only the k likeliest, 0: all.
    top_p: only the likeliest whose chances sum to p (Holtzman et al. 2020, arXiv:1904.09751), 1: all.
    """

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0


def choose(logits_V: jax.Array, key: jax.Array, sampling: Sampling) -> jax.Array:
    """Draw a token, int32 [], from float logits."""
    logits_V = logits_V.astype(jnp.float32)
    if sampling.temperature == 0:
        return jnp.argmax(logits_V).astype(jnp.int32)
    order_V = jnp.argsort(-logits_V, stable=True)
    sorted_V = logits_V[order_V] / sampling.temperature
    chance_V = jax.nn.softmax(sorted_V)
    if sampling.top_k:
        sorted_V = jnp.where(jnp.arange(len(sorted_V)) < sampling.top_k, sorted_V, -jnp.inf)
        chance_V = jax.nn.softmax(sorted_V)
    before_V = jnp.cumsum(chance_V) - chance_V  # of all likelier tokens: the first is always kept
    sorted_V = jnp.where(before_V < sampling.top_p, sorted_V, -jnp.inf)
    return order_V[jax.random.categorical(key, sorted_V)].astype(jnp.int32)


def extend(model: Any, caches: list[Cache], tokens_BT: jax.Array, start: jax.Array) -> tuple[Tree, list[Cache]]:
    """Run T new tokens at positions start, start+1, ... through a model; returns the last stream and the caches."""
    positions_BT = jnp.broadcast_to(start + jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
    stream = model.embed({"tokens": tokens_BT, "positions": positions_BT}, None)
    found = []
    for block, cache in zip(model.blocks, caches, strict=True):
        stream, cache = block.extend(stream, cache, start)
        found.append(cache)
    return stream, found


def _cast(tree: Tree, dtype: str) -> Tree:
    return jax.tree.map(lambda a: a.astype(dtype) if jnp.issubdtype(a.dtype, jnp.floating) else a, tree)


def generate(
    params: Tree,
    prompt: Sequence[int] | np.ndarray,
    count: int,
    key: jax.Array,
    sampling: Sampling,
    as_model: Callable[[Tree], Any] = lambda params: params,
    dtype: str = "float32",
    end: int | None = None,
) -> Iterator[int]:
    """Yield up to `count` tokens after a prompt.

    Args: params, a model or what as_model makes one of inside `jax.jit`, for example parameters placed on the stages of
    a mesh, which are then gathered layer by layer; prompt, int [n], n >= 1; key, folded with the number of each token;
    dtype, of the computation; end, a token after which to stop (it is not yielded).
    """
    length = len(prompt)
    assert length >= 1
    padded = -(-length // BUCKET) * BUCKET
    room = -(-(length + count) // BUCKET) * BUCKET

    @partial(jax.jit, donate_argnums=1)
    def step(
        params: Tree, caches: list[Cache], tokens_BT: jax.Array, start: jax.Array, last: jax.Array, key: jax.Array
    ) -> tuple[jax.Array, list[Cache]]:
        model = _cast(as_model(params), dtype)
        stream, caches = extend(model, caches, tokens_BT, start)
        logits_BTV = model.head(stream, model.embed)
        return choose(logits_BTV[0, last], key, sampling), caches

    def empty(params: Tree) -> list[Cache]:
        specs = [block.attention.spec for block in as_model(params).blocks]
        make = lambda spec: jnp.zeros((1, room, spec.kv_heads, spec.head_dim), dtype)
        return [Cache(make(spec), make(spec)) for spec in specs]

    caches = jax.jit(empty)(params)
    tokens_BT = np.zeros((1, padded), np.int32)
    tokens_BT[0, :length] = prompt
    start, last = 0, length - 1
    for i in range(count):
        token, caches = step(params, caches, tokens_BT, start, last, jax.random.fold_in(key, i))
        if int(token) == end:
            return
        yield int(token)
        tokens_BT = np.asarray(token)[None, None]
        start, last = length + i, 0
