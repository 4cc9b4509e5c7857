"""Two runs against each other: the precision checker's folders, tensor by tensor, or two metrics.jsonl.

A difference counts where it is more than atol + rtol times the size of what is compared: of two saved tensors the root
mean square of their difference against the larger of theirs (with atol 0, the norm of the difference relative to the
norm), of statistics and first values the largest magnitude in the tensor, of metrics the larger of the two numbers.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxpp.json_files import read_lines
from jaxpp.options import check_ranges, option
from jaxpp.probe import BACKWARD, FORWARD
from jaxpp.records import FILE, order_of, place_of

SHOWN = 10  # differences that are printed
OF_THE_MACHINE = re.compile(r"_seconds$|_per_second$|^mfu$|^peak_bytes")  # metrics that no two runs share
STATISTICS = ("min", "max", "mean")


@dataclass(frozen=True)
class CompareConfig:
    """Compare two runs, by --precision_check folders or metrics.jsonl: exit code 1 where they differ."""

    runs: tuple[str, ...] = option(
        (), "two folders of --precision_check, or two metrics.jsonl", many=True, positional=True
    )
    atol: float = option(0.0, "a difference up to atol + rtol x size is none", float, least=0)
    rtol: float = option(1e-5, "likewise; size: a tensor's root mean square, its largest magnitude", float, least=0)


class Difference(NamedTuple):
    """What differs: its name, and how."""

    name: str
    how: str


class Found(NamedTuple):
    """What a comparison found. count: names compared. differences: in order of computation, missing names among them.
    largest: (size, name) of the largest difference relative to what it is of. notes: lines to print."""

    count: int
    differences: list[Difference]
    largest: tuple[float, str]
    notes: list[str]


def run(config: CompareConfig) -> int:
    """Print what differs; returns 1 where anything does, else 0. Raises ValueError for what cannot be compared."""
    check_ranges(config)
    if len(config.runs) != 2:
        raise ValueError(f"compare needs two runs, got {len(config.runs)}, for example compare output1 output2")
    paths = [Path(path) for path in config.runs]
    if len({path.is_dir() for path in paths}) > 1:
        raise ValueError(
            f"compare needs two folders or two metrics.jsonl, got one of each: {' and '.join(config.runs)}"
        )
    compare = compare_records if paths[0].is_dir() else compare_metrics
    found = compare(paths[0], paths[1], config.atol, config.rtol)
    print(f"A: {paths[0]}\nB: {paths[1]}")
    print("\n".join(lines(found, config)))
    return 1 if found.differences else 0


def lines(found: Found, config: CompareConfig) -> Iterator[str]:
    """What is printed of a comparison."""
    size, name = found.largest
    within = f"atol={config.atol:g}, rtol={config.rtol:g}"
    largest = f"the largest relative difference is {size:.1e}" + (f", of {name}" if name else "")
    if not found.differences:
        yield f"equal: all {found.count} within {within}; {largest}"
    for i, (name, how) in enumerate(found.differences[:SHOWN]):
        yield f"{'first difference' if i == 0 else 'then'}: {name}: {how}"
    yield from found.notes
    if found.differences:
        yield f"{len(found.differences)} of {found.count} differ ({within}); {largest}"


def _lines_of(path: Path) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines, at least one. Raises ValueError."""
    found = read_lines(path)
    if not found:
        raise ValueError(f"{str(path)!r} has no lines: was its run stopped before the first step?")
    return found


def load_records(folder: Path) -> dict[str, dict[str, Any]]:
    """The records of a folder by name. Raises ValueError where there are none."""
    if not (folder / FILE).is_file():
        near = folder / "precision"
        works = near if (near / FILE).is_file() else "the path of a --precision_check"
        raise ValueError(f"{str(folder)!r} has no {FILE}: give {works}")
    found = {}
    for number, record in enumerate(_lines_of(folder / FILE), 1):
        missing = {"name", "step", "microbatch", "place", "tap", "direction", "order", "stage", "shape"} - set(record)
        if missing:
            raise ValueError(
                f"{str(folder / FILE)!r}: line {number} lacks {', '.join(sorted(missing))}: it is no record"
            )
        found[record["name"]] = record
    return found


def compare_records(a: Path, b: Path, atol: float, rtol: float) -> Found:
    """Compare two folders, name by name."""
    runs = load_records(a), load_records(b)
    names = sorted(runs[0] | runs[1], key=lambda name: order_of(runs[0].get(name) or runs[1][name]))
    differences, largest, dtypes = [], (0.0, ""), []
    for name in names:
        pair = runs[0].get(name), runs[1].get(name)
        x, y = pair
        if x is None or y is None:
            have = x or y
            assert have is not None
            differences.append(Difference(name, f"missing in {'A' if x is None else 'B'}"))
            continue
        if x["dtype"] != y["dtype"]:
            dtypes.append(f"{name}: {x['dtype']} against {y['dtype']}")
        size, how = _compare(x, y, a, b, atol, rtol)
        largest = max(largest, (size, name), key=lambda found: found[0])
        if how:
            boundary = _boundary(x, runs[0], runs[1]) if not differences else ""
            differences.append(Difference(f"{name} (stage {x['stage']} of A, {y['stage']} of B)", how + boundary))
    notes = [f"note: dtypes differ in {len(dtypes)}, first {dtypes[0]} (not counted)"] if dtypes else []
    return Found(len(names), differences, largest, notes)


