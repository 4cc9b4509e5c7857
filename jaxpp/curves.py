"""Curves of runs as a picture: losses, learning rate, gradient norm and speed, from their metrics.jsonl."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxpp.json_files import read_lines
from jaxpp.options import option

FILE = "metrics.jsonl"
# Okabe and Ito's colours, which the colour-blind tell apart; more runs than that begin anew, with dashes.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ("-", "--", ":")
INK, GRID = "#333333", "#DDDDDD"
SMOOTH = 50  # the running mean is over this part of a curve
FEW = 20  # a curve of at most so many points has them marked
MOST_LABEL = 60  # letters of a run's name in the legend
MOST_OF_TWO = 64  # letters of an entry of the legend where two stand in a line


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
        raise ValueError(
            f"to={config.to!r} is not a PNG's name: use one that ends in .png, for example --to curves.png"
        )
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
    """Short names that differ: paths, without what all begin and end with."""
    places = [(path.parent if path.name == FILE else path).resolve() for path in files]
    shared = os.path.commonpath([place.parent for place in places])
    parts = [place.relative_to(shared).parts for place in places]
    while min(map(len, parts)) > 1 and len({found[-1] for found in parts}) == 1:
        parts = [found[:-1] for found in parts]
    names = ["/".join(found) for found in parts]
    return [name if len(name) <= MOST_LABEL else f"…{name[-MOST_LABEL:]}" for name in names]


def read(path: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """The points of a metrics file, by a panel's key: steps and values; a last line that a kill cut short is left out.

    Raises ValueError where there is no such file, it is of another kind, or it has no step yet.
    """
    try:
        records = read_lines(path)
    except ValueError as error:
        raise ValueError(f"runs: {error}: give the --output_dir of a run") from None
    found: dict[str, list[tuple[float, float]]] = {panel.key: [] for panel in PANELS}
    for number, record in enumerate(records, 1):
        numbers = all(type(record.get(panel.key, 0)) in (int, float) for panel in PANELS)
        if type(record.get("step")) is not int or not numbers:
            raise ValueError(f"runs: line {number} of {str(path)!r} is no step of a run: give a {FILE}")
        for key, points in found.items():
            if key in record:
                points.append((record["step"], float(record[key])))
    if not any(found.values()):
        raise ValueError(f"runs: {str(path)!r} has no step yet: give a run that has made one")
    return {key: (np.array(points)[:, 0], np.array(points)[:, 1]) for key, points in found.items() if points}


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
    # Training does not wait for these imports, and no window is opened.
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415

    entries = [f"{curves.name}   {_last(curves)}" for curves in runs]
    columns = 2 if len(runs) > 3 and max(map(len, entries)) <= MOST_OF_TWO else 1
    lines_above = -(-len(runs) // columns) * 0.25
    height = 8.0 + lines_above  # inches, as all lengths here
    top, middle = 1 - (0.45 + lines_above) / height, 3.45 / height
    figure = Figure(figsize=(13, height), dpi=130, facecolor="white")
    FigureCanvasAgg(figure)
    upper = figure.add_gridspec(1, 2, left=0.05, right=0.985, bottom=middle + 0.85 / height, top=top, wspace=0.12)
    lower = figure.add_gridspec(1, 3, left=0.05, right=0.985, bottom=0.5 / height, top=middle, wspace=0.2)
    lines: list[Any] = []
    for panel, place in zip(PANELS, (*upper, *lower), strict=True):
        axes = figure.add_subplot(place)
        lines = [_curve(axes, panel, curves, i, len(runs)) for i, curves in enumerate(runs)]
        _finish(axes, panel, runs)
    _legend(figure, entries, lines, columns)
    figure.savefig(to, format="png")


def _curve(axes: Any, panel: Panel, curves: Curves, index: int, of: int) -> Any:
    """Draw the curve of a run, one of so many, in a panel; returns a line for the legend."""
    color, dashes = COLORS[index % len(COLORS)], DASHES[index // len(COLORS) % len(DASHES)]
    steps, values = curves.points.get(panel.key, (np.empty(0), np.empty(0)))
    if len(steps) >= 2 * SMOOTH and panel.key != "learning_rate":
        axes.plot(steps, values, color=color, linewidth=0.7, alpha=0.3 if of <= 3 else 0.12)
        values = smoothed(values)
    marker = "o" if len(steps) <= FEW else None
    return axes.plot(steps, values, color=color, linestyle=dashes, linewidth=1.6, marker=marker, markersize=3.5)[0]


def _finish(axes: Any, panel: Panel, runs: Sequence[Curves]) -> None:
    """Scale, title, grid and limits of a panel."""
    from matplotlib import ticker  # noqa: PLC0415

    axes.set_title(panel.title, loc="left", fontsize=11, fontweight="bold", color=INK)
    axes.set_xlabel("step", fontsize=9, color=INK)
    axes.grid(color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=9, colors=INK, length=3)
    axes.xaxis.set_major_locator(ticker.MaxNLocator(nbins=6, integer=True, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(ticker.EngFormatter(sep=""))
    first, last = _extent(runs)
    margin = max(0.02 * (last - first), 0.5)
    axes.set_xlim(first - margin, last + margin)  # the same in all panels
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    values = [curves.points[panel.key][1] for curves in runs if panel.key in curves.points]
    shown = np.concatenate(values) if values else np.empty(0)
    shown = shown[np.isfinite(shown)]
    if not len(shown):
        axes.text(0.5, 0.5, "none", transform=axes.transAxes, ha="center", va="center", color="#888888")
    elif panel.scale == "log" and (shown > 0).any():
        axes.set_yscale("log", nonpositive="mask")
        axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(ticker.StrMethodFormatter("{x:g}"))
        axes.yaxis.set_minor_formatter(ticker.NullFormatter())
    elif panel.key == "tokens_per_second":
        axes.set_ylim(0, 1.08 * max(shown.max(), 1))
        axes.yaxis.set_major_formatter(ticker.EngFormatter(sep=""))
    elif panel.key == "learning_rate":
        unit = 10.0 ** np.floor(np.log10(shown.max() or 1.0))
        axes.set_title(f"learning rate / {unit:.0e}", loc="left", fontsize=11, fontweight="bold", color=INK)
        axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda rate, _: f"{rate / unit:g}"))


def _extent(runs: Sequence[Curves]) -> tuple[float, float]:
    """The first and the last step of all runs."""
    ends = [steps[[0, -1]] for curves in runs for steps, _ in curves.points.values()]
    return float(min(end[0] for end in ends)), float(max(end[1] for end in ends))


def _legend(figure: Any, entries: Sequence[str], lines: Sequence[Any], columns: int) -> None:
    """Above the panels; the entries are taken letter by letter, whatever they hold."""
    legend = figure.legend(
        list(lines),
        ["run"] * len(lines),  # a label that begins with _ would be left out
        loc="upper left",
        bbox_to_anchor=(0.04, 0.997),
        ncols=columns,
        frameon=False,
        fontsize=10,
    )
    for text, line, entry in zip(legend.get_texts(), legend.get_lines(), entries, strict=True):
        text.set_parse_math(False)
        text.set_text(entry)
        text.set_color(INK)
        line.set_linewidth(3)


def _last(curves: Curves) -> str:
    losses = {"loss": "loss", "val_loss": "validation"}
    found = [f"{word} {curves.points[key][1][-1]:#.4g}" for key, word in losses.items() if key in curves.points]
    return f"step {_extent([curves])[1]:,.0f}: {', '.join(found)}"
