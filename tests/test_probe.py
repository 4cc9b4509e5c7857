"""Taps: what they show, under which names, for any layout; and that without a probe there is nothing.

Legend: B microbatch size; S stages, M microbatches.
"""

import os
import subprocess
import sys
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import toy
from test_families import TIGHT, loss_of, make, oracle
from test_families import batch as family_batch

import jaxpp
from jaxpp import probe, slots
from jaxpp.executor import train_step
from jaxpp.losses import token_loss
from jaxpp.probe import BACKWARD, FORWARD, Probe, Spot, Tap
from models import attention, head, mlp, moe

ROOT = Path(__file__).parent.parent
Shown = dict[tuple[Tap, Spot], np.ndarray]
INSIDE = {"attention.q", "attention.kv", "attention.heads", "attention.output", "mlp.hidden", "mlp.output", "logits"}


class Sink:
    """Keeps what it is told; nothing may be told twice."""

    def __init__(self) -> None:
        self.found: list[tuple[Tap, Spot, np.ndarray]] = []

    def __call__(self, tap: Tap, spot: Any, value: Any) -> None:
        self.found.append((tap, Spot(*np.asarray(spot).tolist()), np.array(value)))

    def taken(self) -> Shown:
        jax.effects_barrier()
        shown = {(tap, spot): value for tap, spot, value in self.found}
        assert len(shown) == len(self.found)
        return shown


def show(net: Any, batch: dict, level: int = 1, key: Any = None, **options: Any) -> Shown:
    """What one step's taps show, sorted by nothing."""
    sink = Sink()
    toy.run(net, batch, key, remat="none", probe=Probe(level, sink), **options)
    return sink.taken()


def by_name(shown: Shown) -> dict[tuple, np.ndarray]:
    """Without the layout: by (part, tap, direction, microbatch, layer), rows of the data ranks put together."""
    found: dict[tuple, np.ndarray] = {}
    for (tap, spot), value in sorted(shown.items(), key=lambda item: item[0][1].data):
        name = (tap.part, tap.name, tap.direction, spot.microbatch, spot.layer)
        found[name] = np.concatenate([found[name], value]) if name in found else value
    return found


LAYERS, M = 4, 3


@cache
def on_one_stage(data: int) -> dict[tuple, np.ndarray]:
    """What is shown with neither stages nor replicas; with dropout, whose draws are by row, where there are none."""
    return by_name(show(toy.model(LAYERS), toy.batch(M, data), key=key_of(data), stages=1))


def key_of(data: int) -> jax.Array | None:
    return jax.random.key(1) if data == 1 else None


@pytest.mark.parametrize(
    "options",
    [
        {"stages": 4},
        {"stages": 3, "name": "gpipe"},
        {"stages": 2, "chunks": 2, "name": "interleaved"},
        {"stages": 2, "data": 2},
    ],
    ids=str,
)
def test_every_layout_shows_the_same_tensors_once(options: dict) -> None:
    """The names of one stage, each once, and the same values; uneven splits too."""
    data = options.get("data", 1)
    shown = show(toy.model(LAYERS), toy.batch(M, data), key=key_of(data), **options)
    want, got = on_one_stage(data), by_name({at: value for at, value in shown.items() if at[0].rows})
    assert len(want) == 2 * M * (1 + 2 * LAYERS + 1)  # the embedding's output, each layer's two, the loss
    losses = {name for name in want if name[1] == "loss"}
    assert got.keys() == want.keys() - losses
    for name in got:
        assert np.linalg.norm(got[name] - want[name]) <= 2e-6 * np.linalg.norm(want[name]), name
    for name in losses:
        parts = [v for (tap, spot), v in shown.items() if (tap.name, tap.direction, spot.microbatch) == name[1:4]]
        assert len(parts) == data
        np.testing.assert_allclose(np.sum(parts) if name[2] == FORWARD else np.mean(parts), want[name], rtol=1e-5)


