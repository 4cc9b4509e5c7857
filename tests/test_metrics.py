"""The log: lines on the terminal or the bar, and metrics.jsonl."""

import json
import sys

import pytest

from jaxpp.metrics import Log

RECORD = {
    "step": 7,
    "loss": 1.2345678901234567,
    "grad_norm": 0.5,
    "learning_rate": 3e-3,
    "tokens_per_second": 12345.6,
    "step_seconds": 0.0259,
}


def lines(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_plain_lines_and_exact_numbers(tmp_path, capsys):
    with Log(str(tmp_path / "a" / "b"), 240) as log:
        log.say("first")
        log.step(RECORD)
        assert lines(tmp_path / "a" / "b") == [RECORD]  # while the run goes on: every line is flushed
        log.write({"step": 7, "val_loss": 2.5})
    assert lines(tmp_path / "a" / "b") == [RECORD, {"step": 7, "val_loss": 2.5}]
    out, err = capsys.readouterr()
    step = "step   7  loss 1.2346  lr 3.00e-03  grad norm 0.500  12,346 tokens/s  26 ms"
    assert (out, err) == (f"first\n{step}\n", "")


def test_terminal_gets_a_bar_and_the_same_file(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with Log(str(tmp_path), 10) as log:
        log.say("[not markup]")
        log.step(RECORD)
    out = capsys.readouterr().out
    assert "[not markup]" in out
    assert "loss 1.2346" in out
    assert "7/10" in out
    assert lines(tmp_path) == [RECORD]


def test_a_new_run_replaces_the_file(tmp_path):
    for value in (1.0, 2.0):
        with Log(str(tmp_path), 1) as log:
            log.write({"val_loss": value})
    assert lines(tmp_path) == [{"val_loss": 2.0}]


def test_the_file_is_closed_when_the_run_fails(tmp_path):
    with pytest.raises(KeyError), Log(str(tmp_path), 1) as log:
        raise KeyError
    with pytest.raises(ValueError, match="closed"):
        log.write({})


@pytest.mark.parametrize("place", ["file", "file/sub", "folder"])
def test_unwritable_folder(tmp_path, place):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder" / "metrics.jsonl").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"^output_dir='.*' cannot be written \(.+\): use another$"):
        Log(str(tmp_path / place), 1)
