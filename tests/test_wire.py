"""What crosses between stages: the dtype both ways, the spec that is checked, and who is joined to whom."""

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from jax.sharding import PartitionSpec

import jaxpp
from jaxpp import wire
from jaxpp.executor import eval_step, train_step
from jaxpp.mesh import PIPE
from jaxpp.wire import Wire, backward_send, forward_send, self_test, spec_of, transfer

WIRES = ("float32", "bfloat16", "float16")
NAMES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}


def link(stages: int, dtype: str = "float32", grad_dtype: str | None = None, wrap: bool = False) -> Wire:
    return Wire(PIPE, stages, dtype, grad_dtype or dtype, wrap)


def on_ranks(body: Any, stages: int, *args: Any) -> Any:
    """Run `body` on every rank of a pipe: arguments and results are stacked over the ranks."""
    mesh, spec = jaxpp.make_mesh(pipe=stages), PartitionSpec(PIPE)

    def rank(*local: Any) -> Any:
        return jax.tree.map(lambda a: a[None], body(*jax.tree.map(lambda a: a[0], local)))

    return jax.jit(jax.shard_map(rank, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))(*args)


def step_of(
    dtype: str, pipeline_dtype: str | None, grad_dtype: str | None, name: str = "1f1b", **options: Any
) -> tuple:
    chunks = 2 if name == "interleaved" else 1
    batch, precision = toy.batch(3), jaxpp.resolve(dtype, pipeline_dtype, grad_dtype)
    net = toy.model(4, pair=options.pop("pair", False))
    return *toy.set_up(net, batch, name=name, chunks=chunks, precision=precision, **options), batch


def dtypes(found: list, step: int) -> set[str]:
    """Dtypes of the floating operands that go forward (+1) or backward (-1) between two stages."""
    ours = [a for a, pairs in found if pairs == ((0, 1) if step > 0 else (1, 0),)]
    return {a.dtype.name for a in ours if jnp.issubdtype(a.dtype, jnp.floating)}


@pytest.mark.parametrize("remat", ["full", "dots"])
@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize(
    ("dtype", "pipeline_dtype", "grad_dtype"),
    [
        *[(dtype, None, None) for dtype in WIRES],
        ("float32", "bfloat16", None),
        ("bfloat16", "float32", None),
        ("bfloat16", None, "float32"),
        ("float32", "float16", "bfloat16"),
    ],
)
def test_the_whole_step_has_one_dtype_on_the_wire_each_way(
    dtype: str, pipeline_dtype: str | None, grad_dtype: str | None, pair: bool, remat: str
) -> None:
    """Also where the stream has a float32 leaf beside one in the compute dtype."""
    forward = pipeline_dtype or dtype
    found = toy.permutes(toy.step_jaxpr(*step_of(dtype, pipeline_dtype, grad_dtype, pair=pair, remat=remat)))
    assert len(found) == (4 if pair else 2)
    assert dtypes(found, +1) == {forward}
    assert dtypes(found, -1) == {grad_dtype or forward}


@pytest.mark.parametrize("name", ["gpipe", "interleaved"])
@pytest.mark.parametrize(("dtype", "pipeline_dtype"), [*[(dtype, None) for dtype in WIRES], ("float32", "bfloat16")])
def test_the_lowered_step_has_one_dtype_on_the_wire(dtype: str, pipeline_dtype: str | None, name: str) -> None:
    pipeline, *args = step_of(dtype, pipeline_dtype, None, name)
    text = jax.jit(partial(train_step, pipeline)).lower(*args).as_text()
    types = re.findall(r"stablehlo\.collective_permute.*?: \(tensor<(?:\d+x)*(\w+)>\) -> tensor<(?:\d+x)*(\w+)>", text)
    assert len(types) == text.count("stablehlo.collective_permute") == (4 if name == "interleaved" else 2)
    assert {NAMES[t] for pair in types for t in pair} == {pipeline_dtype or dtype}


@pytest.mark.parametrize(("dtype", "pipeline_dtype"), [("bfloat16", None), ("float32", "bfloat16")])
def test_evaluation_has_the_forward_wire_alone(dtype: str, pipeline_dtype: str | None) -> None:
    pipeline, *args = step_of(dtype, pipeline_dtype, "float32")
    found = toy.permutes(jax.make_jaxpr(partial(eval_step, pipeline))(*args))
    assert [(a.dtype.name, pairs) for a, pairs in found] == [("bfloat16", ((0, 1),))]


