"""Train a language model through a pipeline, or plan it.

    python run.py [train] [options]     train (the default)
    python run.py plan [options]        show schedule, memory and wire, without touching a device
    python run.py tokenize [options]    write text files as one token file
    python run.py generate [options]    continue a prompt
    python run.py export [options]      write a Hugging Face folder
    python run.py eval [options]        loss and perplexity of a trained model over a text
    python run.py plot RUNS... [options]    draw the curves of runs
    python run.py compare A B [options] hold two runs against each other

Options: python run.py COMMAND --help
"""

import dataclasses
import json
import os
import shutil
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

import models
from jaxpp import (
    checkpoint,
    compare,
    curves,
    mesh,
    metrics,
    option_files,
    partition,
    plan,
    probe,
    records,
    report,
    tokenize,
    tokenizer,
    train,
)
from jaxpp import config as options
from jaxpp.config import Config, EvalConfig, ExportConfig, GenerateConfig, PlanConfig
from jaxpp.options import check_ranges, parse
from models import flops, hf
from models.attention import kernel
from models.generate import Sampling, generate

SAMPLE_TOKENS = 160
DEFAULT_MODEL = "gpt2-tiny"


def source_of(config: Config) -> hf.Source | None:
    """The weights that a run starts from, or None where it starts from random ones. Raises ValueError."""
    options.check_start(config)
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


def check_split(config: Config, model: models.ModelConfig, sizes: options.Sizes) -> None:
    """Check that a model divides over the ranks that share its layers. Raises ValueError."""
    hidden = model.hidden or 4 * model.dim
    options.check_split(config, model.attention.heads, hidden, getattr(model, "experts", 0), sizes.length)


def builder(model: models.ModelConfig) -> train.Build:
    """A function key -> model."""
    return lambda key: models.build(key, model)


