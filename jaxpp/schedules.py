"""When each stage works: pipeline schedules as numpy tables, their validator and their simulator.

A schedule is a table over **ticks**. In every tick a rank has one forward (F) slot and one backward (B) slot, each
filled with a (chunk, microbatch) or idle; F runs before B. What a tick sends is read by the neighbour in a later tick.
Two slots a tick, rather than one, is what lets a lockstep program lose nothing: the bubble is exactly (S-1)(F+B) for
1F1B and (S-1)(F+B)/C interleaved, as in the asynchronous originals (PipeDream-Flush, Narayanan et al. 2021,
arXiv:2104.04473, section 2.2).

This module imports numpy alone.

Legend: T ticks, S stages (pipe ranks), C chunks a stage, M microbatches. Chunk c of rank s is global chunk c*S + s.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches

import numpy as np

IDLE = -1


@dataclass(frozen=True)
class Slots:
    """One kind of slot (F or B) over all ticks and ranks; every table is int32 [T, S], idle entries are -1.

    chunk, microbatch: what is computed.
    ring: where in the rank's ring the forward's residuals stand, from its F to its B.
    read: the inbox slot that holds the input; -1 where the input comes from the embedding (F) or the loss (B).
    arrive: the inbox slot that what was sent in the tick before is written to, before the slot reads; never one still
    to be read.
    output: where the last chunk's output stands from its F to its B; -1 on every other chunk.
    """

    chunk: np.ndarray
    microbatch: np.ndarray
    ring: np.ndarray
    read: np.ndarray
    arrive: np.ndarray
    output: np.ndarray

    def constants(self) -> dict[str, int]:
        """The columns that hold one number everywhere, with it: what they decide is decided while a step is traced."""
        columns = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {name: int(a.flat[0]) for name, a in columns.items() if (a == a.flat[0]).all()}


@dataclass(frozen=True)
class Schedule:
    """A pipeline schedule: the two slot tables and how many buffers they use.

    name: gpipe, 1f1b or interleaved. stages, chunks, microbatches: S, C, M.
    ring_slots: chunk residuals that a rank must be able to hold (the largest over ranks).
    forward_inbox, backward_inbox: arrivals that a rank must be able to hold, 1 when each is read in the next tick.
    output_slots: outputs of the last chunk held between its F and its B, 1 when both share a tick.
    """

    name: str
    stages: int
    chunks: int
    microbatches: int
    forward: Slots
    backward: Slots
    ring_slots: int = field(init=False)
    forward_inbox: int = field(init=False)
    backward_inbox: int = field(init=False)
    output_slots: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ring_slots", int(self.forward.ring.max()) + 1)
        object.__setattr__(self, "forward_inbox", int(self.forward.arrive.max()) + 1)
        object.__setattr__(self, "backward_inbox", int(self.backward.arrive.max()) + 1)
        object.__setattr__(self, "output_slots", int(self.forward.output.max()) + 1)

    @property
    def ticks(self) -> int:
        """Number of ticks T."""
        return self.forward.chunk.shape[0]

    @property
    def waits(self) -> bool:
        """Whether a forward's residuals wait for a later tick; on one stage 1f1b uses them in their own."""
        f, b = self.forward, self.backward
        return not (np.array_equal(f.chunk, b.chunk) and np.array_equal(f.microbatch, b.microbatch))

    def in_flight(self) -> list[int]:
        """Chunk forwards whose backward has not run, at most, for each rank (units: one chunk of one microbatch)."""
        done = np.cumsum(self.backward.chunk != IDLE, axis=0)
        begun = np.cumsum(self.forward.chunk != IDLE, axis=0)
        before = np.vstack([np.zeros((1, self.stages), int), done[:-1]])  # B runs after F, so this tick's B still holds
        return [int(n) for n in (begun - before).max(axis=0)]


