"""The pipelined step against the unpipelined oracle, and against what went wrong for others (docs: pitfalls)."""

import re
import warnings
from dataclasses import replace
from functools import cache, partial
from itertools import combinations
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import toy

import jaxpp
from jaxpp import executor, slots, trees
from jaxpp.executor import eval_step, new_workspace, train_step
from jaxpp.losses import count_valid, token_loss

TIGHT = 1e-6  # relative norm of the difference from the oracle, of the loss and of every gradient leaf, in float32
FACTORS = {
    "name": ("gpipe", "1f1b", "interleaved"),
    "stages": (1, 2, 4),
    "microbatches": (1, 3, 8),
    "remat": ("full", "none", "dots"),
    "data": (1, 2),
    "tied": (False, True),
    "uneven": (False, True),
    "vocab": (toy.WIDE, toy.NARROW),
}


CASES = toy.all_pairs(FACTORS)


def case_id(case: dict) -> str:
    flags = "".join(f"-{flag}" for flag in ("tied", "uneven") if case[flag])
    shape = f"S{case['stages']}-M{case['microbatches']}-D{case['data']}-V{case['vocab']}"
    return f"{case['name']}-{shape}-{case['remat']}{flags}"


def size(case: dict) -> tuple[int, int]:
    """Layers and chunks of a case: one place holds a layer on some ranks only where it is uneven."""
    chunks = 2 if case["name"] == "interleaved" else 1
    places = case["stages"] * chunks
    if case["uneven"]:
        return (places - 1 if chunks == 2 and places > 2 else places + 1), chunks
    return max(places, 2), chunks


def assert_parity(got: Any, want: reference.Reference, tolerance: float = TIGHT) -> None:
    assert reference.error(got.microbatch_losses, want.microbatch_losses) <= tolerance
    assert got.loss == pytest.approx(float(want.loss), rel=tolerance)
    errors = reference.leaf_errors(got.grads, want.grads)
    assert max(errors.values()) <= tolerance, errors
    assert {np.asarray(g).dtype.name for g in jax.tree.leaves(got.grads)} == {"float32"}


def assert_as_near(got: Any, plain: reference.Reference, exact: reference.Reference) -> None:
    """Measured: equal to the last bit but for a rounding or two. The bound of the issue is a ratio of 1.25."""
    for part in ("grads", "microbatch_losses", "loss"):
        a, b, c = (getattr(result, part) for result in (got, plain, exact))
        far = reference.error(b, c)
        assert 1e-5 < far < 0.05
        assert reference.error(a, c) <= 1.02 * far
        assert reference.error(a, b) <= 0.1 * far


def test_the_cases_cover_every_pair() -> None:
    covered = set().union(*map(toy.pairs_of, CASES))
    for (a, first), (b, second) in combinations(FACTORS.items(), 2):
        assert covered >= {((a, x), (b, y)) for x in first for y in second}
    assert len(CASES) <= 18


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_loss_and_every_gradient_equal_the_oracles(case: dict) -> None:
    layers, chunks = size(case)
    net = toy.model(layers, case["vocab"], case["tied"])
    batch = toy.batch(case["microbatches"], case["data"], case["vocab"])
    options = {key: case[key] for key in ("name", "stages", "remat", "data")}
    assert_parity(toy.run(net, batch, chunks=chunks, **options), reference.value_and_grad(net, batch, case["data"]))


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_a_stage_may_hold_no_layer_at_all(stages: int) -> None:
    """Also: a third stage meets buffers that two never share."""
    layer_split = [2, 0, *[1] * (stages - 2)]
    net, batch = toy.model(sum(layer_split), toy.NARROW), toy.batch(2, vocab=toy.NARROW)
    assert_parity(toy.run(net, batch, stages=stages, layer_split=layer_split), reference.value_and_grad(net, batch))


