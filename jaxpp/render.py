"""Pictures of a schedule: columns of ticks for the terminal, a timeline to scale as SVG.

Legend: T ticks, S stages (pipe ranks), C chunks a stage, M microbatches.
"""

import re
from collections.abc import Iterator
from colorsys import hls_to_rgb
from xml.sax.saxutils import escape

import numpy as np

from jaxpp.schedules import IDLE, Schedule, simulate

# 256-colour (background, ink) by chunk: a background of our own reads alike on black and on white terminals.
_ANSI = {"F": ((25, 231), (68, 231), (110, 16), (153, 16)), "B": ((22, 231), (65, 231), (108, 16), (151, 16))}
_TONE = {"F": (0.59, 0.43), "B": (0.43, 0.36)}  # hue and lightness of chunk 0
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, Helvetica, Arial, 'DejaVu Sans', sans-serif"
_MIDDLE = ' text-anchor="middle"'
_INK, _MUTED, _LANE, _GRID = "#1f2933", "#5b6774", "#f0f2f5", "#d9dee4"
_PAD, _GUTTER, _BAR, _PITCH, _HEAD = 24, 56, 28, 34, 92  # pixels: margin, rank labels, bar, row pitch, top of row 0
_CELL, _NARROW, _WIDE = 20, 480, 6000  # pixels: least width of a slot; least and greatest width of the plot


def as_text(schedule: Schedule, width: int | None = None, color: bool = False) -> str:
    """Draw a schedule for the terminal: ticks as columns, an F and a B line for each rank, microbatches in the cells.

    Args: width, the most columns a line may take (None: no limit); what does not fit goes on below, under a line that
    names its first tick. color: ANSI backgrounds, blue F and green B, lighter for later chunks.
    Raises ValueError for a width that cannot hold the labels.
    """
    stages, chunks, ticks = schedule.stages, schedule.chunks, schedule.ticks
    head = [schedule.name, f"stages S={stages}", f"chunks C={chunks}", f"microbatches M={schedule.microbatches}"]
    head.append(f"ticks T={ticks}")
    legend = [_paint("F", "F", 0, color) + " forward", _paint("B", "B", 0, color) + " backward", ". idle"]
    legend += [f"{_letter(c)} chunk {c}" for c in range(chunks) if chunks > 1]
    digits = len(str(schedule.microbatches - 1)) + (len(_letter(chunks - 1)) if chunks > 1 else 0)
    pitch = digits + 1
    # Tick numbers may be wider than cells, so only every so many are printed.
    every = next(k for k in (1, 2, 5, 10) if k * pitch > len(str(ticks - 1)))
    margin = len(f"rank {stages - 1} F")
    least = max(margin + every * pitch, *(_seen(piece) for piece in head + legend), len(f"... from tick {ticks}"))
    if width is not None and width < least:
        raise ValueError(f"width={width} is too narrow for this schedule, use at least width={least}")
    fit = ticks if width is None else (width - margin) // pitch
    fit = ticks if fit >= ticks else fit // every * every  # each further part begins with a numbered tick
    lines = _pack(head, width)
    for begin in range(0, ticks, fit):
        span = range(begin, min(begin + fit, ticks))
        lines += ["", f"... from tick {begin}"] if begin else [""]
        numbers = list("tick".ljust(margin + len(span) * pitch))
        for t in span[::every]:
            end = margin + (t - begin + 1) * pitch
            numbers[end - len(str(t)) : end] = str(t)
        lines.append("".join(numbers).rstrip())
        for s in range(stages):
            for label, kind in ((f"rank {s}", "F"), ("", "B")):
                cells = (_cell(schedule, kind, t, s, digits, color) for t in span)
                lines.append(label.ljust(margin - 1) + kind + "".join(cells))
    return "\n".join([*lines, "", *_pack(legend, width)]) + "\n"


def _cell(schedule: Schedule, kind: str, tick: int, rank: int, digits: int, color: bool) -> str:
    table = schedule.forward if kind == "F" else schedule.backward
    chunk, microbatch = int(table.chunk[tick, rank]), int(table.microbatch[tick, rank])
    if chunk == IDLE:
        return " " + ".".rjust(digits)
    text = f"{microbatch}{_letter(chunk) if schedule.chunks > 1 else ''}"
    return " " + _paint(text.rjust(digits), kind, chunk, color)


def _paint(text: str, kind: str, chunk: int, color: bool) -> str:
    back, ink = _ANSI[kind][chunk % len(_ANSI[kind])]
    return f"\x1b[48;5;{back};38;5;{ink}m{text}\x1b[0m" if color else text