def start_devices(config: Config) -> int:
    """Start JAX on the GPUs, or on emulated devices where there are none. Returns the number of GPUs in use."""
    count = (config.pipeline_parallel or 4) * (config.data_parallel or 1) * config.tensor_parallel
    count *= config.context_parallel * config.expert_parallel
    if config.precision_check:
        probe.spare_threads(config.emulate_devices or count)
    if config.emulate_devices:
        mesh.emulate_devices(config.emulate_devices)
    else:  # counts only where the CPU is what JAX finds
        mesh.set_host_devices(-(-count // mesh.started(config.num_processes)))
    mesh.join_processes(config.coordinator_address, config.num_processes, config.process_id)
    return len(jax.devices()) if jax.default_backend() == "gpu" else 0


def describe(run: train.Run, model: models.ModelConfig, corpus: str, parameters: int) -> str:
    """The first line: what is trained, on what, how it is split."""
    c, s, device = run.config, run.sizes, jax.devices()[0]
    kind = f"{len(jax.devices())} emulated CPU devices" if device.platform == "cpu" else f"{device.device_kind}"
    chunks = f" x {c.virtual_pipeline_parallel} chunks" if c.virtual_pipeline_parallel > 1 else ""
    others = "".join(f" x {n} {axis}" for axis, n in s.mesh.items() if n > 1 and axis not in (mesh.PIPE, mesh.DATA))
    name = c.init_from or c.llmc_filepath or c.model or DEFAULT_MODEL
    return (
        f"training {name} ({parameters / 1e6:.1f}M parameters) on {corpus}: {c.schedule_name} over {s.pipe} stages"
        f"{chunks} x {s.data} replicas{others}, {s.microbatches} microbatches of {s.rows} x {s.length} tokens,"
        f" {c.dtype} with {run.pipeline.precision.wire} on the wire, {c.num_iteration} steps, {kind},"
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
    check_split(config, model, sizes)
    grid = mesh.make_mesh(sizes.pipe, sizes.data, sizes.expert, sizes.context, sizes.tensor)
    run = train.make_run(
        config,
        sizes,
        grid,
        model.layers,
        loss=models.training_loss(model),
        model=models.to_json(model),
        flops_per_token=flops.per_token(model, sizes.length),
        recorder=recorder_of(config, sizes),
    )
    where = config.tokenizer or tokenizer_in(config.init_from)
    corpus = train.load_corpus(config, model.vocab_size, where)
    feeds = train.make_feeds(run, corpus)
    run = dataclasses.replace(run, order=feeds.batches.order())
    build = builder(model)
    if source:
        hf.check_source(source, train.placed_spec(run, build))
    found = train.find_checkpoint(run)
    stop = on_sigterm() if config.save else lambda step: False
    done, quiet = found.step if found else 0, jax.process_index() > 0
    if run.recorder:
        run.recorder.open()
    with metrics.Log(config.output_dir, config.num_iteration, done, config.tensorboard, quiet) as log:
        if not quiet:
            write_options(config, sizes, log.path.with_name("config.toml"))
        if config.load:
            log.say(f"going on from {found.path}" if found else f"{config.load} has no checkpoint yet: starting anew")
        log.say(describe(run, model, corpus.said, train.parameter_count(train.placed_spec(run, build))))
        if run.recorder:
            log.say(f"precision check: tensors are recorded in {run.recorder.folder}, with remat none")
        text_of = tokenizer.load(where)
        speaks = where is not None or model.vocab_size == text_of.vocab_size
        sample = sampler(run, model.positions, corpus.validation[0], text_of, log) if speaks else lambda params: None
        read = partial(hf.assemble, source) if source else None
        hooks = train.Hooks(sample, read, found, stop)
        train.train(run, build, feeds, log, hooks)
        if config.save:
            log.say(f"checkpoints are in {config.save}")
        log.say(f"metrics are in {log.path}")


def recorder_of(config: Config, sizes: options.Sizes) -> records.Recorder | None:
    """The precision checker, where it is asked for."""
    if config.precision_check is None:
        return None
    return records.Recorder(records.parse_check(config.precision_check, config.output_dir), sizes.data)


def write_options(config: Config, sizes: options.Sizes, path: Path) -> None:
    """Write the options as they were resolved; --config with this file repeats the run."""
    found = dataclasses.asdict(options.resolved(config, sizes))
    if not (config.init_from or config.llmc_filepath):
        found["model"] = config.model or DEFAULT_MODEL
    path.write_text("# python run.py --config THIS_FILE\n" + option_files.to_toml(found), encoding="utf-8")


def on_sigterm() -> Callable[[int], bool]:
    """From now on SIGTERM is only noted; returns a function of the step: whether it has come, to any process."""
    if jax.process_count() > 1:  # they must stop after the same step, which JAX agrees on
        return multihost_utils.reached_preemption_sync_point
    came = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: came.set())
    return lambda step: came.is_set()


def tokenizer_in(folder: str | None) -> str | None:
    """A folder that has a tokenizer, or None."""
    return folder if folder is not None and (Path(folder) / "tokenizer.json").is_file() else None


def sampler(
    run: train.Run, positions: int, tokens: np.ndarray, text_of: tokenizer.Tokenizer, log: metrics.Log
) -> Callable[[partition.Placed], None]:
    """A function that says how the model goes on after the validation text's beginning."""
    prompt = tokens[: run.sizes.length // 2]
    key = jax.random.key(run.config.seed)
    # Between processes each token waits for all layers to come over the network.
    count = min(SAMPLE_TOKENS // (8 if jax.process_count() > 1 else 1), positions - len(prompt))

    def sample(params: partition.Placed) -> None:
        found = generate(params, prompt, count, key, Sampling(), partition.unstack, run.config.dtype, text_of.end)
        log.say(f"a continuation of {text_of.decode(prompt[-32:].tolist())!r}:\n{text_of.decode(list(found))}")

    return sample


def run_generate(config: GenerateConfig) -> None:
    """Print the prompt and its continuation as it comes."""
    check_ranges(config)
    if config.load is None or not config.prompt:
        raise ValueError("generate needs --load FOLDER and --prompt TEXT, for example --load model --prompt 'Once'")
    model, weight, origin, _ = open_model(config.load)
    text_of = tokenizer.load(config.tokenizer or origin)
    prompt = text_of.encode(config.prompt)
    if len(prompt) + config.max_new_tokens > model.positions:
        raise ValueError(
            f"max_new_tokens={config.max_new_tokens} after a prompt of {len(prompt)} tokens is more than the"
            f" {model.positions} positions of the model: use at most {max(0, model.positions - len(prompt))}"
        )
    tokenizer.check_vocabulary(text_of, model.vocab_size)
    spec = spec_of(model)
    params = partition.assemble(
        spec, partition.shardings(spec, mesh.make_mesh(devices=jax.local_devices()[:1])), weight
    )
    sampling = Sampling(config.temperature, config.top_k, config.top_p)
    key = jax.random.key(config.seed)
    options = (key, sampling, partition.unstack, config.dtype, text_of.end)
    print(config.prompt, end="", flush=True)
    for piece in tokenizer.stream(text_of, generate(params, prompt, config.max_new_tokens, *options)):
        print(piece, end="", flush=True)
    print()


class Trained(NamedTuple):
    """A model: its config, its weights by (part, path, layer), where its tokenizer is, if it has one, and what a
    checkpoint says of its run (see `train.describe_run`), or nothing."""

    config: models.ModelConfig
    weight: Callable[[str, str, int | None], np.ndarray]
    tokenizer: str | None
    info: dict[str, Any]


def open_model(folder: str) -> Trained:
    """The model of a Hugging Face folder, or of a folder of checkpoints. Raises ValueError where it is neither."""
    if (Path(folder) / "config.json").is_file():
        source = hf.open_folder(folder, "load")
        weight = hf.source_weight(source, spec_of(source.config))
        return Trained(source.config, weight, tokenizer_in(folder), {})
    found = checkpoint.latest(folder)
    if found is None:
        raise ValueError(f"load={folder!r} has neither a config.json nor a checkpoint: give a folder that has")
    model, given = models.from_json(found.info["model"]), found.info["options"]
    weight = checkpoint.weights(found, 0, model.layers)
    return Trained(model, weight, given["tokenizer"] or tokenizer_in(given["init_from"]), found.info)


def spec_of(model: models.ModelConfig) -> partition.Placed:
    """Shapes of a model's parameters on one stage."""
    layout = partition.split_layers(model.layers, 1)
    return jax.eval_shape(lambda: partition.stack(builder(model)(jax.random.key(0)), layout))


def run_export(config: ExportConfig) -> None:
    """Write a Hugging Face folder, one tensor at a time."""
    if config.load is None or config.to is None:
        raise ValueError("export needs --load FOLDER and --to FOLDER, for example --load model --to exported")
    model, weight, origin, _ = open_model(config.load)
    files = hf.export(model, spec_of(model), weight, config.to, config.dtype, config.tokenizer or origin)
    print(f"wrote {', '.join(files)} to {config.to}")


def run_eval(given: EvalConfig) -> None:
    """Print a model's loss and perplexity over a text."""
    check_ranges(given)
    if given.load is None:
        raise ValueError("eval needs --load FOLDER, for example --load model")
    model, weight, origin, info = open_model(given.load)
    config = options.of_eval(given, info)
    options.check(config, model.layers, model.positions)
    gpus = start_devices(config)
    model = dataclasses.replace(model, cudnn=gpus > 0)
    sizes = options.sizes(config, model.layers, model.positions, gpus)
    check_split(config, model, sizes)
    grid = mesh.make_mesh(sizes.pipe, sizes.data, sizes.expert, sizes.context, sizes.tensor)
    run = train.make_run(config, sizes, grid, model.layers)
    where = config.tokenizer or origin
    if given.input_bin is None:
        corpus = train.load_corpus(config, model.vocab_size, where)
        said = ", ".join(config.input_val_bin or (f"the validation part of {corpus.said.split(' (')[0]}",))
    else:
        texts = train.read_texts(given.input_bin, model.vocab_size, where, "input_bin")
        corpus = train.Corpus((), texts, "", tokenizer.load(where).end)
        said = ", ".join(given.input_bin)
    batches = train.evaluation_batches(run, corpus, given.eval_batches)
    spec = train.placed_spec(run, builder(model))
    params = partition.assemble(spec, partition.shardings(spec, run.mesh), weight)
    found = train.make_eval(run)(params, batches)
    if given.json:
        print(json.dumps(found._asdict()))
    else:
        print(f"loss {found.loss:.4f}  perplexity {found.perplexity:.2f}  ({found.tokens:,} tokens of {said})")


def run_plan(config: PlanConfig) -> None:
    """Print the plan."""
    model = model_config(config, source_of(config))
    options.check(config, model.layers, model.positions)
    sizes = options.sizes(config, model.layers, model.positions)
    check_split(config, model, sizes)
    grid = mesh.abstract_mesh(list(sizes.mesh.values()))
    run = train.make_run(config, sizes, grid, model.layers, loss=models.training_loss(model))
    found = plan.make_plan(run, builder(model), config.devices_per_host)
    if config.json:
        print(json.dumps(found))
    else:
        terminal = sys.stdout.isatty()
        width = shutil.get_terminal_size().columns if terminal else 120
        print(plan.as_text(run, found, width, terminal and "NO_COLOR" not in os.environ))


class Command(NamedTuple):
    """A command of run.py: its options, a frozen dataclass, and what it does with them (None: exit code 0)."""

    options: type
    run: Callable[[Any], int | None]


COMMANDS = {
    "train": Command(Config, run_train),
    "plan": Command(PlanConfig, run_plan),
    "tokenize": Command(tokenize.TokenizeConfig, tokenize.run),
    "generate": Command(GenerateConfig, run_generate),
    "export": Command(ExportConfig, run_export),
    "eval": Command(EvalConfig, run_eval),
    "plot": Command(curves.PlotConfig, curves.run),
    "compare": Command(compare.CompareConfig, compare.run),
}


def main(arguments: Sequence[str]) -> int:
    """Run a command line; returns the exit code, 2 for bad input."""
    warnings.showwarning = lambda message, *_: print(f"warning: {message}", file=sys.stderr)
    try:
        name, given = parse(arguments, {name: command.options for name, command in COMMANDS.items()})
        return COMMANDS[name].run(given) or 0
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except report.Diverged as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
