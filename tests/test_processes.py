"""Several real processes of run.py on this machine, joined by gloo."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import run
from jaxpp import mesh

ROOT = Path(__file__).parent.parent
WORDS = ["--dtype", "float32", "--sequence_length", "16", "--batch_size", "1", "--model", "llama3-tiny"]


def start(folder: Path, processes: int, *words: str) -> list[subprocess.Popen]:
    """Start the processes of one run; the devices are dealt out evenly."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{found.getsockname()[1]}"
    flags = [f for f in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in f]
    environment = os.environ | {"XLA_FLAGS": " ".join(flags), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(ROOT / "run.py"), *WORDS, *words, "--output_dir", str(folder)]
    joined = ["--coordinator_address", address, "--num_processes", str(processes), "--process_id"]
    several = [[*joined, str(i)] for i in range(processes)] if processes > 1 else [[]]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return [subprocess.Popen([*command, *more], env=environment, **pipes) for more in several]


def losses(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line.get("loss", line.get("val_loss")) for line in lines]


LAYOUTS = {
    2: ["--pipeline_parallel", "2", "--data_parallel", "2", "--zero_stage", "1"],
    4: ["--pipeline_parallel", "2", "--tensor_parallel", "2", "--data_parallel", "2", "--sequence_parallel"],
}


@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_several_processes_train_as_one_does(processes: int, tmp_path: Path) -> None:
    words = [*LAYOUTS[processes], "--num_iteration", "3", "--save"]
    found = {}
    for count in (1, processes):
        folder = tmp_path / str(count)
        runs = start(folder, count, *words, str(folder / "s"))
        said = [each.communicate(timeout=300)[0] for each in runs]
        assert [each.returncode for each in runs] == [0] * count, said
        found[count] = losses(folder)
        # Only process 0 says anything: its last line is where the metrics are.
        assert sum("metrics are in" in text for text in said) == 1
        assert (folder / "s" / "step-00000003" / "checksums.json").is_file()
    assert len(found[1]) == 4
    assert found[processes] == pytest.approx(found[1], rel=1e-5)


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_process_that_dies_ends_the_others(victim: int, tmp_path: Path) -> None:
    runs = start(tmp_path, 2, *LAYOUTS[2], "--num_iteration", "100000")
    metrics, began = tmp_path / "metrics.jsonl", time.monotonic()
    while not (metrics.is_file() and len(metrics.read_text().splitlines()) >= 2):
        assert time.monotonic() - began < 240
        time.sleep(0.5)
    runs[victim].send_signal(signal.SIGKILL)
    killed = time.monotonic()
    said, _ = runs[1 - victim].communicate(timeout=60)
    assert time.monotonic() - killed < 60
    assert runs[1 - victim].returncode != 0
    runs[victim].communicate()
    assert "stopped sending heartbeats" in said if victim else "coordination service" in said.lower()


@pytest.mark.slow
def test_a_signal_to_one_process_saves_and_ends_all(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    runs = start(tmp_path, 2, *LAYOUTS[2], "--num_iteration", "100000", "--save", str(saved))
    metrics, began = tmp_path / "metrics.jsonl", time.monotonic()
    while not (metrics.is_file() and len(metrics.read_text().splitlines()) >= 2):
        assert time.monotonic() - began < 240
        time.sleep(0.5)
    runs[1].send_signal(signal.SIGTERM)
    said = [each.communicate(timeout=120)[0] for each in runs]
    assert [each.returncode for each in runs] == [0, 0], said
    assert "stopped after step" in said[0]
    assert list(saved.glob("step-*/checksums.json"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--num_processes", "2"], "coordinator_address and process_id are missing: give all three"),
        (["--coordinator_address", "a:1"], "num_processes and process_id are missing"),
        (["--coordinator_address", "a:1", "--num_processes", "2", "--process_id", "2"], "process_id=2 must be below"),
    ],
)
def test_options_that_contradict_each_other(
    words: list[str], said: str, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mesh, "set_host_devices", lambda count: None)
    assert run.main(["train", *words]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
