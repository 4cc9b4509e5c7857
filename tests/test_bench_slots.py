"""The measuring of slots: tables, what is read from compiled texts, and one small pipeline from end to end."""

import dataclasses

import numpy as np
import pytest

import models
from jaxpp import bench_slots, config, train
from jaxpp.schedules import IDLE, build


@pytest.mark.parametrize("kinds", bench_slots.KINDS.values(), ids=list(bench_slots.KINDS))
@pytest.mark.parametrize("rank", [0, 2])
def test_tables_of_a_rank_are_the_schedules_with_all_else_idle(rank: int, kinds: tuple[str, ...]) -> None:
    schedule = build("1f1b", 3, 5)
    for kind, table in zip(("forward", "backward"), bench_slots.tables_of(schedule, rank, kinds), strict=True):
        own = getattr(schedule, kind)
        for name in ("chunk", "microbatch", "ring", "read", "output"):
            column = getattr(table, name)
            want = getattr(own, name)[:, rank] if kind in kinds else IDLE
            assert (column[:, rank] == want).all()
            assert (np.delete(column, rank, axis=1) == IDLE).all()
        assert (table.arrive == own.arrive).all()


@pytest.mark.parametrize(("name", "stages"), [("1f1b", 4), ("gpipe", 2)])
def test_nothing_is_read_where_arrivals_go(name: str, stages: int) -> None:
    kept = bench_slots.keeping_inputs(build(name, stages, 6))
    for table in (kept.forward, kept.backward):
        assert not set(table.arrive.flat) & set(table.read.flat)


def test_idle_ticks_follow_a_schedule() -> None:
    own = bench_slots.keeping_inputs(build("1f1b", 3, 5))
    longer = bench_slots.with_idle_ticks(own, 4)
    assert longer.ticks == own.ticks + 4
    for kind in ("forward", "backward"):
        long, short = vars(getattr(longer, kind)), vars(getattr(own, kind))
        assert all((long[name][: own.ticks] == short[name]).all() for name in short)
        assert all((long[name][own.ticks :] == IDLE).all() for name in short if name != "arrive")
        assert (long["arrive"] == long["arrive"][0]).all()


def test_the_simulator_is_given_the_slots_of_each_rank() -> None:
    """1f1b whose ranks take alike: M + S - 1 slots of either kind; and the ticks' overhead, and the rest."""
    schedule = build("1f1b", 4, 8)
    ranks = [{"forward_ms": 2.0, "backward_ms": 4.0, "tick_ms": 0.1, "fixed_ms": 5.0}] * 4
    found = bench_slots.predict(schedule, ranks)
    assert found["step_ms"] == pytest.approx((8 + 3) * 6.0 + 0.1 * schedule.ticks + 5.0)
    assert found["bubble_fraction"] == pytest.approx(3 / 11)


def test_slots_of_a_small_pipeline(capsys: pytest.CaptureFixture[str]) -> None:
    """On emulated devices, whose times say nothing: all is there, and adds up in form."""
    model = dataclasses.replace(models.config_of("gpt2-tiny"), layers=2, dim=32)
    options = config.Config(
        pipeline_parallel=2, data_parallel=1, batch_size=1, sequence_length=16, total_batch_size=48, dtype="float32"
    )
    sizes = config.sizes(options, model.layers, model.positions)
    make_run = lambda grid: train.make_run(options, sizes, grid, model.layers)
    found = bench_slots.measure(make_run, lambda key: models.build(key, model), 2, [0, 1], model.vocab_size)
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1]
    for rank in found["ranks"]:
        steps = rank["step_ms"]
        assert rank["forward_ms"] == pytest.approx((steps["forward"] - steps["none"]) / 3)
        assert rank["fixed_ms"] == pytest.approx(steps["none"] - rank["tick_ms"] * build("1f1b", 2, 3).ticks)
        assert rank["predicted_ms"] == pytest.approx(steps["forward"] + steps["backward"] - steps["none"])
    assert found["bare_ms"] > 0
    assert "rank 1: F" in capsys.readouterr().out