def build(name: str, stages: int, microbatches: int, chunks: int = 1) -> Schedule:
    """Build a schedule by name.

    Args: name, one of `SCHEDULES`; stages >= 1; microbatches >= 1 (fewer than stages is allowed); chunks >= 1 a stage.
    Returns: the validated tables.
    Raises ValueError for an unknown name, a size below 1, or chunks > 1 with a schedule that has none.
    """
    if name not in SCHEDULES:
        near = get_close_matches(name, SCHEDULES, n=1)
        hint = f", did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"schedule={name!r} is unknown{hint} (one of {', '.join(SCHEDULES)})")
    for option, value in (("stages", stages), ("microbatches", microbatches), ("chunks", chunks)):
        if value < 1:
            raise ValueError(f"{option}={value} must be at least 1, for example {option}=1")
    if chunks > 1 and not SCHEDULES[name].chunked:
        raise ValueError(f"schedule={name!r} has one chunk a stage, got chunks={chunks}: use schedule='interleaved'")
    forward, backward = _ticks(stages, microbatches, chunks, SCHEDULES[name].backward_waits)
    schedule = _tables(name, stages, microbatches, chunks, forward, backward)
    validate(schedule)
    return schedule


@dataclass(frozen=True)
class _Kind:
    chunked: bool  # may have several chunks a stage
    backward_waits: bool  # the first backward waits for the last forward


SCHEDULES = {
    "gpipe": _Kind(chunked=False, backward_waits=True),
    "1f1b": _Kind(chunked=False, backward_waits=False),
    "interleaved": _Kind(chunked=True, backward_waits=False),
}


