"""Models from and to other formats: Hugging Face folders (config.json, safetensors) and llm.c's GPT-2 files.

A source gives tensors by their names; `assemble` reads them straight into the places of a pipeline, each device's part
by itself, so that the host never holds the model.
"""

import json
import math
import os
import shutil
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from jaxpp import partition
from jaxpp.json_files import read_object
from models import hf_config, mapping
from models.gpt2 import GPT2Config
from models.stored import tensors_of

SHARD_BYTES = 5 * 10**9
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "chat_template.jinja",
)
_GENERATION = "generation_config.json"
_LLMC_MAGIC, _LLMC_DTYPES = 20240326, {3: np.dtype("<f4"), 5: np.dtype(ml_dtypes.bfloat16)}


class Source(NamedTuple):
    """Weights somewhere: our config, the table of their names, the shape of each tensor, and how to get one.

    warning: what to say to whom trains it.
    """

    config: Any
    table: mapping.Table
    shapes: Mapping[str, tuple[int, ...]]
    get: Callable[[str], np.ndarray]
    where: str
    warning: str | None = None


def open_folder(folder: str, option: str = "init_from") -> Source:
    """A Hugging Face folder. Raises ValueError, naming the option, for a folder or a config that cannot be used."""
    config, warning = read_config(folder, option), hf_config.unused_dropout(_json(folder, option))
    try:
        found = tensors_of(Path(folder))
    except (OSError, ValueError) as error:
        raise ValueError(f"{option}={folder!r}: {error}") from None
    inner = isinstance(config, GPT2Config) and not any(name.startswith("transformer.") for name in found)
    if inner:  # OpenAI's own folders hold the inner model alone
        found = {name if name.startswith("lm_head.") else f"transformer.{name}": t for name, t in found.items()}
    table = hf_config.ARCHITECTURES[hf_config.kind_of(config)].table
    shapes = {name: tensor.shape for name, tensor in found.items()}
    return Source(config, table, shapes, lambda name: found[name].read(), f"{option}={folder!r}", warning)


def read_config(folder: str, option: str = "init_from") -> Any:
    """Our config from a Hugging Face folder's config.json; ValueError as `hf_config.read`, naming the option."""
    found = _json(folder, option)
    try:
        return hf_config.read(found)
    except ValueError as error:
        raise ValueError(f"{option}={folder!r}: config.json: {error}") from None


def _json(folder: str, option: str) -> dict[str, Any]:
    try:
        return read_object(Path(folder) / "config.json")
    except OSError as error:
        text = f"config.json cannot be read ({error.strerror}): give a folder of a Hugging Face model"
        raise ValueError(f"{option}={folder!r}: {text}") from None
    except ValueError as error:
        raise ValueError(f"{option}={folder!r}: {error}") from None


