"""Tensors in safetensors files: where they lie, checked before any is read."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jaxpp.json_files import read_object

# Their tensors that hold no weights: masks and tables that the model makes itself.
_DERIVED = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
_DTYPES = {name: np.dtype(kind) for name, kind in (("F32", "<f4"), ("F16", "<f2"), ("F64", "<f8"))}
_DTYPES["BF16"] = np.dtype(ml_dtypes.bfloat16)
_naturals = lambda found: type(found) is list and all(type(n) is int and n >= 0 for n in found)
# What each entry of a header must have: in words, and as a test.
_ENTRY: tuple[tuple[str, str, Callable[[Any], bool]], ...] = (
    ("dtype", "a string", lambda found: type(found) is str),
    ("shape", "a list of whole numbers", _naturals),
    ("data_offsets", "two whole numbers", lambda found: _naturals(found) and len(found) == 2),
)


class Stored(NamedTuple):
    """Where a tensor lies in a file. Read, not mapped: mapped pages would count as the process's memory."""

    path: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int

    def read(self) -> np.ndarray:
        return np.fromfile(self.path, self.dtype, math.prod(self.shape), offset=self.offset).reshape(self.shape)


def tensors_of(folder: Path) -> dict[str, Stored]:
    """Every tensor of a folder that holds weights. Raises ValueError for what is missing, truncated or of no number."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        named = read_object(index).get("weight_map")
        if not isinstance(named, dict) or not all(type(file) is str for file in named.values()):
            raise ValueError(f"{index.name} has no weight_map of tensors to files: copy it again")
        absent = sorted({file for file in named.values() if not (folder / file).is_file()})
        if absent:
            raise ValueError(f"{absent[0]} is missing, which model.safetensors.index.json names: copy it again")
        found = {k: v for file in sorted(set(named.values())) for k, v in header(folder / file).items()}
        absent = sorted(named.keys() - found.keys())
        if absent:
            raise ValueError(f"tensor {absent[0]} is missing in {named[absent[0]]}, where the index has it")
    else:
        single = folder / "model.safetensors"
        if not single.is_file():
            raise ValueError("it has no model.safetensors and no model.safetensors.index.json: save it as safetensors")
        found = header(single)
    return {name: tensor for name, tensor in found.items() if not name.endswith(_DERIVED)}


def header(path: Path) -> dict[str, Stored]:
    """The tensors of a safetensors file: 8 bytes, the length of the JSON that follows, which says where each lies."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        try:
            listed = json.loads(file.read(length) if length < size else b"")
        except (ValueError, RecursionError):
            listed = None
    if not isinstance(listed, dict):
        raise ValueError(f"{path.name} is no safetensors file, or is cut short: copy it again")
    return {k: _stored(path, k, v, 8 + length, size) for k, v in listed.items() if k != "__metadata__"}


def _stored(path: Path, name: str, entry: Any, begin: int, size: int) -> Stored:
    """A tensor by its entry in a header; begin, where the file's data begin. Raises ValueError."""
    fields = entry if isinstance(entry, dict) else {}
    for field, words, test in _ENTRY:
        if not test(fields.get(field)):
            shown = repr(fields[field]) if field in fields else "none"
            raise ValueError(f"{path.name}: {field} of tensor {name} is {shown}, not {words}: copy it again")
    if fields["dtype"] not in _DTYPES:
        raise ValueError(f"{name} is {fields['dtype']}, only {', '.join(_DTYPES)} are supported")
    dtype, (start, stop) = _DTYPES[fields["dtype"]], fields["data_offsets"]
    if begin + stop > size:
        raise ValueError(f"{path.name} is cut short: {name} ends at byte {begin + stop} of {size}")
    need = dtype.itemsize * math.prod(fields["shape"])
    if stop - start != need:
        text = f"shape {fields['shape']} takes {need} bytes, its data_offsets are {stop - start} apart"
        raise ValueError(f"{path.name}: tensor {name}: {text}: copy it again")
    return Stored(path, dtype, tuple(fields["shape"]), begin + start)
