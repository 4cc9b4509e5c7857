"""What `run.py bench` has found, for a terminal and as a picture."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from jaxpp.curves import COLORS, GRID, INK

Turn = dict[str, Any]  # what a turn says of itself, as it stands in bench.json
OURS = "ours"
MOST_NAME = 48  # letters of a peer's command line that are shown


class Column(NamedTuple):
    """A column of the table: its title, its key in a turn, how it is written, and what it is multiplied with."""

    title: str
    key: str
    form: str
    scale: float = 1


COLUMNS = (
    Column("tokens/s", "tokens_per_second", ",.0f"),
    Column("step ms", "step_ms_median", ",.1f"),
    Column("MFU", "mfu", ".1%"),
    Column("MFU causal", "mfu_causal", ".1%"),
    Column("MFU as said", "mfu_said", ".1%"),
    Column("peak GiB", "peak_bytes_in_use", ".2f", 2**-30),
    Column("loss", "loss", ".4f"),
    Column("compile s", "compile_seconds", ".1f"),
)
PANELS = (
    Column("tokens / s", "tokens_per_second", ",.0f"),
    Column("peak memory, GiB", "peak_bytes_in_use", ".1f", 2**-30),
)


def short(who: str) -> str:
    """A name that fits a line: of a long one the end, which has the sizes."""
    return who if len(who) <= MOST_NAME else f"…{who[1 - MOST_NAME :]}"


def _cell(turn: Turn, column: Column) -> str:
    return format(turn[column.key] * column.scale, column.form) if column.key in turn else "-"


def table(turns: Sequence[Turn]) -> list[str]:
    """A line for each turn below the titles; columns that no turn has are left out."""
    shown = [column for column in COLUMNS if any(column.key in turn for turn in turns)]
    rows = [["turn", "who", *(column.title for column in shown)]]
    rows += [[str(i), short(t["who"]), *(_cell(t, column) for column in shown)] for i, t in enumerate(turns, 1)]
    wide = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    left = 1  # the column of names
    return [
        "  ".join(c.ljust(w) if i == left else c.rjust(w) for i, (c, w) in enumerate(zip(cells, wide, strict=True)))
        for cells in rows
    ]


def headline(found: dict[str, Any]) -> str:
    """What was measured, on what."""
    machine = f", {found['tokens_per_step']:,} tokens a step, {found['devices']} x {found['device']}"
    return f"{found['name']}, {found['options']['dtype']}" + (machine if "device" in found else "")


def ratio_line(who: str, ratio: dict[str, Any]) -> str:
    """The ratio to a peer with its spread."""
    count = len(ratio["each"])
    spread = f"from {ratio['min']:.3f} to {ratio['max']:.3f}, {count} pair{'s' if count > 1 else ''}"
    return f"our tokens/s over {short(who)}: {ratio['median']:.3f} ({spread})"


def lines(found: dict[str, Any]) -> Iterator[str]:
    """What is printed at the end: the table, the ratios, and what the MFU counts."""
    yield headline(found)
    yield from table(found["turns"])
    for who, ratio in found["ratios"].items():
        yield ratio_line(who, ratio)
    for key, count in found.get("flops_per_token", {}).items():
        title = next((column.title for column in COLUMNS if column.key == key), key)
        yield f"{title}: {count['flops']:,} FLOPs a token = {count['formula']}"
    if found.get("peak_flops") is None:
        yield "no MFU: the device's peak is not known"


def draw(found: dict[str, Any], to: str) -> None:
    """Write the picture as a PNG: bars of each turn's tokens/s and peak memory, a colour for ours and each peer."""
    # Measuring does not wait for these imports, and no window is opened.
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415

    turns = found["turns"]
    colors = {who: COLORS[i % len(COLORS)] for i, who in enumerate(dict.fromkeys(turn["who"] for turn in turns))}
    notes = [headline(found), *(ratio_line(who, ratio) for who, ratio in found["ratios"].items())]
    above = 0.6 + 0.25 * (len(notes) + len(colors))  # inches, as all lengths here
    height = 4.0 + above
    figure = Figure(figsize=(11, height), dpi=130, facecolor="white")
    FigureCanvasAgg(figure)
    for i, note in enumerate(notes):
        bold = "bold" if i == 0 else "normal"
        place = (0.05, 1 - (0.3 + 0.25 * i) / height)
        figure.text(*place, note, fontsize=10, color=INK, fontweight=bold, parse_math=False)
    grid = figure.add_gridspec(1, 2, left=0.08, right=0.98, bottom=0.5 / height, top=1 - above / height, wspace=0.2)
    for i, panel in enumerate(PANELS):
        _bars(figure.add_subplot(grid[i]), panel, turns, colors)
    for i, (who, color) in enumerate(colors.items()):
        place = (0.05, 1 - (0.3 + 0.25 * (len(notes) + i)) / height)
        figure.text(*place, f"■ {short(who)}", fontsize=10, color=color, parse_math=False)
    figure.savefig(to, format="png")


def _bars(axes: Any, panel: Column, turns: Sequence[Turn], colors: dict[str, str]) -> None:
    """A bar for each turn that has the value, with the value on it."""
    axes.set_title(panel.title, loc="left", fontsize=11, fontweight="bold", color=INK)
    axes.set_xlabel("turn", fontsize=9, color=INK)
    axes.grid(axis="y", color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=9, colors=INK, length=3)
    axes.set_xticks(range(1, len(turns) + 1))
    axes.set_xlim(0.4, len(turns) + 0.6)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    having = [(i, turn) for i, turn in enumerate(turns, 1) if panel.key in turn]
    if not having:
        axes.text(0.5, 0.5, "not told", transform=axes.transAxes, ha="center", va="center", color="#888888")
    for i, turn in having:
        value = turn[panel.key] * panel.scale
        axes.bar(i, value, width=0.7, color=colors[turn["who"]])
        axes.annotate(
            _cell(turn, panel), (i, value), (0, 2), textcoords="offset points", ha="center", fontsize=8, color=INK
        )