def open_llmc(path: str, option: str = "llmc_filepath") -> Source:
    """A GPT-2 of llm.c: 256 int32 (magic, version 3: float32, 5: bfloat16, T, V, L, N, D, padded V), then parameters.

    Raises ValueError, naming the option, for a missing, foreign or truncated file.
    """
    try:
        size = os.path.getsize(path)
        with open(path, "rb") as file:
            header = np.frombuffer(file.read(1024), "<i4", count=min(256, size // 4))
    except OSError as error:
        raise ValueError(f"{option}={path!r} cannot be read ({error.strerror}): give a model file of llm.c") from None
    if len(header) < 256 or header[0] != _LLMC_MAGIC:
        magic = int(header[0]) if len(header) else None
        raise ValueError(f"{option}={path!r} begins with {magic}, a model file of llm.c with {_LLMC_MAGIC}")
    if header[1] not in _LLMC_DTYPES:
        raise ValueError(f"{option}={path!r} has version {header[1]}: only 3 (float32) and 5 (bfloat16) are supported")
    dtype = _LLMC_DTYPES[int(header[1])]
    positions, vocab, layers, heads, dim, padded = (int(n) for n in header[2:8])
    if min(positions, vocab, layers, heads, dim) < 1 or dim % heads or padded < vocab:
        text = f"T={positions}, V={vocab}, L={layers}, N={heads}, D={dim}, padded V={padded}"
        rule = "all must be 1 or more, D a multiple of N, and padded V at least V: copy it again"
        raise ValueError(f"{option}={path!r} has a header with {text}: {rule}")
    config = GPT2Config(vocab_size=vocab, positions=positions, layers=layers, dim=dim, heads=heads)
    stored = _llmc_shapes(positions, padded, layers, dim)
    need = 1024 + dtype.itemsize * sum(math.prod(shape) for shape in stored.values())
    if size != need:
        raise ValueError(f"{option}={path!r} has {size} bytes, its header's sizes need {need}: copy it again")
    offsets = np.cumsum([1024, *(dtype.itemsize * int(np.prod(shape)) for shape in stored.values())])
    where = dict(zip(stored, offsets[:-1].tolist(), strict=True))

    def get(name: str) -> np.ndarray:
        base, _, layer = name.partition(".")
        array = np.memmap(path, dtype, "r", where[base], stored[base])
        array = array[int(layer)] if layer else array
        return np.asarray(array[:vocab] if base == "wte" else array)

    shapes = {}
    for name, shape in stored.items():
        if name in ("wte", "wpe", "lnfw", "lnfb"):
            shapes[name] = (vocab, dim) if name == "wte" else shape
        else:
            shapes |= {f"{name}.{i}": shape[1:] for i in range(layers)}
    return Source(config, mapping.LLMC, shapes, get, f"{option}={path!r}")


def _llmc_shapes(positions: int, padded: int, layers: int, dim: int) -> dict[str, tuple[int, ...]]:
    """Parameters in the file's order; the vocabulary is padded there."""
    block = {"ln1w": (dim,), "ln1b": (dim,), "qkvw": (3 * dim, dim), "qkvb": (3 * dim,)}
    block |= {"attprojw": (dim, dim), "attprojb": (dim,), "ln2w": (dim,), "ln2b": (dim,)}
    block |= {"fcw": (4 * dim, dim), "fcb": (4 * dim,), "fcprojw": (dim, 4 * dim), "fcprojb": (dim,)}
    inner = {name: (layers, *shape) for name, shape in block.items()}
    return {"wte": (padded, dim), "wpe": (positions, dim), **inner, "lnfw": (dim,), "lnfb": (dim,)}


def _parts(placed_spec: partition.Placed) -> dict[str, dict[str, tuple[int, ...]]]:
    """Shapes of our parameters by path, of embedding, one block and head."""
    shape = lambda module, lead: {name: tuple(a.shape[lead:]) for name, a in mapping.paths(module).items()}
    block = shape(placed_spec.blocks[0], 2)
    return {"embed": shape(placed_spec.embed, 0), "block": block, "head": shape(placed_spec.head, 0)}


def check_source(source: Source, placed_spec: partition.Placed) -> None:
    """Check that a source has exactly the tensors that the model needs, with their shapes. Raises ValueError."""
    parts, needed = _parts(placed_spec), {}
    for part, each in mapping.rows_of(source.table, parts):
        ours = parts[part][each.ours]
        for layer in range(sum(placed_spec.layout.layers)) if part == "block" else (None,):
            needed |= dict.fromkeys(mapping.names(each, ours, layer), mapping.their_shape(each, ours))
    absent, surplus = [sorted(a.keys() - b.keys()) for a, b in ((needed, source.shapes), (source.shapes, needed))]
    if absent:
        raise ValueError(f"{source.where}: tensor {absent[0]} is missing ({len(absent)} in all)")
    if surplus == ["lm_head.weight"] and source.config.tied:
        _check_tied(source)
    elif surplus:
        raise ValueError(f"{source.where}: tensor {surplus[0]} has no place in the model ({len(surplus)} in all)")
    for name, shape in needed.items():
        if source.shapes[name] != shape:
            raise ValueError(f"{source.where}: tensor {name} has shape {list(source.shapes[name])}, not {list(shape)}")


def _check_tied(source: Source) -> None:
    table = next(each.pieces[0].name for each in source.table.embed if each.ours == "tokens")
    if not np.array_equal(source.get("lm_head.weight"), source.get(table)):
        raise ValueError(
            f"{source.where}: tie_word_embeddings is set but lm_head.weight is not {table}: set it to false"
        )


def assemble(source: Source, placed_spec: partition.Placed, shardings: partition.Placed) -> partition.Placed:
    """The parameters of a source on their devices, float32; shapes and shardings of `partition`.

    Raises ValueError as `check_source`.
    """
    check_source(source, placed_spec)
    parts = _parts(placed_spec)
    rows = {(part, each.ours): each for part, each in mapping.rows_of(source.table, parts)}

    def weight(part: str, path: str, layer: int | None) -> np.ndarray:
        return mapping.read(rows[part, path], parts[part][path], layer, source.get)

    return partition.assemble(placed_spec, shardings, weight)


Weight = Callable[[str, str, int | None], np.ndarray]  # (part, path, layer) -> our parameter


def placed_weight(params: partition.Placed) -> Weight:
    """A function that fetches one parameter of one layer from its devices."""
    outer = {"embed": mapping.paths(params.embed), "head": mapping.paths(params.head)}
    blocks = [mapping.paths(block) for block in params.blocks]

    def weight(part: str, path: str, layer: int | None) -> np.ndarray:
        if layer is None:
            return np.asarray(jax.device_get(outer[part][path]))
        stage, chunk, place = params.layout.where(layer)
        return np.asarray(jax.device_get(blocks[place][path][stage, chunk]))

    return weight


def source_weight(source: Source, placed_spec: partition.Placed) -> Weight:
    """A function that reads one parameter of one layer from a source, which is checked first."""
    check_source(source, placed_spec)
    parts = _parts(placed_spec)
    rows = {(part, each.ours): each for part, each in mapping.rows_of(source.table, parts)}
    return lambda part, path, layer: mapping.read(rows[part, path], parts[part][path], layer, source.get)


def export(
    config: Any,
    placed_spec: partition.Placed,
    weight: Weight,
    folder: str,
    dtype: str,
    origin: str | None = None,
    tokenizer: str | None = None,
) -> list[str]:
    """Write a Hugging Face folder: config.json, safetensors of at most 5 GB each, and the tokenizer's files.

    Args: placed_spec, shapes of the parameters; weight, gives them one by one; dtype, of the files; origin, a folder
    whose token ids, options of generation and tokenizer are taken over; tokenizer, a folder or tokenizer.json that is
    taken instead of that.
    Returns: the files' names. Raises ValueError where the folder cannot be written.
    """
    parts = _parts(placed_spec)
    table = hf_config.ARCHITECTURES[hf_config.kind_of(config)].table
    layers = sum(placed_spec.layout.layers)
    jobs = _tensors(table, parts, layers)
    shards = _deal(jobs, parts, np.dtype(dtype if dtype != "bfloat16" else ml_dtypes.bfloat16))
    root = Path(folder)
    try:
        root.mkdir(parents=True, exist_ok=True)
        has = origin is not None and (Path(origin) / "config.json").is_file()
        source = read_object(Path(origin or "") / "config.json") if has else None
        written = _copy(origin, tokenizer, root)
        described = hf_config.write(config, source) | {"torch_dtype": dtype}
        described.pop("dtype", None)
        (root / "config.json").write_text(json.dumps(described, indent=2) + "\n")
        weights = _write_shards(root, shards, weight, dtype)
    except OSError as error:
        raise ValueError(f"to={folder!r} cannot be written ({error.strerror}): use another folder") from None
    return ["config.json", *weights, *written]


class _Tensor(NamedTuple):
    """One of their tensors and the rows that its parts come from."""

    name: str
    sources: tuple[tuple[str, mapping.Row, int | None], ...]
    shape: tuple[int, ...]


def _tensors(table: mapping.Table, parts: dict, layers: int) -> list[_Tensor]:
    found: dict[str, list] = {}
    shapes = {}
    for part, each in mapping.rows_of(table, parts):
        ours = parts[part][each.ours]
        for layer in range(layers) if part == "block" else (None,):
            for name in mapping.names(each, ours, layer):
                found.setdefault(name, []).append((part, each, layer))
                shapes[name] = mapping.their_shape(each, ours)
    return [_Tensor(name, tuple(sources), shapes[name]) for name, sources in found.items()]


def _deal(jobs: list[_Tensor], parts: dict, dtype: np.dtype) -> list[list[_Tensor]]:
    """Tensors to files, in order, none above SHARD_BYTES unless one tensor is."""
    shards: list[list[_Tensor]] = [[]]
    size = 0
    for job in sorted(jobs, key=lambda job: (job.sources[0][2] is not None, job.sources[0][2] or 0, job.name)):
        bytes_ = int(np.prod(job.shape)) * dtype.itemsize
        if shards[-1] and size + bytes_ > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(job)
        size += bytes_
    return shards


def _write_shards(root: Path, shards: list[list[_Tensor]], weight: Weight, dtype: str) -> list[str]:
    total, where = 0, {}
    single = len(shards) == 1
    for i, jobs in enumerate(shards):
        file = "model.safetensors" if single else f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        tensors = {job.name: _make(job, weight, dtype) for job in jobs}
        mode = _usual_mode(root / file)
        save_file(tensors, root / file, metadata={"format": "pt"})
        (root / file).chmod(mode)  # the library makes it its owner's alone
        total += sum(array.nbytes for array in tensors.values())
        where |= dict.fromkeys(tensors, file)
    index = root / "model.safetensors.index.json"
    index.unlink(missing_ok=True)
    if not single:
        index.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2) + "\n")
    return sorted(set(where.values()))


