"""What pipelining costs on cores that are always busy: a pipeline of S=4 against S=1 on the same two cores.

    python benchmarks/pipeline_cost.py                                 # all three parts
    python benchmarks/pipeline_cost.py --peer PATH/torch_pipeline.py --peer-python PYTHON   # and a peer beside it

(a) step time of S=4 over S=1, median of pairs in one run, and CPU seconds, for each remat; (b) compiled temporary bytes
at M=32 over M=8; (c) compile time at M=64 over M=8. The model is Llama-like: 8 layers, dim 256, 4 heads, feed-forward
1024, vocabulary 512, sequence 256, microbatches of 2, float32, SGD: the shapes of the peer script.

Legend: B microbatch size, T sequence, D model, N heads, H head dim, F feed-forward, V vocabulary.
"""

import argparse
import statistics
import subprocess
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxpp
from jaxpp import executor
from jaxpp.executor import Pipeline
from models.attention import AttentionSpec, attend
from models.dense import normal, project

LAYERS, DIM, HEADS, VOCAB, SEQ, BATCH, FF = 8, 256, 4, 512, 256, 2, 1024
ATTENTION = AttentionSpec(DIM, HEADS, HEADS, DIM // HEADS)
STD = 0.02


class Embed(nnx.Module):
    def __init__(self, key: jax.Array) -> None:
        self.table = nnx.Param(normal(key, (VOCAB, DIM), STD))

    def __call__(self, microbatch: dict[str, jax.Array], key: jax.Array | None) -> jax.Array:
        return self.table[...][microbatch["tokens"]]


def rms(x_BTD: jax.Array, scale: jax.Array) -> jax.Array:
    return x_BTD * jax.lax.rsqrt(jnp.square(x_BTD).mean(-1, keepdims=True) + 1e-5) * scale


class Block(nnx.Module):
    def __init__(self, key: jax.Array) -> None:
        keys = jax.random.split(key, 7)
        head = DIM // HEADS
        self.norm1, self.norm2 = nnx.Param(jnp.ones(DIM)), nnx.Param(jnp.ones(DIM))
        self.wq, self.wk, self.wv = (nnx.Param(normal(k, (DIM, HEADS, head), STD)) for k in keys[:3])
        self.wo = nnx.Param(normal(keys[3], (HEADS, head, DIM), STD))
        self.gate, self.up = (nnx.Param(normal(k, (DIM, FF), STD)) for k in keys[4:6])
        self.down = nnx.Param(normal(keys[6], (FF, DIM), STD))

    def __call__(self, x_BTD: jax.Array, microbatch: dict[str, jax.Array], key: jax.Array | None) -> jax.Array:
        n_BTD = rms(x_BTD, self.norm1[...])
        q, k, v = (project(n_BTD, w[...]) for w in (self.wq, self.wk, self.wv))
        x_BTD = x_BTD + project(attend(ATTENTION, q, k, v), self.wo[...], summed=2)
        n_BTD = rms(x_BTD, self.norm2[...])
        return x_BTD + project(
            jax.nn.silu(project(n_BTD, self.gate[...])) * project(n_BTD, self.up[...]), self.down[...]
        )


class Head(nnx.Module):
    def __init__(self, key: jax.Array) -> None:
        self.w = nnx.Param(normal(key, (DIM, VOCAB), STD))

    def __call__(self, x_BTD: jax.Array, embed: Embed) -> jax.Array:
        return project(x_BTD, self.w[...])


class Case:
    """One compiled step: `run()` executes it, `temp_bytes` and `compile_seconds` say what it took."""

    def __init__(self, stages: int, microbatches: int, remat: str, schedule: str = "1f1b") -> None:
        keys = jax.random.split(jax.random.key(0), LAYERS + 2)
        model = jaxpp.Model(Embed(keys[0]), [Block(k) for k in keys[1:-1]], Head(keys[-1]))
        mesh = jaxpp.make_mesh(pipe=stages)
        pipeline = Pipeline(jaxpp.build(schedule, stages, microbatches), mesh, jaxpp.resolve(), remat)
        text = np.random.default_rng(0).integers(0, VOCAB, (microbatches, BATCH, SEQ + 1))
        batch = {"tokens": jnp.asarray(text[..., :-1]), "labels": jnp.asarray(text[..., 1:])}
        self.batch = jax.device_put(batch, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
        self.params = jaxpp.place(model, mesh)
        self.workspace = executor.new_workspace(pipeline, self.params, self.batch)

        def step(params, workspace, batch):
            result = executor.train_step(pipeline, params, batch, None, workspace)
            return jax.tree.map(lambda p, g: p - 0.01 * g, params, result.grads), result.workspace, result.loss

        start = time.perf_counter()
        lowered = jax.jit(step, donate_argnums=(0, 1)).lower(self.params, self.workspace, self.batch)
        self.compiled = lowered.compile()
        self.compile_seconds = time.perf_counter() - start
        analysis = self.compiled.memory_analysis()
        self.temp_bytes = analysis.temp_size_in_bytes if analysis else 0

    def run(self) -> tuple[float, float]:
        """Wall and CPU seconds of one step."""
        wall, cpu = time.perf_counter(), time.process_time()
        self.params, self.workspace, loss = self.compiled(self.params, self.workspace, self.batch)
        loss.block_until_ready()
        return time.perf_counter() - wall, time.process_time() - cpu


def step_time(pairs: int) -> None:
    """Part (a)."""
    for remat in ("dots", "full", "none"):
        one, four = Case(1, 8, remat), Case(4, 8, remat)
        for _ in range(2):
            one.run()
            four.run()
        runs = [(one.run(), four.run()) for _ in range(pairs)]
        ratio, a, b, cpu_a, cpu_b = (
            statistics.median(found)
            for found in zip(*((y[0] / x[0], x[0], y[0], x[1], y[1]) for x, y in runs), strict=True)
        )
        print(
            f"(a) remat {remat}: S=4 over S=1 {ratio:.3f} (S=1 {a * 1e3:.0f} ms, S=4 {b * 1e3:.0f} ms a step;"
            f" CPU {cpu_a:.2f} and {cpu_b:.2f} s)",
            flush=True,
        )


def sizes() -> None:
    """Parts (b) and (c)."""
    short, long, longer = (Case(4, m, "dots") for m in (8, 32, 64))
    print(f"(b) temporary bytes M=32 over M=8: {long.temp_bytes / short.temp_bytes:.4f} ({short.temp_bytes:,} at M=8)")
    times = [[Case(4, m, "dots").compile_seconds for m in (8, 64)] for _ in range(2)]
    times.append([short.compile_seconds, longer.compile_seconds])
    ratio = statistics.median(b / a for a, b in times)
    print(f"(c) compile time M=64 over M=8: {ratio:.2f} ({min(a for a, _ in times):.1f} s at M=8)", flush=True)


def beside(peer: str, python: str, pairs: int) -> None:
    """The peer's 1f1b over 4 stages and our S=4 step, in turn."""
    four = Case(4, 8, "dots")
    ours, theirs = [], []
    for _ in range(pairs):
        ours.append(statistics.median(four.run()[0] for _ in range(7)))
        out = subprocess.run([python, peer, "4", "8", "1f1b"], capture_output=True, text=True, check=True).stdout
        theirs.append(float(out.split(":")[1].split()[0]) / 1e3)
    ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
    print(f"peer: our S=4 step over its 1f1b {ratio:.3f} ({ours} and {theirs} s)", flush=True)


def main() -> None:
    """Run the parts and print a line each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--pairs", type=int, default=9, help="pairs of steps in part (a)")
    parser.add_argument("--peer", help="a script that prints the step time of a peer's pipeline")
    parser.add_argument("--peer-python", default="python", help="the interpreter that has the peer's packages")
    parser.add_argument("--parts", default="abc", help="which parts to run")
    options = parser.parse_args()
    jaxpp.emulate_devices(4)
    parts: dict[str, Callable[[], None]] = {"a": lambda: step_time(options.pairs), "b": sizes}
    for part, run in parts.items():
        if part in options.parts:
            run()
    if options.peer:
        beside(options.peer, options.peer_python, 3)


if __name__ == "__main__":
    main()
