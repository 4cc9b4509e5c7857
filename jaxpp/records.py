"""The precision checker's records: what is written of each tensor that a step's taps show, and where.

A folder holds `records.jsonl`, a line a tensor, and with save_tensors also `tensors/NAME.npy`. Names say what a tensor
is and not where it was computed, so that runs of different layouts have the same:

    step1/microbatch3/layer05/output/forward

Steps count from 1, as in metrics.jsonl; microbatches and layers from 0. Rows of several data ranks are put together; a
tensor without rows (the loss) is summed over them, and its cotangent, which is the same on each, averaged.
"""

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from threading import Lock
from typing import Any

import jax
import numpy as np

from jaxpp.options import nearest
from jaxpp.probe import FORWARD, Spot, Tap

FILE = "records.jsonl"
FIRST_VALUES = 8
_EXAMPLE = "for example --precision_check level=1"


@dataclass(frozen=True)
class Check:
    """What --precision_check asks for.

    level: 1, what goes into and comes out of each layer; 2, also inside. path: the folder. format: "simple",
    statistics, or "md5", a sum of the rounded values. save_tensors: also the tensors themselves. md5_tolerance: values
    are rounded to multiples of it times the power of two at or below their largest magnitude: a fixed step would round
    all of a small gradient to zero.
    """

    level: int
    path: str
    format: str = "simple"
    save_tensors: bool = False
    md5_tolerance: float = 1e-3


_WORDS = {
    "level": {"1": 1, "2": 2},
    "format": {"simple": "simple", "md5": "md5"},
    "save_tensors": {"true": True, "false": False},
}


def parse_check(text: str, output_dir: str) -> Check:
    """Parse the option precision_check, "level=1,format=md5,..."; the folder is by default OUTPUT_DIR/precision.

    Raises ValueError for what is unknown (with the nearest), given twice, or out of range.
    """
    known = [each.name for each in fields(Check)]
    values: dict[str, Any] = {}
    for part in text.split(","):
        name, equals, word = part.partition("=")
        where = f"precision_check={text!r}: "
        if name not in known or not equals:
            fault = "has no value" if name in known else f"is unknown{nearest(name, known)} (one of {', '.join(known)})"
            raise ValueError(f"{where}{name!r} {fault}, {_EXAMPLE}")
        if name in values:
            raise ValueError(f"{where}{name} is given twice: give it once")
        if name in _WORDS and word not in _WORDS[name]:
            raise ValueError(f"{where}{name}={word!r} is unknown{nearest(word, _WORDS[name])} ({_one_of(name)})")
        if word == "":
            raise ValueError(f"{where}{name} is empty, {_EXAMPLE}")
        values[name] = _WORDS[name][word] if name in _WORDS else word
    if "md5_tolerance" in values:
        values["md5_tolerance"] = _tolerance(values["md5_tolerance"])
        if values.get("format") != "md5":
            raise ValueError("precision_check: md5_tolerance is of format=md5: give both, or neither")
    return Check(**({"level": 1, "path": str(Path(output_dir) / "precision")} | values))


def _one_of(name: str) -> str:
    return f"one of {', '.join(_WORDS[name])}"


def _tolerance(word: str) -> float:
    try:
        value = float(word)
    except ValueError:
        value = math.nan
    if not 0 < value < 1:
        raise ValueError(f"precision_check: md5_tolerance={word!r} must be a number in (0, 1), for example 1e-3")
    return value


def place_of(part: str, layer: int) -> str:
    """Where a tensor is in the model: "embed", "layer05" or "head"."""
    return f"layer{layer:02d}" if part == "layer" else part


def order_of(record: dict[str, Any]) -> tuple:
    """A key that sorts records by their computation, whatever the layout: step, forward before backward, microbatch,
    then through the model, backward from its end."""
    depth = {"embed": -1, "head": math.inf}.get(record["place"])
    place = (int(record["place"].removeprefix("layer")) if depth is None else depth, record["order"])
    forward = record["direction"] == FORWARD
    return record["step"], not forward, record["microbatch"], *(place if forward else (-place[0], -place[1]))


def describe(values: np.ndarray, check: Check) -> dict[str, Any]:
    """What a record says of the values: dtype, shape, counts of NaN and Inf; statistics over the finite ones (null
    where there are none) and the first values, or the md5."""
    flat = values.ravel().astype(np.float64)
    finite = flat[np.isfinite(flat)]
    found = {
        "dtype": values.dtype.name,
        "shape": list(values.shape),
        "nan": int(np.isnan(flat).sum()),
        "inf": int(np.isinf(flat).sum()),
    }
    if check.format == "md5":
        return found | {"md5": md5(flat, finite, check.md5_tolerance), "md5_tolerance": check.md5_tolerance}
    shown = [v if math.isfinite(v) else str(v) for v in flat[:FIRST_VALUES].tolist()]
    statistics = {n: float(f(finite)) if finite.size else None for n, f in _STATISTICS.items()}
    return found | statistics | {"first": shown}


_STATISTICS: dict[str, Callable] = {"min": np.min, "max": np.max, "mean": np.mean}


