"""Eight emulated devices, set before JAX starts, which it does here: run.py would ask for another number."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import jax

from jaxpp.mesh import emulate_devices

emulate_devices(8)
# Tests compile many small programs once: what the optimiser gains there is less than what it costs.
os.environ["XLA_FLAGS"] += " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
assert len(jax.devices()) == 8