@pytest.mark.parametrize(
    ("name", "stages", "chunks", "remat", "residual"),
    [("1f1b", 4, 1, "dots", False), ("interleaved", 2, 2, "none", True), ("gpipe", 2, 1, "full", False)],
)
def test_bfloat16_is_as_near_to_the_oracle_as_the_unpipelined_model(
    name: str, stages: int, chunks: int, remat: str, residual: bool
) -> None:
    """And nearer yet to the unpipelined bfloat16 model: there the roundings are the same."""
    net, batch = toy.model(4), toy.batch(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the residual raises the wire
        precision = jaxpp.resolve("bfloat16", fp32_residual=residual)
    got = toy.run(net, batch, name=name, stages=stages, chunks=chunks, remat=remat, precision=precision)
    exact = reference.value_and_grad(net, batch)
    plain = reference.value_and_grad(net, batch, compute="bfloat16", residual="float32" if residual else None)
    assert_as_near(got, plain, exact)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize(("name", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.filterwarnings("ignore:fp32_residual")
def test_every_dtype_traces_and_keeps_its_carries(dtype: str, name: str, chunks: int, residual: bool) -> None:
    precision = jaxpp.resolve(dtype, fp32_residual=residual)
    seen, options = set(), {"name": name, "chunks": chunks, "precision": precision}

    def loss(head: Any, embed: Any, x: jax.Array, microbatch: dict) -> jax.Array:
        seen.add((x.dtype.name, head.w[...].dtype.name))
        return token_loss(head, embed, x, microbatch)

    pipeline, params = toy.set_up(toy.model(4), toy.batch(3), loss=loss, **options)
    result = jax.eval_shape(partial(train_step, pipeline), params, toy.batch(3))
    assert seen == {("float32" if residual else dtype, dtype)}
    assert {g.dtype.name for g in jax.tree.leaves(result.grads)} == {"float32"}


@pytest.mark.parametrize("remat", ["none", "full"])
def test_a_block_that_is_nan_at_zero_in_warm_up_ticks(remat: str) -> None:
    """Ranks that nobody has sent to hold zeros, where Sharp's value and gradient are NaN. M=2 is fewer than S=4."""
    net, batch = toy.model(5, block=toy.Sharp), toy.batch(2)
    assert np.isnan(net.blocks[0](jnp.zeros((1, 1, toy.DIM)), {}, None)).all()
    assert_parity(toy.run(net, batch, stages=4, remat=remat), reference.value_and_grad(net, batch))


@pytest.mark.parametrize(
    ("name", "layers", "chunks", "remat"),
    [
        ("1f1b", 4, 1, "none"),
        ("1f1b", 4, 1, "full"),
        ("gpipe", 5, 1, "dots"),
        ("interleaved", 7, 2, "none"),
        ("interleaved", 7, 2, "full"),
    ],
)
def test_bubbles_never_touch_a_number(monkeypatch: Any, name: str, layers: int, chunks: int, remat: str) -> None:
    """Everything that idle slots and empty places would read is NaN, and S=4, M=3 has many."""
    net, batch = toy.model(layers, tied=True), toy.batch(3)
    pipeline, params = toy.set_up(net, batch, name=name, stages=4, chunks=chunks, remat=remat)
    for module in (slots, trees):
        monkeypatch.setattr(module, "blank", toy.nans)
    workspace = toy.nans(new_workspace(pipeline, params, batch))
    result = jax.jit(partial(train_step, pipeline))(params, batch, None, workspace)
    grads = jaxpp.unstack(jax.device_get(result.grads))
    assert_parity(result._replace(grads=grads), reference.value_and_grad(net, batch))
    assert reference.norm(result.grads) == pytest.approx(reference.norm(grads), rel=1e-12)  # empty places: zeros
    total, _ = jax.jit(partial(eval_step, pipeline))(params, batch)
    assert np.isfinite(total)


def test_one_global_batch_in_more_microbatches_has_the_same_gradient() -> None:
    """Neither rescaled at every accumulation, nor summed where it should be averaged."""
    net, batch = toy.model(2), toy.batch(8)
    want = reference.value_and_grad(net, batch)
    for count in (1, 2, 4, 8):
        regrouped = jax.tree.map(lambda a, n=count: a.reshape(n, -1, *a.shape[2:]), batch)
        got = toy.run(net, regrouped)
        assert reference.norm(got.grads) == pytest.approx(reference.norm(want.grads), rel=TIGHT)
        assert max(reference.leaf_errors(got.grads, want.grads).values()) <= TIGHT
        assert got.loss == pytest.approx(float(want.loss), rel=TIGHT)


@cache
def dropped(stages: int, remat: str) -> Any:
    return toy.run(toy.model(4), toy.batch(3, data=2), jax.random.key(3), stages=stages, remat=remat, data=2)


@pytest.mark.parametrize(("remat", "many"), [("full", (2, 4)), ("none", (1, 2)), ("dots", (2,))])
def test_dropout_and_gradients_do_not_depend_on_the_number_of_stages(remat: str, many: tuple[int, ...]) -> None:
    net, batch = toy.model(4), toy.batch(3, data=2)
    want = reference.value_and_grad(net, batch, data=2, key=jax.random.key(3))
    for stages in many:
        got = dropped(stages, remat)
        assert_parity(got, want)
        assert got.loss == pytest.approx(float(dropped(1, remat).loss), rel=2e-7)
        assert reference.norm(got.grads) == pytest.approx(reference.norm(want.grads), rel=TIGHT)


@pytest.mark.parametrize(("name", "stages", "chunks", "remat"), [("1f1b", 4, 1, "full"), ("interleaved", 2, 2, "none")])
def test_every_draw_is_the_documented_one(name: str, stages: int, chunks: int, remat: str) -> None:
    """Each gradient of a probe is its draw: of one layer, for one microbatch and data rank. No two are alike."""
    layers, rows, key = 5, 3 * 2, jax.random.key(11)
    which = np.arange(rows).reshape(3, 2)
    batch, net = toy.probe_batch(np.ones((3, 2)), which), toy.probe_model(layers, rows)
    options = {"name": name, "stages": stages, "chunks": chunks, "remat": remat, "loss": toy.probe_loss}
    got = toy.run(net, batch, key, data=2, **options)
    draws = np.stack([module.w[...] for module in (got.grads.embed, *got.grads.blocks)])
    draw = lambda layer, row: float(jax.random.uniform(reference.layer_key(key, row, layer)))
    np.testing.assert_array_equal(
        draws, np.float32([[draw(i - 1, row) for row in range(rows)] for i in range(layers + 1)])
    )
    assert len(np.unique(draws)) == draws.size


@pytest.mark.parametrize(("stages", "vocab"), [(4, toy.WIDE), (2, toy.NARROW)])
def test_a_tied_gradient_is_the_sum_of_the_untied_oracles_two(stages: int, vocab: int) -> None:
    tied, untied, batch = toy.model(4, vocab, True), toy.model(4, vocab), toy.batch(3, vocab=vocab)
    for a, b in zip(tied.blocks, untied.blocks, strict=True):
        b.w[...], b.gain[...] = a.w[...], a.gain[...]
    untied.head.w[...], untied.embed.table[...] = tied.embed.table[...].T, tied.embed.table[...]
    want = reference.value_and_grad(untied, batch).grads
    got = toy.run(tied, batch, stages=stages).grads
    both = want.embed.table[...] + want.head.w[...].T
    assert reference.error(got.embed.table[...], both) <= TIGHT
    assert reference.error(got.blocks, want.blocks) <= TIGHT


def test_a_tied_parameter_is_counted_once() -> None:
    net, batch = toy.model(4, tied=True), toy.batch(1)
    _, params = toy.set_up(net, batch, stages=4)
    assert sum(a.size for a in jax.tree.leaves(params)) == toy.WIDE * toy.DIM + 4 * (toy.DIM**2 + toy.DIM)
    assert jax.tree.leaves(params.head) == []


@pytest.mark.parametrize("stages", [1, 2])
def test_gradients_are_accumulated_in_float32(stages: int) -> None:
    """1 and 256 times 1/512, of a bfloat16 model: 1.0 where the sum is a bfloat16."""
    batch = toy.probe_batch(np.array([1.0, *[1 / 512] * 256])[:, None])
    precision = jaxpp.resolve("bfloat16")
    got = toy.run(toy.probe_model(2), batch, stages=stages, precision=precision, loss=toy.probe_loss)
    assert [float(w[0]) for w in jax.tree.leaves(got.grads)] == [1.5] * 4


def test_data_ranks_are_summed_in_float32() -> None:
    """Two ranks' 256 and 1, twice: 514, where bfloat16 has 512 or 516."""
    batch = toy.probe_batch(np.array([[256.0, 1.0]] * 2))
    got = toy.run(toy.probe_model(2), batch, data=2, precision=jaxpp.resolve("bfloat16"), loss=toy.probe_loss)
    assert [float(w[0]) for w in jax.tree.leaves(got.grads)] == [514.0] * 4


def test_thirty_layers_on_four_stages_are_thirty() -> None:
    net, batch = toy.probe_model(30), toy.probe_batch(np.ones((5, 1)))
    got = toy.run(net, batch, stages=4, loss=toy.probe_loss)
    assert got.loss == 5 * 32
    assert [float(w[0]) for w in jax.tree.leaves(got.grads.blocks)] == [5.0] * 30


def compiled(name: str, chunks: int, microbatches: int, remat: str) -> Any:
    batch = toy.batch(microbatches)
    pipeline, params = toy.set_up(toy.model(8), batch, name=name, stages=4, chunks=chunks, remat=remat)
    workspace = new_workspace(pipeline, params, batch)
    step = lambda params, batch, workspace: train_step(pipeline, params, batch, None, workspace)
    stats = jax.jit(step, donate_argnums=2).lower(params, batch, workspace).compile().memory_analysis()
    return stats.temp_size_in_bytes + sum(a.nbytes // 4 for a in jax.tree.leaves(workspace))


@pytest.mark.parametrize(
    ("name", "chunks", "remat"),
    [("1f1b", 1, "none"), ("1f1b", 1, "full"), ("interleaved", 2, "none"), ("gpipe", 1, "none")],
)
def test_memory_does_not_grow_with_the_microbatches(name: str, chunks: int, remat: str) -> None:
    """Temporaries and ring of one rank, batches apart, at M=8 and M=32."""
    few, many = (compiled(name, chunks, m, remat) for m in (8, 32))
    if name == "gpipe":
        assert many > 1.5 * few
    else:
        assert many <= 1.02 * few


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("remat", ["none", "dots"])
def test_neither_weights_nor_anything_of_the_vocabulary_enters_the_ring(remat: str, chunks: int) -> None:
    batch, name = toy.batch(3), "interleaved"
    pipeline, params = toy.set_up(toy.model(7), batch, name=name, stages=2, chunks=chunks, remat=remat)
    kept = jax.tree.leaves(new_workspace(pipeline, params, batch, jax.random.key(0)))
    assert {a.shape[:2] for a in kept} == {(2, pipeline.schedule.ring_slots)}
    weights = {(toy.DIM, toy.DIM), (toy.DIM,)}
    assert [a.shape for a in kept if a.shape[2:] in weights or toy.WIDE in a.shape] == []
    assert (toy.B, toy.T, toy.DIM) in {a.shape[2:] for a in kept}


@pytest.mark.parametrize(("name", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2)])
def test_the_program_does_not_grow_with_the_microbatches(name: str, chunks: int) -> None:
    def count(microbatches: int) -> int:
        batch = toy.batch(microbatches)
        return sum(1 for _ in toy.equations(toy.step_jaxpr(*toy.set_up(net, batch, name=name, chunks=chunks), batch)))

    net = toy.model(4)
    assert count(8) == count(64) > 100


@pytest.mark.parametrize(
    ("name", "chunks", "in_flight"),
    [("gpipe", 1, [16] * 4), ("1f1b", 1, [7, 5, 3, 1]), ("interleaved", 2, [11, 9, 7, 5])],
)
def test_the_schedule_asked_for_is_the_one_executed(name: str, chunks: int, in_flight: list[int]) -> None:
    """In flight, not only in name: the slots of a ring full of NaN that each rank has written."""
    batch = toy.batch(16, vocab=toy.NARROW)
    pipeline, params = toy.set_up(toy.model(8, toy.NARROW), batch, name=name, stages=4, chunks=chunks, remat="full")
    (ring,) = toy.nans(new_workspace(pipeline, params, batch))
    assert ring.shape == (4, max(in_flight), toy.B, toy.T, toy.DIM)
    step = partial(train_step, pipeline)
    ring = np.asarray(jax.jit(step)(params, batch, None, [ring]).workspace[0])
    assert np.isfinite(ring).all(axis=(2, 3, 4)).sum(axis=1).tolist() == in_flight
    scans = [e for e in toy.equations(toy.step_jaxpr(pipeline, params, batch)) if e.primitive.name == "scan"]
    assert [e.params["length"] for e in scans] == [pipeline.schedule.ticks]


@pytest.mark.parametrize(
    ("name", "stages", "chunks", "layers"), [("1f1b", 4, 1, 5), ("interleaved", 2, 2, 4), ("gpipe", 1, 1, 2)]
)
def test_eval_step_is_the_oracles_sum_and_count(name: str, stages: int, chunks: int, layers: int) -> None:
    net, batch = toy.model(layers), toy.batch(5, data=2)
    pipeline, params = toy.set_up(net, batch, name=name, stages=stages, chunks=chunks, data=2)
    total, count = jax.jit(partial(eval_step, pipeline))(params, batch)
    assert count == count_valid(batch["labels"])
    assert total / count == pytest.approx(float(reference.value_and_grad(net, batch, data=2).loss), rel=TIGHT)


@pytest.mark.parametrize(
    ("stages", "chunks", "remat", "dtype"),
    [(1, 1, "none", "float32"), (4, 1, "full", "float32"), (2, 2, "dots", "float32"), (2, 2, "dots", "bfloat16")],
)
def test_the_stream_may_be_a_tree_with_a_float32_leaf(stages: int, chunks: int, remat: str, dtype: str) -> None:
    net, batch = toy.model(5, pair=True), toy.batch(3)
    options = {"name": "interleaved", "stages": stages, "chunks": chunks, "remat": remat}
    got = toy.run(net, batch, precision=jaxpp.resolve(dtype, "float32"), **options)
    exact = reference.value_and_grad(net, batch)
    if dtype == "float32":
        assert_parity(got, exact)
    else:
        assert_as_near(got, reference.value_and_grad(net, batch, compute=dtype), exact)


def test_evaluation_counts_no_labels_as_none() -> None:
    net, batch = toy.model(2, toy.NARROW), toy.batch(2, vocab=toy.NARROW)
    pipeline, params = toy.set_up(net, batch)
    total, count = executor.eval_step(pipeline, params, batch | {"labels": jnp.full_like(batch["labels"], -100)})
    assert (float(total), float(count)) == (0.0, 0.0)


def test_a_workspace_of_another_batch_is_refused() -> None:
    net, batch = toy.model(2, toy.NARROW), toy.batch(2, vocab=toy.NARROW)
    pipeline, params = toy.set_up(net, batch)
    twice = {name: jnp.concatenate([a, a], axis=1) for name, a in batch.items()}
    workspace = executor.new_workspace(pipeline, params, twice)
    with pytest.raises(ValueError, match=r"^the workspace is of another batch or pipeline: .*$"):
        executor.train_step(pipeline, params, batch, None, workspace)


def test_a_batch_needs_labels() -> None:
    net, batch = toy.model(2, toy.NARROW), toy.batch(2, vocab=toy.NARROW)
    pipeline, params = toy.set_up(net, batch)
    with pytest.raises(ValueError, match=r"^batch has tokens but no labels.*$"):
        executor.train_step(pipeline, params, {"tokens": batch["tokens"]})


def test_a_batch_without_a_single_label_costs_nothing() -> None:
    net, batch = toy.model(2, toy.NARROW), toy.batch(2, vocab=toy.NARROW)
    got = toy.run(net, batch | {"labels": jnp.full_like(batch["labels"], -100)})
    assert got.loss == 0
    assert reference.norm(got.grads) == 0


class Wider(toy.Block):
    def __call__(self, x: jax.Array, microbatch: dict, key: Any) -> jax.Array:
        return jnp.concatenate([x, x[..., :1]], axis=-1)


class Lower(toy.Block):
    def __call__(self, x: jax.Array, microbatch: dict, key: Any) -> jax.Array:
        return super().__call__(x, microbatch, key).astype(jnp.bfloat16)


def _cut(batch: dict, *index: slice) -> dict:
    return {name: a[index] for name, a in batch.items()}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda p, w, b: (p, w, _cut(b, slice(2))), ["shape [2, 4, 8]", "3 microbatches"]),
        (lambda p, w, b: (p, w, _cut(b, slice(None), slice(3))), ["3 rows", "data=2"]),
        (lambda p, w, b: (p, w, b | {"extra": jnp.zeros(3)}), ["extra", "[3]", "3 microbatches"]),
        (lambda p, w, b: (replace(p, schedule=jaxpp.build("1f1b", 4, 3)), w, b), ["2 stages", "schedule 4"]),
        (lambda p, w, b: (replace(p, schedule=jaxpp.build("interleaved", 2, 3, 2)), w, b), ["1 chunks", "2 of 2"]),
        (lambda p, w, b: (replace(p, remat="ful"), w, b), ["remat='ful'", "'full'"]),
        (lambda p, w, b: (p, jaxpp.place(toy.model(2, block=Wider), p.mesh), b), ["float32[2, 8, 64]", "[2, 8, 65]"]),
        (lambda p, w, b: (p, jaxpp.place(toy.model(2, block=Lower), p.mesh), b), ["float32[2", "bfloat16[2"]),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line_with_its_numbers(change: Any, words: list[str]) -> None:
    batch = toy.batch(3, data=2)
    pipeline, params, batch = change(*toy.set_up(toy.model(2), batch, data=2), batch)
    with pytest.raises(ValueError, match=re.escape(words[0])) as caught:
        jax.eval_shape(partial(train_step, pipeline), params, batch)
    assert "\n" not in str(caught.value)
    assert [word for word in words if word not in str(caught.value)] == []


def test_trains_with_donation_and_without_transfers() -> None:
    net, batch = toy.model(4, tied=True), jax.device_put(toy.batch(3))
    pipeline, params = toy.set_up(net, batch)

    def step(params: Any, workspace: Any, batch: dict, key: jax.Array) -> tuple[Any, Any, jax.Array]:
        result = train_step(pipeline, params, batch, key, workspace)
        return jax.tree.map(lambda p, g: p - 0.5 * g, params, result.grads), result.workspace, result.loss

    key = jax.random.key(0)
    workspace = new_workspace(pipeline, params, batch, key)
    losses = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled = jax.jit(step, donate_argnums=(0, 1)).lower(params, workspace, batch, key).compile()
        batch, key = jax.device_put((batch, key), compiled.input_shardings[0][2:])
        with jax.transfer_guard("disallow"):
            for _ in range(3):
                old = jax.tree.leaves((params, workspace))
                params, workspace, loss = compiled(params, workspace, batch, key)
                losses.append(loss)
                assert all(a.is_deleted() for a in old)
    first, *_, last = (float(a) for a in losses)
    assert last < first == pytest.approx(float(reference.value_and_grad(net, batch, key=key).loss), rel=TIGHT)


def test_the_public_function_is_the_step() -> None:
    net, batch = toy.model(2), toy.batch(3)
    pipeline, params = toy.set_up(net, batch)
    loss, grads = jax.jit(jaxpp.value_and_grad(pipeline.schedule, pipeline.mesh, loss=token_loss))(params, batch)
    want = reference.value_and_grad(net, batch)
    assert loss == pytest.approx(float(want.loss), rel=TIGHT)
    assert reference.error(jaxpp.unstack(grads), want.grads) <= TIGHT
