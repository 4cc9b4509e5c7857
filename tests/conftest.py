"""Eight emulated devices, set before JAX starts, which it does here: run.py would ask for another number."""

import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import jax
import pytest

import run
from jaxpp.mesh import emulate_devices

emulate_devices(8)
# Tests compile many small programs once: what the optimiser gains there is less than what it costs.
os.environ["XLA_FLAGS"] += " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
# Many run the same program, in processes of their own too; workers keep theirs apart, for files are not locked.
_cache = tempfile.TemporaryDirectory(prefix="jaxpp-compiled-")
os.environ |= {"JAX_COMPILATION_CACHE_DIR": _cache.name, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.3"}
jax.config.update("jax_compilation_cache_dir", _cache.name)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
assert len(jax.devices()) == 8


@pytest.fixture(autouse=True)
def short_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample's tokens take longer than most tests' steps."""
    monkeypatch.setattr(run, "SAMPLE_TOKENS", 8)
