"""The plan against known models and against the arrays that a run really makes."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import models
import run
from jaxpp import executor, mesh, plan, train
from jaxpp.config import Config, sizes

ROOT = Path(__file__).parent.parent
PROMISED = {"ticks", "bubble_fraction", "in_flight", "layers_per_stage", "parameters", "wire_dtype"}
PROMISED |= {"wire_bytes_per_hop", "bytes_per_device"}
PARTS = ("parameters", "compute_weights", "gradients", "optimizer", "activations", "slot", "logits")
COUNTS = {"gpt2": 124_439_808, "gpt2-medium": 354_823_168, "gpt2-large": 774_030_080, "gpt2-xl": 1_557_611_200}
COUNTS["gpt2-tiny"] = 1_651_968


@pytest.fixture
def make(capsys):
    """The plan of a command line."""

    def plan_of(*words: str) -> dict:
        assert run.main(["plan", "--json", *words]) == 0
        return json.loads(capsys.readouterr().out)

    return plan_of


@pytest.mark.parametrize("name", COUNTS)
def test_presets(make, name):
    found = make("--model", name)
    layers = models.config_of(name).layers
    assert found.keys() >= PROMISED
    assert found["parameters"] == COUNTS[name]
    assert found["layers_per_stage"] == [layers // 4] * 4
    assert found["bytes_per_device"].keys() == {*PARTS, "total"}
    assert found["bytes_per_device"]["total"] == sum(found["bytes_per_device"][part] for part in PARTS)


def test_numbers_of_the_default(make):
    """M = 8 on S = 4, B = 2 rows of 64 tokens of width 128 in bfloat16."""
    found = make()
    assert found["ticks"] == 14
    assert found["bubble_fraction"] == pytest.approx(3 / 11)
    assert found["in_flight"] == [7, 5, 3, 1]
    assert found["wire_dtype"] == "bfloat16"
    assert found["wire_bytes_per_hop"] == 128 * 128 * 2


@pytest.mark.parametrize(
    ("words", "key", "want"),
    [
        (["--pipeline_dtype", "float32"], "wire_bytes_per_hop", 128 * 128 * 4),
        (["--pipeline_dtype", "float32"], "wire_dtype", "float32"),
        (["--batch_size", "3", "--data_parallel", "2"], "wire_bytes_per_hop", 3 * 64 * 128 * 2),
        (["--virtual_pipeline_parallel", "2"], "bubble_fraction", 1.5 / (8 + 1.5)),
        (["--virtual_pipeline_parallel", "2"], "in_flight", [5.5, 4.5, 3.5, 2.5]),
        (["--schedule", "gpipe"], "in_flight", [8, 8, 8, 8]),
        (["--pipeline_parallel", "1"], "bubble_fraction", 0),
        (["--pipeline_parallel", "3"], "layers_per_stage", [3, 3, 2]),
        (["--pipeline_parallel", "3"], "parameters", COUNTS["gpt2-tiny"]),
        (["--virtual_pipeline_parallel", "3"], "parameters", COUNTS["gpt2-tiny"]),
        (["--total_batch_size", "4096"], "microbatches", 32),
    ],
)
def test_options_count(make, words, key, want):
    assert make(*words)[key] == pytest.approx(want)


def test_optimizer_and_recomputation_count(make):
    adamw, sgd, full, none = (
        make(*words)["bytes_per_device"]
        for words in ([], ["--optimizer", "sgd"], ["--remat", "full"], ["--remat", "none"])
    )
    assert adamw["optimizer"] == 2 * adamw["parameters"]
    assert sgd["optimizer"] == 0
    assert full["activations"] < adamw["activations"] < none["activations"]


def test_gathering_by_layer_counts(make):
    """Over 4 replicas a quarter of the blocks' gradients, and one of two chunks of their weights."""
    words = ["--pipeline_parallel", "2", "--virtual_pipeline_parallel", "2", "--data_parallel", "4"]
    step, layer = (
        make(*words, "--zero_stage", "3", "--zero_gather", gather)["bytes_per_device"] for gather in ("step", "layer")
    )
    matrices = 4 * 12 * 128**2  # of two chunks of two layers; norms and biases are too small to be split
    assert step["gradients"] - layer["gradients"] == 4 * matrices * 3 // 4
    assert step["compute_weights"] - layer["compute_weights"] == pytest.approx(2 * matrices // 2, rel=0.02)
    assert step["parameters"] == layer["parameters"]


def test_logits_are_of_a_chunk_where_there_are_many(make):
    """2 and 16 rows of 1024 tokens: of them 8192 at a time, float32, and their gradients, then also the table's."""
    words = ["--model", "gpt2", "--sequence_length", "1024", "--batch_size"]
    few, many = (make(*words, rows)["bytes_per_device"]["logits"] for rows in ("2", "16"))
    assert (few, many) == (8 * 2048 * 50257, 8 * 8192 * 50257 + 4 * 768 * 50257)


def test_activations_do_not_grow_with_microbatches(make):
    few, many = (make("--total_batch_size", str(128 * m))["bytes_per_device"] for m in (8, 64))
    assert few == many


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_device_is_needed_or_touched(dtype):
    """No backend can even start here; 64 devices are planned for."""
    words = ["plan", "--json", "--model", "gpt2-xl", "--pipeline_parallel", "16", "--data_parallel", "4", "--dtype"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "run.py"), *words, dtype],
        env=os.environ | {"JAX_PLATFORMS": "nonexistent"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr[-2000:]) == (0, "")
    found = json.loads(done.stdout)
    assert found["layers_per_stage"] == [3] * 16
    assert found["parameters"] == COUNTS["gpt2-xl"]
    assert found["data_parallel"] == 4


