"""Pictures show every slot, and keep to their width."""

import itertools
import re
from collections import Counter
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpp.render import as_svg, as_text
from jaxpp.schedules import IDLE, Schedule, build, simulate

SVG = "{http://www.w3.org/2000/svg}"
CASES = [
    build("1f1b", 4, 8),
    build("gpipe", 4, 4),
    build("interleaved", 4, 12, 2),
    build("interleaved", 12, 5, 3),
    build("1f1b", 4, 2),
    build("1f1b", 1, 1),
]


def cells(text: str) -> dict[tuple[int, str], list[str]]:
    """Cells of each (rank, F or B), the parts of a wrapped picture joined."""
    rows: dict[tuple[int, str], list[str]] = {}
    rank = -1
    for line in text.splitlines():
        if found := re.match(r"(?:rank (\d+) *|  +)([FB])((?: +\S+)+)$", line):
            rank = int(found[1]) if found[1] else rank
            rows.setdefault((rank, found[2]), []).extend(found[3].split())
    return rows


def expected(schedule: Schedule) -> dict[tuple[int, str], list[str]]:
    rows = {}
    for kind, table in (("F", schedule.forward), ("B", schedule.backward)):
        for t, s in np.ndindex(table.chunk.shape):
            c, m = table.chunk[t, s], table.microbatch[t, s]
            letter = "abcd"[c] if schedule.chunks > 1 else ""
            rows.setdefault((s, kind), []).append("." if c == IDLE else f"{m}{letter}")
    return rows


@pytest.mark.parametrize("schedule", CASES, ids=lambda x: f"{x.name}-{x.stages}-{x.microbatches}-{x.chunks}")
def test_text_shows_every_slot(schedule: Schedule) -> None:
    text = as_text(schedule)
    assert cells(text) == expected(schedule)
    assert "forward" in text and "backward" in text and schedule.name in text
    colored = as_text(schedule, color=True)
    assert "\x1b[" in colored and "\x1b[" not in text
    assert re.sub(r"\x1b\[[0-9;]*m", "", colored) == text


@settings(deadline=None, max_examples=40)
@given(st.integers(0, len(CASES) - 1), st.integers(1, 120), st.booleans())
def test_text_keeps_to_its_width_and_loses_nothing(case: int, width: int, color: bool) -> None:
    schedule = CASES[case]
    try:
        text = as_text(schedule, width, color)
    except ValueError as error:
        width = int(re.search(r"use at least width=(\d+)$", str(error))[1])
        assert 15 < width < 40
        text = as_text(schedule, width, color)
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert max(len(line) for line in text.splitlines()) <= width
    assert cells(text) == expected(schedule)


def test_wrapped_text_says_where_it_goes_on() -> None:
    lines = as_text(build("1f1b", 4, 30), width=60).splitlines()
    assert lines[0] == "1f1b  stages S=4  chunks C=1  microbatches M=30  ticks T=36"
    assert lines[2].split() == ["tick", *(str(t) for t in range(17))]
    assert "... from tick 17" in lines and "... from tick 34" in lines


def test_tick_numbers_stand_over_their_columns() -> None:
    head, row = as_text(build("1f1b", 4, 8)).splitlines()[2:4]
    assert head == "tick     0   2   4   6   8  10  12"
    assert row == "rank 0 F 0 1 2 3 4 5 6 7 . . . . . ."


@pytest.mark.parametrize("schedule", CASES, ids=lambda x: f"{x.name}-{x.stages}-{x.microbatches}-{x.chunks}")
@pytest.mark.parametrize("cost", [(1, 2), (300, 700)])
def test_svg_has_a_rectangle_for_every_slot(schedule: Schedule, cost: tuple[int, int]) -> None:
    root = ElementTree.fromstring(as_svg(schedule, *cost))
    every = schedule.stages * schedule.chunks * schedule.microbatches
    rects = {kind: root.findall(f"{SVG}rect[@class='{kind}']") for kind in ("F", "B", "lane", "page")}
    assert [len(found) for found in rects.values()] == [every, every, schedule.stages, 1]
    numbers = Counter(text.text for text in root.iter(f"{SVG}text") if text.get("class") == "microbatch")
    assert numbers == {str(m): 2 * schedule.stages * schedule.chunks for m in range(schedule.microbatches)}
    words = " ".join(text.text for text in root.iter(f"{SVG}text"))
    sim = simulate(schedule, *cost)
    for word in (schedule.name, f"S = {schedule.stages}", f"makespan {sim.makespan}", f"bubble {sim.bubble} ("):
        assert word in words


def test_svg_is_to_scale() -> None:
    schedule = build("interleaved", 3, 5, 2)
    f, b = np.array([[1, 2], [3, 4], [5, 6]]), np.array([[2, 3], [4, 5], [6, 7]])
    sim, root = simulate(schedule, f, b), ElementTree.fromstring(as_svg(schedule, f, b))
    lanes = root.findall(f"{SVG}rect[@class='lane']")
    unit = float(lanes[0].get("width")) / sim.makespan
    for s, lane in enumerate(lanes):
        spans = sorted(
            (float(rect.get("x")) - 0.5, float(rect.get("width")) + 1)
            for rect in root.iter(f"{SVG}rect")
            if rect.get("class") in ("F", "B") and rect.get("y") == lane.get("y")
        )
        assert sum(wide for _, wide in spans) == pytest.approx(unit * sim.busy[s], abs=0.1)
        for (x, wide), (after, _) in itertools.pairwise(spans):
            assert x + wide <= after + 0.01
        assert spans[-1][0] + spans[-1][1] <= float(lane.get("x")) + float(lane.get("width")) + 0.01


def test_svg_refuses_float_costs() -> None:
    with pytest.raises(ValueError, match="forward_cost must be an integer"):
        as_svg(build("1f1b", 2, 2), 1.5, 2)