def md5(flat: np.ndarray, finite: np.ndarray, tolerance: float) -> str:
    """The md5 of values rounded as `Check` says; of -0 as of 0, and of all NaN alike."""
    largest = float(np.abs(finite).max(initial=0.0))
    step = tolerance * 2.0 ** math.floor(math.log2(largest)) if largest else 1.0
    rounded = np.rint(flat / step) + 0.0
    rounded[np.isnan(rounded)] = np.nan
    return hashlib.md5(rounded.astype("<f8").tobytes(), usedforsecurity=False).hexdigest()


def combined(parts: Sequence[np.ndarray], tap: Tap) -> np.ndarray:
    """One tensor from those of the data ranks."""
    if len(parts) == 1:
        return parts[0]
    if tap.rows:
        return np.concatenate(parts)
    total = np.sum([part.astype(np.float64) for part in parts], axis=0)
    return (total if tap.direction == FORWARD else total / len(parts)).astype(parts[0].dtype)


class Recorder:
    """The sink of a run's taps.

    Args: check; data, the number of data ranks, all of this process. Nothing is written before `open`.
    """

    def __init__(self, check: Check, data: int) -> None:
        self.check, self.data, self.step = check, data, 0
        self.folder = Path(check.path)
        self._lock = Lock()
        self._parts: dict[tuple, dict[int, np.ndarray]] = {}
        self._records: list[dict[str, Any]] = []
        self._fault: OSError | None = None
        self._said = False

    def open(self) -> None:
        """Make the folder, and begin its file anew. Raises ValueError where that cannot be."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / FILE).write_text("")
        except OSError as error:
            raise self._cannot(error) from None

    def _cannot(self, error: OSError) -> ValueError:
        return ValueError(f"precision_check: path={self.check.path!r} cannot be written ({error.strerror})")

    def __call__(self, tap: Tap, spot: Any, value: Any) -> None:
        """Take one data rank's tensor."""
        where = Spot(*np.asarray(spot).tolist())
        key = (tap, where._replace(data=0))
        with self._lock:
            parts = self._parts.setdefault(key, {})
            assert where.data not in parts, f"{key} is shown twice"
            parts[where.data] = np.asarray(value)
            if len(parts) < self.data:
                return
            del self._parts[key]
        try:
            record = self._record(tap, where, combined([parts[i] for i in range(self.data)], tap))
        except OSError as error:  # it is told after the step: from here it would only end the program
            self._fault = error
            return
        with self._lock:
            self._records.append(record)

    def _record(self, tap: Tap, where: Spot, values: np.ndarray) -> dict[str, Any]:
        place = place_of(tap.part, where.layer)
        name = f"step{self.step}/microbatch{where.microbatch}/{place}/{tap.name}/{tap.direction}"
        record = {"name": name, "step": self.step, "microbatch": where.microbatch, "place": place, "tap": tap.name}
        record |= {"direction": tap.direction, "order": tap.order, "stage": where.stage}
        record |= describe(values, self.check)
        if self.check.save_tensors:
            path = self.folder / "tensors" / f"{name}.npy"
            path.parent.mkdir(parents=True, exist_ok=True)
            known = values.dtype.kind in "fiu"  # of numpy itself; the others (bfloat16) fit into float32
            np.save(path, values if known else values.astype(np.float32))
            record["tensor"] = str(path.relative_to(self.folder))
        return record

    def flush(self, say: Callable[[str], None]) -> None:
        """Write the step's records in the order of computation, and say once where the first value is not finite.

        Raises ValueError where the disk does not take them.
        """
        found, self._records = sorted(self._records, key=order_of), []
        names = [record["name"] for record in found]
        assert not self._parts and len(set(names)) == len(names), "each tensor is shown once by each data rank"
        try:
            if self._fault is not None:
                raise self._fault
            with (self.folder / FILE).open("a") as file:
                file.writelines(json.dumps(record) + "\n" for record in found)
        except OSError as error:
            raise self._cannot(error) from None
        bad = next((record for record in found if record["nan"] or record["inf"]), None)
        if bad is not None and not self._said:
            self._said = True
            say(f"warning: {first_bad(bad)}")


def first_bad(record: dict[str, Any]) -> str:
    """One line about a record whose values are not all finite."""
    return (
        f"step {record['step']}: the first value that is not finite is in {record['place']}, {record['tap']}"
        f" ({record['direction']}), microbatch {record['microbatch']}, stage {record['stage']}:"
        f" {record['nan']} NaN and {record['inf']} Inf in {record['dtype']}{record['shape']}"
    )


def watched(recorder: Recorder | None, step: Callable, say: Callable[[str], None]) -> Callable:
    """A training step (state, batch) -> (state, metrics) whose tensors are on file when it returns; `step` itself
    without a recorder."""
    if recorder is None:
        return step

    def run(state: Any, batch: dict) -> tuple[Any, dict]:
        recorder.step = int(jax.device_get(state.step)) + 1
        result = jax.block_until_ready(step(state, batch))
        jax.effects_barrier()
        recorder.flush(say)
        return result

    return run
