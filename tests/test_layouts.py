"""Every dimension at once: tensor, sequence, context, expert and data parallelism, ZeRO and the pipeline together,
against the unpipelined oracle.

Legend: B microbatch size, T sequence, V vocabulary; M microbatches.
"""

import dataclasses
import re
from functools import cache, partial
from itertools import combinations
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
import toy
from compiled import collectives

import jaxpp
import models
from jaxpp import executor, partition, train
from jaxpp.config import Config
from jaxpp.config import sizes as sizes_of

SMALL = {"vocab_size": 61, "positions": 16, "layers": 4, "dim": 24}  # 61 divides by nothing: the vocabulary is padded
GROUPED = SMALL | {"heads": 4, "kv_heads": 2, "hidden": 40, "head_dim": 8}
CONFIGS: dict[str, models.ModelConfig] = {
    "gpt2": models.GPT2Config(**SMALL, heads=4),
    "llama3": models.Llama3Config(**GROUPED),
    "mixtral": models.MixtralConfig(**GROUPED, experts=4, balance_loss=0.05, z_loss=0.01),
}
FEATURES = {
    "PP": {"stages": 2},
    "VPP": {"stages": 2, "chunks": 2, "name": "interleaved"},
    "TP": {"tensor": 2},
    "SP": {"tensor": 2, "sequence_parallel": True},
    "CP": {"context": 2},
    "DP": {"data": 2},
    "ZeRO 1": {"data": 2, "zero_stage": 1},
    "ZeRO 2": {"data": 2, "zero_stage": 2},
    "ZeRO 3": {"data": 2, "zero_stage": 3},
    "ZeRO 3 by layer": {"data": 2, "zero_stage": 3, "zero_gather": "layer"},
    "EP": {"expert": 2},
}
MIXTRAL = [
    ("PP", "TP", "EP"),
    ("VPP", "SP", "EP"),
    ("VPP", "CP", "EP"),
    ("PP", "DP", "EP"),
    ("VPP", "ZeRO 1", "EP"),
    ("PP", "ZeRO 2", "EP"),
    ("TP", "ZeRO 3", "EP"),
    ("SP", "CP", "EP"),
]
OTHERS = [
    ("gpt2", ("PP", "TP", "ZeRO 1")),
    ("gpt2", ("VPP", "SP", "ZeRO 2")),
    ("gpt2", ("PP", "CP", "ZeRO 3")),
    ("gpt2", ("SP", "CP", "DP")),
    ("gpt2", ("VPP", "TP", "CP")),
    ("llama3", ("PP", "SP", "ZeRO 3")),
    ("llama3", ("VPP", "TP", "DP")),
    ("llama3", ("TP", "CP", "ZeRO 2")),
    ("llama3", ("VPP", "CP", "ZeRO 1")),
    ("llama3", ("PP", "SP", "CP")),
    ("llama3", ("VPP", "ZeRO 3")),
    ("llama3", ("PP", "SP", "ZeRO 1")),
    ("llama3", ("PP", "DP")),
    ("llama3", ("VPP", "ZeRO 3 by layer")),
    ("gpt2", ("PP", "CP", "ZeRO 3 by layer")),
    ("mixtral", ("SP", "ZeRO 3 by layer", "EP")),
    ("llama3", ("PP", "TP", "ZeRO 3 by layer")),
]
CASES = [("mixtral", case) for case in MIXTRAL] + OTHERS
M, TIGHT = 3, 5e-6  # the bound is 1e-5; sums over ranks come in another order than the oracle's


def ids(case: tuple) -> str:
    return f"{case[0]}-{'-'.join(case[1])}".replace(" ", "")


def options_of(features: tuple[str, ...]) -> dict[str, Any]:
    return {"stages": 1} | {name: value for feature in features for name, value in FEATURES[feature].items()}


def replicas(options: dict) -> int:
    return options.get("data", 1) * options.get("expert", 1)


@cache
def make(name: str) -> Any:
    return jax.jit(lambda: models.build(jax.random.key(0), dataclasses.replace(CONFIGS[name], std=0.2)))()


@cache
def batch(rows: int) -> dict[str, jax.Array]:
    return toy.batch(M, rows, vocab=SMALL["vocab_size"])


def loss_of(name: str) -> Any:
    return models.training_loss(CONFIGS[name])


