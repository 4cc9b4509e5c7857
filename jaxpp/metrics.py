"""What a run says: lines on the terminal, a progress bar where it is one, metrics.jsonl and TensorBoard's events."""

import json
import os
import sys
import time
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

FLUSH_SECONDS = 10  # how long an event may wait to be written
BAR = 40  # letters


class Log:
    """Writes a run's lines and its metrics file; a context manager, so that the files and the bar are closed.

    Args: folder, made if missing; steps, of the bar; done, the steps that a run goes on after: their lines are kept;
    tensorboard, whether all that is written also becomes events in the folder's `tensorboard`; quiet, write nothing at
    all, as all but the first of several processes.
    Raises ValueError where the folder cannot be made.
    """

    def __init__(self, folder: str, steps: int, done: int = 0, tensorboard: bool = False, quiet: bool = False) -> None:
        self._quiet, tensorboard = quiet, tensorboard and not quiet
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            self.path = Path(folder) / "metrics.jsonl"
            kept = _lines_until(self.path, done) if done and self.path.exists() else []
            self._file = (Path(os.devnull) if quiet else self.path).open("w")
            self._file.writelines(kept)
            self._file.flush()
            self._events = _Events(Path(folder) / "tensorboard", map(json.loads, kept)) if tensorboard else None
        except OSError as error:
            raise ValueError(f"output_dir={folder!r} cannot be written ({error.strerror}): use another") from None
        self._bar = _Bar(steps)
        self._live = Live(self._bar, console=Console()) if sys.stdout.isatty() and not quiet else None
        self._width = len(str(steps))

    def __enter__(self) -> "Log":
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()
        if self._events:
            self._events.close()
        self._file.close()

    def say(self, text: str) -> None:
        """Print a line."""
        if self._live:
            self._live.console.print(text, markup=False, highlight=False, soft_wrap=True)
        elif not self._quiet:
            print(text, flush=True)

    def write(self, record: dict[str, Any]) -> None:
        """Append a line to metrics.jsonl, and to TensorBoard's events."""
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        if self._events:
            self._events.write(record)

    def step(self, record: dict[str, Any]) -> None:
        """One training step: a line on the terminal and one in the file.

        record: step (1-based), loss, grad_norm, learning_rate, tokens_per_second, step_seconds; mfu where it is known.
        """
        self.write(record)
        self._bar.update(record["step"], record["loss"])
        mfu = f"  mfu {record['mfu']:.1%}" if "mfu" in record else ""
        self.say(
            f"step {record['step']:{self._width}d}  loss {record['loss']:.4f}  lr {record['learning_rate']:.2e}"
            f"  grad norm {record['grad_norm']:.3f}  {record['tokens_per_second']:,.0f} tokens/s"
            f"  {record['step_seconds'] * 1e3:.0f} ms{mfu}"
        )


class _Bar:
    """The line below the log: the part of the steps that is done, the loss, and the time that is left.

    It is drawn anew for each line above it, which takes rich's own bar of columns three times as long.
    """

    def __init__(self, steps: int) -> None:
        self._steps, self._done, self._loss = steps, 0, 0.0
        self._since: tuple[int, float] | None = None  # the first step that was seen, which was slow, and its time

    def update(self, step: int, loss: float) -> None:
        self._done, self._loss = step, loss
        self._since = self._since or (step, time.monotonic())

    def __rich__(self) -> Text:
        if self._since is None:
            return Text("compiling")
        full = BAR * self._done // self._steps
        first, start = self._since
        each = (time.monotonic() - start) / max(1, self._done - first)
        left = f"{timedelta(seconds=round(each * (self._steps - self._done)))} left" if self._done > first else ""
        words = Text(f"  {self._done}/{self._steps}  loss {self._loss:.3f}  {left}", no_wrap=True)
        done, todo = "━─" if "utf" in (sys.stdout.encoding or "").lower() else "=-"
        return Text.assemble((done * full, "green"), (todo * (BAR - full), "bright_black"), words)


class _Events:
    """The records as TensorBoard's scalars, one event a record.

    Args: folder, whose events are replaced; records, written first. A run that goes on so gives its events anew from
    the lines that it kept: whatever a kill has left behind, each step is there once.
    """

    def __init__(self, folder: Path, records: Iterable[dict[str, Any]]) -> None:
        # Only runs that ask for it wait for these imports.
        from tensorboardX import FileWriter  # noqa: PLC0415
        from tensorboardX.proto import summary_pb2  # noqa: PLC0415

        for old in folder.glob("events.out.tfevents.*"):
            old.unlink()
        folder.mkdir(parents=True, exist_ok=True)
        self._summary = summary_pb2.Summary  # pyright: ignore[reportAttributeAccessIssue]
        self._writer = FileWriter(str(folder), flush_secs=FLUSH_SECONDS)
        for record in records:
            self.write(record)

    def write(self, record: dict[str, Any]) -> None:
        summary = self._summary()
        for tag, value in _scalars(record):
            summary.value.add(tag=tag, simple_value=value)
        self._writer.add_summary(summary, record["step"])

    def close(self) -> None:
        self._writer.close()


def _scalars(record: dict[str, Any]) -> Iterable[tuple[str, float]]:
    """(name, number) of a record, but for its step; those of a list are named by their places."""
    for name, value in record.items():
        if isinstance(value, list):
            yield from ((f"{name}/{i}", float(item)) for i, item in enumerate(value))
        elif name != "step":
            yield name, float(value)


def _lines_until(path: Path, step: int) -> list[str]:
    """The lines of a metrics file up to a step; a last line that a kill cut short is left out."""
    kept = []
    for line in path.read_text().splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
        except (ValueError, KeyError):
            continue
    return kept
