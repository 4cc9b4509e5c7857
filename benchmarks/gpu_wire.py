"""What crosses the wire in a GPU's compiled program, checked on one GPU: stages 2 to 4 are emulated.

    XLA_FLAGS=--xla_gpu_shard_autotuning=false python benchmarks/gpu_wire.py

Compiles the train step of a small GPT-2 for 4 stages with mocked peers and lists the dtype and shape of every
collective-permute in the optimised text. Exits 1 where a floating one is not in the wire's dtype, or where the count is
not one forward and one backward wire (twice that with chunks, whose wrap is a permute of its own).
"""

import dataclasses
import re
import sys
from collections import Counter

import jax

import models
from jaxpp import config, executor, mesh, partition, train

STAGES = 4
CASES = (  # dtype, pipeline_dtype, schedule, chunks
    ("bfloat16", None, "1f1b", 1),
    ("float32", None, "1f1b", 1),
    ("float32", "bfloat16", "1f1b", 1),
    ("bfloat16", None, "interleaved", 2),
)
NAMES = {"bfloat16": "bf16", "float32": "f32"}


def compiled_text(dtype: str, pipeline_dtype: str | None, schedule: str, chunks: int) -> tuple[train.Run, str]:
    """The optimised text of one step's program for rank 0 of 4."""
    model = dataclasses.replace(models.config_of("gpt2-tiny"), dim=256, heads=4)
    options = config.Config(
        dtype=dtype,
        pipeline_dtype=pipeline_dtype,
        pipeline_parallel=STAGES,
        data_parallel=1,
        schedule=schedule,
        virtual_pipeline_parallel=chunks,
    )
    sizes = config.sizes(options, model.layers, model.positions)
    run = train.make_run(options, sizes, mesh.make_mesh(STAGES), model.layers)
    spec = train.placed_spec(run, lambda key: models.build(key, model))
    where = partition.shardings(spec, run.mesh)
    spec = jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), spec, where)
    step = lambda params, batch: executor.train_step(run.pipeline, params, batch)[:3]
    return run, jax.jit(step).lower(spec, run.batch_spec()).compile().as_text() or ""


def permutes(text: str) -> list[str]:
    """dtype[shape] of every collective-permute in an optimised text, started or whole."""
    found = []
    for line in text.splitlines():
        call = re.search(r"= (.*?) collective-permute(-start)?\(", line)
        if call:
            found.append(re.findall(r"\w+\[[\d,]*\]", call.group(1))[0])
    return found


def main() -> int:
    """Check every case and print a line each."""
    jax.config.update("mock_num_gpu_processes", STAGES)
    wrong = 0
    for case in CASES:
        run, text = compiled_text(*case)
        found = Counter(permutes(text))
        name = NAMES[run.pipeline.precision.wire]
        good = all(kind.startswith(name + "[") for kind in found) and found.total() == 2 * min(case[3], 2)
        wrong += not good
        print(f"{'ok ' if good else 'BAD'} dtype {case[0]}, wire {name}, {case[2]} x {case[3]}: {dict(found)}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
