"""Where the program runs: the device mesh, and emulated devices for machines without enough of them.

Axes: `data` (replicas of the pipeline) and `pipe` (stages) are manual in the program; others are left to the compiler.
"""

import os
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

DATA, PIPE = "data", "pipe"
# Emulated devices are threads: with fewer cores than devices, one may wait long for the others at a collective, and
# XLA's default limits (20 s warning, 40 s abort) end the process.
_EMULATION = {
    "--xla_force_host_platform_device_count": "{count}",
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds": "600",
    "--xla_cpu_collective_call_terminate_timeout_seconds": "1200",
}


def set_host_devices(count: int) -> None:
    """Make the CPU look like `count` devices where JAX runs on it: sets XLA_FLAGS, keeping limits that are set already.

    Must run before the first JAX operation: later it is ignored by JAX, and `make_mesh` then says how many there are.
    """
    flags = os.environ.get("XLA_FLAGS", "").split()
    for name, value in _EMULATION.items():
        if name.endswith("device_count") or not any(flag.startswith(name) for flag in flags):
            flags = [flag for flag in flags if not flag.startswith(name)]
            flags.append(f"{name}={value.format(count=count)}")
    os.environ["XLA_FLAGS"] = " ".join(flags)


def emulate_devices(count: int) -> None:
    """Run on the CPU as `count` devices, whatever else there is; as `set_host_devices`, before JAX starts."""
    set_host_devices(count)
    os.environ["JAX_PLATFORMS"] = "cpu"
    jax.config.update("jax_platforms", "cpu")


def make_mesh(pipe: int = 1, data: int = 1, devices: Sequence[Any] | None = None) -> jax.sharding.Mesh:
    """A mesh of data x pipe devices, stages next to each other.

    Args: pipe, stages S; data, replicas; devices, default all of JAX's.
    Returns: a mesh with axes (data, pipe).
    Raises ValueError where there are too few devices: how many there are, are needed, and how to emulate them.
    """
    devices = list(jax.devices() if devices is None else devices)
    need = pipe * data
    if len(devices) < need:
        raise ValueError(too_few_devices(len(devices), devices[0].platform, pipe, data))
    grid = np.asarray(devices[:need], dtype=object).reshape(data, pipe)
    return jax.sharding.Mesh(grid, (DATA, PIPE), axis_types=(jax.sharding.AxisType.Auto,) * 2)


def too_few_devices(have: int, platform: str, pipe: int, data: int) -> str:
    """The message for a layout that needs more devices than there are."""
    return (
        f"pipeline_parallel={pipe} x data_parallel={data} needs {pipe * data} devices, there are {have} ({platform}):"
        f" ask for fewer, or emulate them on the CPU with --emulate_devices {pipe * data}"
    )
