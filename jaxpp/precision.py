"""Which dtype is used where: parameters, compute, wire, residual stream, accumulation, reduction.

All floating casts of the program follow one `Precision`; the dtype names that users may write are parsed here alone.
"""

import warnings
from dataclasses import dataclass

DTYPES = ("float32", "bfloat16", "float16")


def parse_dtype(option: str, value: str) -> str:
    """Check a dtype's name: one of float32, bfloat16, float16; ValueError names the option and the allowed values."""
    if value not in DTYPES:
        raise ValueError(f"{option}={value!r} is not a dtype we know: use one of {', '.join(DTYPES)}")
    return value


@dataclass(frozen=True)
class Precision:
    """The dtype of every kind of floating number in a step, as names.

    param: master weights and optimizer state. compute: weights and activations inside a stage.
    wire: what crosses between stages, forward. grad_wire: what crosses backward.
    residual: the residual stream, where "compute" means what the embedding returns.
    accumulate: gradients within a rank, over microbatches. reduce: gradients and losses over ranks.
    """

    param: str = "float32"
    compute: str = "float32"
    wire: str = "float32"
    grad_wire: str = "float32"
    residual: str = "compute"
    accumulate: str = "float32"
    reduce: str = "float32"


def resolve(
    dtype: str = "float32",
    pipeline_dtype: str | None = None,
    grad_pipeline_dtype: str | None = None,
    fp32_residual: bool = False,
) -> Precision:
    """The precision that a user's options ask for.

    Args: dtype, of compute and, unless pipeline_dtype says otherwise, of the wire; grad_pipeline_dtype, of the
    backward wire (default: the forward's); fp32_residual, keep the residual stream in float32, which raises the wire
    to float32 with a warning unless pipeline_dtype was given.
    Raises ValueError for an unknown name.
    """
    parse_dtype("dtype", dtype)
    wire = parse_dtype("pipeline_dtype", pipeline_dtype or dtype)
    if fp32_residual and pipeline_dtype is None and wire != "float32":
        warnings.warn(
            f"fp32_residual raises the wire from {wire} to float32; set pipeline_dtype to keep it narrow", stacklevel=2
        )
        wire = "float32"
    grad_wire = parse_dtype("grad_pipeline_dtype", grad_pipeline_dtype or wire)
    return Precision(compute=dtype, wire=wire, grad_wire=grad_wire, residual="float32" if fp32_residual else "compute")