def groups(stages: int, microbatches: int, chunks: int) -> list[int]:
    """Split M microbatches into the groups that pass through one chunk before the next chunk's turn.

    floor(M/S) groups of nearly equal size, each at least S, so that every M >= S meets the bubble (S-1)(F+B)/C; one
    group where M < S. Without chunks the grouping changes nothing and one group is returned.
    """
    count = max(1, microbatches // stages) if chunks > 1 else 1
    size, extra = divmod(microbatches, count)
    return [size + 1] * extra + [size] * (count - extra)


def _ticks(stages: int, microbatches: int, chunks: int, backward_waits: bool) -> tuple[np.ndarray, np.ndarray]:
    """Tick of each F and each B, int [S, C, M] both: a closed form, see docs/design.md."""
    forward = np.zeros((stages, chunks, microbatches), int)
    backward = np.zeros_like(forward)
    rank = np.arange(stages)
    turn = first = 0
    strides = [max(size, stages) for size in groups(stages, microbatches, chunks)]
    for size, stride in zip(groups(stages, microbatches, chunks), strides, strict=True):
        for k in range(size):
            for c in range(chunks):
                forward[:, c, first + k] = rank + turn + c * stride + k
                backward[:, c, first + k] = (stages - 1 - rank) + turn + (chunks - 1 - c) * stride + k
        turn, first = turn + chunks * stride, first + size
    # With B at its turn on the last rank, its first B may share the tick of that microbatch's last F.
    start = stages - 1 + (chunks - 1) * max(strides)
    if backward_waits:
        start = int(forward.max())
    return forward, backward + start


def _tables(
    name: str, stages: int, microbatches: int, chunks: int, forward: np.ndarray, backward: np.ndarray
) -> Schedule:
    """Tables from ticks: who computes what when, and a buffer slot for everything that waits."""
    ticks = int(backward.max()) + 1
    tables = {
        kind: {key: np.full((ticks, stages), IDLE, np.int32) for key in Slots.__dataclass_fields__}
        for kind in ("forward", "backward")
    }
    f, b = tables["forward"], tables["backward"]
    for s in range(stages):
        items = [(c, m) for c in range(chunks) for m in range(microbatches)]
        for table, when in ((f, forward), (b, backward)):
            for c, m in items:
                table["chunk"][when[s, c, m], s], table["microbatch"][when[s, c, m], s] = c, m
        _assign(items, {i: (forward[s][i], backward[s][i] + 1) for i in items}, ((f, "ring"), (b, "ring")), s)
        if s == stages - 1:
            last = [(chunks - 1, m) for m in range(microbatches)]
            held = {i: (forward[s][i], backward[s][i] + 1) for i in last}
            _assign(last, held, ((f, "output"), (b, "output")), s)
        for table, when, step in ((f, forward, -1), (b, backward, +1)):
            waits = {}
            for c, m in items:
                neighbour = divmod(c * stages + s + step, stages)
                if 0 <= neighbour[0] < chunks:
                    waits[c, m] = (int(when[neighbour[1], neighbour[0], m]), int(when[s, c, m]))
            arrivals = {sent for sent, _ in waits.values()}
            waits |= {("idle", t): (t, t + 1) for t in range(ticks) if t not in arrivals}
            for item, slot in _allocate(waits).items():
                sent, read = waits[item]
                table["arrive"][(sent + 1) % ticks, s] = slot  # before the first tick nothing waits in any slot
                if item[0] != "idle":
                    table["read"][read, s] = slot
    return Schedule(name, stages, chunks, microbatches, Slots(**f), Slots(**b))


def _assign(items: Iterable, intervals: dict, columns: Sequence[tuple[dict, str]], rank: int) -> None:
    """Write the slot of each item's interval at its first tick in the first column and its last in the second."""
    slots = _allocate(intervals)
    for item in items:
        begin, end = intervals[item]
        columns[0][0][columns[0][1]][begin, rank] = slots[item]
        columns[1][0][columns[1][1]][end - 1, rank] = slots[item]


def _allocate(intervals: dict) -> dict:
    """Lowest free slot for each half-open interval [begin, end): as many slots as the most that overlap."""
    slots, busy_until = {}, []
    for item, (begin, end) in sorted(intervals.items(), key=lambda pair: pair[1]):
        free = next((i for i, until in enumerate(busy_until) if until <= begin), len(busy_until))
        busy_until[free : free + 1] = [end]
        slots[item] = free
    return slots


def validate(schedule: Schedule) -> None:
    """Replay the tables symbolically and check that every slot finds what it needs.

    Each F and B of every (rank, chunk, microbatch) runs once; inputs, residuals and outputs that a slot reads are
    those of its own (chunk, microbatch). Raises ValueError naming the schedule, the tick, the rank and what was found.
    """
    s_, f, b = schedule.stages, schedule.forward, schedule.backward
    last = schedule.chunks * s_ - 1
    seen: dict[str, set] = {"F": set(), "B": set()}
    ring, outputs = [{} for _ in range(s_)], [{} for _ in range(s_)]
    inbox = {"F": [{} for _ in range(s_)], "B": [{} for _ in range(s_)]}
    sent: dict[str, dict] = {"F": {}, "B": {}}

    def arrive(kind: str, table: Slots, t: int) -> None:
        for s in range(s_):
            slot = int(table.arrive[t, s])
            _require(slot >= 0, f"{schedule.name}: tick {t}, rank {s} has no inbox slot for what arrives")
            inbox[kind][s][slot] = sent[kind].pop(s, None)

    for t in range(schedule.ticks):
        for kind, table, step in (("F", f, 1), ("B", b, -1)):
            arrive(kind, table, t)
            for s in range(s_):
                c, m = int(table.chunk[t, s]), int(table.microbatch[t, s])
                if c == IDLE:
                    continue
                item, place = (s, c, m), f"{schedule.name}: tick {t}, rank {s}, {kind} of chunk {c} microbatch {m}"
                inside = 0 <= c < schedule.chunks and 0 <= m < schedule.microbatches
                _require(
                    inside, f"{place} is outside {schedule.chunks} chunks and {schedule.microbatches} microbatches"
                )
                _require(item not in seen[kind], f"{place} runs a second time")
                seen[kind].add(item)
                g = c * s_ + s
                first = g == (0 if kind == "F" else last)
                slots = {"ring": True, "read": not first, "output": g == last}
                for name, used in slots.items():
                    slot = int(getattr(table, name)[t, s])
                    _require(
                        (slot >= 0) == used, f"{place} has {name} slot {slot}, {'>= 0' if used else '-1'} is right"
                    )
                got = None if first else inbox[kind][s].get(int(table.read[t, s]))
                _require(first or got == (g - step, m), f"{place} needs the result of its neighbour, found {got}")
                if kind == "F":
                    ring[s][int(f.ring[t, s])] = (c, m)
                    if g == last:
                        outputs[s][int(f.output[t, s])] = m
                else:
                    got = ring[s].get(int(b.ring[t, s]))
                    _require(got == (c, m), f"{place} needs its own residuals, found {got}")
                    got = outputs[s].get(int(b.output[t, s])) if g == last else m
                    _require(got == m, f"{place} needs its own output, found that of {got}")
                sent[kind][(s + step) % s_] = (g, m)
    every = set(itertools.product(range(s_), range(schedule.chunks), range(schedule.microbatches)))
    for kind, items in seen.items():
        for s, c, m in sorted(every - items)[:1]:
            raise ValueError(
                f"{schedule.name}: {len(items)} {kind} slots are filled, {len(every)} are needed:"
                f" rank {s} never runs chunk {c} microbatch {m}"
            )


def _require(truth: bool, message: str) -> None:
    if not truth:
        raise ValueError(message)


@dataclass(frozen=True)
class Simulation:
    """What a schedule costs under lockstep, in the units of the given costs.

    makespan: end of the last slot. busy: work of each rank. bubble: makespan less the busiest rank's work.
    start, end: int [T, S], each rank's ticks. bubble_fraction: bubble / makespan.
    """

    makespan: int
    busy: list[int]
    bubble: int
    start: np.ndarray
    end: np.ndarray

    @property
    def bubble_fraction(self) -> float:
        return self.bubble / self.makespan


def simulate(schedule: Schedule, forward_cost: int | np.ndarray = 1, backward_cost: int | np.ndarray = 2) -> Simulation:
    """Run the tables by the clock: each tick of a rank waits for its own and both neighbours' previous tick.

    Args: forward_cost, backward_cost: integer cost of one chunk's F and B, a number or an array [S, C]. Integers, so
    that equal times compare equal.
    Returns: the simulation. Raises ValueError for a cost that is not an integer.
    """
    shape = (schedule.stages, schedule.chunks)
    costs = [np.broadcast_to(np.asarray(c), shape) for c in (forward_cost, backward_cost)]
    for option, cost in zip(("forward_cost", "backward_cost"), costs, strict=True):
        if not np.issubdtype(cost.dtype, np.integer):
            raise ValueError(f"{option} must be an integer (scale it, for example to microseconds), got {cost.dtype}")
    rank = np.arange(schedule.stages)
    work = np.zeros((schedule.ticks, schedule.stages), int)
    for table, cost in zip((schedule.forward, schedule.backward), costs, strict=True):
        work += np.where(table.chunk == IDLE, 0, cost[rank, table.chunk])
    start, end = np.zeros_like(work), np.zeros_like(work)
    ring = schedule.chunks > 1  # chunks join the last rank to the first
    for t in range(schedule.ticks):
        if t:
            wait = end[t - 1].copy()
            wait[1:] = np.maximum(wait[1:], end[t - 1, :-1])
            wait[:-1] = np.maximum(wait[:-1], end[t - 1, 1:])
            if ring:
                wait[0], wait[-1] = max(wait[0], end[t - 1, -1]), max(wait[-1], end[t - 1, 0])
            start[t] = wait
        end[t] = start[t] + work[t]
    busy = [int(n) for n in work.sum(axis=0)]
    makespan = int(end.max())
    return Simulation(makespan, busy, makespan - max(busy), start, end)
