"""Traces of steps: which steps, and the schedule's slots by name in the compiled step and in what is written."""

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import models
import run
from jaxpp import config, mesh, profile, schedules, train
from models import GPT2, GPT2Config

MODEL = GPT2Config(vocab_size=97, positions=16, layers=2, dim=32, heads=2)
SMALL = ["--num_iteration", "4", "--sequence_length", "16", "--total_batch_size", "64", "--pipeline_parallel", "2"]


@pytest.mark.parametrize(
    ("text", "want"), [("1:2", [1]), ("3:7", [3, 4, 5, 6]), ("10:11", [10]), ("1:11", range(1, 11))]
)
def test_spans(text: str, want: Any) -> None:
    assert list(profile.parse_span(text, 10)) == list(want)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("3", "is not two whole numbers"),
        ("3:", "is not two whole numbers"),
        ("a:b", "is not two whole numbers"),
        ("-1:3", "is not two whole numbers"),
        ("1:2:3", "is not two whole numbers"),
        ("3:3", "has no step, START must be below STOP"),
        ("5:3", "has no step, START must be below STOP"),
        ("0:3", "is not within the steps 1 to 10"),
        ("10:12", "is not within the steps 1 to 10"),
        ("11:12", "is not within the steps 1 to 10"),
    ],
)
def test_refused_spans(text: str, words: str, capsys: pytest.CaptureFixture) -> None:
    """With an example that works."""
    assert run.main(["--num_iteration", "10", "--profile=" + text]) == 2
    error = capsys.readouterr().err
    assert f"profile={text!r} {words}" in error
    assert error.count("\n") == 1
    assert list(profile.parse_span(error.split("--profile ")[1].strip(), 10))


def test_which_steps_are_traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that goes on may come in the midst of the span, or end there."""
    monkeypatch.setattr(jax.profiler, "start_trace", lambda *_, **__: None)
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: None)

    def traced(first: int, last: int) -> list[int]:
        trace, found = profile.Trace(range(3, 6), tmp_path), []
        for step in range(first, last + 1):
            if trace.starts(step):
                trace.start(())
            found += [step] * trace.running
            if trace.ends(step, step == last):
                trace.stop((), lambda: "")
        assert not trace.running
        return found

    assert traced(1, 9) == [3, 4, 5]
    assert traced(4, 9) == [4, 5]
    assert traced(1, 4) == [3, 4]
    assert traced(6, 9) == []


def test_the_slots_are_named_in_the_compiled_step() -> None:
    chosen = config.Config(sequence_length=16, total_batch_size=64, pipeline_parallel=2)
    sizes = config.sizes(chosen, MODEL.layers, MODEL.positions)
    made = train.make_run(chosen, sizes, mesh.make_mesh(sizes.pipe), MODEL.layers)
    state = train.initial_state(made, lambda key: GPT2(key, MODEL))
    batch = {name: np.zeros(spec.shape, np.int32) for name, spec in made.batch_spec().items()}
    text = train.make_step(made).lower(state, train.put_batch(made, batch)).compile().as_text()
    found = set(profile.slot_names(text).values())
    inside = {"forward_slot/embed", "backward_slot/head", "backward_slot/embed"}
    assert {"forward_slot", "backward_slot", "forward_wire", "backward_wire"} | inside <= found


def test_names_are_put_before_those_of_a_module() -> None:
    text = (
        "HloModule jit_step, is_scheduled=true\n"
        '  %fusion.3 = f32[2]{0} fusion(%a), metadata={op_name="jit(step)/backward_slot/cond/head/dot" source_line=1}\n'
        '  ROOT %add.1 = f32[2]{0} add(%a, %b), metadata={op_name="jit(step)/ahead/add"}\n'
    )
    names = profile.slot_names(text)
    assert names == {("jit_step", "fusion.3"): "backward_slot/head"}
    told = [{"hlo_module": module, "hlo_op": op} for module in ("jit_step", "jit_eval") for op in ("fusion.3", "add.1")]
    events: list[dict] = [{"name": args["hlo_op"], "args": args} for args in told] + [{"name": "fusion.3"}, {}]
    profile.name_slots(events, names)
    want = ["backward_slot/head fusion.3", "add.1", "fusion.3", "add.1", "fusion.3", None]
    assert [event.get("name") for event in events] == want


def test_a_run_writes_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of steps 2 and 3, for xprof and for Perfetto, with the slots and wires as often as the schedule has ticks."""
    monkeypatch.setattr(run, "sampler", lambda *_: lambda _: None)
    monkeypatch.setitem(models.PRESETS, "gpt2-tiny", replace(MODEL, vocab_size=256))
    assert run.main([*SMALL, "--profile", "2:4", "--output_dir", str(tmp_path)]) == 0
    assert f"the trace is in {tmp_path / 'profile'}\n" in capsys.readouterr().out
    (xprof,) = tmp_path.glob("profile/plugins/profile/*/*.xplane.pb")
    data = jax.profiler.ProfileData.from_file(str(xprof))
    assert any(event.name == "train" for plane in data.planes for line in plane.lines for event in line.events)
    (perfetto,) = tmp_path.glob("profile/plugins/profile/*/perfetto_trace.json.gz")
    events = json.loads(gzip.decompress(perfetto.read_bytes()))["traceEvents"]
    steps = [event["args"]["step_num"] for event in events if event.get("name") == "train"]
    assert steps == ["2", "3"]
    names = [event.get("name", "").split(" ")[0] for event in events]
    counts = {scope: sum(name == scope for name in names) for scope in ("forward_wire", "backward_wire")}
    ticks = schedules.build("1f1b", 2, 2).ticks
    assert counts == {"forward_wire": 2 * 2 * ticks, "backward_wire": 2 * 2 * ticks}
    assert {"forward_slot", "backward_slot", "backward_slot/head"} <= set(names)
