"""Schedules against counts, bubbles and buffers that are worked out here, not taken from the module."""

import ast
import inspect
import sys
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpp import schedules
from jaxpp.schedules import IDLE, SCHEDULES, Schedule, build, simulate, validate

quick = settings(max_examples=60, deadline=None)

PLACE = r"tick \d+, rank \d+"
costs = st.integers(1, 9)
stages_ = st.integers(1, 8)
microbatches_ = st.integers(1, 24)


@st.composite
def any_schedule(draw: st.DrawFn, names: tuple[str, ...] = tuple(SCHEDULES)) -> Schedule:
    name = draw(st.sampled_from(names))
    chunks = draw(st.integers(1, 4)) if name == "interleaved" else 1
    return build(name, draw(stages_), draw(microbatches_), chunks)


def ran(schedule: Schedule, kind: str) -> list[tuple[tuple[int, int], int]]:
    """((global chunk, microbatch), tick) of every filled slot."""
    table = getattr(schedule, kind)
    where = np.argwhere(table.chunk != IDLE)
    return [((int(table.chunk[t, s]) * schedule.stages + s, int(table.microbatch[t, s])), int(t)) for t, s in where]


@quick
@given(any_schedule())
def test_each_forward_and_backward_runs_once_and_in_order(schedule: Schedule) -> None:
    validate(schedule)
    pieces = schedule.stages * schedule.chunks
    every = {(g, m): 1 for g in range(pieces) for m in range(schedule.microbatches)}
    for kind in ("forward", "backward"):
        assert Counter(item for item, _ in ran(schedule, kind)) == every
    forward, backward = dict(ran(schedule, "forward")), dict(ran(schedule, "backward"))
    for g, m in every:
        assert g == 0 or forward[g - 1, m] < forward[g, m]
        assert g == pieces - 1 or backward[g + 1, m] < backward[g, m]
        assert forward[g, m] <= backward[g, m]
    if schedule.name == "gpipe":
        assert min(backward.values()) >= max(forward.values())


@quick
@given(any_schedule())
def test_tables_are_int32_and_idle_slots_say_so(schedule: Schedule) -> None:
    for table in (schedule.forward, schedule.backward):
        for column in vars(table).values():
            assert column.dtype == np.int32 and column.shape == (schedule.ticks, schedule.stages)
        idle = table.chunk == IDLE
        for column in (table.microbatch, table.ring, table.read, table.output):
            assert (column[idle] == IDLE).all()
        assert (table.ring[~idle] >= 0).all() and (table.arrive >= 0).all()
    first, last = schedule.forward.chunk[:, 0] == 0, schedule.forward.chunk[:, -1] == schedule.chunks - 1
    assert (schedule.forward.read[first, 0] == IDLE).all()
    assert (schedule.forward.output[last, -1] >= 0).all() and (schedule.forward.output[~last, -1] == IDLE).all()
    assert (schedule.forward.output[:, :-1] == IDLE).all()


@quick
@given(st.sampled_from(["gpipe", "1f1b", "interleaved"]), stages_, microbatches_)
def test_ticks_without_chunks(name: str, stages: int, microbatches: int) -> None:
    # M turns, a climb of S-1 and a descent of S-1; GPipe's backwards wait for M-1 more.
    turns = 2 * microbatches - 1 if name == "gpipe" else microbatches
    assert build(name, stages, microbatches).ticks == turns + 2 * (stages - 1)


@quick
@given(st.sampled_from(["gpipe", "1f1b"]), stages_, microbatches_, costs, costs)
def test_bubble_is_one_slot_pair_for_each_other_stage(name: str, stages: int, m: int, f: int, b: int) -> None:
    sim = simulate(build(name, stages, m), f, b)
    assert sim.bubble == (stages - 1) * (f + b)
    assert sim.makespan == (stages - 1 + m) * (f + b)
    assert sim.bubble_fraction == pytest.approx((stages - 1) / (stages - 1 + m))


@quick
@given(stages_, microbatches_, st.integers(1, 4), costs, costs)
def test_bubble_interleaved(stages: int, m: int, chunks: int, f: int, b: int) -> None:
    sim = simulate(build("interleaved", stages, m, chunks), f, b)
    assert sim.busy == [m * chunks * (f + b)] * stages
    if m >= stages:  # costs are those of one chunk, so this is (S-1)(F+B)/C in those of a stage
        assert sim.bubble == (stages - 1) * (f + b)
    else:
        assert sim.makespan == stages * chunks * (f + b) + (m - 1) * (f + b)


