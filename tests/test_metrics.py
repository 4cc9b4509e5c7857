"""The log: lines on the terminal or the bar, and metrics.jsonl."""

import json
import struct
import sys

import pytest
from tensorboardX.proto.event_pb2 import Event

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


def events(folder) -> list[tuple[int, dict[str, float]]]:
    """(step, scalars) of each event in all files of a folder, read as TFRecords (length, its CRC, data, its CRC)."""
    found = []
    for path in sorted(folder.glob("events.out.tfevents.*")):
        content, at = path.read_bytes(), 0
        while at < len(content):
            (length,) = struct.unpack_from("<Q", content, at)
            event = Event.FromString(content[at + 12 : at + 12 + length])
            found.append((event.step, {value.tag: value.simple_value for value in event.summary.value}))
            at += 12 + length + 4
        assert at == len(content)
    return [(step, scalars) for step, scalars in found if scalars]


def test_tensorboard_has_the_scalars_of_every_record(tmp_path):
    with Log(str(tmp_path), 8, tensorboard=True) as log:
        log.step(RECORD | {"expert_load": [0.25, 0.75], "mfu": 0.5})
        log.write({"step": 7, "val_loss": 2.5})
        log.step(RECORD | {"step": 8, "loss": float("nan")})
    (seven, first), validation, (eight, last) = events(tmp_path / "tensorboard")
    assert (seven, eight) == (7, 8)
    want = {name: value for name, value in RECORD.items() if name != "step"}
    want |= {"expert_load/0": 0.25, "expert_load/1": 0.75, "mfu": 0.5}
    assert first == pytest.approx(want, rel=1e-7)  # float32
    assert validation == (7, {"val_loss": 2.5})
    assert last["loss"] != last["loss"]


@pytest.mark.parametrize("before", [True, False], ids=["with TensorBoard", "without"])
def test_a_run_that_goes_on_has_each_step_once(tmp_path, before):
    """Also those between the checkpoint and the kill, and also where the kill came before the events were written."""
    with Log(str(tmp_path), 9, tensorboard=before) as log:
        for step in (1, 2, 3, 4):
            log.write({"step": step, "loss": float(step)})
    with Log(str(tmp_path), 9, done=2, tensorboard=True) as log:
        for step in (3, 4, 5):
            log.write({"step": step, "loss": 10.0 * step})
    want = [(1, 1.0), (2, 2.0), (3, 30.0), (4, 40.0), (5, 50.0)]
    assert [(step, scalars["loss"]) for step, scalars in events(tmp_path / "tensorboard")] == want
    assert [(line["step"], line["loss"]) for line in lines(tmp_path)] == want


def test_a_new_run_replaces_the_events_alone(tmp_path):
    folder = tmp_path / "tensorboard"
    folder.mkdir()
    (folder / "note.txt").write_text("mine")
    for value in (1.0, 2.0):
        with Log(str(tmp_path), 1, tensorboard=True) as log:
            log.write({"step": 1, "val_loss": value})
    assert events(folder) == [(1, {"val_loss": 2.0})]
    assert (folder / "note.txt").read_text() == "mine"


def test_without_tensorboard_there_is_no_folder(tmp_path):
    with Log(str(tmp_path), 1) as log:
        log.write({"step": 1, "val_loss": 1.0})
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_mfu_is_said_where_it_is_known(tmp_path, capsys):
    with Log(str(tmp_path), 9) as log:
        log.step(RECORD | {"mfu": 0.4123, "peak_bytes_in_use": 2**30})
    assert capsys.readouterr().out.endswith("  26 ms  mfu 41.2%\n")
    assert lines(tmp_path) == [RECORD | {"mfu": 0.4123, "peak_bytes_in_use": 2**30}]
