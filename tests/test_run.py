"""run.py as a user meets it: refusals, equal losses for every split, and the main job."""

import io
import json
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import models
import run
from jaxpp import data, optim, partition
from jaxpp.options import check_ranges
from models import GPT2Config, hf

ROOT = Path(__file__).parent.parent


def refusal(capsys: pytest.CaptureFixture, *arguments: str) -> str:
    """Run a command line that must be refused; returns its one line."""
    assert run.main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--dtype", "float8"], ["dtype='float8'", "float32, bfloat16, float16"]),
        (["--pipeline_dtype", "int8"], ["pipeline_dtype='int8'", "bfloat16"]),
        (["--total_batch_size", "1000"], ["1000", "2 x 1 x 64 = 128", "896 and 1024"]),
        (["--total_batch_size", "100"], ["100", "128"]),
        (["--schedule", "1f1"], ["did you mean '1f1b'"]),
        (["--schedule", "1f1b", "--virtual_pipeline_parallel", "2"], ["--schedule interleaved"]),
        (["--model", "gpt2-tinny"], ["did you mean 'gpt2-tiny'"]),
        (["--remat", "dot"], ["did you mean 'dots'"]),
        (["--sequence_length", "512"], ["512", "256 positions"]),
        (["--pipeline_parallel", "9"], ["pipeline_parallel=9", "8 layers"]),
        (["--batch_size", "0"], ["batch_size=0", "at least 1"]),
        (["--learning_rate", "nan"], ["learning_rate=nan"]),
        (["--num_iteration", "many"], ["num_iteration", "'many'"]),
        (["--optimizer", "adam"], ["optimizer", "adamw"]),
        (["--learning-rat", "1"], ["--learning-rat", "did you mean --learning_rate"]),
        (["trian"], ["did you mean 'train'"]),
        (["--input_bin", "/nowhere.bin"], ["input_bin", "/nowhere.bin"]),
        (["--input_val_bin", "x.txt"], ["input_val_bin", "input_bin"]),
        (
            ["--pipeline_parallel", "8", "--data_parallel", "2"],
            ["needs 16 devices, there are 8", "--emulate_devices 16"],
        ),
        (["--router_z_loss", "0.1"], ["router_z_loss=0.1", "this model has none"]),
        (["--output_dir", "/dev/null/x"], ["output_dir='/dev/null/x'"]),
        (["--save", "/dev/null/x"], ["save='/dev/null/x'"]),
        (["--num_iteration", "9" * 23], ["num_iteration=99999999999999999999999 must be at most 1000000000"]),
        (["--pipeline_parallel", "1", "--data_parallel", "65536"], ["needs 65536 devices, there are 8"]),
        (["generate", "--load", "x", "--prompt", ""], ["prompt='' is empty", "for example --prompt x"]),
        (["generate", "--load", "x", "--prompt", "a\udcffb"], ["prompt='a\\udcffb' is not text in UTF-8 (letter 1)"]),
    ],
    ids=lambda a: " ".join(a) if a and a[0].startswith(("-", "t")) else "",
)
def test_bad_input_gets_one_line(capsys: pytest.CaptureFixture, arguments: list[str], words: list[str]) -> None:
    line = refusal(capsys, *arguments)
    assert all(word in line for word in words), line


WORDS = [
    (name, each.name)
    for name, command in run.COMMANDS.items()
    for each in fields(command.options)
    if each.metadata["type"] is str and not each.metadata["positional"]
]
COUNTS = [
    (name, each.name)
    for name, command in run.COMMANDS.items()
    for each in fields(command.options)
    if each.metadata["type"] is int
]


