"""Which layers stand where, and where parameters rest."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

import jaxpp
from jaxpp.mesh import PIPE
from jaxpp.partition import (
    SHARD_FROM,
    Layout,
    Placed,
    place,
    rest,
    shardings,
    split_layers,
    stack,
    unstack,
)

quick = settings(max_examples=100, deadline=None)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    stages, chunks = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    layers = draw(st.lists(st.integers(0, 5), min_size=stages * chunks, max_size=stages * chunks))
    return Layout(stages, chunks, tuple(layers))


@pytest.mark.parametrize(
    ("layers", "stages", "chunks", "want"),
    [
        (30, 4, 1, (8, 8, 7, 7)),
        (4, 4, 1, (1, 1, 1, 1)),
        (7, 1, 1, (7,)),
        (7, 4, 2, (1, 1, 1, 1, 1, 1, 1, 0)),
        (5, 2, 2, (2, 1, 1, 1)),
    ],
)
def test_layers_are_dealt_in_order_the_larger_chunks_first(layers: int, stages: int, chunks: int, want: tuple) -> None:
    assert split_layers(layers, stages, chunks).layers == want


@quick
@given(st.integers(1, 6), st.integers(1, 4), st.integers(0, 40))
def test_no_layer_is_ever_dropped(stages: int, chunks: int, more: int) -> None:
    layout = split_layers(stages + more, stages, chunks)
    assert sum(layout.layers) == stages + more
    assert max(layout.layers) - min(layout.layers) <= 1
    assert list(layout.layers) == sorted(layout.layers, reverse=True)
    assert min(layout.layers_per_stage()) >= 1


def test_a_split_by_hand_stands() -> None:
    layout = split_layers(6, 2, 2, [3, 0, 1, 2])
    assert layout.layers == (3, 0, 1, 2)
    assert layout.layers_per_stage() == [4, 2]
    assert layout.places == 3


@pytest.mark.parametrize(
    ("layer_split", "stages", "chunks"),
    [([3, 3, 3], 2, 1), ([3, 4], 2, 1), ([7, -1], 2, 1), ([3, 3], 2, 2), ([], 2, 1)],
)
def test_a_split_by_hand_that_does_not_fit_is_refused_with_one_that_does(
    layer_split: list[int], stages: int, chunks: int
) -> None:
    example, words = list(split_layers(6, stages, chunks).layers), " ".join(map(str, layer_split))
    rule = f"must be {stages * chunks} numbers >= 0, of the layers of each chunk, that sum to 6: for example"
    with pytest.raises(ValueError, match=f"^layer_split={words} {rule} {' '.join(map(str, example))}$"):
        split_layers(6, stages, chunks, layer_split)
    assert split_layers(6, stages, chunks, example).layers == tuple(example)


@pytest.mark.parametrize("chunks", [1, 2])
def test_more_stages_than_layers_are_refused(chunks: int) -> None:
    with pytest.raises(ValueError, match="pipeline_parallel=4 is more than the model's 3 layers: use at most 3"):
        split_layers(3, 4, chunks)


@quick
@given(layouts())
def test_where_counts_and_first_layers_agree(layout: Layout) -> None:
    counts, first = layout.counts(), layout.first_layer()
    assert counts.shape == first.shape == (layout.stages, layout.chunks)
    places = [layout.where(i) for i in range(sum(layout.layers))]
    assert [first[s, c] + k for s, c, k in places] == list(range(len(places)))
    assert all(0 <= k < counts[s, c] <= layout.places for s, c, k in places)
    assert [c * layout.stages + s for s, c, _ in places] == [g for g, n in enumerate(layout.layers) for _ in range(n)]
    assert layout.layers_per_stage() == [sum(s == stage for s, _, _ in places) for stage in range(layout.stages)]
    assert layout.places == max(1, counts.max())


def numbered(layers: int) -> jaxpp.Model:
    """Blocks that hold their own number from 1, so that zeros are none of theirs."""
    blocks = [{"w": jnp.full(2, i + 1.0), "b": jnp.asarray(i + 1.0)} for i in range(layers)]
    return jaxpp.Model({"table": jnp.ones((3, 2))}, blocks, {"w": jnp.ones(2)})


def assert_same(got: Any, want: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(np.testing.assert_array_equal, got, want)


@settings(max_examples=25, deadline=None)
@given(layouts().filter(lambda layout: sum(layout.layers) > 0))
def test_unstack_is_the_inverse_of_stack_and_empty_places_are_zeros(layout: Layout) -> None:
    model = numbered(sum(layout.layers))
    placed = stack(jax.device_get(model), layout)
    assert_same(unstack(placed), model)
    held = np.stack([block["b"] for block in placed.blocks])  # [K, S, C]
    want = np.zeros_like(held)
    for i in range(sum(layout.layers)):
        s, c, k = layout.where(i)
        want[k, s, c] = i + 1
    np.testing.assert_array_equal(held, want)


def unlike(i: int, change: Any) -> jaxpp.Model:
    model = numbered(4)
    model.blocks[i] = change(model.blocks[i])
    return model


@pytest.mark.parametrize(
    "change",
    [
        lambda block: {"w": block["w"]},
        lambda block: block | {"w": jnp.ones(3)},
        lambda block: block | {"b": jnp.ones(1)},
        lambda block: block | {"w": block["w"].astype(jnp.bfloat16)},
    ],
)
def test_unlike_blocks_are_refused_by_number(change: Any) -> None:
    with pytest.raises(ValueError, match="block 2 must have the structure, shapes and dtypes of block 0"):
        stack(unlike(2, change), split_layers(4, 2))


def test_a_layout_for_another_model_is_refused() -> None:
    with pytest.raises(ValueError, match="holds 5 layers, the model has 4"):
        stack(numbered(4), split_layers(5, 2))


@pytest.mark.parametrize(
    ("shape", "stages", "dim"),
    [
        ((512, 64), 4, 0),
        ((64, 512), 4, 1),
        ((51, 512), 4, 1),  # 51 does not divide
        ((513, 65), 4, None),
        ((SHARD_FROM,), 4, 0),
        ((SHARD_FROM - 4,), 4, None),  # too small to be worth a collective
        ((), 4, None),
    ],
)
def test_an_outer_leaf_rests_along_its_largest_dim_that_divides(shape: tuple, stages: int, dim: int | None) -> None:
    placed = Placed(jnp.zeros(shape), [], jnp.zeros(()), split_layers(stages, stages))
    spec = rest(placed, jaxpp.make_mesh(pipe=stages)).embed.param
    assert [d for d, axis in enumerate(spec) if axis == PIPE] == ([] if dim is None else [dim])


@pytest.mark.parametrize(("vocab", "held"), [(toy.WIDE, toy.WIDE // 4), (toy.NARROW, toy.NARROW)])
def test_no_rank_holds_a_big_embedding_or_another_ranks_layers(vocab: int, held: int) -> None:
    mesh = jaxpp.make_mesh(pipe=4, data=2)
    placed = place(toy.model(6, vocab), mesh)
    assert placed.layout.layers == (2, 2, 1, 1)
    for leaf, wide in ((placed.embed.table[...], (held, toy.DIM)), (placed.head.w[...], (toy.DIM, held))):
        assert {shard.data.shape for shard in leaf.addressable_shards} == {wide}
        assert len({str(shard.index) for shard in leaf.addressable_shards}) == vocab // held
    assert len(placed.blocks) == 2
    for leaf in jax.tree.leaves(placed.blocks):
        assert {shard.data.shape for shard in leaf.addressable_shards} == {(1, 1, *leaf.shape[2:])}
        assert {shard.index[0].start for shard in leaf.addressable_shards} == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("stages", "chunks", "layer_split"), [(4, 1, None), (2, 2, None), (2, 1, [5, 1]), (1, 1, None)]
)
def test_placing_moves_parameters_and_changes_none(stages: int, chunks: int, layer_split: list[int] | None) -> None:
    model = toy.model(6, tied=True)
    mesh = jaxpp.make_mesh(pipe=stages)
    placed = place(model, mesh, chunks, layer_split)
    assert_same(jax.device_get(unstack(placed)), jax.device_get(model))
    rests = jax.tree.map(
        lambda a, sharding: a.sharding.is_equivalent_to(sharding, a.ndim), placed, shardings(placed, mesh)
    )
    assert all(jax.tree.leaves(rests))


def test_specs_are_those_of_abstract_parameters_too() -> None:
    placed = jax.eval_shape(lambda model: stack(model, split_layers(4, 4)), toy.model(4))
    got = rest(placed, jaxpp.make_mesh(pipe=4))
    assert [r.param for r in jax.tree.leaves(got.embed)] == [PartitionSpec(PIPE, None)]
    assert [r.param for r in jax.tree.leaves(got.head)] == [PartitionSpec(None, PIPE)]


def test_any_object_with_the_three_parts_is_a_model() -> None:
    parts = SimpleNamespace(**toy.model(4)._asdict())
    assert_same(jax.device_get(unstack(place(parts, jaxpp.make_mesh(pipe=2)))), jax.device_get(toy.model(4)))
