"""What the devices tell of a step: model FLOPs utilization and peak memory."""

from collections.abc import Sequence
from typing import Any

# Dense bfloat16 FLOP/s of makers' data sheets, by words of `device_kind`; the first that fits is taken. A slice of a
# GPU (MIG) has a part of its GPU's speed, and is not listed.
PEAK_FLOPS = (
    ("MIG", None),
    ("GB200", 2500e12),
    ("B200", 2250e12),
    ("GH200", 989.4e12),
    ("H200 NVL", 835.5e12),
    ("H200", 989.4e12),
    ("H100 NVL", 835.5e12),
    ("H100 PCIe", 756.5e12),
    ("H100", 989.4e12),
    ("H800", 989.4e12),
    ("A100", 312e12),
    ("A800", 312e12),
    ("L40S", 362e12),
    ("A40", 149.7e12),
    ("A30", 165e12),
    ("A10G", 70e12),
    ("A10", 125e12),
    ("L4", 121e12),
    ("RTX 4090", 165.2e12),
    ("RTX 3090", 71e12),
    ("TPU v6 lite", 918e12),
    ("TPU v5 lite", 197e12),
    ("TPU v5p", 459e12),
    ("TPU v5", 459e12),
    ("TPU v4", 275e12),
)


def peak_flops(kind: str) -> float | None:
    """Dense bfloat16 FLOP/s of a device of this `device_kind`, or None for one that is not known."""
    words = f" {kind} "
    return next((peak for part, peak in PEAK_FLOPS if f" {part} " in words.replace("-", " ")), None)


def figures(devices: Sequence[Any], flops_per_second: float) -> dict[str, float]:
    """What the devices of a run tell, each where they tell it.

    Args: devices, all of the run; flops_per_second, that the model needed (0: not known).
    Returns: mfu, the share of the devices' dense bfloat16 peak, whatever the dtype in use; peak_bytes_in_use, the
    largest of any of this process's devices since it began.
    """
    found: dict[str, float] = {}
    peak = peak_flops(devices[0].device_kind)
    if peak and flops_per_second:
        found["mfu"] = flops_per_second / (peak * len(devices))
    mine = [d for d in devices if d.process_index == devices[0].client.process_index()]
    used = [stats["peak_bytes_in_use"] for d in mine if "peak_bytes_in_use" in (stats := d.memory_stats() or {})]
    return found | ({"peak_bytes_in_use": max(used)} if used else {})
