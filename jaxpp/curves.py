"""Curves of runs as a picture: losses, learning rate, gradient norm and speed, from their metrics.jsonl."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxpp.options import option

FILE = "metrics.jsonl"
# Okabe and Ito's colours, which the colour-blind tell apart; more runs than that begin anew.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
INK, GRID = "#333333", "#DDDDDD"
SMOOTH = 50  # a curve of more points than this has its running mean drawn over it
MOST_LABEL = 60  # letters of a run's name in the legend


class Panel(NamedTuple):
    """A panel of the picture: its key in the records, its title, and its scale."""

    key: str
    title: str
    scale: str = "linear"


PANELS = (
    Panel("loss", "loss"),
    Panel("val_loss", "validation loss"),
    Panel("learning_rate", "learning rate"),
    Panel("grad_norm", "gradient norm", "log"),
    Panel("tokens_per_second", "tokens / s"),
)


@dataclass(frozen=True)
class PlotConfig:
    """Draw the curves of one or several runs as a PNG."""

    runs: tuple[str, ...] = option(
        ("output",), f"output folders of runs, or {FILE} files", str, many=True, positional=True
    )
    to: str = option("curves.png", "the picture to write, a .png")


class Curves(NamedTuple):
    """A run: its name, and for each key of a panel its steps and values, float64 [points]."""

    name: str
    points: dict[str, tuple[np.ndarray, np.ndarray]]


def run(config: PlotConfig) -> None:
    """Draw the picture of a command line. Raises ValueError for what cannot be read or written."""
    if Path(config.to).suffix != ".png":
        raise ValueError(f"to={config.to!r} is not a PNG's name: use one that ends in .png, for example --to curves.png")
    files = list(dict.fromkeys(_file(path) for path in config.runs))
    found = [Curves(name, read(path)) for name, path in zip(_names(files), files, strict=True)]
    try:
        Path(config.to).parent.mkdir(parents=True, exist_ok=True)
        draw(found, config.to)
    except OSError as error:
        raise ValueError(f"to={config.to!r} cannot be written ({error.strerror}): use another file") from None
    print(f"wrote the curves of {', '.join(curves.name for curves in found)} to {config.to}")


def _file(path: str) -> Path:
    return Path(path) / FILE if Path(path).is_dir() else Path(path)


def _names(files: Sequence[Path]) -> list[str]:
    """Short names that differ: paths, without what all begin with."""
    places = [(path.parent if path.name == FILE else path).resolve() for path in files]
    shared = os.path.commonpath([place.parent for place in places])
    names = [os.path.relpath(place, shared) for place in places]
    return [name if len(name) <= MOST_LABEL else f"…{name[-MOST_LABEL:]}" for name in names]


def read(path: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """The points of a metrics file, by a panel's key: steps and values; a last line that a kill cut short is left out.

    Raises ValueError where there is no such file, it is of another kind, or it has no step yet.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ValueError(f"runs: {str(path)!r} cannot be read ({why}): give the --output_dir of a run") from None
    found: dict[str, list[tuple[float, float]]] = {panel.key: [] for panel in PANELS}
    for number, line in enumerate(lines, 1):
        record = _record(line)
        if record is None and number == len(lines) > 1:
            break
        if record is None:
            raise ValueError(f"runs: line {number} of {str(path)!r} is no step of a run: give a {FILE}")
        for key, points in found.items():
            if key in record:
                points.append((record["step"], float(record[key])))
    if not any(found.values()):
        raise ValueError(f"runs: {str(path)!r} has no step yet: give a run that has made one")
    return {key: (np.array(points)[:, 0], np.array(points)[:, 1]) for key, points in found.items() if points}


