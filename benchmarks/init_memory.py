"""Peak host memory of starting from a Hugging Face folder of 1 GiB: python benchmarks/init_memory.py

On the CPU the devices' memory is the host's, so the parameters themselves (1 GiB, float32) are part of the peak.
"""

import dataclasses
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import numpy as np

import models
import run
from jaxpp import mesh, partition
from models import hf

CONFIG = dataclasses.replace(
    models.config_of("llama3.2-1b"), vocab_size=32_000, layers=17, dim=1024, hidden=3584, heads=16, tied=True
)
GIB = 2**30


def peak() -> float:
    """The process's largest resident memory so far, GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def make(folder: str) -> None:
    """Write the folder, in float32."""
    rng = np.random.default_rng(0)
    spec = run.spec_of(CONFIG)
    shapes = {
        part: {k: a.shape[lead:] for k, a in hf.mapping.paths(module).items()}
        for part, module, lead in (("embed", spec.embed, 0), ("block", spec.blocks[0], 2), ("head", spec.head, 0))
    }
    weight = lambda part, path, layer: rng.standard_normal(shapes[part][path], np.float32) * 0.02
    hf.SHARD_BYTES = 200 * 10**6
    hf.export(CONFIG, spec, weight, folder, "float32")


def load(folder: str) -> None:
    """Read it onto 4 stages and print the peak above what was there before."""
    grid = mesh.make_mesh(pipe=4)
    source = hf.open_folder(folder)
    layout = partition.split_layers(source.config.layers, 4)
    spec = jax.eval_shape(lambda: partition.stack(models.build(jax.random.key(0), source.config), layout))
    before = peak()
    params = hf.assemble(source, spec, partition.shardings(spec, grid))
    size = sum(a.nbytes for a in jax.tree.leaves(params)) / GIB
    print(f"parameters {size:.2f} GiB; peak {peak() - before:.2f} GiB above the {before:.2f} GiB before")


def main() -> None:
    """Each in a process of its own."""
    if len(sys.argv) == 3:
        mesh.emulate_devices(4)
        {"make": make, "load": load}[sys.argv[1]](sys.argv[2])
        return
    with tempfile.TemporaryDirectory() as folder:
        for step in ("make", "load"):
            subprocess.run([sys.executable, __file__, step, folder], check=True)


if __name__ == "__main__":
    main()