@quick
@given(any_schedule(), st.data())
def test_makespan_with_uneven_costs(schedule: Schedule, data: st.DataObject) -> None:
    shape = (schedule.stages, schedule.chunks)
    size = shape[0] * shape[1]
    f, b = (np.array(data.draw(st.lists(costs, min_size=size, max_size=size))).reshape(shape) for _ in "fb")
    sim = simulate(schedule, f, b)
    assert sim.busy == [int(n) * schedule.microbatches for n in (f + b).sum(axis=1)]
    assert sim.makespan >= max(sim.busy)
    assert sim.makespan >= (f + b).sum()  # one microbatch goes through everything
    assert sim.bubble == sim.makespan - max(sim.busy)
    assert (sim.start[1:] >= sim.end[:-1]).all() and (sim.end >= sim.start).all()


def test_makespan_with_uneven_costs_by_hand() -> None:
    #        rank 0        rank 1
    # tick 0 F0     0-1                     idle ends at 0
    # tick 1 F1     1-2    F0 B0   1-7      waits for rank 0's end at 1
    # tick 2 B0     7-10   F1 B1   7-13
    # tick 3 B1    13-16
    sim = simulate(build("1f1b", 2, 2), np.array([[1], [2]]), np.array([[3], [4]]))
    assert (sim.makespan, sim.busy, sim.bubble) == (16, [8, 12], 4)
    assert sim.start.tolist() == [[0, 0], [1, 1], [7, 7], [13, 13]]
    assert sim.end.tolist() == [[1, 0], [2, 7], [10, 13], [16, 13]]


@pytest.mark.parametrize(("forward", "backward", "named"), [(1.0, 2, "forward_cost"), (1, 2.5, "backward_cost")])
def test_float_costs_are_refused(forward: float, backward: float, named: str) -> None:
    with pytest.raises(ValueError, match=rf"^{named} must be an integer .*float64$"):
        simulate(build("1f1b", 2, 2), forward, backward)


@quick
@given(stages_, microbatches_)
def test_in_flight(stages: int, m: int) -> None:
    assert build("1f1b", stages, m).in_flight() == [min(m, 2 * (stages - 1 - s) + 1) for s in range(stages)]
    # Also on the last rank, whose last forward and first backward share a tick: F runs before B.
    assert build("gpipe", stages, m).in_flight() == [m] * stages


def test_in_flight_is_not_that_of_gpipe() -> None:
    # The run that was asked for 1f1b and used GPipe's order trains just as well, and runs out of memory.
    assert build("1f1b", 4, 64).in_flight() == [7, 5, 3, 1]
    assert build("gpipe", 4, 64).in_flight() == [64] * 4
    assert build("1f1b", 4, 64).ring_slots == 7


@pytest.mark.parametrize(("chunks", "held"), [(1, 7), (2, 11), (4, 19)])
def test_in_flight_interleaved(chunks: int, held: int) -> None:
    for m in (8, 16, 64):
        assert build("interleaved", 4, m, chunks).in_flight()[0] == held


@quick
@given(st.sampled_from(["1f1b", "interleaved"]), stages_, st.integers(1, 4), st.integers(3, 6))
def test_in_flight_does_not_grow_with_microbatches(name: str, stages: int, chunks: int, rounds: int) -> None:
    chunks = chunks if name == "interleaved" else 1
    few, many = (build(name, stages, n * stages, chunks) for n in (3, rounds))
    assert few.in_flight() == many.in_flight()
    assert few.ring_slots == many.ring_slots


@quick
@given(any_schedule())
def test_ring_is_no_larger_than_what_is_in_flight(schedule: Schedule) -> None:
    assert schedule.ring_slots == max(schedule.in_flight())


@quick
@given(stages_, microbatches_)
def test_buffers_of_1f1b_are_single(stages: int, m: int) -> None:
    schedule = build("1f1b", stages, m)
    assert (schedule.forward_inbox, schedule.backward_inbox, schedule.output_slots) == (1, 1, 1)