def test_what_is_shown_is_what_it_says() -> None:
    """Against the model run by hand: streams forward, and of one microbatch the cotangent that jax.grad gives."""
    net, batch = toy.model(4), toy.batch(2)
    shown = by_name(show(net, batch, stages=4))
    microbatch = jax.tree.map(lambda a: a[1], batch)
    stream = net.embed(microbatch, None)
    np.testing.assert_allclose(shown["embed", "output", FORWARD, 1, -1], stream, rtol=1e-6)
    streams = [stream]
    for block in net.blocks:
        streams.append(block(streams[-1], microbatch, None))
    for i in range(4):
        np.testing.assert_allclose(shown["layer", "input", FORWARD, 1, i], streams[i], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(shown["layer", "output", FORWARD, 1, i], streams[i + 1], rtol=1e-5, atol=1e-6)

    def rest(x: jax.Array) -> jax.Array:
        for block in net.blocks[2:]:
            x = block(x, microbatch, None)
        return token_loss(net.head, net.embed, x, microbatch) / jnp.sum(batch["labels"] != -100)

    want = jax.grad(rest)(streams[2])
    for name in (("layer", "output", BACKWARD, 1, 1), ("layer", "input", BACKWARD, 1, 2)):
        assert np.linalg.norm(shown[name] - want) <= 1e-6 * np.linalg.norm(want)


def test_stages_and_data_ranks_are_told() -> None:
    shown = show(toy.model(4), toy.batch(2, 2), stages=2, data=2)
    stages = {spot.layer: spot.stage for tap, spot in shown if tap.part == "layer"}
    assert stages == {0: 0, 1: 0, 2: 1, 3: 1}
    assert {spot.stage for tap, spot in shown if tap.part == "embed"} == {0}
    assert {spot.stage for tap, spot in shown if tap.part == "head"} == {1}
    assert {spot.data for _, spot in shown} == {0, 1}


def test_what_arrives_over_a_narrow_wire_is_shown() -> None:
    """Inputs of a stage's first layer are rounded to the wire's dtype, and outputs of the layer before are not."""
    net, batch = toy.model(4), toy.batch(2)
    shown = by_name(show(net, batch, stages=2, precision=jaxpp.resolve("float32", pipeline_dtype="bfloat16")))
    sent, got = shown["layer", "output", FORWARD, 0, 1], shown["layer", "input", FORWARD, 0, 2]
    assert got.dtype == sent.dtype == np.float32
    assert np.array_equal(got, np.asarray(jnp.asarray(sent).astype("bfloat16").astype("float32")))
    assert not np.array_equal(got, sent)
    sent, got = shown["layer", "input", BACKWARD, 0, 2], shown["layer", "output", BACKWARD, 0, 1]
    assert np.array_equal(got, np.asarray(jnp.asarray(sent).astype("bfloat16").astype("float32")))
    assert not np.array_equal(got, sent)


def test_a_stream_that_is_a_tree_has_a_name_a_leaf() -> None:
    shown = show(toy.model(2, pair=True), toy.batch(2), stages=2)
    assert {tap.name for tap, _ in shown if tap.part == "layer"} == {"input.x", "input.aux", "output.x", "output.aux"}


@pytest.mark.parametrize("name", ["gpt2", "llama3", "mixtral"])
def test_taps_inside_a_model(name: str) -> None:
    """Level 2 shows them in the order of computation, each once each way; the gradients stay the oracle's."""
    sink = Sink()
    probing = {"remat": "none", "probe": Probe(2, sink)}
    got = toy.run(make(name), family_batch(), stages=4, loss=loss_of(name), **probing)
    errors = reference.leaf_errors(got.grads, oracle(name).grads)
    assert max(errors.values()) <= TIGHT, errors
    shown = sink.taken()
    ends = {"output", "loss", "input", *(f"{end}.{leaf}" for end in ("input", "output") for leaf in ("x", "router"))}
    want = INSIDE if name != "mixtral" else INSIDE - {"mlp.hidden"} | {"mlp.router"}
    assert {tap.name for tap, _ in shown} - ends == want
    one = sorted((tap.order, tap.name) for tap, spot in shown if spot[:2] == (0, 1) and tap.direction == FORWARD)
    names = [tap for _, tap in one]
    assert names[0].startswith("input") and names[-1].startswith("output")
    inner = ["attention.q", "attention.heads", "attention.output", "mlp.output"]
    assert [tap for tap in names if tap in inner] == inner
    counts = {direction: sum(tap.direction == direction for tap, _ in shown) for direction in (FORWARD, BACKWARD)}
    assert counts[FORWARD] == counts[BACKWARD]


@pytest.mark.parametrize(("name", "remat"), [("gpt2", "dots"), ("mixtral", "full")])
def test_without_a_probe_there_is_nothing(monkeypatch: pytest.MonkeyPatch, name: str, remat: str) -> None:
    """The lowered step is, letter for letter, that of a program that has no taps; with a probe it is not."""

    def lowered(**options: Any) -> str:
        batch = family_batch()
        pipeline, params = toy.set_up(make(name), batch, stages=4, loss=loss_of(name), **options)
        return jax.jit(partial(train_step, pipeline)).lower(params, batch, jax.random.key(0)).as_text()

    usual = lowered(remat=remat)
    assert "callback" not in usual
    assert "callback" in lowered(remat="none", probe=Probe(1, Sink()))
    with monkeypatch.context() as patch:
        for module in (attention, head, mlp, moe, probe):
            patch.setattr(module, "tap", lambda name, x, level=2: x)
        patch.setattr(probe, "call", lambda _, block, *args: block(*args))
        patch.setattr(probe, "mark", lambda _, microbatch, *args: microbatch)
        patch.setattr(probe, "mark_spec", lambda _, microbatch: microbatch)
        patch.setattr(slots.Context, "note_embed", lambda self, m, direction, tree: tree)
        assert lowered(remat=remat) == usual


def test_a_tap_outside_a_step_is_its_argument() -> None:
    x = jnp.ones(3)
    assert probe.tap("name", x) is x


@pytest.mark.parametrize(("asked", "threads"), [(None, 2048), ("7", 2048), ("5000", 5000)])
def test_spare_threads_are_asked_for(monkeypatch: pytest.MonkeyPatch, asked: str | None, threads: int) -> None:
    monkeypatch.setenv("PJRT_NPROC", asked or "")
    probe.spare_threads(1024)
    assert probe.os.environ["PJRT_NPROC"] == str(threads)


LARGE = """
from jaxpp import mesh, probe
probe.spare_threads(8)
mesh.emulate_devices(8)
import jax, jax.numpy as jnp
import numpy as np
seen = []
told = probe.Probe(1, lambda tap, spot, value: seen.append(np.asarray(value).sum()))

def rank(x):
    def tick(x, m):
        spot = {"labels": x, probe.KEY: jnp.stack([m, m, m, m])}
        x = probe.note(told, "layer", "forward", spot, x)
        return jax.lax.ppermute(x, "pipe", [(i, i ^ 1) for i in range(8)]), None
    return jax.lax.scan(tick, x, jnp.arange(10))[0]

grid, spec = mesh.make_mesh(8), jax.sharding.PartitionSpec("pipe")
step = jax.jit(jax.shard_map(rank, mesh=grid, in_specs=spec, out_specs=spec, check_vma=False))
jax.block_until_ready(step(jnp.ones((8 * 512, 512))))
jax.effects_barrier()
assert seen == [512.0 * 512] * 80
"""


def test_large_tensors_on_as_many_devices_as_there_are_threads_do_not_block() -> None:
    """Each is 1 MiB, which is not copied at once; without the spare threads JAX 0.10 waits for ever."""
    environment = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "PJRT_NPROC")}
    command = [sys.executable, "-c", LARGE]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