def _record(line: str) -> dict[str, Any] | None:
    """A line's record, or None where it is none: each has a step, and numbers for the panels."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    numbers = isinstance(record, dict) and [record.get("step"), *(record.get(panel.key, 0) for panel in PANELS)]
    return record if numbers and all(type(number) in (int, float) for number in numbers) else None


def smoothed(values: np.ndarray) -> np.ndarray:
    """The mean of each value and those around it, a fiftieth of all, fewer at the ends; those not finite left out."""
    width = len(values) // SMOOTH // 2
    finite = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    at = np.arange(len(values))
    first, last = np.maximum(at - width, 0), np.minimum(at + width + 1, len(values))
    with np.errstate(invalid="ignore"):
        return (sums[last] - sums[first]) / (counts[last] - counts[first])


def draw(runs: Sequence[Curves], to: str) -> None:
    """Write the picture as a PNG: a panel for each of `PANELS`, a colour and an entry of the legend for each run."""
    # Training does not wait for this import, and no window is opened.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = -(-len(runs) // 2)
    height = 8.2 + 0.28 * rows
    figure = Figure(figsize=(13, height), dpi=130, facecolor="white")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(
        2, 6, left=0.06, right=0.985, bottom=0.065, top=1 - (0.55 + 0.28 * rows) / height, hspace=0.3, wspace=1.1
    )
    places = (grid[0, :3], grid[0, 3:], grid[1, :2], grid[1, 2:4], grid[1, 4:])
    lines: list[Any] = []
    for panel, place in zip(PANELS, places, strict=True):
        axes = figure.add_subplot(place)
        lines = [_curve(axes, panel, curves, COLORS[i % len(COLORS)]) for i, curves in enumerate(runs)]
        _finish(axes, panel, runs)
    _legend(figure, runs, lines)
    figure.savefig(to, format="png")


def _curve(axes: Any, panel: Panel, curves: Curves, color: str) -> Any:
    """Draw a run's curve in a panel; returns a line for the legend."""
    steps, values = curves.points.get(panel.key, (np.empty(0), np.empty(0)))
    few = len(steps) <= SMOOTH
    marker = "o" if few else None
    if not few and panel.key != "learning_rate":
        axes.plot(steps, values, color=color, linewidth=0.7, alpha=0.3)
        values = smoothed(values)
    return axes.plot(steps, values, color=color, linewidth=1.6, marker=marker, markersize=3)[0]


def _finish(axes: Any, panel: Panel, runs: Sequence[Curves]) -> None:
    """Scale, title, grid and limits of a panel."""
    from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullFormatter, StrMethodFormatter

    axes.set_title(panel.title, loc="left", fontsize=11, fontweight="bold", color=INK)
    axes.set_xlabel("step", fontsize=9, color=INK)
    axes.grid(color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=9, colors=INK, length=3)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    values = [curves.points[panel.key][1] for curves in runs if panel.key in curves.points]
    shown = np.concatenate(values) if values else np.empty(0)
    shown = shown[np.isfinite(shown)]
    if not len(shown):
        axes.text(0.5, 0.5, "none", transform=axes.transAxes, ha="center", va="center", color="#888888")
    elif panel.scale == "log" and (shown > 0).any():
        axes.set_yscale("log", nonpositive="mask")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    elif panel.key == "tokens_per_second":
        axes.set_ylim(0, 1.08 * shown.max())
        axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    elif panel.key == "learning_rate":
        axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))


def _legend(figure: Any, runs: Sequence[Curves], lines: Sequence[Any]) -> None:
    """Above the panels, with each run's last losses; the names are taken letter by letter, whatever they hold."""
    legend = figure.legend(
        list(lines),
        ["run"] * len(runs),
        loc="upper left",
        bbox_to_anchor=(0.05, 0.995),
        ncols=min(2, len(runs)),
        frameon=False,
        fontsize=10,
    )
    for text, line, curves in zip(legend.get_texts(), legend.get_lines(), runs, strict=True):
        text.set_parse_math(False)
        text.set_text(f"{curves.name}   {_last(curves)}")
        text.set_color(INK)
        line.set_linewidth(3)


def _last(curves: Curves) -> str:
    found = [f"{key.replace('_', ' ')} {curves.points[key][1][-1]:.4g}" for key in ("loss", "val_loss") if key in curves.points]
    steps = max(steps[-1] for steps, _ in curves.points.values())
    return f"{', '.join(found)} at step {steps:,.0f}"