def test_output_slots_of_gpipe_hold_every_microbatch() -> None:
    assert build("gpipe", 4, 8).output_slots == 8


# Corruption: each names the rank and the tick at which the tables stop making sense.


def mutate(schedule: Schedule, kind: str, column: str, *changes: tuple[tuple[int, int], int]) -> Schedule:
    """The schedule with entries (tick, rank) of one column set to other values."""
    table = getattr(schedule, kind)
    values = getattr(table, column).copy()
    for at, value in changes:
        values[at] = value
    return replace(schedule, **{kind: replace(table, **{column: values})})


def move(schedule: Schedule, kind: str, source: tuple[int, int], target: tuple[int, int], copy: bool) -> Schedule:
    """The schedule with what runs at one (tick, rank) moved or copied to another, arrivals aside."""
    for column in ("chunk", "microbatch", "ring", "read", "output"):
        value = int(getattr(getattr(schedule, kind), column)[source])
        changes = [(target, value)] if copy else [(source, IDLE), (target, value)]
        schedule = mutate(schedule, kind, column, *changes)
    return schedule


def refused(schedule: Schedule, message: str = PLACE) -> None:
    with pytest.raises(ValueError, match=message) as error:
        validate(schedule)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("rank", "found"), [(0, "tick 1, rank 1"), (1, "tick 1, rank 1"), (3, "tick 3, rank 3")])
def test_swapped_microbatches(rank: int, found: str) -> None:
    at = [((rank, rank), 1), ((rank + 1, rank), 0)]  # rank s runs its first two forwards in ticks s and s + 1
    refused(
        mutate(build("1f1b", 4, 8), "forward", "microbatch", *at), f"1f1b: {found}, F of .* result of its neighbour"
    )


def test_clobbered_ring_slot() -> None:
    schedule = build("1f1b", 4, 8)
    held = int(schedule.forward.ring[0, 0])
    refused(
        mutate(schedule, "forward", "ring", ((1, 0), held)),
        r"1f1b: tick 6, rank 0, B of chunk 0 microbatch 0 needs its own residuals, found \(0, 1\)",
    )


def test_clobbered_output() -> None:
    schedule = build("gpipe", 4, 8)
    held = int(schedule.forward.output[3, 3])
    refused(
        mutate(schedule, "forward", "output", ((4, 3), held)),
        "gpipe: tick 10, rank 3, B of chunk 0 microbatch 0 needs its own output, found that of 1",
    )


@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_redirected_inbox_read(kind: str) -> None:
    schedule = build("interleaved", 4, 11, 2)  # unequal groups, so that arrivals wait and inboxes have several slots
    inbox = schedule.forward_inbox if kind == "forward" else schedule.backward_inbox
    assert inbox > 1
    read = getattr(schedule, kind).read
    for t, s in np.argwhere(read != IDLE):
        other = (int(read[t, s]) + 1) % inbox
        refused(
            mutate(schedule, kind, "read", ((t, s), other)),
            f"interleaved: tick {t}, rank {s}, {kind[0].upper()} of .* needs the result of its neighbour",
        )


@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_arrival_over_one_still_to_be_read(kind: str) -> None:
    schedule = build("interleaved", 4, 11, 2)
    arrive, read = getattr(schedule, kind).arrive, getattr(schedule, kind).read
    waits = 0
    for t, s in np.argwhere(read != IDLE):
        slot = int(read[t, s])
        sent = int(np.flatnonzero(arrive[:t, s] == slot)[-1])
        for between in range(sent + 1, int(t)):
            waits += 1
            place = rf"rank {s}, {kind[0].upper()} of .* needs the result of its neighbour"
            refused(mutate(schedule, kind, "arrive", ((between, s), slot)), place)
    assert waits


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_dropped_backward(rank: int) -> None:
    # Rank s runs B of microbatch 0 in tick 2(S-1) - s, and the rank upstream misses it one tick later.
    schedule = mutate(build("1f1b", 4, 8), "backward", "chunk", ((6 - rank, rank), IDLE))
    refused(schedule, f"1f1b: tick {7 - rank}, rank {rank - 1}, B of chunk 0 microbatch 0 .* found None")


