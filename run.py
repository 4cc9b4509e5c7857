"""Train a language model through a pipeline, or plan it.

    python run.py [train] [options]     train (the default)
    python run.py plan [options]        show schedule, memory and wire, without touching a device
    python run.py tokenize [options]    write text files as one token file
    python run.py generate [options]    continue a prompt
    python run.py export [options]      write a Hugging Face folder
    python run.py eval [options]        loss and perplexity of a trained model over a text
    python run.py plot RUNS... [options]    draw the curves of runs
    python run.py compare A B [options] hold two runs against each other
    python run.py bench [options]       tokens/s, MFU and memory of the training step, beside peers

Options: python run.py COMMAND --help
"""

import dataclasses
import io
import json
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

import models
from jaxpp import (
    bench,
    bench_slots,
    checkpoint,
    commands,
    compare,
    costs,
    curves,
    feeds,
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
    xla_flags,
)
from jaxpp import config as options
from jaxpp.commands import EvalConfig, ExportConfig, GenerateConfig, PlanConfig
from jaxpp.config import Config
from jaxpp.options import check_ranges, parse
from models import flops, hf, peft, prompted
from models.attention import kernel
from models.generate import Sampling, generate
from models.opened import (
    DEFAULT_MODEL,
    adapters_in,
    builder,
    open_base,
    open_model,
    open_source,
    spec_of,
    tokenizer_in,
    trained_type,
    with_adapters,
)

SAMPLE_TOKENS = 160
OF_THE_MODEL = {"dropout": "dropout", "router_balance_loss": "balance_loss", "router_z_loss": "z_loss"}


class Start(NamedTuple):
    """What a run starts from: its options, filled in with what that says; the model; weights or a checkpoint of it."""

    config: Config
    model: models.ModelConfig
    source: hf.Source | None
    found: checkpoint.Found | None


def start_of(config: Config) -> Start:
    """A checkpoint where --load has one, else a folder or file of weights, else random ones. Raises ValueError."""
    options.check_start(config)
    found, source = train.find_checkpoint(config), None
    if found:
        model = models.from_json(found.info["model"])
        adapters, moved = model.lora, config.init_from
        if adapters is None and config.model is not None:
            model = models.config_of(config.model)
        config = options.going_on(config, found.info["options"])
        if adapters:  # their base is where it was, or where the command line says that it is now
            config = config if moved is None else dataclasses.replace(config, init_from=moved, llmc_filepath=None)
            base, source = open_base(config, model)
            model = dataclasses.replace(base, lora=adapters)
    else:
        source = open_source(config)
        model = source.config if source else models.config_of(config.model or DEFAULT_MODEL)
    if source and source.warning and config.dropout is None:
        warnings.warn(source.warning, stacklevel=1)
    config, model = with_adapters(config, model, config.load if found else None)
    return Start(*with_options(config, model), source, found)


def with_options(config: Config, model: models.ModelConfig) -> tuple[Config, models.ModelConfig]:
    """Options and model made equal: an option that is given changes the model, one that is not gets the model's value.

    Raises ValueError for an option that is not of this model.
    """
    for name, ours in OF_THE_MODEL.items():
        value = getattr(config, name)
        if value is not None and not hasattr(model, ours):
            raise ValueError(f"{name}={value} is of models with experts, this model has none: leave it out")
        if value is not None:
            model = dataclasses.replace(model, **{ours: value})
        config = dataclasses.replace(config, **{name: getattr(model, ours, None)})
    return dataclasses.replace(config, tokenizer=config.tokenizer or tokenizer_in(config.init_from)), model


def check_split(config: Config, model: models.ModelConfig, sizes: options.Sizes) -> None:
    """Check that a model divides over the ranks that share its layers. Raises ValueError."""
    hidden = model.hidden or 4 * model.dim
    options.check_split(config, model.attention.heads, hidden, getattr(model, "experts", 0), sizes.length)