def _usual_mode(path: Path) -> int:
    """The mode that a new file gets here; makes it."""
    path.unlink(missing_ok=True)
    path.touch()
    return stat.S_IMODE(path.stat().st_mode)


def _make(job: _Tensor, weight: Weight, dtype: str) -> np.ndarray:
    pieces: dict[int, np.ndarray] = {}
    for part, each, layer in job.sources:
        for name, piece, array in mapping.write(each, weight(part, each.ours, layer), layer):
            if name == job.name:
                pieces[piece.part] = array
    axis = mapping.split_dim(job.sources[0][1]) if len(pieces) > 1 else 0
    array = np.concatenate([pieces[i] for i in sorted(pieces)], axis=axis) if len(pieces) > 1 else pieces[0]
    return np.ascontiguousarray(array.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype))


def _copy(origin: str | None, tokenizer: str | None, root: Path) -> list[str]:
    """Copy a tokenizer's files, and generation_config.json of the model's own folder; returns their names."""
    files: dict[str, Path] = {}
    given = Path(tokenizer) if tokenizer is not None else None
    base = given.parent if given is not None and given.is_file() else given
    for folder, names in ((base or origin, _TOKENIZER_FILES), (origin, (_GENERATION,))):
        files |= {name: Path(folder) / name for name in names if folder and (Path(folder) / name).is_file()}
    if given is not None and given.is_file():
        files["tokenizer.json"] = given
    for name, path in files.items():
        if path.resolve() != (root / name).resolve():
            shutil.copyfile(path, root / name)
    return list(files)