@pytest.mark.parametrize(("name", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2)])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_no_permute_has_a_cycle(name: str, chunks: int, stages: int) -> None:
    batch = toy.batch(3, data=2)
    options = {"name": name, "chunks": chunks, "stages": stages, "data": 2}
    found = [pairs for _, pairs in toy.permutes(toy.step_jaxpr(*toy.set_up(toy.model(8), batch, **options), batch))]
    forward, back = (tuple((i, i + step) for i in range(stages) if 0 <= i + step < stages) for step in (1, -1))
    wrap = [((stages - 1, 0),), ((0, stages - 1),)] if chunks > 1 else []
    assert sorted(found) == (sorted([forward, back, *wrap]) if stages > 1 else [])


@pytest.mark.parametrize(
    ("pipeline_dtype", "arrives", "returns"), [("bfloat16", 0.0, 1.0), ("float32", 2**-10, 1 + 2**-10)]
)
def test_the_wire_alone_decides_what_a_float32_stream_loses(
    pipeline_dtype: str, arrives: float, returns: float
) -> None:
    """Identity blocks: 1 + 2**-10 is no bfloat16, neither as the stream nor as the cotangent that comes back."""

    def loss(head: Any, embed: Any, x: jax.Array, microbatch: dict) -> jax.Array:
        assert x.dtype == jnp.float32
        here = microbatch["labels"] != -100
        return jnp.sum(jnp.where(here, (x[..., 0] - 1) + (x - jax.lax.stop_gradient(x))[..., 0] * 2**-10, 0))

    net, batch = toy.model(2, toy.NARROW, tied=True, block=toy.Identity), toy.batch(2, vocab=toy.NARROW)
    net.embed.table[...] = jnp.full_like(net.embed.table[...], 1 + 2**-10)
    batch["tokens"], batch["labels"] = batch["tokens"] * 0, batch["labels"].at[:].set(-100).at[1, 1, 1].set(7)
    got = toy.run(net, batch, precision=jaxpp.resolve("float32", pipeline_dtype), loss=loss)
    assert got.loss == arrives
    assert got.grads.embed.table[...][0, 0] == returns


@pytest.mark.parametrize("dtype", WIRES)
@pytest.mark.parametrize("wrap", [False, True])
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_a_payload_of_mixed_dtypes_arrives_at_the_next_rank(stages: int, wrap: bool, dtype: str) -> None:
    """Integers are never cast: 257 is no bfloat16. A rank that nobody sends to gets zeros."""
    rank = np.arange(stages)[:, None]
    payload = {"f": np.float32(1 + rank / 8), "b": jnp.asarray(2 + rank / 8, jnp.bfloat16), "i": np.int32(257 + rank)}
    got = on_ranks(lambda p: forward_send(link(stages, dtype, wrap=wrap), spec_of(p), p), stages, payload)
    assert {k: a.dtype.name for k, a in got.items()} == {"f": dtype, "b": dtype, "i": "int32"}
    for name, sent in payload.items():
        want = np.roll(np.asarray(sent, float), 1, axis=0)
        want[: 0 if wrap or stages == 1 else 1] = 0
        np.testing.assert_array_equal(np.asarray(got[name], float), want)


@pytest.mark.parametrize(("dtype", "arrives"), [("bfloat16", 1.0), ("float32", 1 + 2**-10), ("float16", 1 + 2**-10)])
def test_a_float_is_rounded_by_the_wire_alone(dtype: str, arrives: float) -> None:
    sent = np.full((2, 3), 1 + 2**-10, np.float32)
    got = on_ranks(lambda x: forward_send(link(2, dtype), spec_of(x), x).astype(x.dtype), 2, sent)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got[1], np.float32([arrives] * 3))


def test_the_raw_wire_does_not_hide_the_limits_of_float16() -> None:
    """7e4 is infinite and 1e-8 zero in it, both ways: scaling is for whoever chooses float16."""
    sent = np.float32([[7e4, 1e-8, 65504.0], [7e4, 1e-8, 65504.0]])
    forward = on_ranks(lambda x: forward_send(link(2, "float16"), spec_of(x), x), 2, sent)
    back = on_ranks(lambda x: backward_send(link(2, "float16"), spec_of(x), x), 2, sent)
    np.testing.assert_array_equal(np.asarray(forward[1], float), [np.inf, 0, 65504])
    np.testing.assert_array_equal(back[0], [np.inf, 0, 65504])
    assert back.dtype == np.float32