def test_nothing_is_allocated(make):
    before = {id(a) for a in jax.live_arrays()}
    make("--model", "gpt2")
    assert sum(a.nbytes for a in jax.live_arrays() if id(a) not in before) < 10_000


def test_text(capsys):
    assert run.main(["plan", "--model", "gpt2"]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out  # no colours where there is no terminal
    for line in ("124,439,808", "3, 3, 3, 3", "27.3% of the step", "7, 5, 3, 1 (by rank)", "bfloat16"):
        assert line in out


SMALL = models.GPT2Config(vocab_size=256, positions=32, layers=5, dim=64, heads=4)
CASES = {
    "dots": {},
    "replicas": {"data_parallel": 2},
    "full": {"remat": "full", "schedule": "gpipe"},
    "chunks": {"virtual_pipeline_parallel": 2, "pipeline_parallel": 2, "remat": "none"},
    "alone": {"pipeline_parallel": 1, "optimizer": "sgd"},
    "wide": {"dtype": "float32", "dropout": 0.1},
    "odd": {"pipeline_parallel": 3, "fp32_residual": True, "pipeline_dtype": "bfloat16"},
}


def shard_bytes(tree) -> int:
    """Bytes of the largest share that a device has."""
    held: dict = {}
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            held[shard.device] = held.get(shard.device, 0) + shard.data.nbytes
    return max(held.values())


@pytest.mark.parametrize("case", CASES)
def test_bytes_are_those_of_the_real_arrays(case):
    config = Config(**({"pipeline_parallel": 4, "batch_size": 2} | CASES[case]))
    model = replace(SMALL, dropout=config.dropout)
    size = sizes(config, model.layers, model.positions)
    abstract = train.make_run(config, size, mesh.abstract_mesh(list(size.mesh.values())), model.layers)
    found = plan.make_plan(abstract, run.builder(model))
    per_device = found["bytes_per_device"]
    real = train.make_run(config, size, mesh.make_mesh(**size.mesh), model.layers)
    state = train.initial_state(real, run.builder(model))

    assert found["layers_per_stage"] == real.layout.layers_per_stage()
    built = jax.eval_shape(lambda: run.builder(model)(jax.random.key(0)))
    assert found["parameters"] == sum(a.size for a in jax.tree.leaves(built))
    assert per_device["parameters"] == shard_bytes(state.params)
    moments = [a for a in jax.tree.leaves(state.opt_state) if jnp.issubdtype(a.dtype, jnp.floating)]
    assert per_device["optimizer"] == (shard_bytes(moments) if moments else 0)
    # Gradients accumulate over the whole of embedding and head on every rank, and over its own blocks.
    outer = sum(a.size for a in jax.tree.leaves(state.params.outer))
    blocks = shard_bytes(state.params.blocks) // 4
    assert per_device["gradients"] == 4 * (blocks + outer)
    assert per_device["compute_weights"] == jnp.dtype(config.dtype).itemsize * (blocks + outer)
    # Activations: the ring, and the buffers in front of it.
    pipeline, schedule = real.pipeline, real.pipeline.schedule
    _, stream = executor.workspace_spec(pipeline, state.params, real.batch_spec(), real.key_spec())
    elements = np.prod(stream.shape)
    assert found["wire_bytes_per_hop"] == elements * jnp.dtype(found["wire_dtype"]).itemsize
    buffers = schedule.forward_inbox * found["wire_bytes_per_hop"]
    buffers += (schedule.backward_inbox + schedule.output_slots) * elements * stream.dtype.itemsize
    # On one stage nothing waits in a ring.
    assert per_device["activations"] - buffers == (shard_bytes(state.workspace) if schedule.waits else 0)
    assert (state.workspace is None) == (not schedule.waits)


def test_what_is_measured_is_told_and_balances_the_layers(make, capsys):
    """Times on emulated devices say little; what is told of them fits together."""
    words = ["--model", "gpt2-tiny", "--sequence_length", "32", "--batch_size", "1", "--measure"]
    found = make(*words)["measured"]
    ms, best = found["costs_ms"], found["balanced"]
    assert min(ms["layer"].values()) > 0
    assert sum(best["layer_split"]) == 8
    assert best["step_ms"] <= found["step_ms"]
    assert best["bytes_per_device"] > 0
    split = [str(n) for n in best["layer_split"]]
    assert make("--layer_split", *split, *words[2:-1])["bytes_per_device"]["total"] == best["bytes_per_device"]
    assert run.main(["plan", *words]) == 0
    lines = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines() if "  " in line)
    assert "--layer_split " in lines["balanced"]
    assert lines["a layer"].strip().startswith("F ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--tensor_parallel", "2"],
            "tensor_parallel=2: slots are measured with one device a stage: use --tensor_parallel 1",
        ),
        (["--lora_rank", "4"], "lora_rank=4: slots are measured of whole models: use --lora_rank 0"),
    ],
)
def test_what_cannot_be_measured_is_refused(capsys, words, message):
    assert run.main(["plan", "--measure", *words]) == 2
    assert capsys.readouterr().err == f"error: {message}\n"
