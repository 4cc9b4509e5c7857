"""What a pipeline's slots cost, put together from a layer, the embedding and the head, and the step that follows.

Legend: S stages, C chunks a stage, G = S*C chunks in the model's order, L layers. Times are milliseconds.
"""

from collections.abc import Mapping, Sequence
from itertools import permutations
from typing import Any, NamedTuple

import numpy as np

from jaxpp import schedules
from jaxpp.partition import Layout, split_layers
from jaxpp.schedules import Schedule

STAGES = 3  # of the pipeline that is measured: the embedding and a layer, a layer, a layer and the head


class Slot(NamedTuple):
    """Milliseconds that something takes of an F slot and of a B slot."""

    forward: float
    backward: float


class Costs(NamedTuple):
    """Milliseconds of a layer, of the embedding, of head and loss; tick, of a tick without slots; beside, of what a
    step does once, beside its ticks and the optimizer."""

    layer: Slot
    embed: Slot
    head: Slot
    tick: float
    beside: float


def of_ranks(ranks: Sequence[Mapping[str, Any]]) -> Costs:
    """Costs from `bench_slots.measure_rank` of each rank of `STAGES`, with a layer each."""
    first, middle, last = (Slot(rank["forward_ms"], rank["backward_ms"]) for rank in ranks)
    # What is less than the noise may come out below nothing.
    more = lambda slot: Slot(*(max(0.0, a - b) for a, b in zip(slot, middle, strict=True)))
    tick, beside = (max(rank[key] for rank in ranks) for key in ("tick_ms", "fixed_ms"))
    return Costs(middle, more(first), more(last), tick, beside)


def slots(costs: Costs, layout: Layout) -> tuple[np.ndarray, np.ndarray]:
    """Milliseconds of each chunk's F and of its B, [S, C] both."""
    found = []
    for kind in Slot._fields:
        times = layout.counts() * getattr(costs.layer, kind)
        times[0, 0] += getattr(costs.embed, kind)
        times[-1, -1] += getattr(costs.head, kind)
        found.append(times)
    return found[0], found[1]


def step(schedule: Schedule, forward: np.ndarray, backward: np.ndarray, overhead: float) -> dict[str, float]:
    """The simulator's step, from milliseconds of each chunk's F and B, [S, C] or [S, 1], and of all that is no slot.

    Returns: step_ms; bubble_fraction, of the slots.
    """
    microseconds = lambda times: np.rint(1e3 * times).astype(int)
    simulation = schedules.simulate(schedule, microseconds(forward), microseconds(backward))
    return {"step_ms": simulation.makespan / 1e3 + overhead, "bubble_fraction": simulation.bubble_fraction}


def predict(schedule: Schedule, layout: Layout, costs: Costs) -> dict[str, float]:
    """`step` of a layout."""
    return step(schedule, *slots(costs, layout), costs.tick * schedule.ticks + costs.beside)


def balanced(schedule: Schedule, layers: int, costs: Costs) -> Layout:
    """A split of L layers under which the step is short, by search.

    From the even split a layer moves to or from the first or the last chunk, which have more than layers, and so on for
    as long as that shortens the step.
    """
    stages, chunks = schedule.stages, schedule.chunks
    length = lambda layout: predict(schedule, layout, costs)["step_ms"]
    ends, unit = {0, stages * chunks - 1}, np.eye(stages * chunks, dtype=int)
    moves = [(a, b) for a, b in permutations(range(stages * chunks), 2) if {a, b} & ends]
    best = split_layers(layers, stages, chunks)
    while True:
        counts = [best.layers - unit[a] + unit[b] for a, b in moves if best.layers[a]]
        tried = [Layout(stages, chunks, tuple(each.tolist())) for each in counts]
        shortest = min([best, *tried], key=length)
        if shortest is best:
            return best
        best = shortest
