"""Adapters in PEFT's format: `adapter_config.json` and `adapter_model.safetensors`, read, written and merged.

What we cannot do as PEFT does is refused: a field of the config that is neither named here nor switched off might
change the result. PEFT keeps lora_A as [R, in] and lora_B as [out, R], with the dims of ours flattened.

Legend: R rank.
"""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from jaxpp.json_files import read_object
from models import hf_config, mapping
from models.lora import PLACES, LoraSpec
from models.stored import header

Weight = Callable[[str, str, int | None], np.ndarray]  # (part, path, layer) -> our parameter

CONFIG, TENSORS, ALL = "adapter_config.json", "adapter_model.safetensors", "all-linear"
_ATTENTION = {name: "model.layers.{i}.self_attn." + name for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
_MLP = {name: "model.layers.{i}.mlp." + name for name in ("gate_proj", "up_proj", "down_proj")}
_GPT2 = {"c_attn": "transformer.h.{i}.attn.c_attn", "attn.c_proj": "transformer.h.{i}.attn.c_proj"}
_GPT2 |= {"c_fc": "transformer.h.{i}.mlp.c_fc", "mlp.c_proj": "transformer.h.{i}.mlp.c_proj"}
# By model_type: names of targets, and the modules of a layer that they are.
MODULES = {"gpt2": _GPT2, "llama": _ATTENTION | _MLP, "qwen3": _ATTENTION | _MLP, "mixtral": _ATTENTION}
DEFAULTS = {"gpt2": ("c_attn",)} | dict.fromkeys(("llama", "qwen3", "mixtral"), ("q_proj", "v_proj"))
_MUST: dict[str, tuple] = {
    "peft_type": ("LORA",),
    "task_type": ("CAUSAL_LM", None),
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian"),  # others change the base too
}
_READ = ("r", "lora_alpha", "lora_dropout", "target_modules")
# Changes nothing here: who wrote it and of what, how weights are stored (we know), and what is read with others alone.
_SKIP = ("peft_version", "base_model_name_or_path", "revision", "auto_mapping", "inference_mode", "fan_in_fan_out")
_SKIP += ("megatron_core", "qalora_group_size")


def targets_of(kind: str, names: Sequence[str] | None, where: str = "lora_target_modules") -> tuple[str, ...]:
    """Targets by PEFT's rule: a name is that of all modules that end in it; None: PEFT's own default for the model.

    Raises ValueError, naming `where`, for a name that is of no module that can have an adapter.
    """
    known = MODULES[kind]
    if names is None:
        return DEFAULTS[kind]
    choices = ", ".join(known)
    if tuple(names) == (ALL,):
        if kind == "mixtral":  # PEFT's would be
            raise ValueError(f"{where}={ALL} has experts of {kind} among it, which have no adapters: use {choices}")
        return tuple(known)
    found = set()
    for name in names:
        of_layers = re.sub(r"\.\d+\.", ".{i}.", name)  # PEFT may name the module of every layer
        matches = {target for target, module in known.items() if f".{module}".endswith(f".{of_layers}")}
        if not matches:
            raise ValueError(f"{where}={name!r} is no module of {kind} that can have an adapter: use some of {choices}")
        found |= matches
    return tuple(target for target in known if target in found)


def choose(kind: str, config: Any, saved: LoraSpec | None, where: str) -> LoraSpec | None:
    """The adapters that the options lora_* of a config ask for, or None.

    Args: saved, those that are gone on from, which the options must not contradict; where, these are, in words.
    Raises ValueError for options that do, and for unknown targets.
    """
    given = {"rank": config.lora_rank or None, "alpha": config.lora_alpha, "targets": config.lora_target_modules}
    if given["targets"] is not None:
        given["targets"] = targets_of(kind, given["targets"])
    if saved is None:
        if not config.lora_rank:
            return None
        alpha = float(config.lora_rank) if config.lora_alpha is None else config.lora_alpha
        return LoraSpec(config.lora_rank, alpha, config.lora_dropout or 0.0, given["targets"] or DEFAULTS[kind])
    options = {"rank": "lora_rank", "alpha": "lora_alpha", "targets": "lora_target_modules"}
    for name, value in given.items():
        has = getattr(saved, name)
        if value is not None and value != has:
            shown, had = (" ".join(v) if isinstance(v, tuple) else v for v in (value, has))
            raise ValueError(f"{options[name]}={shown} is not that of {where}, which has {had}: leave it out")
    return saved if config.lora_dropout is None else replace(saved, dropout=config.lora_dropout)


def read_spec(folder: str, kind: str, option: str = "lora_load_path") -> LoraSpec:
    """The adapters that a folder's config describes. Raises ValueError, naming the option, for what we cannot do."""
    try:
        found = read_object(Path(folder) / CONFIG)
    except OSError as error:
        text = f"{CONFIG} cannot be read ({error.strerror}): give a folder of PEFT's"
        raise ValueError(f"{option}={folder!r}: {text}") from None
    except ValueError as error:
        raise ValueError(f"{option}={folder!r}: {error}") from None
    try:
        return _spec(found, kind)
    except ValueError as error:
        raise ValueError(f"{option}={folder!r}: {CONFIG}: {error}") from None


def _spec(found: Mapping[str, Any], kind: str) -> LoraSpec:
    for name, value in found.items():
        allowed = _MUST.get(name)
        if allowed is not None and value not in allowed:
            raise ValueError(f"{name}={value!r} is not supported: only {' or '.join(map(repr, allowed))}")
        if name not in (*_MUST, *_READ, *_SKIP) and value not in (None, False, "", [], {}):
            raise ValueError(f"{name}={value!r} is not supported: only adapters without it")
    rank, alpha, rate = found.get("r"), found.get("lora_alpha"), found.get("lora_dropout", 0.0)
    if type(rank) is not int or rank < 1:
        raise ValueError(f"r={rank!r} is not a whole number of 1 or more")
    if not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise ValueError(f"lora_alpha={alpha!r} is not a number")
    if not isinstance(rate, int | float) or not 0 <= rate < 1:
        raise ValueError(f"lora_dropout={rate!r} is not in [0, 1)")
    names = found.get("target_modules")
    names = [names] if names == ALL else names
    if not isinstance(names, list) or not names or not all(type(name) is str for name in names):
        raise ValueError(f"target_modules={names!r} is not a list of names, for example {list(DEFAULTS[kind])}")
    return LoraSpec(rank, float(alpha), float(rate), targets_of(kind, names, "target_modules"))


def _sides(config: Any, layer: int | None = None) -> dict[str, str]:
    """Our path of every adapter's half, and its name in the file; of a layer, or for any."""
    kind, found = hf_config.kind_of(config), {}
    for target in config.lora.targets:
        module = MODULES[kind][target]
        module = module if layer is None else module.format(i=layer)
        for ours, theirs in (("lora_a", "lora_A"), ("lora_b", "lora_B")):
            found[path_of(kind, target, ours)] = f"base_model.model.{module}.{theirs}.weight"
    return found


def path_of(kind: str, target: str, half: str) -> str:
    """Our path, within a block, of half an adapter."""
    part = "mlp" if ".mlp." in MODULES[kind][target] else "attention"
    return f"{part}.lora.{PLACES[target]}.{half}"


def _flat(path: str, array: np.ndarray) -> np.ndarray:
    """Ours as PEFT keeps it: lora_a [*ins, R] as [R, in], lora_b [R, *outs] as [out, R]."""
    return (array.reshape(-1, array.shape[-1]) if path.endswith("lora_a") else array.reshape(len(array), -1)).T


def open_adapters(folder: str, config: Any, shapes: Mapping[str, tuple], option: str = "lora_load_path") -> Weight:
    """The adapters in a folder, as a function (part, path, layer) -> our parameter, float32.

    Args: config, of a model with these adapters; shapes, of ours by their paths in a block.
    Raises ValueError, naming the option, for tensors that are missing, unknown or of another shape.
    """
    path, where = Path(folder) / TENSORS, f"{option}={folder!r}"
    try:
        stored = header(path)
    except OSError as error:
        raise ValueError(f"{where}: {TENSORS} cannot be read ({error.strerror}): save it as safetensors") from None
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    wanted = {}
    for layer in range(config.layers):
        for ours, name in _sides(config, layer).items():
            # Of no elements, but of this shape.
            wanted[name] = _flat(ours, np.broadcast_to(np.float32(0), shapes[ours])).shape
    absent, surplus = (sorted(a.keys() - b.keys()) for a, b in ((wanted, stored), (stored, wanted)))
    if absent:
        raise ValueError(f"{where}: tensor {absent[0]} is missing ({len(absent)} in all)")
    if surplus:
        raise ValueError(f"{where}: tensor {surplus[0]} has no place in the model's adapters ({len(surplus)} in all)")
    for name, shape in wanted.items():
        if stored[name].shape != shape:
            raise ValueError(f"{where}: tensor {name} has shape {list(stored[name].shape)}, not {list(shape)}")

    def weight(part: str, path: str, layer: int | None) -> np.ndarray:
        return stored[_sides(config, layer)[path]].read().astype(np.float32).T.reshape(shapes[path])

    return weight


def write(folder: str, config: Any, weight: Weight, base: str | None) -> list[str]:
    """Write the adapters of a model; base, the folder that it began as. Returns the files' names.

    Raises ValueError where the folder cannot be written.
    """
    kind, spec = hf_config.kind_of(config), config.lora
    described = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base}
    described |= {"r": spec.rank, "lora_alpha": int(spec.alpha) if spec.alpha == int(spec.alpha) else spec.alpha}
    described |= {"lora_dropout": spec.dropout, "target_modules": list(spec.targets), "bias": "none"}
    described |= {"fan_in_fan_out": kind == "gpt2", "inference_mode": True, "init_lora_weights": True}
    described |= {"modules_to_save": None, "rank_pattern": {}, "alpha_pattern": {}, "layers_to_transform": None}
    described |= {"layers_pattern": None, "revision": None, "use_dora": False, "use_rslora": False}
    tensors = {}
    for layer in range(config.layers):
        for ours, name in _sides(config, layer).items():
            tensors[name] = np.ascontiguousarray(_flat(ours, weight("block", ours, layer).astype(np.float32)))
    root = Path(folder)
    try:
        root.mkdir(parents=True, exist_ok=True)
        (root / CONFIG).write_text(json.dumps(described, indent=2) + "\n")
        save_file(tensors, root / TENSORS, metadata={"format": "pt"})
        (root / TENSORS).chmod((root / CONFIG).stat().st_mode)  # the library makes it its owner's alone
    except OSError as error:
        raise ValueError(
            f"lora_save_path={folder!r} cannot be written ({error.strerror}): use another folder"
        ) from None
    return [CONFIG, TENSORS]


def merged(config: Any, base: Weight, adapters: Weight) -> Weight:
    """The parameters of a model whose adapters are added to its weights: W + alpha / R * (B A)."""
    kind, spec = hf_config.kind_of(config), config.lora
    rows = {each.ours: each for each in hf_config.ARCHITECTURES[kind].table.block}

    def weight(part: str, path: str, layer: int | None) -> np.ndarray:
        found = base(part, path, layer)
        targets = {MODULES[kind][target].format(i=layer) + ".weight": target for target in spec.targets}
        row = rows.get(path) if part == "block" else None
        if row is None or not targets.keys() & set(mapping.names(row, found.shape, layer)):
            return found

        def get(name: str) -> np.ndarray:
            if name not in targets:
                return np.zeros(mapping.their_shape(row, found.shape), np.float32)
            a, b = (path_of(kind, targets[name], half) for half in ("lora_a", "lora_b"))
            product = _flat(b, adapters(part, b, layer)) @ _flat(a, adapters(part, a, layer))
            return (product.T if kind == "gpt2" else product) * np.float32(spec.alpha / spec.rank)

        return found + mapping.read(row, found.shape, layer, get)

    return weight
