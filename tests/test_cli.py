"""run.py in a process of its own: its devices, its streams and its exit code; test_run.py has what needs none."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import run
from jaxpp import data

ROOT = Path(__file__).parent.parent
SMALL = ["--num_iteration", "3", "--sequence_length", "16", "--total_batch_size", "64", "--warmup_iterations", "0"]
KEYS = {"step", "loss", "grad_norm", "learning_rate", "tokens_per_second", "step_seconds"}


def start(folder: Path, *words: str) -> subprocess.CompletedProcess:
    """Run a command line in a folder, on CPU devices of its own number; only the tests' compile options are kept."""
    flags = [f for f in os.environ["XLA_FLAGS"].split() if "device_count" not in f]
    environment = os.environ | {"XLA_FLAGS": " ".join(flags), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(ROOT / "run.py"), *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture
def token_file(tmp_path: Path) -> str:
    """An llm.c file in which every token follows from the one before."""
    path = tmp_path / "tokens.bin"
    data.write_tokens(path, np.arange(3000) % 16 + 60)
    return str(path)


@pytest.mark.parametrize("word", ["--pipeline_parallel", "--pipeline-parallel"])
def test_too_few_devices(tmp_path: Path, word: str) -> None:
    done = start(tmp_path, "--emulate_devices", "2", word, "4")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "needs 4 devices, there are 2 (cpu)" in done.stderr
    assert done.stderr.rstrip().endswith("--emulate_devices 4")
    assert not list(tmp_path.iterdir())


def test_unknown_option_in_a_process(tmp_path: Path) -> None:
    done = start(tmp_path, "--batchsize", "4")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: --batchsize is not an option of train, did you mean --batch_size?\n"


def test_output_where_there_is_no_terminal(tmp_path: Path, token_file: str) -> None:
    """Plain lines: what is trained, on what and how it is split; the steps; where the metrics are, by default."""
    done = start(tmp_path, *SMALL, "--pipeline_parallel", "2", "--input_bin", token_file)
    assert (done.returncode, done.stderr) == (0, "")
    said = done.stdout.splitlines()
    assert said[0] == (
        f"training gpt2-tiny (1.7M parameters) on {token_file} (2,850 tokens): 1f1b over 2 stages x 1 replicas,"
        " 2 microbatches of 2 x 16 tokens, bfloat16 with bfloat16 on the wire, 3 steps,"
        " 2 emulated CPU devices, plain attention"
    )
    assert "\x1b" not in done.stdout and "\r" not in done.stdout
    assert [line.split("  ")[0] for line in said[1:5]] == ["step 1", "step 2", "step 3", "step 3"]
    assert said[-1] == "metrics are in output/metrics.jsonl"
    lines = [json.loads(line) for line in (tmp_path / "output" / "metrics.jsonl").read_text().splitlines()]
    assert [set(line) for line in lines] == [KEYS] * 3 + [{"step", "val_loss", "perplexity"}]
    assert [f"loss {line['loss']:.4f}" in text for line, text in zip(lines, said[1:4], strict=False)] == [True] * 3
    assert f"validation loss {lines[-1]['val_loss']:.4f}" in said[4]


def test_a_token_file_is_learnt(tmp_path: Path, token_file: str) -> None:
    """Each of 16 tokens tells the next: from log 256 to below log 16, which knowing the 16 alone would give."""
    words = ("--num_iteration", "30", "--optimizer", "adamw", "--learning-rate=0.003", "--output_dir", str(tmp_path))
    words += (
        "--pipeline_parallel",
        "2",
        "--dtype",
        "float32",
        "--input_bin",
        token_file,
        "--input_val_bin",
        token_file,
    )
    assert run.main([*SMALL, *words]) == 0
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["loss"] == pytest.approx(np.log(256), rel=0.1)
    assert lines[-1]["val_loss"] < np.log(16) / 2


def test_nothing_compiles_for_what_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, token_file: str) -> None:
    """Training is not entered, though devices and files have been looked at."""
    entered = []
    monkeypatch.setattr(run.train, "train", lambda *_: entered.append(True))
    monkeypatch.setattr(run.train, "initial_state", lambda *_: entered.append(True))
    for words in (
        ["--remat", "dotz"],
        ["--total_batch_size", "65"],
        ["--output_dir", token_file],
        ["--input_bin", str(tmp_path)],
        ["--pipeline_parallel", "8", "--data_parallel", "2", "--total_batch_size", "128"],
    ):
        assert run.main([*SMALL, "--output_dir", str(tmp_path / "out"), "--input_bin", token_file, *words]) == 2
    assert not entered
