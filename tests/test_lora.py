"""Adapters: their gradients against the unpipelined oracle's in every layout, a base that rests, the wire unchanged.

Legend: B microbatch size, T sequence; M microbatches, R rank.
"""

import dataclasses
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
import toy
from flax import nnx

import jaxpp
import models
from jaxpp import executor, partition, plan, train
from jaxpp.config import Config, sizes
from models import flops
from models.lora import Adapter, Dims, LoraParam, LoraSpec

SMALL = {"vocab_size": 61, "positions": 16, "layers": 4, "dim": 24, "std": 0.2}
GROUPED = SMALL | {"heads": 4, "kv_heads": 2, "hidden": 40, "head_dim": 8}
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
CONFIGS: dict[str, models.ModelConfig] = {
    "gpt2": models.GPT2Config(**SMALL, heads=4, lora=LoraSpec(4, 6.0, 0.0, ("c_attn", "attn.c_proj", "c_fc"))),
    "gpt2 mlp": models.GPT2Config(**SMALL, heads=4, lora=LoraSpec(3, 3.0, 0.0, ("mlp.c_proj",))),
    "llama3": models.Llama3Config(
        **GROUPED, lora=LoraSpec(4, 8.0, 0.0, (*ATTENTION, "gate_proj", "up_proj", "down_proj"))
    ),
    "qwen3": models.Qwen3Config(**GROUPED, lora=LoraSpec(2, 4.0, 0.0, ("v_proj", "up_proj"))),
    "mixtral": models.MixtralConfig(
        **GROUPED, experts=4, balance_loss=0.05, z_loss=0.01, lora=LoraSpec(4, 8.0, 0.0, ATTENTION)
    ),
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "1": {"stages": 1},
    "PP full": {"stages": 2, "remat": "full"},
    "VPP none": {"stages": 2, "chunks": 2, "name": "interleaved", "remat": "none"},
    "uneven": {"stages": 3, "remat": "dots"},
    "PP TP": {"stages": 2, "tensor": 2},
    "PP SP DP": {"stages": 2, "tensor": 2, "sequence_parallel": True, "data": 2},
    "PP CP": {"stages": 2, "context": 2},
    "PP ZeRO 1": {"stages": 2, "data": 2, "zero_stage": 1},
    "PP ZeRO 3": {"stages": 2, "data": 2, "zero_stage": 3, "remat": "full"},
    "PP EP TP": {"stages": 2, "expert": 2, "tensor": 2},
}
CASES = [
    *(("llama3", layout) for layout in LAYOUTS if "EP" not in layout),
    *(("mixtral", layout) for layout in ("VPP none", "PP EP TP", "PP ZeRO 3")),
    *(("gpt2", layout) for layout in ("uneven", "PP TP", "PP SP DP", "PP ZeRO 3")),
    ("gpt2 mlp", "PP full"),
    ("qwen3", "PP CP"),
    ("qwen3", "PP TP"),
]
M, TIGHT = 3, 5e-6


@cache
def make(name: str) -> Any:
    """A model whose lora_b are drawn too: with zeros half of the gradients are zero, and faults hide."""
    model = jax.jit(lambda: models.build(jax.random.key(0), CONFIGS[name]))()
    keys = iter(jax.random.split(jax.random.key(1), 1000))
    draw = lambda v: jax.tree.map(lambda a: jax.random.normal(next(keys), a.shape) * 0.2, v)
    is_variable = lambda a: isinstance(a, nnx.Variable)
    return jax.tree.map(lambda v: draw(v) if isinstance(v, LoraParam) else v, model, is_leaf=is_variable)


def without(name: str) -> Any:
    """The same model without adapters."""
    config = dataclasses.replace(CONFIGS[name], lora=None)
    return jax.jit(lambda: models.build(jax.random.key(0), config))()


@cache
def batch(rows: int) -> dict[str, jax.Array]:
    return toy.batch(M, rows, vocab=SMALL["vocab_size"])


def rows_of(layout: dict) -> int:
    return layout.get("data", 1) * layout.get("expert", 1)


@cache
def oracle(name: str, rows: int) -> reference.Reference:
    return reference.value_and_grad(make(name), batch(rows), rows, loss=models.training_loss(CONFIGS[name]))


@pytest.fixture(autouse=True)
def small_leaves_are_split_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition, "SHARD_FROM", 64)


