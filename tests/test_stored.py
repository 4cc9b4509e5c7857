"""Safetensors files: every part of a header is checked before a tensor is read."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from models import stored

GOOD = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}


def write(path: Path, header: Any, size: int = 24) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(size))


def test_tensors_are_the_librarys(tmp_path: Path) -> None:
    want = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.float16([1.5]), "c": np.asarray(2.0)}
    save_file(want, tmp_path / "model.safetensors")
    found = stored.tensors_of(tmp_path)
    assert found.keys() == want.keys()
    for name, array in want.items():
        np.testing.assert_array_equal(found[name].read(), array)


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ([1], "model.safetensors is no safetensors file"),
        (b"{", "model.safetensors is no safetensors file"),
        (b"\xff", "model.safetensors is no safetensors file"),
        (b"[" * 200_000, "model.safetensors is no safetensors file"),
        ({"a": 3}, "model.safetensors: dtype of tensor a is none, not a string"),
        ({"a": GOOD | {"dtype": ["F32"]}}, "dtype of tensor a is ['F32'], not a string"),
        ({"a": {"dtype": "F32", "shape": [2, 3]}}, "data_offsets of tensor a is none, not two whole numbers"),
        ({"a": GOOD | {"data_offsets": 24}}, "data_offsets of tensor a is 24"),
        ({"a": GOOD | {"data_offsets": [0]}}, "data_offsets of tensor a is [0]"),
        ({"a": GOOD | {"data_offsets": [-24, 0]}}, "data_offsets of tensor a is [-24, 0]"),
        ({"a": GOOD | {"data_offsets": [0, 24.0]}}, "data_offsets of tensor a is [0, 24.0]"),
        ({"a": GOOD | {"shape": "abc"}}, "shape of tensor a is 'abc', not a list of whole numbers"),
        ({"a": GOOD | {"shape": [2, True]}}, "shape of tensor a is [2, True]"),
        ({"a": GOOD | {"shape": [2, 4]}}, "tensor a: shape [2, 4] takes 32 bytes, its data_offsets are 24 apart"),
        ({"a": GOOD | {"data_offsets": [24, 0]}}, "its data_offsets are -24 apart"),
        ({"a": GOOD | {"data_offsets": [1, 25]}}, "model.safetensors is cut short: a ends at byte"),
        ({"a": GOOD | {"dtype": "I8"}}, "a is I8, only F32, F16, F64, BF16 are supported"),
    ],
)
def test_headers(header: Any, words: str, tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", header)
    with pytest.raises(ValueError) as refusal:
        stored.tensors_of(tmp_path)
    assert words in str(refusal.value) and "\n" not in str(refusal.value)
    write(tmp_path / "model.safetensors", {"a": GOOD, "__metadata__": {"format": "pt"}})
    assert stored.tensors_of(tmp_path)["a"].shape == (2, 3)


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ([1], "model.safetensors.index.json holds a list"),
        ({}, "model.safetensors.index.json has no weight_map"),
        ({"weight_map": ["a"]}, "has no weight_map of tensors to files"),
        ({"weight_map": {"a": 3}}, "has no weight_map of tensors to files"),
        ({"weight_map": {"a": "one.safetensors"}}, "one.safetensors is missing"),
        ({"weight_map": {"b": "model.safetensors"}}, "tensor b is missing in model.safetensors"),
    ],
)
def test_indices(index: Any, words: str, tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", {"a": GOOD})
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError) as refusal:
        stored.tensors_of(tmp_path)
    assert words in str(refusal.value)