def _letter(chunk: int) -> str:
    """Name of a chunk: a to z, then aa, ab and so on."""
    return (_letter(chunk // 26 - 1) if chunk >= 26 else "") + chr(ord("a") + chunk % 26)


def _seen(text: str) -> int:
    """Columns that a text takes on the terminal."""
    return len(re.sub(r"\x1b\[[0-9;]*m", "", text))


def _pack(pieces: list[str], width: int | None) -> list[str]:
    """Join pieces with two spaces into as few lines as the width allows."""
    lines = [pieces[0]]
    for piece in pieces[1:]:
        fits = width is None or _seen(lines[-1]) + 2 + _seen(piece) <= width
        lines[-1:] = [lines[-1] + "  " + piece] if fits else [lines[-1], piece]
    return lines


def as_svg(schedule: Schedule, forward_cost: int | np.ndarray = 1, backward_cost: int | np.ndarray = 2) -> str:
    """Draw the simulated timeline of a schedule to scale, as a standalone SVG.

    Args: forward_cost, backward_cost: integer cost of one chunk's F and B, a number or an array [S, C].
    Returns: the SVG text, on a white ground of its own. Raises ValueError for a cost that is not an integer.
    """
    sim = simulate(schedule, forward_cost, backward_cost)
    shape = (schedule.stages, schedule.chunks)
    costs = {"F": np.broadcast_to(forward_cost, shape), "B": np.broadcast_to(backward_cost, shape)}
    least = min((int(cost[cost > 0].min()) for cost in costs.values() if (cost > 0).any()), default=1)
    makespan = max(sim.makespan, 1)
    unit = min(max(_CELL / least, _NARROW / makespan), _WIDE / makespan)  # pixels a unit of cost
    left, plot, bottom = _PAD + _GUTTER, unit * makespan, _HEAD + _PITCH * schedule.stages

    scalar = np.ndim(forward_cost) == np.ndim(backward_cost) == 0
    price = f"F = {forward_cost}, B = {backward_cost}" if scalar else "F and B by stage and chunk"
    summary = f"S = {shape[0]} · C = {shape[1]} · M = {schedule.microbatches} · {price}"
    summary += f" · makespan {sim.makespan} · bubble {sim.bubble} ({sim.bubble / makespan:.1%})"
    # Both texts are at most so wide in any of the fonts; long ones would else run off a short plot.
    width = round(max(left + plot + _PAD, 2 * _PAD + 6.8 * len(summary), 470 + 30 * schedule.chunks))
    height = bottom + 53 + _PAD
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="{_FONT}" role="img">',
        f"<title>{escape(f'{schedule.name}: {summary}')}</title>",
        f'<rect class="page" width="{width}" height="{height}" rx="8" fill="#ffffff"/>',
        _text(_PAD, 40, schedule.name, 18, _INK, ' font-weight="600"'),
        _text(_PAD, 62, summary, 12, _MUTED),
    ]
    for s in range(schedule.stages):
        y = _HEAD + _PITCH * s
        parts.append(_text(_PAD, y + _BAR / 2 + 4, f"rank {s}", 12, _INK))
        parts.append(_rect("lane", left, y, plot, _BAR, _LANE))
    parts += _axis(sim.makespan, left, bottom, unit)
    parts += _bars(schedule, sim.start, costs, left, unit)
    return "\n".join([*parts, *_legend(schedule.chunks, bottom + 50), "</svg>"]) + "\n"


def _bars(schedule: Schedule, start: np.ndarray, costs: dict, left: float, unit: float) -> Iterator[str]:
    """A rectangle with its microbatch for each F and B; a slot too narrow for a number keeps its tooltip."""
    for t, s in np.ndindex(start.shape):
        begin = int(start[t, s])
        for kind, table in (("F", schedule.forward), ("B", schedule.backward)):
            c, m = int(table.chunk[t, s]), int(table.microbatch[t, s])
            if c == IDLE:
                continue
            end = begin + int(costs[kind][s, c])
            x, y, wide = left + unit * begin, _HEAD + _PITCH * s, unit * (end - begin)
            fill, ink = _shade(kind, c, schedule.chunks)
            inset = min(0.5, wide / 8)
            tip = f"{kind} of microbatch {m}, chunk {c}: {begin} to {end}"
            yield _rect(kind, x + inset, y, wide - 2 * inset, _BAR, fill, tip)
            size = min(12, (wide - 3) / (0.6 * len(str(m))))
            if size >= 5:
                yield _text(
                    x + wide / 2, y + _BAR / 2 + size * 0.36, str(m), size, ink, _MIDDLE + ' class="microbatch"'
                )
            begin = end


def _axis(makespan: int, left: float, bottom: float, unit: float) -> Iterator[str]:
    """Numbered grid lines at round times, far enough apart for the largest number."""
    apart = 20 + 8 * len(str(makespan))  # pixels
    step = next(n * 10**p for p in range(20) for n in (1, 2, 5) if n * 10**p * unit >= apart)
    yield _text(_PAD, bottom + 14, "time", 11, _MUTED)
    for time in range(0, makespan + 1, step):
        x = left + unit * time
        yield f'<path d="M{x:g} {_HEAD}V{bottom:g}" stroke="{_GRID}"/>'
        yield _text(x, bottom + 14, str(time), 11, _MUTED, _MIDDLE)


def _legend(chunks: int, y: float) -> Iterator[str]:
    which = "" if chunks == 1 else f", chunks 0 to {chunks - 1}"
    x = _PAD
    for kind, label in (("F", "forward" + which), ("B", "backward" + which), ("idle", "idle")):
        swatches = [_LANE] if kind == "idle" else [_shade(kind, c, chunks)[0] for c in range(chunks)]
        for fill in swatches:
            yield _rect("swatch", x, y - 11, 14, 14, fill)
            x += 15
        yield _text(x + 5, y, label, 12, _INK)
        x += 25 + 6.4 * len(label)


def _shade(kind: str, chunk: int, chunks: int) -> tuple[str, str]:
    """Fill and ink of a slot: later chunks are lighter."""
    hue, light = _TONE[kind]
    red, green, blue = hls_to_rgb(hue, light + (0.82 - light) * chunk / max(chunks - 1, 1), 0.42)
    luminance = 0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2
    fill = "#" + "".join(f"{round(255 * v):02x}" for v in (red, green, blue))
    return fill, "#ffffff" if luminance < 0.22 else _INK


def _rect(kind: str, x: float, y: float, width: float, height: float, fill: str, tip: str = "") -> str:
    rect = f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="2" fill="{fill}"'
    return f"{rect}><title>{tip}</title></rect>" if tip else rect + "/>"


def _text(x: float, y: float, text: str, size: float, fill: str, more: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" font-size="{size:.3g}" fill="{fill}"{more}>{escape(text)}</text>'