def set_up(case: str, net: Any = None, arrays: Any = None, **layout: Any) -> tuple[Any, Any, Any, dict]:
    """A pipeline, the two halves of the parameters, the batch."""
    arrays = batch(rows_of(layout)) if arrays is None else arrays
    loss = models.training_loss(CONFIGS[case])
    pipeline, params = toy.set_up(make(case) if net is None else net, arrays, loss=loss, **layout)
    return pipeline, *partition.split(params, LoraParam), arrays


def step_of(pipeline: Any) -> Any:
    def step(trained: Any, frozen: Any, arrays: dict, key: Any = None) -> executor.Result:
        return executor.train_step(pipeline, trained, arrays, key, frozen=frozen)

    return step


def step(pipeline: Any, *args: Any) -> executor.Result:
    return jax.jit(step_of(pipeline), compiler_options=toy.EXACT)(*args)


def check_gradients(got: executor.Result, want: reference.Reference) -> None:
    assert got.loss == pytest.approx(float(want.loss), rel=TIGHT)
    wanted, _ = partition.split(want.grads, LoraParam)
    errors = reference.leaf_errors(jaxpp.unstack(jax.device_get(got.grads)), wanted)
    assert errors and max(errors.values()) <= TIGHT, errors
    assert min(reference.norm([a]) for a in jax.tree.leaves(wanted)) > 1e-4


QUICK = {("llama3", name) for name in ("VPP none", "uneven", "PP SP DP", "PP ZeRO 3")}
QUICK |= {("mixtral", "PP EP TP"), ("gpt2", "PP TP"), ("gpt2 mlp", "PP full"), ("qwen3", "PP CP")}
ALL = [pytest.param(*case, marks=[pytest.mark.slow] * (case not in QUICK)) for case in CASES]


@pytest.mark.parametrize(("name", "layout"), ALL)
def test_gradients_of_adapters_equal_the_oracles(name: str, layout: str) -> None:
    check_gradients(step(*set_up(name, **LAYOUTS[layout])), oracle(name, rows_of(LAYOUTS[layout])))


def test_gradients_of_packed_documents() -> None:
    arrays = dict(batch(1))
    segments = np.zeros(arrays["tokens"].shape, np.int32)
    segments[..., 3:] = 1
    arrays["segments"] = jnp.asarray(segments)
    arrays["positions"] = jnp.broadcast_to(jnp.asarray([0, 1, 2, 0, 1, 2, 3, 4], jnp.int32), segments.shape)
    got = step(*set_up("llama3", arrays=arrays, stages=2, context=2))
    check_gradients(got, reference.value_and_grad(make("llama3"), arrays))


@pytest.mark.parametrize("options", [{"stages": 1}, {"stages": 2, "chunks": 2, "name": "interleaved"}, {"stages": 3}])
@pytest.mark.parametrize("name", [pytest.param("gpt2", marks=pytest.mark.slow), "llama3"])
def test_dropout_of_adapters_knows_no_layout(name: str, options: dict) -> None:
    """It drops, by keys that are those of the unpipelined model; the model's own dropout is 0."""
    given = CONFIGS[name]
    config = dataclasses.replace(given, lora=dataclasses.replace(given.lora, dropout=0.4))
    key, model = jax.random.key(7), jax.jit(lambda: models.build(jax.random.key(0), config))()
    values = jax.tree.leaves(make(name))
    model = jax.tree.unflatten(jax.tree.structure(model), values)
    want = reference.value_and_grad(model, batch(1), key=key)
    check_gradients(step(*set_up(name, model, **options), key), want)
    leaves = [jax.tree.leaves(partition.split(a.grads, LoraParam)[0]) for a in (want, oracle(name, 1))]
    assert reference.error(*leaves) > 0.01


def test_an_adapter_drops_its_share_and_scales() -> None:
    spec = LoraSpec(64, 16.0, 0.25)
    adapter = Adapter(jax.random.key(0), spec, Dims((4, 16), (64,), (None, None), (None,)))
    a = adapter.lora_a[...]
    assert a.shape == (4, 16, 64) and float(jnp.abs(a).max()) == pytest.approx(1 / 8, rel=1e-2)
    assert float(a.std()) == pytest.approx(1 / 8 / 3**0.5, rel=0.05)  # uniform, as PEFT's
    assert adapter.lora_b.shape == (64, 64) and not adapter.lora_b[...].any()
    adapter.lora_a, adapter.lora_b = LoraParam(jnp.eye(64).reshape(4, 16, 64)), LoraParam(jnp.eye(64))
    x = jnp.ones((2, 500, 4, 16))
    np.testing.assert_array_equal(adapter(x, None), np.full((2, 500, 64), 16 / 64))
    y = np.asarray(adapter(x, jax.random.key(1)))
    assert set(np.unique(y)) == {0.0, np.float32(16 / 64 / 0.75)}
    assert (y == 0).mean() == pytest.approx(0.25, abs=0.01)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_base_is_drawn_as_without_adapters(name: str) -> None:
    model = jax.jit(lambda: models.build(jax.random.key(0), CONFIGS[name]))()
    pairs = zip(jax.tree.leaves(partition.split(model, LoraParam)[1]), jax.tree.leaves(without(name)), strict=True)
    assert all(np.array_equal(a, b) for a, b in pairs)


