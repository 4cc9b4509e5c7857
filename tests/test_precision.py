"""The precision that options ask for."""

import dataclasses
import warnings

import pytest

from jaxpp.precision import DTYPES, Precision, parse_dtype, resolve


def test_the_default_is_float32_throughout() -> None:
    precision = resolve()
    assert precision == Precision()
    fields = dataclasses.asdict(precision)
    assert fields.pop("residual") == "compute"
    assert set(fields.values()) == {"float32"}


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtype_sets_compute_and_both_wires_and_nothing_else(dtype: str) -> None:
    assert resolve(dtype) == Precision(compute=dtype, wire=dtype, grad_wire=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pipeline", DTYPES)
@pytest.mark.parametrize("grad", [None, *DTYPES])
@pytest.mark.parametrize("residual", [False, True])
def test_what_is_set_by_hand_stands(dtype: str, pipeline: str, grad: str | None, residual: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = resolve(dtype, pipeline, grad, fp32_residual=residual)
    assert (got.compute, got.wire, got.grad_wire) == (dtype, pipeline, grad or pipeline)
    assert got.residual == ("float32" if residual else "compute")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("grad", [None, "bfloat16"])
def test_a_float32_residual_raises_the_wire_with_a_warning(dtype: str, grad: str | None) -> None:
    with pytest.warns(UserWarning, match=f"raises the wire from {dtype} to float32; set pipeline_dtype") as caught:
        got = resolve(dtype, grad_pipeline_dtype=grad, fp32_residual=True)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert got == Precision(compute=dtype, wire="float32", grad_wire=grad or "float32", residual="float32")


def test_a_float32_residual_of_a_float32_model_warns_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert resolve(fp32_residual=True) == Precision(residual="float32")


@pytest.mark.parametrize("name", ["bf16", "float64", "Float32", "bfloat16 ", "int32"])
@pytest.mark.parametrize("option", ["dtype", "pipeline_dtype", "grad_pipeline_dtype"])
def test_an_unknown_name_is_refused_with_the_option_and_all_that_are_known(option: str, name: str) -> None:
    with pytest.raises(ValueError, match=f"^{option}={name!r} ") as caught:
        resolve(**{option: name})
    assert [dtype for dtype in DTYPES if dtype not in str(caught.value)] == []
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_known_name_is_returned_as_it_is(dtype: str) -> None:
    assert parse_dtype("any", dtype) == dtype


def test_a_precision_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        resolve().wire = "bfloat16"  # pyright: ignore[reportAttributeAccessIssue]