@pytest.mark.parametrize(("command", "name"), WORDS)
def test_no_word_is_empty(command: str, name: str, capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    """From the command line and from a file, of every command."""
    many = name in ("input", "input_bin", "input_val_bin", "lora_target_modules", "peer")
    (tmp_path / "c.toml").write_text(f'{name} = [""]\n' if many else f'{name} = ""\n')
    for words in ([f"--{name}", ""], [f"--{name}="], ["--config", str(tmp_path / "c.toml")]):
        line = refusal(capsys, command, *words)
        assert f"{name}='' is empty: give at least one letter, for example --{name} " in line


def test_no_run_is_empty(capsys: pytest.CaptureFixture) -> None:
    assert "runs='' is empty" in refusal(capsys, "plot", "")


def test_no_word_has_a_nul(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text('save = "a\\u0000b"\n')
    assert "save='a\\x00b' has a NUL character" in refusal(capsys, "--config", str(tmp_path / "c.toml"))


@pytest.mark.parametrize(("command", "name"), COUNTS)
def test_no_count_is_boundless(command: str, name: str) -> None:
    (each,) = (each for each in fields(run.COMMANDS[command].options) if each.name == name)
    most = each.metadata["most"]
    assert most < 2**32
    with pytest.raises(ValueError, match=f"^{name}={10**23} must be at most {most}, for example --{name} "):
        value = (10**23,) if each.metadata["many"] else 10**23
        check_ranges(replace(run.COMMANDS[command].options(), **{name: value}))


def gpt2(folder: Path, vocab: int = 61) -> str:
    """A Hugging Face folder of a GPT-2 with 64 positions."""
    model = GPT2Config(vocab_size=vocab, positions=64, layers=2, dim=16, heads=2)
    params = partition.stack(models.build(jax.random.key(0), model), partition.split_layers(2, 1))
    hf.export(model, params, hf.placed_weight(params), str(folder), "float32")
    return str(folder)


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("x" * 64, "prompt has 64 tokens (byte tokens), and the model 64 positions"),
        ("x" * 63, "max_new_tokens=2 after a prompt of 63 tokens"),
    ],
)
def test_prompts_that_do_not_fit(prompt: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder = gpt2(tmp_path, 300)
    assert words in refusal(capsys, "generate", "--load", folder, "--prompt", prompt, "--max_new_tokens", "2")


def test_text_of_a_model_without_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens that are no bytes stream as U+FFFD, and a terminal that cannot show those shows ?."""
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    words = ["--prompt", "é", "--max_new_tokens", "40", "--temperature", "5"]
    assert run.main(["generate", "--load", gpt2(tmp_path, 5000), *words]) == 0
    out.flush()
    said = out.buffer.getvalue().decode("ascii")
    assert said.count("?") > 20 and said.endswith("\n")


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        (
            100,
            "(the last twentieth of 100 tokens, which is held out unless --input_val_bin is given): the text has 5 tok",
        ),
        (
            30,
            "(all but the last twentieth of 30 tokens, which is held out unless --input_val_bin is given): the",
        ),
    ],
)
def test_a_text_that_is_too_short(tokens: int, words: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "a.txt").write_text("x" * tokens)
    line = refusal(capsys, "--input_bin", str(tmp_path / "a.txt"), "--output_dir", str(tmp_path / "out"))
    assert f"input_bin={str(tmp_path / 'a.txt')!r} {words}" in line and "and 65 (sequence_length 64 + 1)" in line
    assert not (tmp_path / "out").exists()


def damaged(folder: Path, kind: str) -> Path:
    path = folder / "tokens.bin"
    data.write_tokens(path, np.arange(300) % 256)
    content = path.read_bytes()
    if kind == "truncated":
        path.write_bytes(content[:-10])
    elif kind == "foreign":
        path.write_bytes(b"PK\x03\x04" + content[4:])
    elif kind == "beyond":
        data.write_tokens(path, np.arange(300))
    elif kind == "short":
        data.write_tokens(path, np.arange(50))
    return path


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("truncated", ["295", "300"]),
        ("foreign", ["20240520", "20240801"]),
        ("beyond", ["299", "256"]),
        ("short", ["50", "65"]),
    ],
)
def test_bad_files_get_one_line(capsys: pytest.CaptureFixture, tmp_path: Path, kind: str, words: list[str]) -> None:
    path = str(damaged(tmp_path, kind))
    line = refusal(capsys, "--input_bin", path, "--input_val_bin", path)
    assert all(word in line for word in words), line


def test_help_names_every_option(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as stop:
        run.main(["--help"])
    assert stop.value.code == 0
    out = capsys.readouterr().out
    assert all(name in out for name in ("--pipeline_dtype", "--total-batch-size", "--val_loss_every"))


def lines(folder: Path, *arguments: str) -> list[dict]:
    """The metrics of a run in float32."""
    common = (
        "--dtype",
        "float32",
        "--batch_size",
        "1",
        "--sequence_length",
        "32",
        "--total_batch_size",
        "128",
        "--output_dir",
        str(folder),
    )
    assert run.main([*common, *arguments]) == 0
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


SPLITS = {
    "2 stages": ["--pipeline_parallel", "2"],
    "4 stages": ["--pipeline_parallel", "4"],
    "4 stages of 2 chunks": ["--pipeline_parallel", "4", "--virtual_pipeline_parallel", "2"],
    "2 stages of 2 replicas, gpipe": ["--pipeline_parallel", "2", "--data-parallel", "2", "--schedule", "gpipe"],
    "3 stages, full": ["--pipeline_parallel", "3", "--remat", "full"],
}


@pytest.fixture(scope="module")
def unpipelined(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    return lines(tmp_path_factory.mktemp("one"), "--pipeline_parallel", "1", "--num_iteration", "20")


@pytest.mark.parametrize("split", SPLITS)
def test_losses_do_not_depend_on_the_split(tmp_path: Path, split: str, unpipelined: list[dict]) -> None:
    found = lines(tmp_path, *SPLITS[split], "--num_iteration", "20")
    steps = [(a["loss"], b["loss"]) for a, b in zip(found, unpipelined, strict=True) if "loss" in a]
    assert len(steps) == 20
    assert max(abs(a - b) for a, b in steps) < 1e-4
    assert abs(found[-1]["val_loss"] - unpipelined[-1]["val_loss"]) < 1e-4
    assert steps[-1][0] < steps[0][0] - 1


def test_dropout_does_not_depend_on_the_split(tmp_path: Path) -> None:
    options = ("--dropout", "0.2", "--num_iteration", "3", "--pipeline_parallel")
    one, four = (lines(tmp_path / n, *options, n) for n in ("1", "4"))
    assert [a["loss"] for a in one[:3]] == pytest.approx([a["loss"] for a in four[:3]], abs=1e-5)


def test_metrics_file(tmp_path: Path) -> None:
    found = lines(tmp_path, "--num_iteration", "3", "--val_loss_every", "2", "--optimizer", "sgd")
    keys = {"step", "loss", "grad_norm", "learning_rate", "tokens_per_second", "step_seconds"}
    validation = {"step", "val_loss", "perplexity"}
    assert [set(line) for line in found] == [keys, keys, validation, keys, validation]
    assert [line["step"] for line in found] == [1, 2, 2, 3, 3]
    assert all(line["loss"] == np.float32(line["loss"]) != round(line["loss"], 4) for line in found if "loss" in line)


def test_samples_on_the_way(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Every second step and at the end, from a pipeline; the steps' numbers come before the sample."""
    lines(tmp_path, "--num_iteration", "5", "--sample_every", "2", "--pipeline_parallel", "4")
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("step ", "a continuation of"))]
    kinds = ["text" if line.startswith("a") else line.split("  ")[0].removeprefix("step ") for line in said]
    assert kinds == ["1", "2", "text", "3", "4", "text", "5", "5", "text"]