def test_dropped_backward_that_nobody_waits_for() -> None:
    # Rank 0's B of chunk 0 has no reader, so only the count can tell.
    refused(mutate(build("1f1b", 4, 8), "backward", "chunk", ((6, 0), IDLE)), "1f1b: .*31 B slots.* 32")


@pytest.mark.parametrize("rank", [0, 3])
def test_forward_run_twice(rank: int) -> None:
    schedule = move(build("1f1b", 4, 8), "forward", (rank, rank), (12, rank), copy=True)
    refused(schedule, f"1f1b: tick 12, rank {rank}, F of chunk 0 microbatch 0 runs a second time")


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_backward_before_the_one_downstream(rank: int) -> None:
    schedule = move(build("1f1b", 4, 8), "backward", (6 - rank, rank), (5 - rank, rank), copy=False)
    refused(schedule, f"1f1b: tick {5 - rank}, rank {rank}, B of chunk 0 microbatch 0 .* found None")


@quick
@given(any_schedule(), st.data())
def test_any_swap_is_caught(schedule: Schedule, data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(["forward", "backward"]))
    rank = data.draw(st.integers(0, schedule.stages - 1))
    table = getattr(schedule, kind)
    ticks = [int(t) for t in np.flatnonzero(table.chunk[:, rank] != IDLE)]
    one, two = (data.draw(st.sampled_from(ticks)) for _ in range(2))
    a, b = (int(table.microbatch[t, rank]) for t in (one, two))
    if a != b:
        refused(mutate(schedule, kind, "microbatch", ((one, rank), b), ((two, rank), a)))


@quick
@given(any_schedule(), st.data())
def test_any_single_wrong_entry_is_caught(schedule: Schedule, data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(["forward", "backward"]))
    column = data.draw(st.sampled_from(["chunk", "microbatch", "ring", "read", "output"]))
    values = getattr(getattr(schedule, kind), column)
    filled = [tuple(int(i) for i in at) for at in np.argwhere(values != IDLE)]
    if filled:  # one stage of one chunk reads no inbox
        at = data.draw(st.sampled_from(filled))
        refused(mutate(schedule, kind, column, (at, int(values[at]) + 1)))


# Errors of build().


@pytest.mark.parametrize(
    ("name", "sizes", "message"),
    [
        ("1f1", (2, 2), "schedule='1f1' is unknown, did you mean '1f1b'?"),
        ("interleave", (2, 2), "schedule='interleave' is unknown, did you mean 'interleaved'?"),
        ("zzz", (2, 2), "schedule='zzz' is unknown (one of gpipe, 1f1b, interleaved)"),
        ("1f1b", (0, 2), "stages=0 must be at least 1"),
        ("1f1b", (2, -3), "microbatches=-3 must be at least 1"),
        ("interleaved", (2, 2, 0), "chunks=0 must be at least 1"),
        ("1f1b", (2, 2, 2), "schedule='1f1b' has one chunk a stage, got chunks=2: use schedule='interleaved'"),
        ("gpipe", (2, 2, 2), "schedule='gpipe' has one chunk a stage"),
    ],
)
def test_errors_are_one_line_and_say_what_to_do(name: str, sizes: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError) as error:
        build(name, *sizes)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_module_imports_numpy_only() -> None:
    roots = set()
    for node in ast.walk(ast.parse(inspect.getsource(schedules))):
        if isinstance(node, ast.Import):
            roots |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            roots.add(node.module.split(".")[0])
    assert roots - sys.stdlib_module_names == {"numpy"}


@quick
@given(any_schedule())
def test_constants_are_what_a_table_says_everywhere(schedule: Schedule) -> None:
    for table in (schedule.forward, schedule.backward):
        found = table.constants()
        for name, column in vars(table).items():
            assert (name in found) == (len(set(column.flat)) == 1)
            assert name not in found or found[name] == column[0, 0]


@pytest.mark.parametrize(
    ("name", "stages", "microbatches", "waits"),
    [("1f1b", 1, 5, False), ("1f1b", 1, 1, False), ("gpipe", 1, 5, True), ("gpipe", 1, 1, False), ("1f1b", 2, 1, True)],
)
def test_residuals_wait_where_a_backward_is_later_than_its_forward(
    name: str, stages: int, microbatches: int, waits: bool
) -> None:
    assert build(name, stages, microbatches).waits == waits
