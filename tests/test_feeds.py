"""Runs of run.py on several files, on documents and over epochs, and `run.py eval` of what they leave."""

import contextlib
import io
import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from tokenizers import Tokenizer, models

import run
from jaxpp import data

END = 7
WORDS = ["--dtype", "float32", "--sequence_length", "16", "--batch_size", "2", "--total_batch_size", "64"]
WORDS += ["--lr_decay_style", "none", "--model", "gpt2-tiny"]
PACKED = ["--pack_documents", "--tokenizer", "TOKENIZER"]


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]


def train(folder: Path, *words: str) -> list[dict]:
    """A run's metrics."""
    assert run.main([*WORDS, "--pipeline_parallel", "4", "--output_dir", str(folder / "out"), *words]) == 0
    return lines(folder)


def evaluate(capsys: pytest.CaptureFixture, *words: str) -> dict:
    capsys.readouterr()
    assert run.main(["eval", "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)


def documents(path: Path, count: int, every: int, seed: int) -> str:
    """A token file with an end token at every so many places."""
    tokens = np.random.default_rng(seed).integers(10, 60, count)
    tokens[every - 1 :: every] = END
    data.write_tokens(path, tokens)
    return str(path)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Two training files, one for validation, and a tokenizer that says which token ends a document."""
    root = tmp_path_factory.mktemp("files")
    found = {"A": documents(root / "a.bin", 320, 13, 0), "B": documents(root / "b.bin", 160, 7, 1)}
    found["V"] = documents(root / "v.bin", 1500, 19, 2)
    Tokenizer(models.WordLevel({"?": 0, "<end>": END}, unk_token="?")).save(str(root / "tokenizer.json"))
    (root / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    return found | {"TOKENIZER": str(root)}


def words_of(files: dict[str, str], *more: str) -> list[str]:
    words = ["--input_bin", "A", "B", "--input_val_bin", "V", *more]
    return [files.get(word, word) for word in words]


class Left(NamedTuple):
    """What runs have left: their checkpoints, the last line of their metrics, the rows that they took, their words."""

    saved: str
    last: dict
    fed: np.ndarray
    said: str


def run_all(folder: Path, files: dict[str, str], runs: list[list[str]]) -> Left:
    """Runs one after another, each going on where the one before was saved."""
    fed, at, out, last = [], data.Batches.at, io.StringIO(), {}

    def record(self: data.Batches, step: int, rows: slice = slice(None)) -> dict[str, np.ndarray]:
        batch = at(self, step, rows)
        fed.append(batch["tokens"].reshape(-1, 16))
        return batch

    saving = ["--save", str(folder / "saved"), "--load", str(folder / "saved")]
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
        patch.setattr(data.Batches, "at", record)
        patch.setattr(run, "sampler", lambda *_: lambda params: None)  # takes longer than the steps
        for words in runs:
            last = train(folder, *words_of(files, *saving, *words))[-1]
    return Left(str(folder / "saved"), last, np.concatenate(fed), out.getvalue())


@pytest.fixture(scope="module")
def windows(files: dict, tmp_path_factory: pytest.TempPathFactory) -> Left:
    return run_all(tmp_path_factory.mktemp("windows"), files, [["--num_iteration", "3"]])


@pytest.fixture(scope="module")
def packed(files: dict, tmp_path_factory: pytest.TempPathFactory) -> Left:
    """5 steps and, resumed, 10 more: 20 and 10 packed rows, 4 a step, twice."""
    runs = [[*PACKED, "--num_iteration", steps] for steps in ("5", "15")]
    return run_all(tmp_path_factory.mktemp("packed"), files, runs)


def test_a_resumed_run_sees_every_token_twice_in_two_epochs(packed: Left, windows: Left, files: dict) -> None:
    """Each once an epoch, though the run was stopped and resumed within the first; the second is announced."""
    want = np.sort(np.concatenate([data.read_tokens(files[name], 256) for name in "AB"]))
    assert len(packed.fed) == 60
    for epoch in np.split(packed.fed, 2):
        assert np.array_equal(np.sort(epoch.ravel()), want)
    for name, step in {"A": 8, "B": 9}.items():  # after 30 rows, of which two in three are of A
        assert f"epoch 2 of {files[name]} begins with step {step}\n" in packed.said
    assert "epoch" not in windows.said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--shuffle_documents", "--tokenizer", "TOKENIZER"], "shuffle_documents=False, this run True"),
        (PACKED, "pack_documents=False, this run True"),
        (["--data_weights", "0.5", "0.5"], "weights_of_files=[19, 9], this run [1, 1]"),
        (["--input_bin", "A"], "corpus_tokens=[320, 160], this run [320]"),
        (["--input_bin", "B", "A"], "corpus_tokens=[320, 160], this run [160, 320]"),
        (["--output_dir", "/dev/null/x"], "output_dir='/dev/null/x'"),  # the same order comes as far as that
    ],
)
def test_another_order_of_the_data_is_refused(
    words: list[str], said: str, windows: Left, files: dict, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    where = ["--load", windows.saved, "--num_iteration", "9", "--output_dir", str(tmp_path), "--pipeline_parallel", "1"]
    assert run.main([*WORDS, *words_of(files, *where, *words)]) == 2
    _, err = capsys.readouterr()
    assert said in err and err.count("\n") == 1


@pytest.mark.parametrize("pipe", ["1", "4"])
def test_eval_gives_the_validation_loss_of_the_log(pipe: str, packed: Left, capsys: pytest.CaptureFixture) -> None:
    """8 batches are what a run validates on; packed rows, their length and the files are the checkpoint's."""
    found = evaluate(capsys, "--load", packed.saved, "--eval_batches", "8", "--pipeline_parallel", pipe)
    assert list(found) == ["loss", "perplexity", "tokens"]
    assert found["loss"] == pytest.approx(packed.last["val_loss"], rel=1e-6)
    assert found["perplexity"] == pytest.approx(packed.last["perplexity"], rel=1e-5)
    assert found["perplexity"] == pytest.approx(np.exp(found["loss"]), rel=1e-9)
    assert 0.9 * 512 < found["tokens"] < 512  # no loss where documents end


def test_eval_of_plain_windows_in_words(windows: Left, files: dict, capsys: pytest.CaptureFixture) -> None:
    """Without --json one line; without --eval_batches the whole text."""
    words = ["eval", "--load", windows.saved, "--pipeline_parallel", "2"]
    assert run.main([*words, "--eval_batches", "8"]) == 0
    assert f"loss {windows.last['val_loss']:.4f}  perplexity " in capsys.readouterr().out
    assert run.main(words) == 0
    out = capsys.readouterr().out
    assert out.startswith("loss ") and out.count("\n") == 1
    assert f"({1499 // 16 * 16:,} tokens of {files['V']})" in out


def test_eval_of_a_folder_over_whole_texts(
    windows: Left, files: dict, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """A Hugging Face folder and the checkpoint that it came from, with other layouts."""
    assert run.main(["export", "--load", windows.saved, "--to", str(tmp_path)]) == 0
    over = ["--input_bin", files["V"], files["A"], "--sequence_length", "16", "--pipeline_parallel"]
    want = evaluate(capsys, "--load", windows.saved, *over, "1")
    found = evaluate(capsys, "--load", str(tmp_path), *over, "2", "--data_parallel", "2")
    assert found["tokens"] == want["tokens"] == 1499 // 16 * 16 + 319 // 16 * 16
    assert found["loss"] == pytest.approx(want["loss"], rel=1e-6)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "eval needs --load FOLDER"),
        (["--load", "/nowhere"], "load='/nowhere' has neither"),
        (["--load", "SAVED", "--input_bin", "/nowhere"], "input_bin '/nowhere': cannot be read"),
        (["--load", "SAVED", "--eval_batches", "0"], "eval_batches=0 must be at least 1"),
        (["--load", "SAVED", "--pack_documents"], "pack_documents needs the token that ends a document"),
        (["--load", "SAVED", "--total_batch_size", "65"], "total_batch_size=65 must be a multiple"),
        (["--load", "SAVED", "--pipeline_parallel", "9"], "8 layers of the model"),
    ],
)
def test_eval_refusals(words: list[str], said: str, windows: Left, capsys: pytest.CaptureFixture) -> None:
    capsys.readouterr()
    assert run.main(["eval", *(windows.saved if word == "SAVED" else word for word in words)]) == 2
    out, err = capsys.readouterr()
    assert said in err and err.count("\n") == 1 and out == ""
