"""run.py compare: folders of the precision checker, and metrics files."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import run
from jaxpp import data
from jaxpp.probe import FORWARD, Tap
from jaxpp.records import FILE, Check, Recorder
from models import GPT2Config

SMALL_MODEL = GPT2Config(vocab_size=256, positions=16, layers=4, dim=32, heads=2, std=0.1)
SMALL = ["--model", "small", "--num_iteration", "1", "--dtype", "float32"]
SMALL += ["--sequence_length", "8", "--total_batch_size", "32"]


def folder(path: Path, change: Any = None, step: int = 1, **check: Any) -> str:
    """A folder of records: a tensor of layers 0 to 3, each on a stage; `change` is given layer and values."""
    recorder = Recorder(Check(1, str(path), **check), data=1)
    recorder.open()
    recorder.step = step
    for layer in range(4):
        values = np.random.default_rng(layer).normal(size=(2, 8)) * 10.0**-layer
        values = values if change is None else change(layer, values)
        if values is not None:
            recorder(Tap("layer", "output", 1, FORWARD, True), np.asarray([0, layer, layer, 0]), values)
    recorder.flush(print)
    return str(path)


def compare(capsys: pytest.CaptureFixture, *words: str) -> tuple[int, list[str]]:
    capsys.readouterr()
    code = run.main(["compare", *words])
    out, err = capsys.readouterr()
    return code, (out or err).splitlines()


@pytest.mark.parametrize("check", [{}, {"save_tensors": True}, {"format": "md5"}], ids=str)
def test_what_differs_first_and_how_many(tmp_path: Path, capsys: pytest.CaptureFixture, check: dict) -> None:
    a = folder(tmp_path / "a", **check)
    assert compare(capsys, a, folder(tmp_path / "b", **check))[0] == 0
    b = folder(tmp_path / "c", lambda layer, values: values * (1.01 if layer in (1, 3) else 1), **check)
    code, said = compare(capsys, a, b)
    assert code == 1
    assert said[:2] == [f"A: {a}", f"B: {b}"]
    assert said[2].startswith("first difference: step1/microbatch0/layer01/output/forward (stage 1 of A, 1 of B): ")
    assert said[3].startswith("then: step1/microbatch0/layer03/output/forward")
    assert said[4].startswith("2 of 4 differ")
    if "format" not in check:
        assert compare(capsys, a, b, "--rtol", "0.02")[0] == compare(capsys, "--atol", "0.5", a, b)[0] == 0


@pytest.mark.parametrize("check", [{}, {"save_tensors": True}], ids=str)
def test_differences_are_relative_to_the_tensor(tmp_path: Path, capsys: pytest.CaptureFixture, check: dict) -> None:
    """A shift of 5e-8 is nothing in a tensor of size 1e-2 and a difference in one of size 1e-3."""
    pair = folder(tmp_path / "a", **check), folder(tmp_path / "b", lambda _, values: values + 5e-8, **check)
    code, said = compare(capsys, *pair)
    assert code == 1
    assert said[2].startswith("first difference: step1/microbatch0/layer03")
    assert said[-1].startswith("1 of 4 differ")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda layer, values: None if layer == 2 else values, "layer02/output/forward: missing in B"),
        (lambda layer, values: values[:1] if layer == 2 else values, "shape [2, 8] against [1, 8]"),
        (lambda layer, values: np.where(values > 1, np.nan, values), "nan 0 against"),
        (lambda layer, values: np.where(values > 1, np.inf, values), "inf 0 against"),
    ],
)
def test_what_is_no_number(tmp_path: Path, capsys: pytest.CaptureFixture, change: Any, words: str) -> None:
    code, said = compare(capsys, folder(tmp_path / "a"), folder(tmp_path / "b", change))
    assert code == 1
    assert words in said[2]


def test_nan_is_equal_to_nan_in_the_same_place(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    def first(layer: int, values: np.ndarray) -> np.ndarray:
        values.flat[0] = np.nan
        return values

    def last(layer: int, values: np.ndarray) -> np.ndarray:
        values.flat[-1] = np.nan
        return values

    a, b, c = (folder(tmp_path / n, f, save_tensors=True) for n, f in (("a", first), ("b", first), ("c", last)))
    assert compare(capsys, a, b)[0] == 0
    code, said = compare(capsys, a, c)
    assert code == 1
    assert "not finite stand elsewhere" in said[2]


def test_dtypes_are_noted(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    a, b = folder(tmp_path / "a"), folder(tmp_path / "b", lambda _, values: values.astype(np.float32))
    code, said = compare(capsys, a, b)
    assert code == 0
    assert "dtypes differ in 4" in said[-1] and "float64 against float32" in said[-1]


def metrics(path: Path, **changes: Any) -> str:
    lines = [{"step": i, "loss": 2.0 / i, "expert_load": [0.25, 0.75], "step_seconds": i * 0.1} for i in (1, 2, 3)]
    lines[1] |= {name: value for name, value in changes.items() if value is not None}
    lines[1] = {name: value for name, value in lines[1].items() if changes.get(name, 0) is not None}
    path.write_text("".join(json.dumps(line) + "\n" for line in [*lines, {"step": 3, "val_loss": 1.5}]))
    return str(path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"step_seconds": 9.0, "tokens_per_second": 5.0, "mfu": 0.5, "peak_bytes_in_use": 7}, None),
        ({"loss": 1.0 + 1e-7}, None),
        ({"loss": 1.1}, "step 2, loss: loss 1.0 against 1.1"),
        ({"loss": float("nan")}, "step 2, loss: loss 1.0 against nan"),
        ({"expert_load": [0.25, 0.7]}, "step 2, expert_load[1]"),
        ({"loss": None}, "step 2, loss: missing in B"),
        ({"extra": 1.0}, "step 2, extra: missing in A"),
    ],
)
def test_metrics(tmp_path: Path, capsys: pytest.CaptureFixture, changes: dict, words: str | None) -> None:
    code, said = compare(capsys, metrics(tmp_path / "a.jsonl"), metrics(tmp_path / "b.jsonl", **changes))
    assert code == (words is not None)
    assert said[2].startswith("equal: all 10" if words is None else f"first difference: {words}")
    assert words is None or said[-1].startswith("1 of 1")


def test_refusals(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    a, md5, other = (
        folder(tmp_path / name, **check)
        for name, check in (("a", {}), ("b", {"format": "md5"}), ("c", {"format": "md5", "md5_tolerance": 0.1}))
    )
    out = folder(tmp_path / "output" / "precision")
    table = metrics(tmp_path / "m.jsonl")
    (tmp_path / "empty").mkdir()
    (tmp_path / "cut.jsonl").write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    cases = [
        ([a], "compare needs two runs, got 1"),
        ([a, table], "got one of each"),
        ([a, str(tmp_path / "empty")], f"has no {FILE}"),
        ([a, str(tmp_path / "output")], f"give {out}"),
        ([table, str(tmp_path / "nowhere.jsonl")], "cannot be read"),
        ([table, str(tmp_path / "cut.jsonl")], "line 2 of"),
        ([a, md5], "same format"),
        ([md5, other], "md5_tolerance"),
        ([a, a, "--rtol", "-1"], "rtol=-1.0 must be at least 0"),
        ([a, a, "--rtoll", "1"], "did you mean --rtol?"),
    ]
    for words, why in cases:
        code, said = compare(capsys, *words)
        assert (code, len(said)) == (2, 1), said
        assert why in said[0]


def test_four_stages_against_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """In float32 they are equal tensor by tensor; with a narrow wire they differ from the first stage boundary on."""
    monkeypatch.setattr(run, "sampler", lambda *_: lambda params: None)
    monkeypatch.setenv("PJRT_NPROC", "16")  # is set for good otherwise
    monkeypatch.setitem(run.models.PRESETS, "small", SMALL_MODEL)

    data.write_tokens(tmp_path / "tokens.bin", np.arange(3000) * 7 % 256)

    def record(name: str, *words: str) -> str:
        given = ["--output_dir", str(tmp_path / name), "--precision_check", "level=1,save_tensors=true", *words]
        given += ["--input_bin", str(tmp_path / "tokens.bin")]
        assert run.main([*SMALL, *given]) == 0
        assert "remat none" in capsys.readouterr().out
        return str(tmp_path / name / "precision")

    one = record("one", "--pipeline_parallel", "1")
    four = record("four", "--pipeline_parallel", "4")
    narrow = record("narrow", "--pipeline_parallel", "4", "--pipeline_dtype", "bfloat16")
    code, said = compare(capsys, four, one)
    assert code == 0, said
    assert said[2].startswith("equal: all 40")  # 2 microbatches x 2 directions x (embedding + 4 layers x 2 + loss)
    code, said = compare(capsys, narrow, one)
    assert code == 1
    assert said[2].startswith("first difference: step1/microbatch0/layer01/input/forward (stage 1 of A, 0 of B): ")
    assert said[2].endswith("; a stage boundary of A: this is what stage 1 got from stage 0")
    code, said = compare(capsys, str(tmp_path / "four" / "metrics.jsonl"), str(tmp_path / "one" / "metrics.jsonl"))
    assert code == 0, said