@cache
def oracle(name: str, rows: int, compute: str = "float32") -> reference.Reference:
    return reference.value_and_grad(make(name), batch(rows), rows, loss=loss_of(name), compute=compute)


@pytest.fixture(autouse=True)
def small_leaves_are_split_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition, "SHARD_FROM", 64)


def test_every_pair_is_covered() -> None:
    covered = {frozenset(pair) for name, case in CASES if (name, case) not in TWICE for pair in combinations(case, 2)}
    shares = {feature for feature in FEATURES if "data" in FEATURES[feature]}
    same = [{"PP", "VPP"}, {"TP", "SP"}, shares]  # of one kind: one at a time
    for pair in map(frozenset, combinations(FEATURES, 2)):
        assert pair in covered or any(pair <= kind for kind in same), pair


def run(name: str, features: tuple[str, ...], **more: Any) -> tuple[Any, str]:
    """One step, gradients layer by layer, and the compiled text."""
    options = options_of(features) | more
    arrays = batch(replicas(options))
    pipeline, params = toy.set_up(make(name), arrays, loss=loss_of(name), **options)
    step = jax.jit(partial(executor.train_step, pipeline), compiler_options=toy.EXACT).lower(params, arrays).compile()
    result = step(params, arrays)
    return jax.device_get(result._replace(grads=jaxpp.unstack(jax.device_get(result.grads)))), step.as_text()


# Each of their pairs is in others too, see `test_every_pair_is_covered`.
TWICE = [("mixtral", ("SP", "CP", "EP")), ("mixtral", ("PP", "TP", "EP")), ("gpt2", ("VPP", "TP", "CP"))]
TWICE += [("llama3", ("PP", "SP", "CP")), ("llama3", ("PP", "DP"))]


@pytest.mark.parametrize("case", [pytest.param(c, marks=[pytest.mark.slow] * (c in TWICE)) for c in CASES], ids=ids)
def test_loss_and_every_gradient_equal_the_oracles(case: tuple[str, tuple[str, ...]]) -> None:
    """And every permute is a wire: another one, inside a slot that only some stages run, would hang."""
    name, features = case
    got, text = run(name, features)
    want = oracle(name, replicas(options_of(features)))
    assert got.loss == pytest.approx(float(want.loss), rel=TIGHT)
    assert reference.error(got.microbatch_losses, want.microbatch_losses) <= TIGHT
    errors = reference.leaf_errors(got.grads, want.grads)
    assert max(errors.values()) <= TIGHT, errors
    directions = {"PP": 2, "VPP": 4}.get(features[0], 0)  # with chunks the wrap is a permute of its own
    assert wires_of(text, "SP" in features, "CP" in features) == directions * (2 if name == "mixtral" else 1)


def wires_of(text: str, split_by_tensor: bool, split_by_context: bool) -> int:
    """How many permutes there are; each stands in the scan's body itself, a stream's has its part of the sequence."""
    length, wires = toy.T // (2 if split_by_tensor else 1) // (2 if split_by_context else 1), 0
    for line in text.splitlines():
        if found := re.search(r"= f32\[([\d,]*)\]\S* collective-permute\(.*op_name=\"([^\"]*)\"", line):
            assert found[2].endswith("/ppermute") and "cond" not in found[2], line
            assert found[1] in (f"{toy.B},{length},{SMALL['dim']}", "9"), line  # 9: Mixtral's router sums
            wires += 1
    return wires


NARROW = [pytest.param(case, marks=[pytest.mark.slow] * (i not in (1, 9))) for i, case in enumerate(CASES)]


@pytest.mark.parametrize("case", NARROW, ids=ids)
def test_bfloat16_is_about_as_near_as_the_unpipelined_model(case: tuple[str, tuple[str, ...]]) -> None:
    name, features = case
    rows = replicas(options_of(features))
    got, _ = run(name, features, precision=jaxpp.resolve("bfloat16"))
    plain, exact = oracle(name, rows, "bfloat16"), oracle(name, rows)
    far = reference.error(plain.grads, exact.grads)
    assert 1e-4 < far < 0.1
    assert reference.error(got.grads, exact.grads) <= 1.25 * far


STEPS = [CASES[6], CASES[8], pytest.param(*CASES[5], marks=pytest.mark.slow), CASES[13]]


