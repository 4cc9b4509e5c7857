"""The precision checker's option, what its records say, and a NaN that is named."""

import json
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from test_train import batch, build, make

from jaxpp import train
from jaxpp.probe import BACKWARD, FORWARD, Tap
from jaxpp.records import FILE, Check, Recorder, combined, describe, order_of, parse_check, place_of, watched

MD5 = Check(1, "", "md5")


def test_the_option() -> None:
    assert parse_check("level=1", "out") == Check(1, "out/precision", "simple", False, 1e-3)
    words = "save_tensors=true,level=2,path=a/b,format=md5,md5_tolerance=0.01"
    assert parse_check(words, "out") == Check(2, "a/b", "md5", True, 0.01)
    assert parse_check("save_tensors=false", "out").level == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("lvel=1", "'lvel' is unknown, did you mean 'level'?"),
        ("level", "'level' has no value"),
        ("", "'' is unknown"),
        ("level=3", "level='3' is unknown (one of 1, 2)"),
        ("format=sipmle", "did you mean 'simple'? (one of simple, md5)"),
        ("save_tensors=yes", "(one of true, false)"),
        ("level=1,level=2", "level is given twice"),
        ("path=", "path is empty"),
        ("format=md5,md5_tolerance=0", "md5_tolerance='0' must be a number in (0, 1)"),
        ("format=md5,md5_tolerance=nan", "for example 1e-3"),
        ("md5_tolerance=0.1", "md5_tolerance is of format=md5"),
    ],
)
def test_refusals_of_the_option(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)) as refused:
        parse_check(text, "out")
    assert "\n" not in str(refused.value) and str(refused.value).startswith("precision_check")


def test_statistics_are_of_what_is_finite_and_fit_into_json() -> None:
    values = np.asarray([[1.0, np.nan, -3.0], [np.inf, 8.0, -np.inf]], np.float32)
    found = describe(values, Check(1, ""))
    assert found == {
        "dtype": "float32",
        "shape": [2, 3],
        "nan": 1,
        "inf": 2,
        "min": -3.0,
        "max": 8.0,
        "mean": 2.0,
        "first": [1.0, "nan", -3.0, "inf", 8.0, "-inf"],
    }
    json.dumps(found, allow_nan=False)
    none = describe(np.full(20, np.nan), Check(1, ""))
    assert (none["min"], none["max"], none["mean"], none["nan"], len(none["first"])) == (None, None, None, 20, 8)
    assert describe(np.asarray(jax.numpy.full(2, 1.5, "bfloat16")), Check(1, ""))["dtype"] == "bfloat16"


@pytest.mark.parametrize("scale", [1.0, 1e-6, 1e9])
def test_the_md5_is_of_rounded_values_of_any_size(scale: float) -> None:
    """Noise far below the tolerance leaves it, a change above it does not, at any size; -0 is 0 and NaN is NaN."""
    grid = np.asarray([0.0, 0.5, -0.25, 0.9, np.nan, np.inf]) * scale
    largest = 2.0 ** np.floor(np.log2(0.9 * scale))
    grid = np.where(np.isfinite(grid), np.rint(grid / (1e-3 * largest)) * 1e-3 * largest, grid)
    sums = lambda values: describe(np.asarray(values), MD5)["md5"]
    near = grid + 1e-5 * largest
    assert sums(near) == sums(grid) == sums(np.where(grid == 0, -0.0, grid))
    assert sums(grid + 1e-3 * largest) != sums(grid)
    assert "min" not in describe(grid, MD5) and describe(grid, MD5)["nan"] == 1


def test_data_ranks_are_put_together() -> None:
    rows, loss = Tap("layer", "output", 0, FORWARD, True), Tap("head", "loss", 0, FORWARD, False)
    parts = [np.float32([[1.0, 2.0]]), np.float32([[3.0, 4.0]])]
    assert combined(parts, rows).tolist() == [[1.0, 2.0], [3.0, 4.0]]
    assert combined([np.float32(1.0), np.float32(3.0)], loss) == 4
    assert combined([np.float32(0.5)] * 2, loss._replace(direction=BACKWARD)) == 0.5
    assert combined(parts, rows).dtype == combined([np.float32(1)] * 2, loss).dtype == np.float32


