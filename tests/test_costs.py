"""Costs put together and taken apart again, and the split that they ask for, held against every other split."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpp import costs
from jaxpp.costs import Costs, Slot
from jaxpp.partition import Layout, split_layers
from jaxpp.schedules import build

LLAMA = Costs(Slot(5.5, 12.4), Slot(0.1, 0.5), Slot(0.0, 34.0), tick=0.2, beside=7.0)  # about a LLaMA 3 8B on an H200


def ranks_of(found: Costs, noise: float = 0.0) -> list[dict]:
    """What would have been measured; noise, of the first and the last rank."""
    firsts, rests = ((Slot(-noise, 0), found.embed), (Slot(0, 0), Slot(0, 0)), (Slot(0, 0), found.head)), []
    for more in firsts:
        forward, backward = (sum(getattr(slot, kind) for slot in (found.layer, *more)) for kind in Slot._fields)
        rests.append({"forward_ms": forward, "backward_ms": backward, "tick_ms": 0.1, "fixed_ms": 3.0})
    rests[1] |= {"tick_ms": found.tick, "fixed_ms": found.beside}
    return rests


def test_costs_are_what_the_ranks_differ_by() -> None:
    got = costs.of_ranks(ranks_of(LLAMA))
    for name in ("layer", "embed", "head"):
        assert getattr(got, name) == pytest.approx(getattr(LLAMA, name))
    assert (got.tick, got.beside) == (LLAMA.tick, LLAMA.beside)


def test_what_is_less_than_nothing_is_noise() -> None:
    assert costs.of_ranks(ranks_of(LLAMA, noise=1.0)).embed == pytest.approx((0.0, 0.5))


def test_slots_of_chunks() -> None:
    """7 layers on 2 stages of 2 chunks, 2, 2, 2 and 1 in the model's order, which goes round the stages."""
    forward, backward = costs.slots(LLAMA, split_layers(7, 2, 2))
    np.testing.assert_allclose(forward, [[2 * 5.5 + 0.1, 2 * 5.5], [2 * 5.5, 5.5]])
    np.testing.assert_allclose(backward, [[2 * 12.4 + 0.5, 2 * 12.4], [2 * 12.4, 12.4 + 34.0]])


@pytest.mark.parametrize(("name", "stages", "chunks"), [("1f1b", 4, 1), ("interleaved", 2, 2)])
def test_a_step_of_slots_that_are_alike(name: str, stages: int, chunks: int) -> None:
    """M microbatches through all layers of a stage, the bubble of the schedule, each tick's overhead, and the rest."""
    alike = LLAMA._replace(embed=Slot(0, 0), head=Slot(0, 0))
    schedule = build(name, stages, 8, chunks)
    found = costs.predict(schedule, split_layers(8, stages, chunks), alike)
    stage = 8 / stages * (5.5 + 12.4)
    slots = 8 * stage + (stages - 1) * stage / chunks
    assert found["step_ms"] == pytest.approx(slots + 0.2 * schedule.ticks + 7.0)
    assert found["bubble_fraction"] == pytest.approx((stages - 1) * stage / chunks / slots)


def every_split(layers: int, stages: int, chunks: int) -> list[Layout]:
    splits = product(range(layers + 1), repeat=stages * chunks)
    return [split_layers(layers, stages, chunks, counts) for counts in splits if sum(counts) == layers]


@pytest.mark.parametrize("head", [10.0, 34.0, 60.0])
@pytest.mark.parametrize(
    ("name", "stages", "chunks", "layers"),
    [("1f1b", 4, 1, 8), ("gpipe", 3, 1, 10), ("interleaved", 2, 2, 8), ("interleaved", 3, 2, 7)],
)
def test_heads_as_dear_as_layers_are_balanced_as_well_as_can_be(
    name: str, stages: int, chunks: int, layers: int, head: float
) -> None:
    schedule, found = build(name, stages, 8, chunks), LLAMA._replace(head=Slot(0, head))
    step = lambda layout: costs.predict(schedule, layout, found)["step_ms"]
    best = min(map(step, every_split(layers, stages, chunks)))
    assert step(costs.balanced(schedule, layers, found)) == pytest.approx(best, rel=1e-6)


def test_a_head_as_dear_as_two_layers_takes_their_place() -> None:
    schedule = build("1f1b", 4, 8)
    layout = costs.balanced(schedule, 8, LLAMA)
    assert layout.layers == (3, 3, 2, 0)
    even, best = (costs.predict(schedule, each, LLAMA)["step_ms"] for each in (split_layers(8, 4), layout))
    assert best < 0.8 * even


def test_without_a_head_the_split_is_the_even_one() -> None:
    for layers in (8, 30):
        alike = LLAMA._replace(embed=Slot(0, 0), head=Slot(0, 0))
        assert costs.balanced(build("1f1b", 4, 8), layers, alike) == split_layers(layers, 4)


@settings(deadline=None, max_examples=100)
@given(
    layers=st.integers(4, 40),
    shape=st.sampled_from([("gpipe", 2, 1), ("1f1b", 3, 1), ("1f1b", 4, 1), ("interleaved", 2, 2)]),
    times=st.tuples(st.floats(0.1, 20), *[st.floats(0, 20)] * 5),
)
def test_a_balanced_split_has_all_layers_and_is_no_slower_than_the_even_one(
    layers: int, shape: tuple, times: tuple
) -> None:
    name, stages, chunks = shape
    schedule, found = build(name, stages, 6, chunks), Costs(Slot(*times[:2]), Slot(*times[2:4]), Slot(*times[4:]), 0, 0)
    layout, even = costs.balanced(schedule, layers, found), split_layers(layers, stages, chunks)
    assert sum(layout.layers) == layers
    assert min(layout.layers) >= 0
    short, long = (costs.predict(schedule, each, found)["step_ms"] for each in (layout, even))
    assert short <= long