@pytest.mark.parametrize(("name", "features"), STEPS, ids=str)
def test_three_steps_of_adamw(name: str, features: tuple[str, ...]) -> None:
    """Parameters and the norm that clips, with each rank updating the part that it has."""
    options = options_of(features)
    rows = replicas(options)
    words = {"stages": "pipeline", "chunks": "virtual_pipeline", "tensor": "tensor", "context": "context"}
    words |= {"data": "data", "expert": "expert"}
    chosen = {f"{words[k]}_parallel": v for k, v in options.items() if k in words}
    chosen |= {k: v for k, v in options.items() if k in ("zero_stage", "sequence_parallel")}
    chosen |= {"dtype": "float32", "warmup_iterations": 0, "lr_decay_style": "constant", "learning_rate": 1e-3}
    config = Config(**chosen, batch_size=toy.B, sequence_length=toy.T, total_batch_size=M * rows * toy.B * toy.T)
    sizes = sizes_of(config, SMALL["layers"], SMALL["positions"])
    mesh = jaxpp.make_mesh(sizes.pipe, sizes.data, sizes.expert, sizes.context, sizes.tensor)
    described = train.make_run(config, sizes, mesh, SMALL["layers"], loss=loss_of(name))
    model = make(name)
    state, step = train.initial_state(described, lambda key: model), train.make_step(described)
    want = jaxpp.Model(model.embed, list(model.blocks), model.head)
    optimizer = described.optimizer
    kept = optimizer.init(want)
    for _ in range(3):
        state, metrics = step(state, train.put_batch(described, jax.device_get(batch(rows))))
        found = reference.value_and_grad(want, batch(rows), rows, loss=loss_of(name))
        norm = reference.norm(found.grads)
        assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
        grads = jax.tree.map(lambda g, norm=norm: g * min(1.0, config.clip_grad / norm), found.grads)
        updates, kept = optimizer.update(grads, kept, want)
        want = optax.apply_updates(want, updates)
    got, want = jaxpp.unstack(jax.device_get(state.params)), jax.device_get(want)
    if name == "gpt2":  # softmax does not see a bias of keys: its gradient is rounding, which Adam makes large
        for block in (*got.blocks, *want.blocks):
            block.attention.bkv = block.attention.bkv[...][1]
    assert reference.error(got, want) <= 1e-5
    # The state rests where the stage of ZeRO says, after a step too.
    if config.zero_stage:
        moments = jax.tree.leaves(state.opt_state[0].mu)
        assert sum(a.addressable_shards[0].data.size for a in moments) < 0.3 * sum(a.size for a in moments)


@pytest.mark.parametrize("remat", ["full", "dots"])
def test_layers_gathered_as_they_run(remat: str) -> None:
    """Equal to gathered once, for uneven stages too; a rank holds less, and the ring nothing that was gathered."""
    found = {}
    for gather in ("step", "layer"):
        options = {"stages": 3, "data": 2, "zero_stage": 3, "zero_gather": gather, "remat": remat}
        pipeline, params = toy.set_up(make("llama3"), batch(2), **options)
        step = jax.jit(partial(executor.train_step, pipeline), compiler_options=toy.EXACT)
        compiled = step.lower(params, batch(2)).compile()
        ring, _ = executor.workspace_spec(pipeline, params, batch(2))
        grads = jaxpp.unstack(jax.device_get(compiled(params, batch(2)).grads))
        memory: Any = compiled.memory_analysis()
        found[gather] = grads, jax.tree.map(lambda a: (a.shape, a.dtype), ring), memory.temp_size_in_bytes
    assert reference.error(found["layer"][0], oracle("llama3", 2).grads) <= TIGHT
    assert found["layer"][1] == found["step"][1]
    assert found["layer"][2] < found["step"][2]


LLAMA = CONFIGS["llama3"]