def test_order_is_that_of_the_computation() -> None:
    def record(step: int, direction: str, microbatch: int, place: str, order: int) -> dict[str, Any]:
        return {"step": step, "direction": direction, "microbatch": microbatch, "place": place, "order": order}

    assert [place_of("layer", 5), place_of("layer", 117), place_of("head", -1)] == ["layer05", "layer117", "head"]
    places = [("embed", 0), ("layer00", 0), ("layer00", 1), ("layer99", 0), ("layer100", 0), ("head", 0), ("head", 1)]
    want = [record(1, FORWARD, m, *place) for m in (0, 1) for place in places]
    want += [record(1, BACKWARD, m, *place) for m in (0, 1) for place in reversed(places)]
    want += [record(2, FORWARD, 0, "embed", 0)]
    mixed = np.random.default_rng(0).permutation(len(want)).tolist()
    assert sorted((want[i] for i in mixed), key=order_of) == want


def test_a_planted_nan_is_named(tmp_path: Path) -> None:
    """One weight of layer 2 is NaN: it is named with the stage that holds it, once, and the tensors are on file."""
    said: list[str] = []
    recorder = Recorder(Check(2, str(tmp_path / "a"), save_tensors=True), data=2)
    recorder.open()
    run = train.replace(make(pipeline_parallel=4), recorder=recorder)
    state = train.initial_state(run, build)
    wq = state.params.blocks[0].mlp.wi
    wq[...] = wq[...].at[2].set(np.nan)  # [S, C, D, F]
    step = watched(recorder, train.make_step(run), said.append)
    for i in range(2):
        state, _ = step(state, train.put_batch(run, batch(run, i)))
    assert said == [
        "warning: step 1: the first value that is not finite is in layer02, mlp.hidden (forward), microbatch 0, stage"
        " 2: 8192 NaN and 0 Inf in float32[4, 16, 128]"
    ]
    records = [json.loads(line) for line in (tmp_path / "a" / FILE).read_text().splitlines()]
    assert {record["step"] for record in records} == {1, 2}
    names = [record["name"] for record in records]
    assert len(set(names)) == len(names) and "step2/microbatch1/layer03/attention.q/backward" in names
    for record in records[::50]:
        found = describe(np.load(tmp_path / "a" / record["tensor"]), recorder.check)
        assert found == {key: record[key] for key in found}


def test_bfloat16_tensors_can_be_loaded(tmp_path: Path) -> None:
    recorder = Recorder(Check(1, str(tmp_path), save_tensors=True), data=1)
    recorder.open()
    values = jax.numpy.asarray([1.5, -2.25], "bfloat16")
    recorder(Tap("layer", "output", 1, FORWARD, True), np.asarray([3, 5, 1, 0]), values)
    recorder.flush(print)
    (record,) = [json.loads(line) for line in (tmp_path / FILE).read_text().splitlines()]
    assert (record["name"], record["stage"]) == ("step0/microbatch3/layer05/output/forward", 1)
    assert record["dtype"] == "bfloat16"
    assert np.load(tmp_path / record["tensor"]).tolist() == [1.5, -2.25]


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"^precision_check: path='.*/file/x' cannot be written"):
        Recorder(Check(1, str(tmp_path / "file" / "x")), data=1).open()
    recorder = Recorder(Check(1, str(tmp_path / "a"), save_tensors=True), data=1)
    recorder.open()
    (tmp_path / "a" / "tensors").write_text("")  # where a folder is wanted: the step tells it, not its threads
    recorder(Tap("head", "loss", 1, FORWARD, False), np.asarray([0, -1, 0, 0]), np.float32(1))
    with pytest.raises(ValueError, match="cannot be written"):
        recorder.flush(print)


def test_without_the_option_the_step_is_as_it_was() -> None:
    step = lambda state, batch: (state, batch)
    assert watched(None, step, print) is step
    assert make(pipeline_parallel=2).pipeline.probe is None
