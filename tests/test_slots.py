"""What a slot refuses before it is traced, and the forms that it may have; the rest is held by test_executor.py."""

from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
import reference
import toy

import jaxpp
from jaxpp import slots, trees
from jaxpp.executor import new_workspace, train_step


class PlacedEmbed(toy.Embed):
    def __call__(self, microbatch: dict, key: Any) -> dict:
        return {"x": super().__call__(microbatch, key), "at": microbatch["tokens"]}


def test_integers_in_the_stream_are_refused() -> None:
    rng, batch = np.random.default_rng(0), toy.batch(3)
    net = jaxpp.Model(PlacedEmbed(rng, toy.WIDE), [toy.Block(rng), toy.Block(rng)], toy.Head(rng, toy.WIDE, False))
    with pytest.raises(ValueError, match=r"^the stream holds int32\[.*leave integers in the microbatch"):
        toy.run(net, batch)


@pytest.mark.parametrize(
    ("name", "layers", "options"),
    [
        ("1f1b", 4, {"stages": 4, "remat": "none"}),
        ("1f1b", 5, {"stages": 2, "remat": "dots", "tensor": 2}),
        ("gpipe", 2, {"stages": 1, "remat": "dots"}),
        ("interleaved", 7, {"stages": 2, "chunks": 2, "remat": "none"}),
    ],
)
def test_a_ring_of_arrays_gives_what_one_of_a_stack_gives(
    monkeypatch: Any, name: str, layers: int, options: dict
) -> None:
    """The form that GPUs have, on the CPU; whatever is idle is NaN."""
    net, batch = toy.model(layers, tied=True), toy.batch(5)
    monkeypatch.setattr(slots, "SWITCHED", ("cpu",))
    for module in (slots, trees):
        monkeypatch.setattr(module, "blank", toy.nans)
    pipeline, params = toy.set_up(net, batch, name=name, **options)
    assert pipeline.banks == pipeline.schedule.ring_slots > 1
    result = jax.jit(partial(train_step, pipeline))(params, batch)
    want, grads = reference.value_and_grad(net, batch), jaxpp.unstack(jax.device_get(result.grads))
    assert float(result.loss) == pytest.approx(float(want.loss), rel=1e-6)
    assert max(reference.leaf_errors(grads, want.grads).values()) <= 1e-6


@pytest.mark.parametrize("remat", ["none", "dots", "full"])
def test_one_stage_decides_nothing_while_it_runs_and_keeps_no_ring(remat: str) -> None:
    """The step is then the loop over microbatches that one would write by hand."""
    batch = toy.batch(4)
    pipeline, params = toy.set_up(toy.model(2), batch, stages=1, remat=remat)
    names = [e.primitive.name for e in toy.equations(toy.step_jaxpr(pipeline, params, batch))]
    assert names.count("scan") == 1 and "cond" not in names
    assert new_workspace(pipeline, params, batch) is None


@pytest.mark.parametrize("stages", [1, 2])
def test_an_embeddings_gradient_is_summed_in_float32(stages: int) -> None:
    """One token stands in all places, and in bfloat16 a sum of so many would stop growing."""
    batch, net = toy.probe_batch(np.full((2, 512), 1 / 512)), toy.probe_model(2)
    got = toy.run(net, batch, stages=stages, precision=jaxpp.resolve("bfloat16"), loss=toy.probe_loss)
    want = reference.value_and_grad(net, batch, loss=toy.probe_loss)
    assert reference.error(got.grads.embed, want.grads.embed) <= 1e-2


@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("gpipe", 1), ("interleaved", 2)])
def test_a_send_has_a_slot_to_pass_beside(name: str, chunks: int) -> None:
    """Of a tick's two slots the F waits for no send backward of that tick, the B for none forward."""
    batch = toy.batch(6)
    pipeline, params = toy.set_up(toy.model(4), batch, name=name, chunks=chunks)
    (tick,) = [e.params["jaxpr"].jaxpr for e in toy.equations(toy.step_jaxpr(pipeline, params, batch)) if scans(e)]
    sends: dict[Any, set] = {}  # that each variable waits for
    slots_wait = []
    for eqn in tick.eqns:
        before = set().union(*(sends.get(v, set()) for v in eqn.invars if not hasattr(v, "val")))
        own = {tuple(eqn.params["perm"])} if eqn.primitive.name == "ppermute" else set()
        sends |= dict.fromkeys(eqn.outvars, before | own)
        slots_wait += [before] if eqn.primitive.name == "cond" else []
    wrap = {((0, 1),)} if chunks > 1 else set()  # backward, it runs from the first stage to the last
    assert slots_wait == [set(), {((1, 0),)} | wrap]


def scans(eqn: Any) -> bool:
    return eqn.primitive.name == "scan"
