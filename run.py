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
from typing import Any, NamedTuple

import jax

import models
from jaxpp import config as options
from jaxpp import mesh, metrics, partition, plan, train
from jaxpp.config import Config, PlanConfig
from jaxpp.options import parse

SAMPLE_TOKENS = 160


def model_config(config: Config) -> models.ModelConfig:
    """The model's sizes with the options that change it."""
    return dataclasses.replace(models.config_of(config.model), dropout=config.dropout)


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


def describe(run: train.Run, corpus: str, parameters: int) -> str:
    """The first line: what is trained, on what, how it is split."""
    c, s, device = run.config, run.sizes, jax.devices()[0]
    kind = f"{len(jax.devices())} emulated CPU devices" if device.platform == "cpu" else f"{device.device_kind}"
    chunks = f" x {c.virtual_pipeline_parallel} chunks" if c.virtual_pipeline_parallel > 1 else ""
    return (
        f"training {c.model} ({parameters / 1e6:.1f}M parameters) on {corpus}: {c.schedule_name} over {s.pipe} stages"
        f"{chunks} x {s.data} replicas, {s.microbatches} microbatches of {s.rows} x {s.length} tokens, {c.dtype} with"
        f" {run.pipeline.precision.wire} on the wire, {c.num_iteration} steps, {kind}"
    )


def run_train(config: Config) -> None:
    """Train, validate, sample, and say where the files are."""
    model = model_config(config)
    options.check(config, model.layers, model.positions)
    gpus = start_devices(config)
    model = dataclasses.replace(model, cudnn=gpus > 0)
    sizes = options.sizes(config, model.layers, model.positions, gpus)
    grid = mesh.make_mesh(sizes.pipe, sizes.data)
    run = train.make_run(config, sizes, grid, model.layers, models.training_loss(model))
    train_tokens, validation_tokens, corpus = train.load_corpus(config, model.vocab_size)
    train.check_corpus(run, train_tokens, validation_tokens)
    build = builder(model)
    with metrics.Log(config.output_dir, config.num_iteration) as log:
        log.say(describe(run, corpus, train.parameter_count(train.placed_spec(run, build))))
        state = train.train(run, build, (train_tokens, validation_tokens), log)
        if model.vocab_size == 256:
            log.say(sample(run, state, validation_tokens))
        log.say(f"metrics are in {log.path}")


def sample(run: train.Run, state: train.State, tokens: train.np.ndarray) -> str:
    """A continuation of the validation text's beginning, as text."""
    model = jax.device_put(partition.unstack(state.params), jax.local_devices()[0])
    prompt = tokens[: run.sizes.length // 2]
    key = jax.random.key(run.config.seed)
    found = train.continuation(model, prompt, SAMPLE_TOKENS, run.sizes.length, key)
    text = bytes(found).decode(errors="replace")
    return f"a continuation of {bytes(prompt[-32:]).decode(errors='replace')!r}:\n{text}"


def run_plan(config: PlanConfig) -> None:
    """Print the plan."""
    model = model_config(config)
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