def test_halves_are_joined_again() -> None:
    model = make("mixtral")
    trained, frozen = partition.split(model, LoraParam)
    joined = partition.join(trained, frozen)
    assert jax.tree.structure(joined) == jax.tree.structure(model)
    assert all(a is b for a, b in zip(jax.tree.leaves(joined), jax.tree.leaves(model), strict=True))
    assert len(jax.tree.leaves(trained)) == 4 * 2 * 4
    assert partition.split(model, None) == (model, None) and partition.join(model, None) is model


def carries(jaxpr: Any) -> set[tuple[int, ...]]:
    """Shapes of all that loops carry."""
    found = set()
    for eqn in toy.equations(jaxpr):
        if eqn.primitive.name == "scan":
            first, count = eqn.params["num_consts"], eqn.params["num_carry"]
            found |= {v.aval.shape for v in eqn.invars[first : first + count]}
    return found


@pytest.mark.parametrize("layout", ["PP full", "VPP none", "uneven"])
def test_the_wire_is_as_without_adapters_and_no_gradient_is_as_large_as_the_base(layout: str) -> None:
    options = LAYOUTS[layout]
    pipeline, trained, frozen, arrays = set_up("llama3", **options)
    jaxpr = jax.make_jaxpr(step_of(pipeline))(trained, frozen, arrays)
    plain_pipeline, params = toy.set_up(without("llama3"), arrays, **options)
    plain = toy.step_jaxpr(plain_pipeline, params, arrays)
    wires = lambda jaxpr: sorted((str(aval), perm) for aval, perm in toy.permutes(jaxpr))
    assert wires(jaxpr) == wires(plain) and wires(plain)
    base = {a.shape[1:] for block in params.blocks for a in jax.tree.leaves(block)}
    base |= {a.shape for a in jax.tree.leaves(params.outer)}
    assert base <= carries(plain)
    assert not base & carries(jaxpr)
    adapters = {a.shape[1:] for block in trained.blocks for a in jax.tree.leaves(block)}
    assert adapters <= carries(jaxpr)


