"""What a checkpoint costs the run that writes it: python benchmarks/save_cost.py [MODEL [STEPS]]

Steps are timed with no checkpoint, then the call of `Saver.save` by itself (the copy to the host), then the steps while
the files are written in the background. What a checkpoint loses is the call and what those steps take longer.
"""

import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import numpy as np

import models
import run as command
from jaxpp import checkpoint, config, mesh, train


def main() -> None:
    """Print bytes, the three times and the loss."""
    name, steps = sys.argv[1] if len(sys.argv) > 1 else "gpt2-tiny", int(sys.argv[2]) if len(sys.argv) > 2 else 20
    model = models.config_of(name)
    chosen = config.Config(model=name, pipeline_parallel=1, data_parallel=1, batch_size=1, total_batch_size=4096)
    sizes = config.sizes(chosen, model.layers, model.positions)
    run = train.make_run(chosen, sizes, mesh.make_mesh(), model.layers, model=models.to_json(model))
    state, step = train.initial_state(run, command.builder(model)), train.make_step(run)
    rng = np.random.default_rng(0)
    made = {key: rng.integers(0, model.vocab_size, a.shape, np.int32) for key, a in run.batch_spec().items()}
    batch = train.put_batch(run, made)

    def timed() -> float:
        nonlocal state
        start = time.perf_counter()
        state, metrics = step(state, batch)
        jax.block_until_ready(metrics)
        return time.perf_counter() - start

    timed()
    alone = [timed() for _ in range(steps)]
    kept = (state.params, state.opt_state, state.step)
    size = sum(a.nbytes for a in jax.tree.leaves(kept))
    print(f"{name}: {size / 2**20:.0f} MiB of state; a step {statistics.median(alone) * 1e3:.0f} ms", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        saver = checkpoint.Saver(folder, keep=1)
        for i in range(3):
            start = time.perf_counter()
            saver.save(i + 1, (state.params, state.opt_state, state.step), train.describe_run(run))
            blocked, during = time.perf_counter() - start, []
            while saver.writing:
                during.append(timed())
            wrote = time.perf_counter() - start
            longer = sum(during) - len(during) * statistics.median(alone)
            print(
                f"save {i + 1}: {blocked * 1e3:.0f} ms in the call, written after {wrote:.2f} s; {len(during)} steps"
                f" meanwhile, together {longer * 1e3:+.0f} ms; lost {(blocked + longer) * 1e3:.0f} ms,"
                f" {(blocked + longer) / statistics.median(alone):.2f} steps",
                flush=True,
            )


if __name__ == "__main__":
    main()
