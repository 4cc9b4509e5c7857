"""Runs of run.py that are killed and started again, as someone leaves them alone for a week."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
WORDS = ["--sequence_length", "16", "--total_batch_size", "64", "--pipeline_parallel", "2", "--save_interval", "2"]
WORDS += ["--dropout", "0.1", "--num_iteration"]


def start(folder: Path, steps: int, *words: str) -> subprocess.Popen:
    """A run that saves to and loads from the same folder, so that the same command starts and goes on."""
    flags = [f for f in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in f]
    environment = os.environ | {"XLA_FLAGS": " ".join(flags), "JAX_PLATFORMS": "cpu"}
    where = ["--save", str(folder / "saved"), "--load", str(folder / "saved"), "--output_dir", str(folder)]
    command = [sys.executable, str(ROOT / "run.py"), *WORDS, str(steps), *where, *words]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def losses(folder: Path) -> list[float]:
    """The losses of a run's steps, in full precision."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, len(steps) + 1))
    return [line["loss"] for line in steps]


def kill_and_resume(folder: Path, steps: int, kills: int, seed: int, with_signal: int = signal.SIGKILL) -> list[str]:
    """Run to the end, killed at random moments once steps are made. Returns what the last run said, by lines."""
    rng = random.Random(seed)
    for _ in range(kills):
        run = start(folder, steps)
        assert run.stdout
        for line in run.stdout:
            if line.startswith("step "):
                break
        time.sleep(rng.uniform(0, 0.6))
        run.send_signal(with_signal)
        rest = run.stdout.read()
        code = run.wait()
        # It may have come to its end before the signal came.
        assert code in (-with_signal, 0) if with_signal == signal.SIGKILL else code == 0, rest
    last = start(folder, steps)
    said, _ = last.communicate()
    done = last.returncode == 2 and "leaves nothing to do" in said
    assert last.returncode == 0 or done, said
    return said.splitlines()