@pytest.mark.parametrize(
    ("change", "features"),
    [
        ({"kv_heads": 1}, ("TP",)),  # fewer than ranks: whole on each
        ({"kv_heads": 1}, ("CP",)),
        ({"kv_heads": 1}, ("SP", "CP")),
        ({"kv_heads": 4}, ("TP", "CP")),
        ({"tied": True}, ("PP", "SP")),  # a padded table that is used twice
        ({"vocab_size": 64, "tied": True}, ("PP", "TP", "ZeRO 3")),
        ({"attention_bias": True, "mlp_bias": True, "qk_norm": True, "window": 3}, ("SP", "CP")),
    ],
)
def test_uneven_things_that_people_have(change: dict, features: tuple[str, ...]) -> None:
    config = dataclasses.replace(LLAMA, std=0.2, **change)
    model = jax.jit(lambda: models.build(jax.random.key(0), config))()
    rows = replicas(options_of(features))
    got = toy.run(model, batch(rows), **options_of(features))
    want = reference.value_and_grad(model, batch(rows), rows)
    errors = reference.leaf_errors(got.grads, want.grads)
    assert max(errors.values()) <= TIGHT, errors
    assert jax.tree.leaves(got.grads.embed)[0].shape == (config.vocab_size, LLAMA.dim)  # the padding is gone


def test_packed_rows_over_a_split_sequence() -> None:
    """Segments and positions of documents, split like the tokens."""
    model, arrays = make("llama3"), dict(batch(1))
    segments = np.zeros(arrays["tokens"].shape, np.int32)
    segments[..., 3:], segments[..., 6:] = 1, 2
    positions = np.concatenate([np.arange(3), np.arange(3), np.arange(2)])
    arrays["segments"] = jnp.asarray(segments)
    arrays["positions"] = jnp.broadcast_to(jnp.asarray(positions, jnp.int32), segments.shape)
    got = toy.run(model, arrays, stages=2, context=2)
    want = reference.value_and_grad(model, arrays)
    assert reference.error(got.grads, want.grads) <= TIGHT
    assert reference.error(want.grads, oracle("llama3", 1).grads) > 0.01  # they do change something


@pytest.mark.parametrize("features", [("DP",), ("ZeRO 1",), ("ZeRO 2",), ("ZeRO 3",)], ids=str)
def test_what_a_rank_holds_under_zero(features: tuple[str, ...]) -> None:
    stage = options_of(features).get("zero_stage", 0)
    placed = jax.eval_shape(lambda: partition.stack(make("llama3"), partition.split_layers(SMALL["layers"], 1)))
    rests = jax.tree.leaves(partition.rest(placed, jaxpp.make_mesh(data=2), stage))
    split = lambda of: sum("data" in getattr(r, of) for r in rests) / len(rests)
    assert [split(of) > 0.5 for of in ("moment", "grad", "param")] == [stage >= 1, stage >= 2, stage >= 3]
    assert [split(of) == 0 for of in ("moment", "grad", "param")] == [stage < 1, stage < 2, stage < 3]


def text_of(layers: int, **options: Any) -> str:
    """The compiled text of a step of a small LLaMA whose vocabulary divides."""
    config = dataclasses.replace(LLAMA, layers=layers, vocab_size=64)
    model = jax.jit(lambda: models.build(jax.random.key(0), config))()
    arrays = batch(replicas(options))
    pipeline, params = toy.set_up(model, arrays, stages=1, **options)
    return jax.jit(partial(executor.train_step, pipeline)).lower(params, arrays).compile().as_text() or ""


@pytest.mark.parametrize(
    ("features", "want"),
    [
        # Two sums each way.
        ("TP", {"all-reduce": 4}),
        # The same as reduce-scatters, which the CPU writes as all-reduces, and gathers, two of them again for backward.
        ("SP", {"all-reduce": 4, "all-gather": 6}),
        # Queries there and outputs back, both ways; keys and values are half of their size.
        ("CP", {"all-to-all": 4}),
    ],
)
def test_collectives_of_a_block(features: str, want: dict[str, int]) -> None:
    """Docs: the table of collectives. Counted as those of three layers less those of one."""
    one, three = (collectives(text_of(layers, **FEATURES[features]), 128) for layers in (1, 3))
    assert {kind: (three[kind] - one[kind]) / 2 for kind in three if three[kind] > one[kind]} == want


@pytest.mark.parametrize(
    ("stage", "want"),
    [
        (0, {"all-reduce"}),
        (1, {"all-reduce"}),
        (2, {"reduce-scatter"}),
        (3, {"all-gather", "reduce-scatter"}),
    ],
)
def test_collectives_of_a_step_under_zero(stage: int, want: set[str]) -> None:
    """Once a step for each parameter, however many microbatches: nothing of them stands in the loop."""
    text = text_of(1, data=2, zero_stage=stage)
    assert set(collectives(text, 64)) == want
    inside = "".join(line for line in text.splitlines() if "while/body" in line)
    assert not collectives(inside, 64)
