"""What a run says: lines on the terminal, a progress bar where it is one, and metrics.jsonl."""

import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Log:
    """Writes a run's lines and its metrics file; a context manager, so that the file and the bar are closed.

    Args: folder, made if missing; steps, of the bar; done, the steps that a run goes on after: their lines are kept.
    Raises ValueError where the folder cannot be made.
    """

    def __init__(self, folder: str, steps: int, done: int = 0) -> None:
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            self.path = Path(folder) / "metrics.jsonl"
            kept = _lines_until(self.path, done) if done and self.path.exists() else []
            self._file = self.path.open("w")
            self._file.writelines(kept)
            self._file.flush()
        except OSError as error:
            raise ValueError(f"output_dir={folder!r} cannot be written ({error.strerror}): use another") from None
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
        self._bar = Progress(*columns, console=Console()) if sys.stdout.isatty() else None
        self._task = self._bar.add_task("compiling", total=steps) if self._bar else None
        self._width = len(str(steps))

    def __enter__(self) -> "Log":
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()
        self._file.close()

    def say(self, text: str) -> None:
        """Print a line."""
        if self._bar:
            self._bar.console.print(text, markup=False, highlight=False)
        else:
            print(text, flush=True)

    def write(self, record: dict[str, Any]) -> None:
        """Append a line to metrics.jsonl."""
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def step(self, record: dict[str, Any]) -> None:
        """One training step: a line on the terminal and one in the file.

        record: step (1-based), loss, grad_norm, learning_rate, tokens_per_second, step_seconds.
        """
        self.write(record)
        self.say(
            f"step {record['step']:{self._width}d}  loss {record['loss']:.4f}  lr {record['learning_rate']:.2e}"
            f"  grad norm {record['grad_norm']:.3f}  {record['tokens_per_second']:,.0f} tokens/s"
            f"  {record['step_seconds'] * 1e3:.0f} ms"
        )
        if self._bar and self._task is not None:
            self._bar.update(self._task, completed=record["step"], description=f"loss {record['loss']:.3f}")


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