@pytest.mark.parametrize("looped", [False, True])
@pytest.mark.parametrize("dtype", WIRES)
@pytest.mark.parametrize("primal", ["float32", "bfloat16"])
def test_the_cotangent_has_the_dtype_of_the_input(primal: str, dtype: str, looped: bool) -> None:
    """Inside a scan the carry would break where it had not."""
    sent = jnp.asarray([[1 + 2**-7, 3.0], [1 + 2**-7, 3.0]], primal)
    pipe = link(2, dtype, wrap=True)

    def one(x: jax.Array) -> jax.Array:
        return transfer(pipe, x).astype(x.dtype)

    def twice(x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda c, _: (one(c), None), x, None, length=2)[0] if looped else one(one(x))

    def body(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        out, vjp = jax.vjp(twice, x)
        return out, vjp(out)[0]

    out, cotangent = on_ranks(body, 2, sent)
    assert (out.dtype, cotangent.dtype) == (sent.dtype, sent.dtype)
    np.testing.assert_array_equal(np.asarray(out, float), np.asarray(sent, float))
    np.testing.assert_array_equal(np.asarray(cotangent, float), np.asarray(sent, float))


@pytest.mark.parametrize(
    ("dtype", "grad_dtype", "returns"),
    [
        ("float32", "float32", 1 + 2**-10),
        ("float32", "bfloat16", 1.0),
        ("bfloat16", "float32", 1.0),  # what arrives is a bfloat16, and so is its cotangent
        ("float16", "float16", 1 + 2**-10),
    ],
)
def test_transfer_moves_values_forward_and_gradients_back(dtype: str, grad_dtype: str, returns: float) -> None:
    rank = np.arange(3)[:, None]
    sent = {"f": np.float32(1 + rank), "b": jnp.asarray(2 + rank, jnp.bfloat16), "i": np.int32(257 + rank)}

    def body(p: dict) -> tuple[dict, dict]:
        floats = {k: p[k] for k in "fb"}
        out, vjp = jax.vjp(lambda q: transfer(link(3, dtype, grad_dtype), q | {"i": p["i"]}), floats)
        scale = 2.0 ** jax.lax.axis_index(PIPE) * (1 + 2**-10)
        cotangents = {k: jnp.full_like(out[k], scale) for k in "fb"}
        return out, vjp(cotangents | {"i": np.zeros(out["i"].shape, jax.dtypes.float0)})[0]

    out, grads = on_ranks(body, 3, sent)
    assert {k: a.dtype.name for k, a in out.items()} == {"f": dtype, "b": dtype, "i": "int32"}
    assert {k: a.dtype.name for k, a in grads.items()} == {"f": "float32", "b": "bfloat16"}
    assert np.asarray(out["f"], float)[:, 0].tolist() == [0, 1, 2]
    assert np.asarray(out["b"], float)[:, 0].tolist() == [0, 2, 3]
    assert np.asarray(out["i"])[:, 0].tolist() == [0, 257, 258]
    assert np.asarray(grads["f"], float)[:, 0].tolist() == [2 * returns, 4 * returns, 0]
    assert np.asarray(grads["b"], float)[:, 0].tolist() == [2, 4, 0]


@pytest.mark.parametrize("produced", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("grad_dtype", ["float32", "bfloat16"])
def test_a_cotangent_of_any_dtype_goes_out_in_the_wires_and_arrives_in_the_payloads(
    produced: str, grad_dtype: str
) -> None:
    """Whatever dtype the downstream stage's backward produced."""
    spec = {"x": jax.ShapeDtypeStruct((5,), jnp.bfloat16), "i": jax.ShapeDtypeStruct((2,), jnp.int32)}

    def send(g: jax.Array) -> dict:
        return backward_send(link(2, "float16", grad_dtype), spec, {"x": g, "i": np.zeros(2, jax.dtypes.float0)})

    jaxpr = jax.make_jaxpr(lambda g: on_ranks(lambda g: send(g)["x"], 2, g))(jnp.zeros((2, 5), produced))
    assert [a.dtype.name for a, _ in toy.permutes(jaxpr)] == [grad_dtype]
    assert jaxpr.out_avals[0].dtype == jnp.bfloat16


def test_transfer_keeps_nothing_of_the_payload() -> None:
    kept = []

    def body(x: jax.Array) -> jax.Array:
        out, vjp = jax.vjp(partial(transfer, link(2, "bfloat16")), x)
        kept.extend(jnp.shape(leaf) for leaf in jax.tree.leaves(vjp))
        return out

    on_ranks(body, 2, np.zeros((2, 1024), np.float32))
    assert [shape for shape in kept if np.prod(shape) > 1] == []


def _f32(*shape: int) -> jax.Array:
    return jnp.zeros(shape, jnp.float32)


@pytest.mark.parametrize(
    ("payload", "words"),
    [
        ({"x": _f32(2, 3)}, ["2 tensors", "got 1"]),
        ({"x": _f32(2, 3), "y": _f32(4), "z": _f32(1)}, ["2 tensors", "got 3"]),
        ({"x": _f32(2, 3), "z": _f32(4)}, ["'y'", "'z'"]),
        ({"x": _f32(2, 3), "y": _f32(5)}, ["float32[4] as tensor 1", "float32[5]"]),
        ({"x": _f32(2, 3), "y": _f32(4).astype(jnp.bfloat16)}, ["float32[4] as tensor 1", "bfloat16[4]"]),
        ({"x": jnp.zeros((2, 3), jnp.int32), "y": _f32(4)}, ["float32[2, 3] as tensor 0", "int32[2, 3]"]),
    ],
)
def test_what_differs_from_the_spec_is_refused_before_anything_is_sent(
    monkeypatch: Any, payload: dict, words: list[str]
) -> None:
    spec = {"x": jax.ShapeDtypeStruct((2, 3), jnp.float32), "y": jax.ShapeDtypeStruct((4,), jnp.float32)}
    sent = []
    monkeypatch.setattr(wire, "_permute", lambda *args: sent.append(args))
    send = lambda p: on_ranks(lambda q: forward_send(link(2), spec, q, "three"), 2, p)
    with pytest.raises(ValueError, match="stage three must send") as caught:
        jax.make_jaxpr(send)(jax.tree.map(lambda a: jnp.stack([a, a]), payload))
    assert [word for word in words if word not in str(caught.value)] == []
    assert "\n" not in str(caught.value)
    assert sent == []


@pytest.mark.parametrize(
    ("cotangents", "words"),
    [
        ({"x": _f32(2, 4)}, ["float32[2, 3]", "float32[2, 4]"]),
        pytest.param({"y": _f32(2, 3)}, ["'x'", "'y'"]),
        pytest.param({"x": _f32(2, 3), "y": _f32(1)}, ["1 tensors", "got 2"]),
    ],
)
def test_cotangents_that_differ_from_the_spec_are_refused_by_stage(cotangents: dict, words: list[str]) -> None:
    spec = {"x": jax.ShapeDtypeStruct((2, 3), jnp.float32)}
    with pytest.raises(ValueError, match="stage seven must send") as caught:
        jax.make_jaxpr(partial(backward_send, link(1), spec, stage="seven"))(cotangents)
    assert [word for word in words if word not in str(caught.value)] == []


@pytest.mark.parametrize("wrap", [False, True])
@pytest.mark.parametrize(("stages", "data"), [(1, 1), (2, 1), (4, 1), (2, 2), (4, 2), (1, 4)])
def test_self_test_passes_on_a_sound_mesh(stages: int, data: int, wrap: bool) -> None:
    self_test(jaxpp.make_mesh(pipe=stages, data=data), link(stages, wrap=wrap))


def _zeros(whole: Any, pipe: Wire, a: jax.Array, step: int) -> jax.Array:
    return a * 0


def _stays(whole: Any, pipe: Wire, a: jax.Array, step: int) -> jax.Array:
    return a


def _no_way_back(whole: Any, pipe: Wire, a: jax.Array, step: int) -> jax.Array:
    return whole(pipe, a, +1)


def _unwrapped(whole: Any, pipe: Wire, a: jax.Array, step: int) -> jax.Array:
    return whole(link(pipe.stages), a, step)


def _one_rank(whole: Any, pipe: Wire, a: jax.Array, step: int) -> jax.Array:
    """Only the last rank of the last replica receives a wrong number."""
    here = (jax.lax.axis_index(PIPE) == pipe.stages - 1) & (jax.lax.axis_index("data") == 1)
    return whole(pipe, a, step) + here.astype(a.dtype)


@pytest.mark.parametrize("fault", [_zeros, _stays, _no_way_back, _unwrapped, _one_rank])
def test_self_test_names_the_device_that_received_the_wrong_thing(monkeypatch: Any, fault: Any) -> None:
    monkeypatch.setattr(wire, "_permute", partial(fault, wire._permute))
    with pytest.raises(RuntimeError, match=r"device \d of the mesh received \d+, expected \d+"):
        self_test(jaxpp.make_mesh(pipe=4, data=2), link(4, wrap=True))
