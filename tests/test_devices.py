"""What devices tell: peaks by their names, utilization and memory."""

from types import SimpleNamespace
from typing import Any

import jax
import pytest

from jaxpp import devices


@pytest.mark.parametrize(
    ("kind", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4e12),
        ("NVIDIA H100 PCIe", 756.5e12),
        ("NVIDIA H200", 989.4e12),
        ("NVIDIA H200 NVL", 835.5e12),
        ("NVIDIA GH200 480GB", 989.4e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A10G", 70e12),
        ("NVIDIA A10", 125e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", 362e12),
        ("TPU v5 lite", 197e12),
        ("TPU v4", 275e12),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA H20", None),
        ("NVIDIA RTX A4000", None),
        ("Tesla V100-SXM2-16GB", None),
        ("cpu", None),
    ],
)
def test_peaks(kind: str, peak: float | None) -> None:
    assert devices.peak_flops(kind) == peak


def device(kind: str, process: int = 0, stats: Any = None) -> Any:
    client = SimpleNamespace(process_index=lambda: 0)
    return SimpleNamespace(device_kind=kind, process_index=process, client=client, memory_stats=lambda: stats)


def test_figures() -> None:
    """The share of all devices' peak; the most that any device of this process has used."""
    used = [{"peak_bytes_in_use": n} for n in (10, 30, 99)]
    found = [device("NVIDIA H100 PCIe", process, stats) for process, stats in zip((0, 0, 1), used, strict=True)]
    assert devices.figures(found, 3 * 756.5e12 / 4) == {"mfu": 0.25, "peak_bytes_in_use": 30}


@pytest.mark.parametrize(("kind", "flops"), [("NVIDIA H200", 0), ("something new", 1e12)])
@pytest.mark.parametrize("stats", [None, {}, {"bytes_in_use": 3}])
def test_what_is_not_known_is_left_out(kind: str, flops: float, stats: Any) -> None:
    assert devices.figures([device(kind, 0, stats)], flops) == {}


def test_the_cpu_tells_nothing() -> None:
    assert devices.figures(jax.devices(), 1e12) == {}
