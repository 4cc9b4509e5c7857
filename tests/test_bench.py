"""run.py bench: what a peer says, ratios, the order of turns, refusals, and one measurement with a fake peer."""

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread

import run
from jaxpp import bench, bench_report

GIB = 2**30


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("532,000 tokens/s", {"tokens_per_second": 532_000}),
        ("speed: 532000 tokens/s.", {"tokens_per_second": 532_000}),
        ("1,234.5 tokens/s", {"tokens_per_second": 1234.5}),
        ("5.3e5 tokens/s", {"tokens_per_second": 530_000}),
        ("10 tokens/s\n20 tokens/s\n", {"tokens_per_second": 20}),
        ("532k tokens/s", {}),
        ("tokens/s", {}),
        ("532 tokens/step", {}),
        ("", {}),
        ("peak 60.5 GiB", {"peak_bytes_in_use": 60.5 * GIB}),
        ("peak 60.5 GB", {}),
        ("MFU 0.43", {"mfu_said": 0.43}),
        ("MFU 43.5%", {"mfu_said": 0.435}),
        ("MFU 43.5 %,", {"mfu_said": 0.435}),
        ("loss 1.234, loss 1.1", {"loss": 1.1}),
        ("loss nan", {}),
        (
            "step 9  loss 3.25  8,000 tokens/s  MFU 0.5  peak 2 GiB",
            {"tokens_per_second": 8000, "loss": 3.25, "mfu_said": 0.5, "peak_bytes_in_use": 2 * GIB},
        ),
        (
            '{"tokens_per_second": 812.5, "step_seconds": [1, 2], "loss": 2.5, "peak_bytes": 1024}',
            {"tokens_per_second": 812.5, "loss": 2.5, "peak_bytes_in_use": 1024},
        ),
    ],
)
def test_what_a_peer_says(text: str, found: dict[str, float]) -> None:
    assert bench.parse_peer(text) == pytest.approx(found)


@pytest.mark.parametrize(
    ("turns", "peers", "who"),
    [
        (3, [], ["ours", "ours", "ours"]),
        (2, ["p"], ["ours", "p", "ours", "p"]),
        (1, ["p", "q"], ["ours", "p", "ours", "q"]),
    ],
)
def test_the_order_of_turns(turns: int, peers: list[str], who: list[str]) -> None:
    assert bench.order(turns, peers) == who


def turns_of(*speeds: tuple[str, float]) -> list[dict[str, Any]]:
    return [{"who": who, "tokens_per_second": speed} for who, speed in speeds]


def test_ratios_by_hand() -> None:
    """Each peer's turn against ours just before it."""
    turns = turns_of(("ours", 90), ("p", 100), ("ours", 60), ("q", 30), ("ours", 120), ("p", 100), ("ours", 7))
    assert bench.ratios(turns) == {
        "p": {"each": [0.9, 1.2], "median": pytest.approx(1.05), "min": 0.9, "max": 1.2},
        "q": {"each": [2.0], "median": 2.0, "min": 2.0, "max": 2.0},
    }
    assert bench.ratios(turns_of(("ours", 90), ("ours", 91))) == {}
    assert bench_report.ratio_line("p", bench.ratios(turns)["p"]) == (
        "our tokens/s over p: 1.050 (from 0.900 to 1.200, 2 pairs)"
    )


