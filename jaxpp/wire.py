"""What crosses between stages: one agreed dtype, both ways.

Forward, floating tensors are cast to the wire's dtype just before the send and arrive in it. Backward, gradients are
cast to the wire's gradient dtype just before the send and restored on arrival to the dtype that the forward tensor had
before its cast. Integers pass as they are and have no gradient. The executor calls the two halves, `forward_send` and
`backward_send`; `transfer` is their composition for code that differentiates through a send.

All three run inside `jax.shard_map`, manual over the pipe axis. Payloads are pytrees; legend: S stages.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Tree = Any


@dataclass(frozen=True)
class Wire:
    """One pipe's transfers: who is joined to whom, and the dtype that crosses.

    axis: mesh axis of the stages. stages: S. dtype: of floating payloads, forward. grad_dtype: backward.
    wrap: the last rank also sends to the first, as schedules with several chunks need.
    """

    axis: str
    stages: int
    dtype: str
    grad_dtype: str
    wrap: bool = False


def spec_of(payload: Tree) -> Tree:
    """The wire spec of a payload: its shapes and dtypes before the cast, as `jax.ShapeDtypeStruct`."""
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(jnp.shape(a), jnp.result_type(a)), payload)


def on_wire(wire: Wire, spec: Tree) -> Tree:
    """The spec of what arrives forward: floating tensors in the wire's dtype."""
    floats = lambda a: jnp.issubdtype(a.dtype, jnp.inexact)
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, wire.dtype if floats(a) else a.dtype), spec)


def check(spec: Tree, payload: Tree, stage: str, dtypes: bool = True) -> None:
    """Compare what a stage hands to a transfer with the declared spec: count, structure, shapes and, if asked, dtypes.

    Raises ValueError naming the stage, the expected and the got, before anything is sent.
    """
    want, got = jax.tree.leaves(spec), jax.tree.leaves(spec_of(payload))
    if len(want) != len(got):
        raise ValueError(f"stage {stage} must send {len(want)} tensors, got {len(got)}")
    if jax.tree.structure(spec) != jax.tree.structure(payload):
        raise ValueError(f"stage {stage} must send {jax.tree.structure(spec)}, got {jax.tree.structure(payload)}")
    for i, (w, g) in enumerate(zip(want, got, strict=True)):
        if w.shape != g.shape or (dtypes and w.dtype != g.dtype):
            expected, found = (f"{a.dtype}{list(a.shape)}" for a in (w, g))
            raise ValueError(f"stage {stage} must send {expected} as tensor {i}, got {found}")


@jax.named_scope("forward_wire")
def forward_send(wire: Wire, spec: Tree, payload: Tree, stage: str = "forward") -> Tree:
    """Send a payload to the next rank.

    Args: spec, what `payload` must look like; stage, its name in errors.
    Returns: what the previous rank sent, floating tensors in `wire.dtype`; zeros on a rank that nobody sends to.
    Raises ValueError where payload and spec differ.
    """
    check(spec, payload, stage)
    return jax.tree.map(lambda a: _permute(wire, _cast(a, wire.dtype), +1), payload)


@jax.named_scope("backward_wire")
def backward_send(wire: Wire, spec: Tree, cotangents: Tree, stage: str = "backward") -> Tree:
    """Send the cotangents of a received payload to the previous rank, which sent it.

    Args: spec, of the forward payload before its cast; cotangents, a tree like it, floating in any dtype, float0 for
    integers.
    Returns: the cotangents that the next rank sent, restored to the spec's dtypes.
    Raises ValueError where counts or shapes differ from the spec's.
    """
    check(spec, cotangents, stage, dtypes=False)

    def send(a: jax.ShapeDtypeStruct, g: Any) -> Any:
        if not jnp.issubdtype(a.dtype, jnp.inexact):
            return np.zeros(a.shape, jax.dtypes.float0)
        return _permute(wire, _cast(g, wire.grad_dtype), -1).astype(a.dtype)

    return jax.tree.map(send, spec, cotangents)


def transfer(wire: Wire, payload: Tree) -> Tree:
    """`forward_send` whose gradient is `backward_send`: what arrives is in the wire's dtype, and the gradient that
    comes back has the dtypes of `payload`. Nothing is kept for the backward pass but the shapes and dtypes.
    """
    spec = spec_of(payload)

    @jax.custom_vjp
    def send(tree: Tree) -> Tree:
        return forward_send(wire, spec, tree)

    send.defvjp(lambda tree: (send(tree), None), lambda _, cotangents: (backward_send(wire, spec, cotangents),))
    return send(payload)


def _cast(a: jax.Array, dtype: str) -> jax.Array:
    return a.astype(dtype) if jnp.issubdtype(jnp.result_type(a), jnp.inexact) else a


def _permute(wire: Wire, a: jax.Array, step: int) -> jax.Array:
    """Move `a` by one rank. The chain is open: a closed ring beside a data axis is several cycles in one permute,
    which an XLA pass for GPUs has turned into zeros (openxla/xla #45222). The wrap is a permute of its own.
    """
    if wire.stages == 1:
        return a
    chain = [(i, i + step) for i in range(wire.stages) if 0 <= i + step < wire.stages]
    moved = jax.lax.ppermute(a, wire.axis, chain)
    if wire.wrap:
        ends = (wire.stages - 1, 0) if step > 0 else (0, wire.stages - 1)
        # A rank that nobody sends to gets zeros, so the sum of the two is their union.
        moved = moved + jax.lax.ppermute(a, wire.axis, [ends])
    return moved


def self_test(mesh: jax.sharding.Mesh, wire: Wire) -> None:
    """Send each rank's index both ways on the real mesh and check what arrives.

    Raises RuntimeError naming the rank, the expected and the got, where the machine's transfers are at fault.
    """
    spec = jax.ShapeDtypeStruct((1,), jnp.dtype("int32"))
    names = tuple(mesh.axis_names)
    everywhere = jax.sharding.PartitionSpec(names)

    def both(a: jax.Array) -> tuple[jax.Array, jax.Array]:
        return forward_send(wire, spec, a), _permute(wire, a, -1)

    devices = mesh.devices.size
    index = np.arange(1, devices + 1, dtype=np.int32)
    send = jax.jit(jax.shard_map(both, mesh=mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False))
    index = jax.device_put(index, jax.sharding.NamedSharding(mesh, everywhere))
    shape = mesh.devices.shape
    axis = names.index(wire.axis)
    sent = np.arange(1, devices + 1).reshape(shape)
    for got, step in zip(send(index), (1, -1), strict=True):
        want = np.roll(sent, step, axis)
        if not wire.wrap and wire.stages > 1:
            edge = [slice(None)] * len(shape)
            edge[axis] = slice(0, 1) if step > 0 else slice(-1, None)
            want[tuple(edge)] = 0
        for shard in got.addressable_shards:
            at = shard.index[0].start or 0
            value, expected = int(np.asarray(shard.data)[0]), int(want.reshape(-1)[at])
            if value != expected:
                raise RuntimeError(
                    f"wire self-test: device {at} of the mesh received {value}, expected {expected}: transfers between"
                    f" these devices are at fault (try other NCCL settings or another JAX)"
                )
