"""Rotary position embedding and the scalings that people use.

Sources: Su et al. 2021 (arXiv:2104.09864); linear interpolation, Chen et al. 2023 (arXiv:2306.15595); YaRN, Peng et al.
2023 (arXiv:2309.00071); Llama 3.1's, by wavelength. Dim i of a head is paired with dim i + H/2.

Legend: B microbatch size, T sequence, N heads, H head dim.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class Rope:
    """Which rotary embedding. kind: one of `KINDS`; the fields behind it are read by that kind alone.

    theta: base of the frequencies. factor: by how much the context was stretched. low, high: of llama3, wavelengths
    above original / low are stretched, below original / high are not. fast, slow: of yarn, the rotations within the
    original context between which it ramps; truncate: round the ramp's ends outwards. original: positions before the
    stretching. scale: what yarn multiplies cosine and sine with, by default 0.1 log(factor) + 1.
    """

    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    low: float = 1.0
    high: float = 4.0
    fast: float = 32.0
    slow: float = 1.0
    truncate: bool = True
    original: int = 8192
    scale: float | None = None


def _default(rope: Rope, head_dim: int) -> np.ndarray:
    return rope.theta ** -(np.arange(0, head_dim, 2) / head_dim)


def _linear(rope: Rope, head_dim: int) -> np.ndarray:
    return _default(rope, head_dim) / rope.factor


def _llama3(rope: Rope, head_dim: int) -> np.ndarray:
    plain = _default(rope, head_dim)
    turns = rope.original * plain / (2 * math.pi)  # within the original context
    share = np.clip((turns - rope.low) / (rope.high - rope.low), 0, 1)
    return plain * share + plain / rope.factor * (1 - share)


def _yarn(rope: Rope, head_dim: int) -> np.ndarray:
    plain = _default(rope, head_dim)

    def dim_of(turns: float) -> float:
        return head_dim * math.log(rope.original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    first, last = dim_of(rope.fast), dim_of(rope.slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    stretched = np.clip((np.arange(head_dim // 2) - first) / max(last - first, 1e-3), 0, 1)
    return plain * (1 - stretched) + plain / rope.factor * stretched


KINDS = {"default": _default, "linear": _linear, "llama3": _llama3, "yarn": _yarn}


def frequencies(rope: Rope, head_dim: int) -> tuple[np.ndarray, float]:
    """Radians a position for each pair of dims, float32 [H/2], and the factor of cosine and sine."""
    scale = 1.0
    if rope.kind == "yarn":
        scale = rope.scale if rope.scale is not None else (0.1 * math.log(rope.factor) + 1 if rope.factor > 1 else 1.0)
    return KINDS[rope.kind](rope, head_dim).astype(np.float32), scale


def rotate(x_BTNH: jax.Array, positions: jax.Array, rope: Rope) -> jax.Array:
    """Rotate queries or keys by their positions, int [T] or [B, T]; in float32, returned in x's dtype."""
    turn, scale = frequencies(rope, x_BTNH.shape[-1])
    angle_BTH = positions[..., None].astype(jnp.float32) * turn
    cos, sin = (f(angle_BTH)[..., None, :] * scale for f in (jnp.cos, jnp.sin))
    first, second = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1).astype(x_BTNH.dtype)
