"""Where the program runs: the device mesh, and emulated devices for machines without enough of them.

The axes, the slowest first, so that those that talk most join the closest devices:

    pipe      stages: one hop a microbatch
    data      replicas of the pipeline: one sum of gradients a step
    expert    ranks that share a layer's experts, with rows of their own: two exchanges a layer
    context   parts of a sequence: two exchanges a layer
    tensor    parts of a layer: two sums a layer each way

All but `tensor` are manual in the program; `tensor` is left to the compiler.
"""

import os
import signal
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

PIPE, DATA, EXPERT, CONTEXT, TENSOR = AXES = ("pipe", "data", "expert", "context", "tensor")
MANUAL = (PIPE, DATA, EXPERT, CONTEXT)
ROWS = (DATA, EXPERT)  # the rows of a microbatch are dealt over these
OPTIONS = tuple(f"{axis}_parallel" for axis in ("pipeline", *AXES[1:]))
REPLICAS = (DATA, EXPERT, CONTEXT)  # ranks that hold the same parameters, experts apart
# What tells how many processes a launcher has started: srun sets the first, mpirun the second.
_STARTED_BY = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")
JOIN_SECONDS, SILENT_SECONDS = 120, 30  # until the others are there; until one that says nothing counts as dead
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


def gpus_here() -> bool:
    """Whether the machine has NVIDIA GPUs, told without starting JAX."""
    return os.path.exists("/dev/nvidiactl")


def started(processes: int | None = None) -> int:
    """How many processes there are: as the option says, or the launcher."""
    return processes or max(int(os.environ.get(name, 1)) for name in _STARTED_BY)


def join_processes(address: str | None, processes: int | None, index: int | None) -> bool:
    """Become one of several processes of one program: by the options, or where SLURM or Open MPI started several.

    Must run before the first JAX operation. Returns whether there are several. Raises ValueError for options that
    contradict each other, and where the others are not there in time.
    """
    given = {"coordinator_address": address, "num_processes": processes, "process_id": index}
    missing = [name for name, value in given.items() if value is None]
    if missing and len(missing) < len(given):
        raise ValueError(f"{' and '.join(missing)} are missing: give all three of {', '.join(given)}, or none")
    if started(processes) == 1:
        return False
    if processes is not None and index is not None and index >= processes:
        raise ValueError(f"process_id={index} must be below num_processes={processes}, for example --process_id 0")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(
            address, processes, index, initialization_timeout=JOIN_SECONDS, heartbeat_timeout_seconds=SILENT_SECONDS
        )
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"the {started(processes)} processes did not meet at {address or 'their host'}: {reason}"
        ) from None
    return True


def on_sigterm() -> Callable[[int], bool]:
    """From now on SIGTERM is only noted; returns a function of the step: whether it has come, to any process."""
    if jax.process_count() > 1:  # they must stop after the same step, which JAX agrees on
        return multihost_utils.reached_preemption_sync_point
    came = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: came.set())
    return lambda step: came.is_set()


def make_mesh(
    pipe: int = 1,
    data: int = 1,
    expert: int = 1,
    context: int = 1,
    tensor: int = 1,
    devices: Sequence[Any] | None = None,
) -> jax.sharding.Mesh:
    """A mesh of pipe x data x expert x context x tensor devices, the last axis on neighbours.

    Args: sizes of the axes, see the module's head; devices, default all of JAX's, which go by host.
    Raises ValueError where there are too few devices: how many there are, are needed, and how to emulate them.
    """
    devices = list(jax.devices() if devices is None else devices)
    sizes = (pipe, data, expert, context, tensor)
    need = int(np.prod(sizes))
    if len(devices) < need:
        raise ValueError(too_few_devices(len(devices), devices[0].platform, sizes))
    grid = np.asarray(devices[:need], dtype=object).reshape(sizes)
    return jax.sharding.Mesh(grid, AXES, axis_types=(jax.sharding.AxisType.Auto,) * len(AXES))


def abstract_mesh(sizes: Sequence[int]) -> jax.sharding.AbstractMesh:
    """A mesh of shapes only, of any size; sizes in the order of `AXES`."""
    return jax.sharding.AbstractMesh(tuple(sizes), AXES, axis_types=(jax.sharding.AxisType.Auto,) * len(AXES))


def too_few_devices(have: int, platform: str, sizes: Sequence[int]) -> str:
    """The message for a layout (sizes in the order of `AXES`) that needs more devices than there are."""
    need = int(np.prod(sizes))
    split = [f"{option}={n}" for option, n in zip(OPTIONS, sizes, strict=True) if n > 1 or option == OPTIONS[0]]
    return (
        f"{' x '.join(split)} needs {need} devices, there are {have} ({platform}): ask for fewer, or emulate them on"
        f" the CPU with --emulate_devices {need}"
    )


def count(mesh: Any, axes: Sequence[str]) -> int:
    """How many ranks there are along some axes together."""
    return int(np.prod([mesh.shape[axis] for axis in axes], initial=1))