@pytest.mark.parametrize("name", ["gpt2", "llama3", "mixtral"])
def test_the_ring_holds_no_weights(name: str) -> None:
    """With the default, dots: all that it keeps of a layer grows with the sequence, which a weight's copy would not."""

    def kept(length: int) -> list[int]:
        arrays = jax.tree.map(lambda a: jnp.tile(a, length // toy.T), batch(1))
        pipeline, trained, frozen, _ = set_up(name, arrays=arrays, stages=2)
        ring, _ = executor.workspace_spec(pipeline, trained, arrays, None, frozen)
        return [int(np.prod(a.shape[1:])) for a in jax.tree.leaves(ring)]

    router = 9 if name == "mixtral" else None  # its sums over layers are part of the stream
    assert all(a < b for a, b in zip(kept(8), kept(16), strict=True) if a != router)


def described(name: str, layout: dict, **more: Any) -> train.Run:
    """A run with AdamW, which also decays weights."""
    words = {"stages": "pipeline", "chunks": "virtual_pipeline", "tensor": "tensor", "data": "data", "expert": "expert"}
    chosen = {f"{words[k]}_parallel": v for k, v in layout.items() if k in words}
    chosen |= {k: v for k, v in layout.items() if k in ("zero_stage", "remat")}
    total = M * rows_of(layout) * toy.B * toy.T
    steady = {"dtype": "float32", "warmup_iterations": 0, "lr_decay_style": "constant", "learning_rate": 1e-2}
    config = Config(**steady | chosen | more, batch_size=toy.B, sequence_length=toy.T, total_batch_size=total)
    size = sizes(config, SMALL["layers"], SMALL["positions"])
    mesh = jaxpp.make_mesh(**size.mesh)
    loss = models.training_loss(CONFIGS[name])
    return train.make_run(config, size, mesh, SMALL["layers"], loss=loss, trained=LoraParam)


@pytest.mark.parametrize(
    ("name", "layout", "dtype"),
    [
        ("llama3", "PP ZeRO 3", "float32"),
        ("gpt2", "PP ZeRO 1", "float32"),
        pytest.param("mixtral", "PP EP TP", "float32", marks=pytest.mark.slow),
        ("llama3", "VPP none", "bfloat16"),
        pytest.param("gpt2", "PP full", "float16", marks=pytest.mark.slow),
    ],
)
def test_steps_of_adamw_leave_the_base_as_it_is(name: str, layout: str, dtype: str) -> None:
    """Bit by bit; adapters are where the unpipelined model's would be; the optimizer keeps nothing for the base."""
    run, model, rows = described(name, LAYOUTS[layout], dtype=dtype), make(name), rows_of(LAYOUTS[layout])
    state, step = train.initial_state(run, lambda key: model), train.make_step(run)
    assert {a.dtype.name for a in jax.tree.leaves(state.base)} == {dtype}
    assert {a.dtype.name for a in jax.tree.leaves(state.params)} == {"float32"}
    _, frozen = partition.split(model, LoraParam)
    before = jax.device_get(jaxpp.unstack(state.base))
    assert all(
        np.array_equal(a, b.astype(dtype))
        for a, b in zip(jax.tree.leaves(before.blocks), jax.tree.leaves(list(frozen.blocks)), strict=True)
    )
    trained, _ = partition.split(jaxpp.Model(model.embed, list(model.blocks), model.head), LoraParam)
    kept = run.optimizer.init(trained)
    for _ in range(3):
        state, metrics = step(state, train.put_batch(run, jax.device_get(batch(rows))))
        if dtype != "float32":
            continue
        whole = partition.join(trained, jaxpp.Model(frozen.embed, list(frozen.blocks), frozen.head))
        found = reference.value_and_grad(whole, batch(rows), rows, loss=models.training_loss(CONFIGS[name]))
        grads, _ = partition.split(found.grads, LoraParam)
        norm = reference.norm(grads)
        assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
        grads = jax.tree.map(lambda g, norm=norm: g * min(1.0, 1.0 / norm), grads)
        updates, kept = run.optimizer.update(grads, kept, trained)
        trained = optax.apply_updates(trained, updates)
    after = jax.device_get(jaxpp.unstack(state.base))
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True))
    got = jaxpp.unstack(jax.device_get(state.params))
    if dtype == "float32":
        assert reference.error(got, jax.device_get(trained)) <= 1e-5
    moments = [a for a in jax.tree.leaves(state.opt_state) if a.ndim]
    assert len(moments) == 2 * len(jax.tree.leaves(state.params))
    assert {a.shape for a in moments} <= {a.shape for a in jax.tree.leaves(state.params)}


@pytest.mark.parametrize(("layout", "dtype"), [("PP full", "bfloat16"), ("PP ZeRO 3", "float32")])
def test_the_plan_counts_a_base_that_rests(layout: str, dtype: str) -> None:
    run = described("llama3", LAYOUTS[layout], dtype=dtype)
    build = lambda key: models.build(key, CONFIGS["llama3"])
    found, state = plan.make_plan(run, build), train.initial_state(run, build)
    share = lambda tree: max(
        sum(s.data.nbytes for a in jax.tree.leaves(tree) for s in a.addressable_shards if s.device == d)
        for d in jax.devices()[:4]
    )
    per_device = found["bytes_per_device"]
    assert per_device["parameters"] == share((state.params, state.base))
    assert per_device["optimizer"] == share([a for a in jax.tree.leaves(state.opt_state) if a.ndim])
    adapters = sum(a.size for a in jax.tree.leaves(partition.split(make("llama3"), LoraParam)[0]))
    assert found["trained_parameters"] == adapters
    assert found["parameters"] == sum(a.size for a in jax.tree.leaves(make("llama3")))
    assert per_device["gradients"] == 4 * adapters // 2  # of two stages
    trained_alone = adapters // 2 * jnp.dtype(dtype).itemsize
    assert (per_device["compute_weights"] > 4 * trained_alone) == (layout == "PP ZeRO 3")
    assert ", of which" in plan.as_text(run, found, 80, False)


def test_flops_without_gradients_of_the_base() -> None:
    config = models.PRESETS["llama3-tiny"]
    adapted = dataclasses.replace(config, lora=LoraSpec(8, 8.0, 0.0, ("q_proj", "down_proj")))
    base = flops.active_parameters(config)
    adapters = config.layers * 8 * (128 + 128 + 384 + 128)
    assert flops.active_parameters(adapted) == base + adapters
    more = flops.per_token(config, 64) - 6 * base
    assert flops.per_token(adapted, 64) == 4 * base + 6 * adapters + more