@pytest.mark.parametrize(
    "model", [*(pytest.param(n, marks=pytest.mark.slow) for n in ("llama3-tiny", "qwen3-tiny")), "mixtral-tiny"]
)
def test_the_other_models_train(tmp_path: Path, model: str) -> None:
    found = lines(tmp_path, "--model", model, "--num_iteration", "6", "--warmup_iterations", "2", "--remat", "full")
    losses = [line["loss"] for line in found if "loss" in line]
    assert losses[-1] < losses[0] - 0.5
    if model == "mixtral-tiny":
        extra = {"cross_entropy", "balance_loss", "z_loss", "expert_load"}
        assert extra < found[0].keys()
        assert sum(found[0]["expert_load"]) == pytest.approx(1)
        without = lines(tmp_path, "--model", model, "--num_iteration", "1", "--router_balance_loss", "0")
        assert without[0]["loss"] < found[0]["loss"]


def bigram_loss(train: np.ndarray, validation: np.ndarray) -> float:
    """Validation loss of a model that counts pairs of bytes, nats a byte."""
    counts = np.full((256, 256), 0.1)
    np.add.at(counts, (train[:-1], train[1:]), 1)
    chances = counts / counts.sum(axis=1, keepdims=True)
    return float(-np.log(chances[validation[:-1], validation[1:]]).mean())


@pytest.mark.slow
def test_the_main_job_learns_more_than_pairs(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "run.py"), "--output_dir", str(tmp_path)]
    environment = {"PATH": "/usr/bin:/bin", "PYTHONUNBUFFERED": "1", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    first = "training gpt2-tiny (1.7M parameters) on Python's own source"
    assert said[0].startswith(first)
    assert "1f1b over 4 stages" in said[0]
    assert "4 emulated CPU devices" in said[0]
    assert said[-1] == f"metrics are in {tmp_path / 'metrics.jsonl'}"
    last = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["val_loss"] < bigram_loss(*data.default_corpus())


SCALED = ["--num_iteration", "4", "--sequence_length", "32", "--total_batch_size", "256", "--batch_size", "1"]


def test_float16_trains_as_float32_does(tmp_path: Path) -> None:
    """With float16 on the wire both ways, the loss scaled over it."""
    found = {}
    for dtype in ("float32", "float16"):
        assert run.main([*SCALED, "--dtype", dtype, "--output_dir", str(tmp_path)]) == 0
        found[dtype] = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()][:4]
    for a, b in zip(found["float32"], found["float16"], strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=5e-3)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=2e-2)
    assert [line["loss_scale"] for line in found["float16"]] == [optim.FIRST_SCALE] * 4
    assert "loss_scale" not in found["float32"][0]


@pytest.mark.parametrize(("first", "ends"), [(2.0**22, False), (2.0**100, True)])
def test_steps_that_overflow_are_skipped_and_counted(
    first: float, ends: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(optim, "FIRST_SCALE", first)
    words = ["--dtype", "float16", "--max_skipped_steps", "6", "--output_dir", str(tmp_path)]
    assert run.main(["--num_iteration", "8", *SCALED[2:], *words]) == (1 if ends else 0)
    said = capsys.readouterr()
    steps = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in steps if "loss_scale" in line]
    in_a_row = [line["skipped_steps"] for line in steps]
    lost = in_a_row.index(0) if 0 in in_a_row else len(steps)
    assert in_a_row == [*range(1, lost + 1), *[0] * (len(steps) - lost)]
    assert [line["loss_scale"] for line in steps[: lost + 1]] == [
        first / 2**i for i in range(min(lost + 1, len(steps)))
    ]
    assert said.out.count("was skipped: gradients are not finite") == lost
    if ends:
        assert lost == 6 and said.err.startswith("error: max_skipped_steps=6: 6 steps in a row")
        assert said.err.count("\n") == 1
    else:
        assert 1 <= lost < 6
