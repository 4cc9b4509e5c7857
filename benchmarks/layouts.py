"""What layouts cost, from programs compiled for 8 GPUs on one, whose peers are mocked:

    XLA_FLAGS="--xla_gpu_shard_autotuning=false --xla_gpu_autotune_level=0" python benchmarks/layouts.py [JSON]

Collectives of a block under tensor and sequence parallelism and of a step under each stage of ZeRO, counted in the
compiled text of a small LLaMA, and the bytes of a wire; then bytes per device of LLaMA 3 8B by the compiler's memory
analysis, beside what `plan` predicts. Nothing is run, and no parameter is allocated.
"""

import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import jax
from compiled import collectives

import models
import run as command
from jaxpp import config, mesh, plan, train
from models import llama3

GIB = 2**30
DEVICES = 8
LAYOUTS = {
    "PP8": {"pipeline_parallel": 8},
    "TP8": {"tensor_parallel": 8, "pipeline_parallel": 1},
    "PP4 x TP2": {"pipeline_parallel": 4, "tensor_parallel": 2},
    "PP2 x TP2 x DP2, ZeRO 1": {"pipeline_parallel": 2, "tensor_parallel": 2, "data_parallel": 2, "zero_stage": 1},
}


def described(model: models.ModelConfig, **options: Any) -> train.Run:
    """A run of a model on the mocked mesh."""
    chosen = dataclasses.replace(config.Config(data_parallel=1, batch_size=1), **options)
    sizes = config.sizes(chosen, model.layers, model.positions)
    grid = mesh.make_mesh(sizes.pipe, sizes.data, sizes.expert, sizes.context, sizes.tensor)
    return train.make_run(chosen, sizes, grid, model.layers, loss=models.training_loss(model))


def compiled(run: train.Run, model: models.ModelConfig) -> jax.stages.Compiled:
    """The whole training step, compiled for shapes alone."""
    spec, where = train.state_spec(run, command.builder(model))
    workspace = train.executor.workspace_struct(run.pipeline, spec[0], run.batch_spec(), run.key_spec())
    place = lambda a, at: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=at)
    params, moments, step = jax.tree.map(place, spec, where)
    state = train.State(params, moments, step, workspace)
    batch = jax.tree.map(lambda a: place(a, train.batch_sharding(run)), run.batch_spec())
    return train.make_step(run).lower(state, batch).compile()


def counts() -> dict:
    """Collectives of a block, as those of two layers less those of one, and of a step."""
    found, hidden = {}, 1024
    for name, options in {
        "TP 2": {"tensor_parallel": 2},
        "TP 2, SP": {"tensor_parallel": 2, "sequence_parallel": True},
        "CP 2": {"context_parallel": 2},
    }.items():
        made = []
        for layers in (2, 4):
            model = dataclasses.replace(llama3.PRESETS["llama3-tiny"], layers=layers, dim=512, hidden=hidden)
            run = described(model, pipeline_parallel=2, sequence_length=128, remat="full", **options)
            made.append(collectives(compiled(run, model).as_text() or "", 4096))
        found[name] = {kind: made[1][kind] - made[0][kind] for kind in made[1]}
        found[name]["permutes of a step"] = made[0]["collective-permute"]
    for stage in range(4):
        model = dataclasses.replace(llama3.PRESETS["llama3-tiny"], layers=2, dim=512, hidden=hidden)
        run = described(model, pipeline_parallel=1, data_parallel=2, sequence_length=128, zero_stage=stage)
        found[f"DP 2, ZeRO {stage}, a step"] = dict(collectives(compiled(run, model).as_text() or "", 4096))
    return found


def memory() -> dict:
    """Bytes per device of LLaMA 3 8B."""
    model, found = dataclasses.replace(models.config_of("llama3-8b"), cudnn=True), {}
    for name, options in LAYOUTS.items():
        start = time.monotonic()
        run = described(model, sequence_length=4096, **options)
        predicted = plan.make_plan(run, command.builder(model))["bytes_per_device"]
        analysis: Any = compiled(run, model).memory_analysis()
        held = analysis.argument_size_in_bytes + analysis.output_size_in_bytes - analysis.alias_size_in_bytes
        total = held + analysis.temp_size_in_bytes
        found[name] = {"plan": predicted, "compiler": total, "temporary": analysis.temp_size_in_bytes}
        ratio = predicted["total"] / total
        print(
            f"{name}: plan {predicted['total'] / GIB:.2f} GiB, compiler {total / GIB:.2f} ({ratio:.3f});"
            f" temporary {analysis.temp_size_in_bytes / GIB:.2f}; {time.monotonic() - start:.0f} s",
            flush=True,
        )
        print(f"    { ({k: round(v / GIB, 2) for k, v in predicted.items()}) }", flush=True)
    return found


def main() -> None:
    """Print both tables, and write them where asked."""
    jax.config.update("mock_num_gpu_processes", DEVICES)
    found = {"collectives": counts()}
    for name, kinds in found["collectives"].items():
        print(f"{name}: {kinds}", flush=True)
    found["memory"] = memory()
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