def _boundary(record: dict, *runs: dict[str, dict]) -> str:
    """Words about the boundary between stages that a record stands right behind, in any of the runs."""
    if not record["place"].startswith("layer"):
        return ""
    tap, before = {FORWARD: ("input", -1), BACKWARD: ("output", 1)}[record["direction"]]
    if record["tap"].split(".")[0] != tap:
        return ""
    receiver, said = int(record["place"].removeprefix("layer")), ""
    for run, records in zip("AB", runs, strict=True):
        stages = {found["place"]: found["stage"] for found in records.values()}
        sent, got = (stages.get(place_of("layer", layer)) for layer in (receiver + before, receiver))
        if sent is not None and sent != got:
            said += f"; a stage boundary of {run}: this is what stage {got} got from stage {sent}"
    return said


def _compare(x: dict, y: dict, a: Path, b: Path, atol: float, rtol: float) -> tuple[float, str]:
    """The relative difference of two records, and how they differ, or nothing."""
    for key in ("shape", "nan", "inf"):
        if x.get(key) != y.get(key):
            return math.inf, f"{key} {x.get(key)} against {y.get(key)}"
    if "tensor" in x and "tensor" in y:
        return _compare_tensors(_tensor(a, x), _tensor(b, y), atol, rtol)
    if "md5" in x and "md5" in y:
        if x["md5_tolerance"] != y["md5_tolerance"]:
            raise ValueError(
                f"{a} has md5_tolerance={x['md5_tolerance']:g}, {b} {y['md5_tolerance']:g}: record both with the same"
            )
        return (0.0, "") if x["md5"] == y["md5"] else (math.inf, f"md5 {x['md5']} against {y['md5']}")
    if "md5" in x or "md5" in y:
        raise ValueError(f"{a} and {b} have neither tensors nor the same format: record both with the same format")
    return _compare_statistics(x, y, atol, rtol)


def _tensor(folder: Path, record: dict) -> np.ndarray:
    path = folder / record["tensor"]
    try:
        return np.load(path).astype(np.float64)
    except (OSError, ValueError):
        raise ValueError(f"{str(path)!r} is missing or damaged: record it again") from None


def _compare_tensors(x: np.ndarray, y: np.ndarray, atol: float, rtol: float) -> tuple[float, str]:
    finite = np.isfinite(x) & np.isfinite(y)
    if not np.array_equal(x[~finite], y[~finite], equal_nan=True):
        return math.inf, "values that are not finite stand elsewhere"
    size = max((_rms(v[finite]) for v in (x, y)), default=0.0)
    away = _rms(x[finite] - y[finite])
    relative = away / size if size else 0.0
    return relative, f"differs by {relative:.1e} of its norm" if away > atol + rtol * size else ""


def _rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(values)))) if values.size else 0.0


def _compare_statistics(x: dict, y: dict, atol: float, rtol: float) -> tuple[float, str]:
    u, v = ({n: r[n] for n in STATISTICS} | {f"value {i}": n for i, n in enumerate(r["first"])} for r in (x, y))
    size = max((abs(r[n]) for r in (x, y) for n in ("min", "max") if r[n] is not None), default=0.0)
    return _compare_numbers(u, v, size, atol, rtol)


def _compare_numbers(x: dict, y: dict, size: float, atol: float, rtol: float) -> tuple[float, str]:
    """The first of several numbers that differs; None and words ("nan") are equal or differ."""
    largest, said = 0.0, ""
    for name, u in x.items():
        v = y[name]
        words = any(isinstance(value, str | None) for value in (u, v))
        away = (0.0 if u == v else math.inf) if words else abs(u - v)
        relative = away / size if size else away
        largest = max(largest, relative)
        if away > atol + rtol * size and not said:
            said = f"{name} {u} against {v}, {relative:.1e} of its size"
    return largest, said


def _flat(path: Path) -> dict[tuple[int, str], Any]:
    """The metrics of a file by step and key, a list's items by themselves; of a step twice in it, the later."""
    found: dict[tuple[int, str], Any] = {}
    for number, line in enumerate(_lines_of(path), 1):
        if not isinstance(line.get("step"), int):
            raise ValueError(f"{str(path)!r}: line {number} has no step: give a metrics.jsonl")
        for key, value in line.items():
            if key == "step" or OF_THE_MACHINE.search(key):
                continue
            items = {f"{key}[{i}]": v for i, v in enumerate(value)} if isinstance(value, list) else {key: value}
            found |= {(line["step"], name): item for name, item in items.items()}
    return found


def compare_metrics(a: Path, b: Path, atol: float, rtol: float) -> Found:
    """Compare two metrics files, by step and key."""
    runs = _flat(a), _flat(b)
    keys = sorted(runs[0] | runs[1], key=lambda key: key[0])  # stable: within a step in the order of the file
    differences, largest = [], (0.0, "")
    for key in keys:
        name = f"step {key[0]}, {key[1]}"
        if key not in runs[0] or key not in runs[1]:
            differences.append(Difference(name, f"missing in {'B' if key in runs[0] else 'A'}"))
            continue
        u, v = ({key[1]: _number(run[key])} for run in runs)
        size = max((abs(n) for n in (*u.values(), *v.values()) if isinstance(n, int | float)), default=0.0)
        relative, how = _compare_numbers(u, v, size, atol, rtol)
        largest = max(largest, (relative, name), key=lambda found: found[0])
        if how:
            differences.append(Difference(name, how))
    return Found(len(keys), differences, largest, [])


def _number(value: Any) -> Any:
    """A number, or a word for what cannot be subtracted."""
    return value if isinstance(value, int | float) and math.isfinite(value) else str(value)