def start_devices(config: Config) -> int:
    """Start JAX on the GPUs, or on emulated devices where there are none. Returns the number of GPUs in use."""
    count = (config.stages or 4) * (config.data_parallel or 1) * config.tensor_parallel
    count *= config.context_parallel * config.expert_parallel
    xla_flags.apply(config.xla_flags, gpu=not config.emulate_devices)
    if config.precision_check:
        probe.spare_threads(config.emulate_devices or count)
    if config.emulate_devices:
        mesh.emulate_devices(config.emulate_devices)
    else:  # counts only where the CPU is what JAX finds
        mesh.set_host_devices(min(1024, -(-count // mesh.started(config.num_processes))))
    mesh.join_processes(config.coordinator_address, config.num_processes, config.process_id)
    return len(jax.devices()) if jax.default_backend() == "gpu" else 0


def lay_out(config: Config, model: models.ModelConfig) -> tuple[models.ModelConfig, options.Sizes, jax.sharding.Mesh]:
    """Check the options, start the devices and join them. Returns the model for these devices, the sizes, the mesh."""
    options.check(config, model.layers, model.positions)
    gpus = start_devices(config)
    sizes = options.sizes(config, model.layers, model.positions, gpus)
    check_split(config, model, sizes)
    grid = mesh.make_mesh(sizes.pipe, sizes.data, sizes.expert, sizes.context, sizes.tensor)
    return dataclasses.replace(model, cudnn=gpus > 0), sizes, grid


def describe(run: train.Run, model: models.ModelConfig, corpus: str) -> str:
    """The first line: what is trained, on what, how it is split."""
    trained, base = (0 if h is None else train.parameter_count(h) for h in train.halves_spec(run, builder(model)))
    adapters = f", of which {trained:,} are trained in adapters and {base:,} frozen" if base else ""
    c, s, device = run.config, run.sizes, jax.devices()[0]
    kind = f"{len(jax.devices())} emulated CPU devices" if device.platform == "cpu" else f"{device.device_kind}"
    chunks = f" x {c.virtual_pipeline_parallel} chunks" if c.virtual_pipeline_parallel > 1 else ""
    split = f" of {', '.join(map(str, c.layer_split))} layers" if c.layer_split else ""
    others = "".join(f" x {n} {axis}" for axis, n in s.mesh.items() if n > 1 and axis not in (mesh.PIPE, mesh.DATA))
    name = c.init_from or c.llmc_filepath or c.model or DEFAULT_MODEL
    return (
        f"training {name} ({(trained + base) / 1e6:.1f}M parameters{adapters}) on {corpus}: {c.schedule_name} over"
        f" {s.pipe} stages"
        f"{chunks}{split} x {s.data} replicas{others}, {s.microbatches} microbatches of {s.rows} x {s.length} tokens,"
        f" {c.dtype} with {run.pipeline.precision.wire} on the wire, {c.num_iteration} steps, {kind},"
        f" {kernel(model.attention, jax.numpy.dtype(c.dtype), model.dropout > 0)} attention"
        f"{f', dropout {model.dropout}' if model.dropout else ''}"
    )


def run_train(config: Config) -> None:
    """Train, validate, sample, and say where the files are."""
    config, model, source, found = start_of(config)
    model, sizes, grid = lay_out(config, model)
    run = train.make_run(
        config,
        sizes,
        grid,
        model.layers,
        loss=models.training_loss(model),
        model=models.to_json(model),
        flops_per_token=flops.per_token(model, sizes.length),
        recorder=recorder_of(config, sizes),
        trained=trained_type(model),
    )
    corpus = feeds.load_corpus(config, model.vocab_size, config.tokenizer)
    fed = feeds.make_feeds(config, sizes, corpus)
    run = dataclasses.replace(run, order=fed.batches.order())
    if found:
        train.check_checkpoint(run, found)
    build = builder(model)
    if source:
        hf.check_source(source, spec_of(dataclasses.replace(model, lora=None)))
    adapters = adapters_in(config.lora_load_path, model) if config.lora_load_path and not found else None
    resolved = describe_options(config, sizes)
    for option in ("save", "lora_save_path"):
        if getattr(config, option):
            checkpoint.check_writable(getattr(config, option), option)
    stop = mesh.on_sigterm() if config.save else lambda step: False
    done, quiet = found.step if found else 0, jax.process_index() > 0
    if run.recorder:
        run.recorder.open()
    with metrics.Log(config.output_dir, config.num_iteration, done, config.tensorboard, quiet) as log:
        if not quiet:
            log.path.with_name("config.toml").write_text(resolved, encoding="utf-8")
        if config.load:
            log.say(f"going on from {found.path}" if found else f"{config.load} has no checkpoint yet: starting anew")
        log.say(describe(run, model, corpus.said))
        if run.recorder:
            log.say(f"precision check: tensors are recorded in {run.recorder.folder}, with remat none")
        sample = sampler(run, model, corpus.validation[0], log)
        read = partial(hf.assemble, source) if source else None
        read_trained = partial(partition.assemble, weight=adapters) if adapters else None
        hooks = train.Hooks(sample, read, read_trained, found, stop)
        state = train.train(run, build, fed, log, hooks)
        if config.lora_save_path:
            write_adapters(config, model, state.params)
            log.say(f"adapters are in {config.lora_save_path}")
        if config.save:
            log.say(f"checkpoints are in {config.save}")
        log.say(f"metrics are in {log.path}")


def write_adapters(config: Config, model: models.ModelConfig, params: partition.Placed) -> None:
    """Write the adapters in PEFT's format, process 0 alone; all give it their parts."""
    held = checkpoint.host_arrays((params,))["0"]
    if jax.process_index() == 0:
        weight = lambda part, path, layer: held[part][path][str(layer)]
        peft.write(config.lora_save_path or "", model, weight, config.init_from)


def recorder_of(config: Config, sizes: options.Sizes) -> records.Recorder | None:
    """The precision checker, where it is asked for."""
    if config.precision_check is None:
        return None
    return records.Recorder(records.parse_check(config.precision_check, config.output_dir), sizes.data)


def describe_options(config: Config, sizes: options.Sizes) -> str:
    """The options as they were resolved, as TOML; --config with a file of it repeats the run."""
    found = dataclasses.asdict(options.resolved(config, sizes))
    if not (config.init_from or config.llmc_filepath):
        found["model"] = config.model or DEFAULT_MODEL
    return "# python run.py --config THIS_FILE\n" + option_files.to_toml(found)


def sampler(
    run: train.Run, model: models.ModelConfig, tokens: np.ndarray, log: metrics.Log
) -> Callable[[partition.Placed], None]:
    """A function that says how the model goes on after the validation text's beginning, or nothing, which it says."""
    text_of = tokenizer.load(run.config.tokenizer)
    if run.config.tokenizer is None and model.vocab_size != text_of.vocab_size:
        log.say(f"no samples: the model's {model.vocab_size} tokens are not bytes; --tokenizer says how they read")
        return lambda params: None
    prompt = tokens[: run.sizes.length // 2]
    key = jax.random.key(run.config.seed)
    # Between processes each token waits for all layers to come over the network.
    count = min(SAMPLE_TOKENS // (8 if jax.process_count() > 1 else 1), model.positions - len(prompt))

    def sample(params: partition.Placed) -> None:
        found = generate(params, prompt, count, key, Sampling(), partition.unstack, run.config.dtype, text_of.end)
        log.say(f"a continuation of {text_of.decode(prompt[-32:].tolist())!r}:\n{text_of.decode(list(found))}")

    return sample


def run_export(config: ExportConfig) -> None:
    """Write a Hugging Face folder, one tensor at a time."""
    if config.load is None or config.to is None:
        raise ValueError("export needs --load FOLDER and --to FOLDER, for example --load model --to exported")
    model, weight, where, origin, _ = open_model(config.load, config.lora_load_path)
    for name, path in (("load", config.load), ("load began as", origin)):
        if path is not None and Path(path).is_dir() and Path(config.to).exists() and os.path.samefile(path, config.to):
            raise ValueError(
                f"to={config.to!r} is {name}={path!r}, which would be overwritten: give another folder, for example"
                f" --to {path.rstrip('/')}-exported"
            )
    if config.tokenizer is not None:
        tokenizer.check_vocabulary(tokenizer.load(config.tokenizer), model.vocab_size)
    spec = spec_of(model)
    files = hf.export(model, spec, weight, config.to, config.dtype, origin, config.tokenizer or where)
    print(f"wrote {', '.join(files)} to {config.to}")


def run_eval(given: EvalConfig) -> None:
    """Print a model's loss and perplexity over a text."""
    check_ranges(given)
    if given.load is None:
        raise ValueError("eval needs --load FOLDER, for example --load model")
    model, weight, origin, _, info = open_model(given.load, given.lora_load_path)
    config = commands.of_eval(given, info)
    model, sizes, grid = lay_out(config, model)
    run = train.make_run(config, sizes, grid, model.layers)
    where = config.tokenizer or origin
    if given.input_bin is None:
        corpus = feeds.load_corpus(config, model.vocab_size, where)
        said = ", ".join(config.input_val_bin or (f"the validation part of {corpus.said.split(' (')[0]}",))
    else:
        texts = feeds.read_texts(given.input_bin, model.vocab_size, where, "input_bin")
        corpus = feeds.Corpus((), texts, "", tokenizer.load(where).end)
        said = ", ".join(given.input_bin)
    batches = feeds.evaluation_batches(config, sizes, corpus, given.eval_batches)
    spec = train.placed_spec(run, builder(model))
    params = partition.assemble(spec, partition.shardings(spec, run.mesh), weight)
    found = train.make_eval(run)(params, batches)
    if given.json:
        print(json.dumps(found._asdict()))
    else:
        print(f"loss {found.loss:.4f}  perplexity {found.perplexity:.2f}  ({found.tokens:,} tokens of {said})")


def run_plan(config: PlanConfig) -> None:
    """Print the plan."""
    resolved, model, *_ = start_of(config)
    options.check(resolved, model.layers, model.positions)
    sizes = options.sizes(resolved, model.layers, model.positions)
    check_split(resolved, model, sizes)
    grid = mesh.abstract_mesh(list(sizes.mesh.values()))
    more = {"loss": models.training_loss(model), "trained": trained_type(model)}
    run = train.make_run(resolved, sizes, grid, model.layers, **more)
    found = plan.make_plan(run, builder(model), config.devices_per_host)
    if config.measure:
        small = dataclasses.replace(model, layers=costs.STAGES)
        pipeline = mocked(commands.of_a_layer(resolved), small, costs.STAGES)
        ranks = bench_slots.measure_ranks(*pipeline, costs.STAGES, range(costs.STAGES), model.vocab_size)
        found["measured"] = plan.measured(run, builder(model), costs.of_ranks(list(ranks)))
    if config.json:
        print(json.dumps(found))
    else:
        terminal = sys.stdout.isatty()
        width = shutil.get_terminal_size().columns if terminal else 120
        print(plan.as_text(run, found, width, terminal and "NO_COLOR" not in os.environ))


def model_of_bench(config: bench.BenchConfig) -> tuple[Config, models.ModelConfig]:
    """The options, and the model with as many layers as they ask for, checked. Raises ValueError."""
    resolved, model, *_ = start_of(config)
    model = dataclasses.replace(model, layers=bench.layers_of(config, model.layers))
    options.check(resolved, model.layers, model.positions)
    return resolved, model


def bench_turn(config: bench.BenchConfig) -> dict[str, Any]:
    """Time the training step, in this process."""
    resolved, model = model_of_bench(config)
    model, sizes, grid = lay_out(resolved, model)
    more = {"loss": models.training_loss(model), "trained": trained_type(model)}
    run = train.make_run(resolved, sizes, grid, model.layers, **more)
    counts = {name: bench.Count(said, count(model, sizes.length)) for name, (said, count) in flops.COUNTS.items()}
    return bench.measure(run, builder(model), model.vocab_size, counts, config.bench_steps)


def bench_train(config: bench.BenchConfig) -> int:
    """Measure the training step in turn with peers."""
    return bench.against(config, bench_turn, name_of_bench(config))


def name_of_bench(config: bench.BenchConfig) -> str:
    """What is measured, in words."""
    resolved, model = model_of_bench(config)
    name = resolved.init_from or resolved.llmc_filepath or resolved.model or DEFAULT_MODEL
    return f"{name}, {model.layers} layers"


def mocked(config: Config, model: models.ModelConfig, stages: int) -> tuple[bench_slots.MakeRun, train.Build]:
    """Start the devices of a pipeline of which one may be there alone. Returns its run by the mesh, and the model's
    builder."""
    bench_slots.check(config)
    if not config.emulate_devices and mesh.gpus_here():
        bench_slots.mock_neighbours(stages)
    model, sizes, _ = lay_out(dataclasses.replace(config, pipeline_parallel=stages, data_parallel=1), model)
    loss = models.training_loss(model)
    return lambda grid: train.make_run(config, sizes, grid, model.layers, loss=loss), builder(model)


def slots_turn(config: bench.BenchConfig) -> dict[str, Any]:
    """Measure a pipeline's slots, in this process."""
    resolved, model = model_of_bench(config)
    stages = resolved.stages or 4
    ranks = range(stages) if config.ranks is None else config.ranks
    return bench_slots.measure(*mocked(resolved, model, stages), stages, ranks, model.vocab_size)


def bench_slot_times(config: bench.BenchConfig) -> int:
    """Measure what each slot of a pipeline costs on each rank."""
    bench.once(config, slots_turn, name_of_bench(config))
    return 0


BENCHES = {"train": bench_train, "slots": bench_slot_times}  # by bench.KINDS


def run_bench(config: bench.BenchConfig) -> int:
    """Measure what is asked for."""
    bench.check(config)
    return BENCHES[config.what[0]](config)


class Command(NamedTuple):
    """A command of run.py: its options, a frozen dataclass, and what it does with them (None: exit code 0)."""

    options: type
    run: Callable[[Any], int | None]


COMMANDS = {
    "train": Command(Config, run_train),
    "plan": Command(PlanConfig, run_plan),
    "tokenize": Command(tokenize.TokenizeConfig, tokenize.run),
    "generate": Command(GenerateConfig, prompted.run),
    "export": Command(ExportConfig, run_export),
    "eval": Command(EvalConfig, run_eval),
    "plot": Command(curves.PlotConfig, curves.run),
    "compare": Command(compare.CompareConfig, compare.run),
    "bench": Command(bench.BenchConfig, run_bench),
}


def main(arguments: Sequence[str]) -> int:
    """Run a command line; returns the exit code, 2 for bad input."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a letter that the terminal has not is no reason to stop
    warnings.showwarning = lambda message, *_: print(f"warning: {message}", file=sys.stderr)
    try:
        name, given = parse(arguments, {name: command.options for name, command in COMMANDS.items()})
        return COMMANDS[name].run(given) or 0
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except report.DivergedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
