"""Train a language model through a pipeline, or plan it.

    python run.py [train] [options]     train (the default)
    python run.py plan [options]        show schedule, memory and wire, without touching a device

Options: python run.py --help
"""

import dataclasses
import json
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

import models
from jaxpp import config as options
from jaxpp import mesh, metrics, partition, plan, train
from jaxpp.config import Config, PlanConfig
from jaxpp.options import parse
from models import hf
from models.attention import kernel
from models.generate import Sampling, generate

SAMPLE_TOKENS = 160
DEFAULT_MODEL = "gpt2-tiny"


def source_of(config: Config) -> hf.Source | None:
    """The weights that a run starts from, or None where it starts from random ones. Raises ValueError."""
    if config.init_from is not None:
        return hf.open_folder(config.init_from)
    return hf.open_llmc(config.llmc_filepath) if config.llmc_filepath is not None else None


def model_config(config: Config, source: hf.Source | None) -> models.ModelConfig:
    """The model's sizes with the options that change it. Raises ValueError for an option that is not of this model."""
    model = source.config if source else models.config_of(config.model or DEFAULT_MODEL)
    model = dataclasses.replace(model, dropout=config.dropout)
    for name, ours in {"router_balance_loss": "balance_loss", "router_z_loss": "z_loss"}.items():
        value = getattr(config, name)
        if value is not None and not hasattr(model, ours):
            raise ValueError(f"{name}={value} is of models with experts, this model has none: leave it out")
        if value is not None:
            model = dataclasses.replace(model, **{ours: value})
    return model


def builder(model: models.ModelConfig) -> train.Build:
    """A function key -> model."""
    return lambda key: models.build(key, model)


def start_devices(config: Config) -> int:
    """Start JAX on the GPUs, or on emulated devices where there are none. Returns the number of GPUs in use."""
    count = (config.pipeline_parallel or 4) * (config.data_parallel or 1)
    if config.emulate_devices:
        mesh.emulate_devices(config.emulate_devices)
        return 0
    mesh.set_host_devices(count)  # counts only where the CPU is what JAX finds
    return len(jax.devices()) if jax.default_backend() == "gpu" else 0


def describe(run: train.Run, model: models.ModelConfig, corpus: str, parameters: int) -> str:
    """The first line: what is trained, on what, how it is split."""
    c, s, device = run.config, run.sizes, jax.devices()[0]
    kind = f"{len(jax.devices())} emulated CPU devices" if device.platform == "cpu" else f"{device.device_kind}"
    chunks = f" x {c.virtual_pipeline_parallel} chunks" if c.virtual_pipeline_parallel > 1 else ""
    name = c.init_from or c.llmc_filepath or c.model or DEFAULT_MODEL
    return (
        f"training {name} ({parameters / 1e6:.1f}M parameters) on {corpus}: {c.schedule_name} over {s.pipe} stages"
        f"{chunks} x {s.data} replicas, {s.microbatches} microbatches of {s.rows} x {s.length} tokens, {c.dtype} with"
        f" {run.pipeline.precision.wire} on the wire, {c.num_iteration} steps, {kind},"
        f" {kernel(model.attention, jax.numpy.dtype(c.dtype), c.dropout > 0)} attention"
    )


def run_train(config: Config) -> None:
    """Train, validate, sample, and say where the files are."""
    source = source_of(config)
    model = model_config(config, source)
    options.check(config, model.layers, model.positions)
    gpus = start_devices(config)
    model = dataclasses.replace(model, cudnn=gpus > 0)
    sizes = options.sizes(config, model.layers, model.positions, gpus)
    grid = mesh.make_mesh(sizes.pipe, sizes.data)
    run = train.make_run(config, sizes, grid, model.layers, models.training_loss(model))
    train_tokens, validation_tokens, corpus = train.load_corpus(config, model.vocab_size)
    train.check_corpus(run, train_tokens, validation_tokens)
    build = builder(model)
    if source:
        hf.check_source(source, train.placed_spec(run, build))
    with metrics.Log(config.output_dir, config.num_iteration) as log:
        log.say(describe(run, model, corpus, train.parameter_count(train.placed_spec(run, build))))
        sample = (
            sampler(run, model.positions, validation_tokens, log) if model.vocab_size == 256 else lambda params: None
        )
        read = partial(hf.assemble, source) if source else None
        train.train(run, build, (train_tokens, validation_tokens), log, sample, read)
        log.say(f"metrics are in {log.path}")


def sampler(run: train.Run, positions: int, tokens: np.ndarray, log: metrics.Log) -> Callable[[partition.Placed], None]:
    """A function that says how the model goes on after the validation text's beginning."""
    prompt = tokens[: run.sizes.length // 2]
    key = jax.random.key(run.config.seed)

    def sample(params: partition.Placed) -> None:
        count = min(SAMPLE_TOKENS, positions - len(prompt))
        found = generate(params, prompt, count, key, Sampling(), partition.unstack, run.config.dtype)
        text = bytes(found).decode(errors="replace")
        log.say(f"a continuation of {bytes(prompt[-32:]).decode(errors='replace')!r}:\n{text}")

    return sample


def run_plan(config: PlanConfig) -> None:
    """Print the plan."""
    model = model_config(config, source_of(config))
    options.check(config, model.layers, model.positions)
    sizes = options.sizes(config, model.layers, model.positions)
    run = train.make_run(
        config, sizes, plan.abstract_mesh(sizes.pipe, sizes.data), model.layers, models.training_loss(model)
    )
    found = plan.make_plan(run, builder(model))
    if config.json:
        print(json.dumps(found))
    else:
        terminal = sys.stdout.isatty()
        width = shutil.get_terminal_size().columns if terminal else 120
        print(plan.as_text(run, found, width, terminal and "NO_COLOR" not in os.environ))


class Command(NamedTuple):
    """A command of run.py: its options, a frozen dataclass, and what it does with them."""

    options: type
    run: Callable[[Any], None]


COMMANDS = {"train": Command(Config, run_train), "plan": Command(PlanConfig, run_plan)}


def main(arguments: Sequence[str]) -> int:
    """Run a command line; returns the exit code, 2 for bad input."""
    warnings.showwarning = lambda message, *_: print(f"warning: {message}", file=sys.stderr)
    try:
        name, given = parse(arguments, {name: command.options for name, command in COMMANDS.items()})
        COMMANDS[name].run(given)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
