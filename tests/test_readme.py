"""The README's example runs as it stands, and its gradients are the unpipelined model's."""

import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import reference

import jaxpp

ROOT = Path(__file__).parent.parent


def example() -> str:
    text = (ROOT / "README.md").read_text()
    found = re.search(r"<!-- example -->\n```python\n(.*?)```", text, re.DOTALL)
    assert found
    return found.group(1)


def test_the_example_has_the_gradients_of_the_unpipelined_model() -> None:
    names: dict = {}
    code = example().replace("jaxpp.emulate_devices(4)", "pass")  # conftest has made eight
    exec(compile(code.replace('pipeline_dtype="bfloat16"', 'pipeline_dtype="float32"'), "README.md", "exec"), names)
    want = reference.value_and_grad(names["model"], names["batch"])
    assert abs(float(names["loss"]) - float(want.loss)) < 1e-5 * float(want.loss)
    got = jaxpp.unstack(names["grads"])
    pairs = zip(jax.tree.leaves((got.embed, got.blocks, got.head)), jax.tree.leaves(tuple(want.grads)), strict=True)
    for a, b in pairs:
        assert jnp.linalg.norm(a - b) <= 1e-5 * jnp.linalg.norm(b)


def test_the_example_runs_as_it_stands() -> None:
    code = example() + "\nprint(float(loss))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert 5.0 < float(done.stdout) < 40.0