def test_a_table() -> None:
    """Columns that no turn has are left out; what one turn lacks is a dash."""
    turns = turns_of(("ours", 1234.4), ("python peer.py", 9))
    turns[1] |= {"mfu_said": 0.5}
    assert bench_report.table(turns) == [
        "turn  who             tokens/s  MFU as said",
        "   1  ours               1,234            -",
        "   2  python peer.py         9        50.0%",
    ]
    assert bench_report.short("x" * 60) == "…" + "x" * 47


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["slits"], "what='slits' is unknown"),
        (["train", "train"], "what='train train': one at a time, for example bench train"),
        (["--turns", "0"], "turns=0 must be at least 1, for example --turns 2"),
        (["--bench_steps", "0"], "bench_steps=0 must be at least 1, for example --bench_steps 15"),
        (
            ["--bench_layers", "9"],
            "bench_layers=9 is more than the 8 layers of the model: use at most",
        ),
        (["--peer", "no-such-program x"], "peer='no-such-program x' names no program that is there"),
        (["--peer", "python 'x"], 'peer="python \'x" is no command line (No closing quotation): close its quotes'),
        (["--to", "/dev/null/x"], "to='/dev/null/x' cannot be written"),
        (["--num_processes", "2"], "num_processes=2: bench measures one process: use --num_processes 1"),
        (["--precision_check", "level=1"], "precision_check='level=1' is not measured by bench: leave it out"),
        (["--remat", "dotz"], "remat"),
    ],
)
def test_refusals(
    words: list[str], said: str, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In one line, before any turn begins."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench, "in_a_process", lambda *_: pytest.fail("a turn has begun"))
    assert run.main(["bench", *words]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert said in err


def test_each_kind_has_its_function() -> None:
    assert tuple(run.BENCHES) == bench.KINDS


def peer(folder: Path, code: str) -> str:
    """The command line of a peer that runs some code."""
    path = folder / "peer.py"
    path.write_text(code)
    return shlex.join([sys.executable, str(path)])


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("print('5 tokens/s'); print('deep trouble'); raise SystemExit(3)", "ended with exit code 3; its last lines:"),
        ("import sys; print('deep trouble', file=sys.stderr)", "printed no 'N tokens/s'; its last lines:"),
        ("print('deep trouble: 0 tokens/s')", "printed no 'N tokens/s'; its last lines:"),
    ],
)
def test_a_peer_that_fails(
    code: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Its last lines are shown, and what was measured before is written."""
    monkeypatch.setattr(bench, "in_a_process", lambda function, argument: function(argument))
    config = bench.BenchConfig(peer=(peer(tmp_path, code),), to=str(tmp_path))
    assert bench.against(config, lambda _: {"tokens_per_second": 8.0, "about": {"device": "x"} | SHARED}, "m") == 1
    out, err = capsys.readouterr()
    assert said in err
    assert "deep trouble" in err
    assert "turn 2" in err
    assert "turn 1, ours: 8 tokens/s" in out
    found = json.loads((tmp_path / "bench.json").read_text())
    assert found["turns"] == [{"who": "ours", "tokens_per_second": 8.0}]
    assert (tmp_path / "bench.png").exists()


SHARED = {"devices": 1, "tokens_per_step": 64, "peak_flops": 1e12}


def test_our_own_turn_may_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """As where memory does not suffice."""

    def fail(*_: Any) -> Any:
        raise RuntimeError("RESOURCE_EXHAUSTED")

    monkeypatch.setattr(bench, "in_a_process", fail)
    assert bench.against(bench.BenchConfig(to=str(tmp_path)), fail, "m") == 1
    assert capsys.readouterr() == ("", "error: turn 1, ours: RESOURCE_EXHAUSTED\n")
    assert list(tmp_path.iterdir()) == []


def test_a_measurement(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Ours in a process of its own, then a peer; the files and the table have both."""
    command = peer(tmp_path, "print('loss 5.5  64,000 tokens/s  peak 1.5 GiB')")
    words = ["--pipeline_parallel", "1", "--sequence_length", "16", "--total_batch_size", "64", "--bench_layers", "1"]
    words += ["--bench_steps", "2", "--turns", "1", "--peer", command, "--to", str(tmp_path / "out")]
    assert run.main(["bench", "train", *words]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "gpt2-tiny, 1 layers, bfloat16, 64 tokens a step, 1 x cpu" in out
    assert "FLOPs a token = 6 N + 12 L T N_heads H" in out
    found = json.loads((tmp_path / "out" / "bench.json").read_text())
    ours, theirs = found["turns"]
    assert theirs == {"who": command, "tokens_per_second": 64_000, "loss": 5.5, "peak_bytes_in_use": 1.5 * GIB}
    low, high = sorted(ours["step_ms"])
    assert ours["step_ms_median"] == pytest.approx((low + high) / 2)
    assert ours["tokens_per_second"] == pytest.approx(64e3 / ours["step_ms_median"])
    assert 4.5 < ours["loss"] < 7  # log 256 is 5.5
    assert found["ratios"][command]["each"] == [pytest.approx(ours["tokens_per_second"] / 64_000)]
    assert {"python", "jax", "jaxlib", "flax", "numpy"} <= set(found["versions"])
    assert found["options"]["bench_layers"] == found["sizes"]["pipe"] == 1
    assert "--xla_force_host_platform_device_count=1" in found["xla_flags"]
    counts = {name: count["flops"] for name, count in found["flops_per_token"].items()}
    assert counts["mfu"] - counts["mfu_causal"] == 6 * 16 * 128
    assert imread(tmp_path / "out" / "bench.png").shape[1] > 1000


def test_utilization_by_both_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the peak of all devices in use, where it is known."""
    monkeypatch.setattr(bench.devices, "PEAK_FLOPS", (("cpu", 1e12),))
    config = bench.BenchConfig(
        pipeline_parallel=2, sequence_length=16, total_batch_size=64, bench_layers=2, bench_steps=1, dtype="float32"
    )
    turn = run.bench_turn(config)
    for name, count in turn["about"]["flops_per_token"].items():
        assert turn[name] == pytest.approx(count["flops"] * turn["tokens_per_second"] / 2e12)
    assert turn["mfu_causal"] < turn["mfu"]
    assert turn["about"]["peak_flops"] == 1e12
