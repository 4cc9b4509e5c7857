"""Taps: what a step shows of its tensors while it runs.

`tap(name, x)` is the identity. While a block or a head is traced under a probe, it also hands x, and in the backward
pass the cotangent at the same place, to the probe's sink on the host; elsewhere it is nothing at all, so that a program
without a probe is the same as one without taps. The numbers that a tensor is told by (microbatch, layer, stage, data
rank) are traced: they travel in the microbatch, under KEY, to where the blocks are called.

Legend: B microbatch size.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpp.mesh import DATA, PIPE

Tree = Any
KEY = "probe_spot"  # in a microbatch: int32 [4], the fields of Spot
FORWARD, BACKWARD = "forward", "backward"


class Tap(NamedTuple):
    """What is known of a tensor when the program is traced.

    part: "embed", "layer" or "head". name: of the tap. order: among the taps of its part, in order of computation.
    direction: FORWARD or BACKWARD. rows: its first dim is B, the rows of this data rank.
    """

    part: str
    name: str
    order: int
    direction: str
    rows: bool


class Spot(NamedTuple):
    """What is known of a tensor when the program runs: layer is -1 for embedding and head."""

    microbatch: int
    layer: int
    stage: int
    data: int


@dataclass(frozen=True)
class Probe:
    """Who is told, and of how much.

    level: 1, what goes into and comes out of embedding, blocks and loss; 2, also the taps inside. sink: called on the
    host with a `Tap`, a `Spot` as int32 [4], and the tensor, by several threads and in no order.
    """

    level: int
    sink: Callable[[Tap, Any, Any], None]


@dataclass
class _Here:
    """The part that is being traced. rows: B."""

    probe: Probe
    part: str
    rows: int
    spot: jax.Array
    order: Iterator[int] = field(default_factory=count)


_HERE: ContextVar[_Here | None] = ContextVar("probe", default=None)  # set only while a part is traced


def spare_threads(devices: int) -> None:
    """Let callbacks finish on an emulated mesh; before JAX starts.

    A CPU device's program holds a thread while it is in a callback, whose tensor another thread of the same pool has to
    copy. JAX 0.10 makes the pool as large as the number of devices, and all of them wait for ever (jax-ml/jax #24255).
    """
    asked = os.environ.get("PJRT_NPROC", "")
    threads = max(int(asked) if asked.isdigit() else os.cpu_count() or 1, 2 * devices)
    os.environ["PJRT_NPROC"] = str(threads)


def mark(probe: Probe | None, microbatch: dict, m: jax.Array, layer: jax.Array | int) -> dict:
    """A microbatch that says which it is and for which layer; as it was without a probe. Runs inside the map."""
    if probe is None:
        return microbatch
    spot = (m, layer, jax.lax.axis_index(PIPE), jax.lax.axis_index(DATA))
    return microbatch | {KEY: jnp.stack([jnp.asarray(n, jnp.int32) for n in spot])}


def mark_spec(probe: Probe | None, microbatch: dict) -> dict:
    """The shapes of `mark`."""
    return microbatch if probe is None else microbatch | {KEY: jax.ShapeDtypeStruct((len(Spot._fields),), jnp.int32)}


def call(probe: Probe | None, block: Callable, stream: Tree, microbatch: dict, key: Any) -> Tree:
    """block(stream, microbatch, key), with taps at its input and output, and around those inside it."""
    if probe is None:
        return block(stream, microbatch, key)
    with inside(probe, "layer", microbatch):
        plain = {name: a for name, a in microbatch.items() if name != KEY}
        return tap("output", block(tap("input", stream, 1), plain, key), 1)


@contextmanager
def inside(probe: Probe | None, part: str, microbatch: dict) -> Iterator[None]:
    """While the body is traced, taps are of this part. microbatch: of `mark`."""
    if probe is None:
        yield
        return
    token = _HERE.set(_Here(probe, part, len(microbatch["labels"]), microbatch[KEY]))
    try:
        yield
    finally:
        _HERE.reset(token)


def tap(name: str, tree: Tree, level: int = 2) -> Tree:
    """The identity; under a probe of at least this level its floating tensors and their cotangents are shown."""
    here = _HERE.get()
    if here is None or level > here.probe.level:
        return tree
    return jax.tree_util.tree_map_with_path(lambda path, x: _observed(here, _joined(name, path), x), tree)


def note(probe: Probe, part: str, direction: str, microbatch: dict, tree: Tree) -> Tree:
    """The identity; shows a part's output (or, BACKWARD, the cotangent of it) at once. microbatch: of `mark`."""
    here = _Here(probe, part, len(microbatch["labels"]), microbatch[KEY])
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        _show(here, _joined("output", path), next(here.order), direction, here.spot, x)
    return tree


def _joined(name: str, path: tuple) -> str:
    return ".".join([name, *(str(getattr(p, "key", getattr(p, "name", getattr(p, "idx", p)))) for p in path)])


def _observed(here: _Here, name: str, x: jax.Array) -> jax.Array:
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return x
    show = partial(_show, here, name, next(here.order))

    @jax.custom_vjp
    def identity(x: jax.Array, spot: jax.Array) -> jax.Array:
        show(FORWARD, spot, x)
        return x

    def backward(spot: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, None]:
        show(BACKWARD, spot, cotangent)
        return cotangent, None

    # The spot is an argument, and a residual, since the backward pass is traced where other tracers live.
    identity.defvjp(lambda x, spot: (identity(x, spot), spot), backward)
    return identity(x, here.spot)


def _show(here: _Here, name: str, order: int, direction: str, spot: jax.Array, x: jax.Array) -> None:
    about = Tap(here.part, name, order, direction, x.ndim > 0 and x.shape[0] == here.rows)
    jax.debug.callback(partial(here.probe.sink, about), spot, x, ordered=False)
