"""Eight emulated devices, set before JAX starts, which it does here: run.py would ask for another number."""

import gc
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import jax
import pytest

import run
from jaxpp.mesh import emulate_devices

emulate_devices(8)
# Tests compile many small programs once: what the optimiser gains there is less than what it costs.
os.environ["XLA_FLAGS"] += " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
# Many run the same program, in other workers and processes of their own too. A size makes JAX lock the folder's files.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _cache = tempfile.TemporaryDirectory(prefix="jaxpp-compiled-")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _cache.name
_keep = {"compilation_cache_max_size": 2**33, "persistent_cache_min_compile_time_secs": 0.3}
for name, value in ({"compilation_cache_dir": os.environ["JAX_COMPILATION_CACHE_DIR"]} | _keep).items():
    os.environ[f"JAX_{name.upper()}"] = str(value)
    jax.config.update(f"jax_{name}", value)
assert len(jax.devices()) == 8
# What is imported stays, and what is traced is much: looking through it all again and again takes minutes.
gc.freeze()
gc.set_threshold(100_000, 20, 20)


@pytest.fixture(autouse=True)
def short_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample's tokens take longer than most tests' steps."""
    monkeypatch.setattr(run, "SAMPLE_TOKENS", 8)


@pytest.fixture(autouse=True, scope="module")
def little_is_kept() -> Iterator[None]:
    """What was traced for one file's tests is of no use to another's, and makes all slower by its size."""
    yield
    jax.clear_caches()
