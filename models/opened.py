"""Models that were trained before, to go on from, evaluate, export or generate with: Hugging Face folders, llm.c files,
checkpoints, and adapters beside any of them."""

import dataclasses
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax

import models
from jaxpp import checkpoint, partition
from models import hf, hf_config, mapping, peft
from models.lora import LoraParam

DEFAULT_MODEL = "gpt2-tiny"


def builder(model: models.ModelConfig) -> Callable[[jax.Array], Any]:
    """A function key -> model."""
    return lambda key: models.build(key, model)


def spec_of(model: models.ModelConfig) -> partition.Placed:
    """Shapes of a model's parameters on one stage."""
    layout = partition.split_layers(model.layers, 1)
    return jax.eval_shape(lambda: partition.stack(builder(model)(jax.random.key(0)), layout))


def tokenizer_in(folder: str | None) -> str | None:
    """A folder that has a tokenizer, or None."""
    return folder if folder is not None and (Path(folder) / "tokenizer.json").is_file() else None


def open_source(options: Any) -> hf.Source | None:
    """The weights that the options init_from or llmc_filepath name, or None. Raises ValueError."""
    if options.init_from is not None:
        return hf.open_folder(options.init_from)
    return hf.open_llmc(options.llmc_filepath) if options.llmc_filepath is not None else None


def open_base(options: Any, model: models.ModelConfig) -> tuple[models.ModelConfig, hf.Source | None]:
    """The base of the adapters that a checkpoint holds: its config, and its weights, or None where they were drawn.

    Args: options, of the run; model, the checkpoint's. Raises ValueError, naming the base, where it is gone or another.
    """
    try:
        source = open_source(options)
    except ValueError as error:
        raise ValueError(f"the checkpoint holds adapters alone, and their base cannot be read: {error}") from None
    base = source.config if source else models.config_of(options.model or DEFAULT_MODEL)
    saved, now = (models.to_json(dataclasses.replace(found, lora=None)) for found in (model, base))
    checkpoint.check_same("load", saved, now, "base")
    return base, source


def with_adapters(config: Any, model: models.ModelConfig, checkpoint_of: str | None) -> tuple[Any, models.ModelConfig]:
    """Options and model with the adapters that the options ask for, and those filled in that were left open.

    Args: checkpoint_of, the folder of the checkpoint that is gone on from. Raises ValueError as `peft.choose`.
    """
    kind, saved, where = hf_config.kind_of(model), model.lora, f"load={checkpoint_of!r}"
    if checkpoint_of is not None and saved is None and config.lora_rank:
        raise ValueError(
            f"lora_rank={config.lora_rank} trains adapters, and {where} is a checkpoint of a whole model: export it"
            f" with run.py export, and start from the folder with --init_from"
        )
    if checkpoint_of is None and config.lora_load_path is not None:
        saved, where = peft.read_spec(config.lora_load_path, kind), f"lora_load_path={config.lora_load_path!r}"
    spec = peft.choose(kind, config, saved, where)
    if spec is None:
        return config, model
    filled = {f"lora_{name}": getattr(spec, name) for name in ("rank", "alpha", "dropout")}
    config = dataclasses.replace(config, **filled, lora_target_modules=spec.targets)
    return config, dataclasses.replace(model, lora=spec)


def adapters_in(folder: str, model: models.ModelConfig) -> hf.Weight:
    """The adapters in a folder of PEFT's, for a model that has them. Raises ValueError as `peft.open_adapters`."""
    trained, _ = partition.split(spec_of(model), LoraParam)
    shapes = {path: tuple(a.shape[2:]) for path, a in mapping.paths(trained.blocks[0]).items()}
    return peft.open_adapters(folder, model, shapes)


def trained_type(model: models.ModelConfig) -> type | None:
    """The type of the variables that a run trains; None: all of them."""
    return None if model.lora is None else LoraParam


class Opened(NamedTuple):
    """A trained model: its config, its weights, where its tokenizer is, the Hugging Face folder it began as, and what
    a checkpoint says of its run (see `train.describe_run`), or nothing."""

    model: models.ModelConfig
    weight: hf.Weight
    tokenizer: str | None
    origin: str | None
    info: dict[str, Any]


def open_model(folder: str, adapters: str | None = None) -> Opened:
    """The model in a Hugging Face folder, or of the newest checkpoint in a folder of them, adapters merged.

    Args: adapters, a folder of PEFT's that is merged too. Raises ValueError where they are not what they should be.
    """
    if (Path(folder) / "config.json").is_file():
        source = hf.open_folder(folder, "load")
        weight = hf.source_weight(source, spec_of(source.config))
        opened = Opened(source.config, weight, tokenizer_in(folder), folder, {})
    else:
        opened = _of_checkpoint(folder, adapters)
    if adapters is None:
        return opened
    model = dataclasses.replace(opened.model, lora=peft.read_spec(adapters, hf_config.kind_of(opened.model)))
    return opened._replace(weight=peft.merged(model, opened.weight, adapters_in(adapters, model)))


def _of_checkpoint(folder: str, adapters: str | None) -> Opened:
    found = checkpoint.latest(folder)
    if found is None:
        raise ValueError(f"load={folder!r} has neither a config.json nor a checkpoint: give a folder that has")
    model, given = models.from_json(found.info["model"]), found.info["options"]
    weight = checkpoint.weights(found, 0, model.layers)
    if model.lora is not None:
        if adapters is not None:
            raise ValueError(
                f"lora_load_path={adapters!r} beside load={folder!r}, a checkpoint of adapters: give one of them"
            )
        weight = peft.merged(model, _base_weight(given, model), weight)
        model = dataclasses.replace(model, lora=None)
    return Opened(model, weight, given["tokenizer"], given["init_from"] or given["tokenizer"], found.info)


def _base_weight(given: Mapping[str, Any], model: models.ModelConfig) -> hf.Weight:
    """The weights beside which a run's adapters were trained; given, its options."""
    base, source = open_base(SimpleNamespace(**given), model)
    if source:
        return hf.source_weight(source, spec_of(base))
    layout = partition.split_layers(base.layers, 1)

    @cache
    def drawn() -> hf.Weight:  # only when asked for: the devices may not have been started yet
        draw = jax.jit(lambda key: partition.stack(builder(base)(key), layout))
        return hf.placed_weight(draw(jax.random.key(given["seed"])))

    return lambda part, path, layer: drawn()(part, path, layer)
