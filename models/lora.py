"""LoRA (Hu et al. 2021, arXiv:2106.09685): low-rank adapters beside projections whose own weights rest.

An adapter adds (alpha / rank) * (x A) B to the output of a projection. There is one for each module that PEFT would
adapt, so that what is trained is what PEFT would train: our fused outputs (keys and values, gate and up) get the stack
of their adapters', and GPT-2's c_attn is one adapter over our three.

Legend: B microbatch size, T sequence, R rank.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpp.sharding import constrain
from models.dense import dropout, project

# PEFT's names of the modules that can have an adapter, and where it is in our layers.
PLACES = {
    "q_proj": "q",
    "k_proj": "k",
    "v_proj": "v",
    "o_proj": "out",
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
    "c_attn": "qkv",
    "attn.c_proj": "out",
    "c_fc": "up",
    "mlp.c_proj": "down",
}
_ORDER = list(dict.fromkeys(PLACES.values()))
_FIRST_DRAW = 16  # keys of adapters are folded with numbers from here on: those below are drawn from the same key


class LoraParam(nnx.Param):
    """A parameter of an adapter: the only kind that is trained where there is one."""


@dataclass(frozen=True)
class LoraSpec:
    """Adapters of a model.

    alpha: their outputs are multiplied with alpha / rank. dropout: of their inputs, while training. targets: names in
    `PLACES`.
    """

    rank: int
    alpha: float
    dropout: float = 0.0
    targets: tuple[str, ...] = ()


class Dims(NamedTuple):
    """The dims that a projection sums over, those that it makes, and the names of both (see `sharding`)."""

    ins: tuple[int, ...]
    outs: tuple[int, ...]
    in_names: tuple[str | None, ...]
    out_names: tuple[str | None, ...]


class Adapter(nnx.Module):
    """The low-rank product beside one projection: lora_a [*ins, R], lora_b [R, *outs], zeros at first."""

    def __init__(self, key: jax.Array, spec: LoraSpec, dims: Dims) -> None:
        bound = 1 / math.sqrt(math.prod(dims.ins))
        a = jax.random.uniform(key, (*dims.ins, spec.rank), minval=-bound, maxval=bound)
        self.lora_a = LoraParam(a, axes=(*dims.in_names, None))
        self.lora_b = LoraParam(jnp.zeros((spec.rank, *dims.outs)), axes=(None, *dims.out_names))
        self.summed, self.rate, self.scale = len(dims.ins), spec.dropout, spec.alpha / spec.rank

    def __call__(self, x: jax.Array, key: jax.Array | None) -> jax.Array:
        x = dropout(x, self.rate, key)
        low_BTR = constrain(project(x, self.lora_a[...], self.summed), None, None, None)
        return project(low_BTR, self.lora_b[...]) * self.scale


class Adapters(nnx.Module):
    """The adapters of a layer's part by their places; the places that are no targets have none."""

    def __init__(self, key: jax.Array, spec: LoraSpec, places: dict[str, Dims]) -> None:
        wanted = {PLACES[target] for target in spec.targets}
        self.places = tuple(name for name in places if name in wanted)
        for name in self.places:
            setattr(self, name, Adapter(jax.random.fold_in(key, draw(name)), spec, places[name]))

    def __call__(self, y: jax.Array, x: jax.Array, key: jax.Array | None, names: Sequence[str]) -> jax.Array:
        """A projection's output y of x with those of its adapters; several names are stacked along y's third dim."""
        found = {name: self.one(name, x, key) for name in names if name in self.places}
        if not found:
            return y
        if len(names) == 1:
            return y + found[names[0]]
        nothing = jnp.zeros_like(next(iter(found.values())))
        return y + jnp.stack([found.get(name, nothing) for name in names], axis=2)

    def one(self, name: str, x: jax.Array, key: jax.Array | None) -> jax.Array:
        """The output of one adapter; each drops by itself."""
        return getattr(self, name)(x, key if key is None else jax.random.fold_in(key, draw(name)))


def draw(place: str) -> int:
    """What a layer's key is folded with for a place, at the start and for dropout."""
    return _FIRST_DRAW + _ORDER.index(place)


def make(key: jax.Array, spec: LoraSpec | None, places: dict[str, Dims]) -> Adapters | None:
    """The adapters of a layer's part, or None where it has none."""
    if spec is None or not {PLACES[target] for target in spec.targets} & places.keys():
        return None
    return Adapters(key, spec, places)


def added(adapters: Adapters | None, y: jax.Array, x: jax.Array, key: Any, *names: str) -> jax.Array:
    """`Adapters.__call__`, or y where there are none."""
    return y if adapters is None else adapters(y, x, key, names)
