"""The training loop: state on the mesh, one jitted step, validation, and what a run reports.

Legend: B microbatch size, T sequence, M microbatches, DP data ranks.
"""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpp import checkpoint, data, devices, executor, optim, partition, precision, schedules, tokenize, tokenizer, wire
from jaxpp.config import Config, Sizes
from jaxpp.executor import Pipeline
from jaxpp.losses import token_loss
from jaxpp.mesh import CONTEXT, ROWS
from jaxpp.metrics import Log
from jaxpp.partition import Placed
from jaxpp.profile import Trace, parse_span

Tree = Any
VALIDATION_BATCHES = 8
Build = Callable[[jax.Array], Any]  # key -> model with embed, blocks, head
Read = Callable[[Placed, Placed], Placed]  # shapes, shardings -> parameters


class State(NamedTuple):
    """What a step changes: parameters, optimizer state, the number of steps done, and the executor's workspace."""

    params: Placed
    opt_state: Tree
    step: jax.Array
    workspace: Tree


@dataclass(frozen=True)
class Run:
    """Everything of a run that does not change: the options, the sizes, the mesh and what is built from them.

    loss: see `executor.value_and_grad`. model: the model as JSON, for checkpoints. flops_per_token: that the model
    needs, forward and backward (0: not known).
    """

    config: Config
    sizes: Sizes
    mesh: Any
    layout: partition.Layout
    loss: Callable = token_loss
    model: dict[str, Any] = field(default_factory=dict)
    flops_per_token: int = 0

    @property
    def pipeline(self) -> Pipeline:
        """The executor's description of the pipeline."""
        c, s = self.config, self.sizes
        chosen = precision.resolve(c.dtype, c.pipeline_dtype, c.grad_pipeline_dtype, c.fp32_residual)
        table = schedules.build(c.schedule_name, s.pipe, s.microbatches, c.virtual_pipeline_parallel)
        return Pipeline(table, self.mesh, chosen, c.remat, self.loss, c.zero_stage, c.sequence_parallel)

    @property
    def rate(self) -> Callable[[Any], jax.Array]:
        """The learning rate of a step."""
        c = self.config
        return optim.learning_rate(
            c.lr_decay_style, c.learning_rate, c.min_learning_rate, c.warmup_iterations, c.num_iteration
        )

    @property
    def optimizer(self) -> optax.GradientTransformation:
        """The optimizer, without clipping: the step clips with the norm that it reports."""
        return optim.make(self.config.optimizer, self.rate, self.config.weight_decay, 0.0)

    def batch_spec(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes of a batch, int32 [M, DP*B, T]."""
        shape = (self.sizes.microbatches, self.sizes.rows, self.sizes.length)
        return {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name in ("tokens", "labels")}

    def key_spec(self) -> jax.ShapeDtypeStruct | None:
        """Shape of a step's key; None without dropout."""
        return jax.eval_shape(lambda: jax.random.key(0)) if self.config.dropout else None


def make_run(config: Config, sizes: Sizes, mesh: Any, layers: int, **fields: Any) -> Run:
    """Describe a run; fields, loss and model of `Run`. Raises ValueError where layers and stages do not fit."""
    layout = partition.split_layers(layers, sizes.pipe, config.virtual_pipeline_parallel)
    return Run(config, sizes, mesh, layout, **fields)


def placed_spec(run: Run, build: Build) -> Placed:
    """Shapes of the placed parameters; nothing is allocated."""
    return jax.eval_shape(lambda: partition.stack(build(jax.random.key(0)), run.layout))


def at_rest_of(run: Run, params: Placed) -> tuple[Placed, Placed]:
    """Shardings of the parameters, and of what the optimizer keeps for each."""
    param, moment = (partition.shardings(params, run.mesh, run.config.zero_stage, of) for of in ("param", "moment"))
    return param, moment


def state_spec(run: Run, build: Build) -> tuple[tuple, tuple]:
    """Shapes, and shardings, of what a checkpoint holds: parameters, optimizer state, step."""
    spec = placed_spec(run, build)
    at_rest, moments = at_rest_of(run, spec)
    opt_spec = jax.eval_shape(run.optimizer.init, spec)
    like_params = optax.tree_utils.tree_map_params(
        run.optimizer, lambda _, s: s, opt_spec, moments, transform_non_params=lambda _: _everywhere(run.mesh)
    )
    return (spec, opt_spec, jax.ShapeDtypeStruct((), jnp.int32)), (at_rest, like_params, _everywhere(run.mesh))


def initial_state(run: Run, build: Build, read: Read | None = None, found: checkpoint.Found | None = None) -> State:
    """Parameters, optimizer state and workspace, each made on the devices where it rests.

    Args: read, gives the parameters instead of random ones; found, a checkpoint that all is read from.
    """
    (spec, opt_spec, step_spec), (at_rest, like_params, everywhere) = state_spec(run, build)
    workspace = executor.new_workspace(run.pipeline, spec, run.batch_spec(), run.key_spec())
    if found is not None:
        shardings = (at_rest, like_params, everywhere)
        params, opt_state, step = checkpoint.restore(found, (spec, opt_spec, step_spec), shardings)
        return State(params, opt_state, step, workspace)
    if read is not None:
        params = read(spec, at_rest)
    else:
        make = jax.jit(lambda key: partition.stack(build(key), run.layout), out_shardings=at_rest)
        params = make(jax.random.key(run.config.seed))
    opt_state = jax.jit(run.optimizer.init, out_shardings=like_params)(params)
    return State(params, opt_state, jax.device_put(jnp.zeros((), jnp.int32), everywhere), workspace)


def describe_run(run: Run) -> dict[str, Any]:
    """What a checkpoint says of its run: the model, what must not change, and all options."""
    fixed = {"optimizer": run.config.optimizer, "seed": run.config.seed}
    fixed |= {"tokens_per_step": run.sizes.tokens, "sequence_length": run.sizes.length}
    return {"model": run.model, "fixed": fixed, "options": asdict(run.config)}


def find_checkpoint(config: Config) -> checkpoint.Found | None:
    """The checkpoint that a run goes on from. Raises ValueError where there is none.

    A folder to save to may be given to load from as well, empty at first: the same command then starts and goes on.
    """
    if config.load is None:
        return None
    found = checkpoint.latest(config.load)
    same = config.save is not None and Path(config.load).resolve() == Path(config.save).resolve()
    if found is None and not same:
        raise ValueError(f"load={config.load!r} has no checkpoint: give a folder that --save has written to")
    return found


def check_checkpoint(run: Run, found: checkpoint.Found) -> None:
    """Check that a run can go on from a checkpoint. Raises ValueError where that is of another run, or at its end."""
    config = run.config
    now = json.loads(json.dumps(describe_run(run)))  # as it comes back from a file
    checkpoint.check_same("load", found.info["model"], now["model"], "model")
    checkpoint.check_same("load", found.info["fixed"], now["fixed"], "run")
    if found.step >= config.num_iteration:
        raise ValueError(
            f"load={config.load!r} is at step {found.step}, and num_iteration={config.num_iteration} leaves nothing"
            f" to do: use a larger --num_iteration"
        )


def _everywhere(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def make_step(run: Run) -> Callable[[State, dict], tuple[State, dict[str, jax.Array]]]:
    """The jitted training step: gradients, clipping, update; the state is donated.

    The metrics are loss, grad_norm (before clipping) and learning_rate, float32 [], and those of the loss.
    """
    config, pipeline, optimizer, rate = run.config, run.pipeline, run.optimizer, run.rate

    def step(state: State, batch: dict[str, jax.Array]) -> tuple[State, dict[str, jax.Array]]:
        key = None
        if config.dropout:
            key = jax.random.fold_in(jax.random.key(config.seed), state.step)
        result = executor.train_step(pipeline, state.params, batch, key, state.workspace)
        at_rest, moments = at_rest_of(run, state.params)
        # Each rank updates the part whose moments it has.
        grads = jax.lax.with_sharding_constraint(result.grads, moments)
        norm = optim.global_norm(grads)
        if config.clip_grad:
            scale = jnp.minimum(1.0, config.clip_grad / jnp.maximum(norm, 1e-12))
            grads = jax.tree.map(lambda g: g * scale, grads)
        # optax's types know no trees but their own
        updates, opt_state = optimizer.update(cast(Any, grads), state.opt_state, cast(Any, state.params))
        put = jax.lax.with_sharding_constraint
        opt_state = optax.tree_utils.tree_map_params(optimizer, put, opt_state, moments)
        params = put(cast(Placed, optax.apply_updates(cast(Any, state.params), updates)), at_rest)
        metrics = {"loss": result.loss, "grad_norm": norm, "learning_rate": rate(state.step), **result.metrics}
        return State(params, opt_state, state.step + 1, result.workspace), metrics

    return jax.jit(step, donate_argnums=0)


def batch_sharding(run: Run) -> NamedSharding:
    """Where a batch's arrays lie: rows over the replicas, sequences over their parts."""
    return NamedSharding(run.mesh, PartitionSpec(None, ROWS, CONTEXT))


def put_batch(run: Run, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    """Place a batch on the mesh."""
    where = batch_sharding(run)
    if jax.process_count() == 1:
        return jax.device_put(batch, where)
    return {k: jax.make_array_from_callback(a.shape, where, a.__getitem__) for k, a in batch.items()}


def load_corpus(config: Config, vocab_size: int, where: str | None = None) -> tuple[np.ndarray, np.ndarray, str]:
    """Training and validation tokens, and their description. Raises ValueError for files that cannot be used.

    where: the tokenizer of text, see `tokenizer.load`; a text is tokenized once and found again by its content.
    """
    chosen = tokenizer.load(where)
    if where is not None or config.input_bin is None:  # the tokens of a file are looked at themselves
        tokenizer.check_vocabulary(chosen, vocab_size)

    def tokens_of(found: np.ndarray, option: str) -> np.ndarray:
        if found.dtype != np.uint8 or where is None:  # a token file, or bytes
            return found
        return data.read_tokens(tokenize.cached(found.tobytes(), where), vocab_size, option=option)

    def read(path: str, option: str) -> np.ndarray:
        found = data.read_tokens(path, 2**32, option=option)
        text = found.dtype == np.uint8 and where is not None
        return tokens_of(found, option) if text else data.read_tokens(path, vocab_size, option=option)

    if config.input_bin is None:
        if config.input_val_bin is not None:
            raise ValueError("input_val_bin is given without input_bin: give both, or neither for Python's own source")
        train, validation = (tokens_of(part, "input_bin") for part in data.default_corpus())
        kind = f"{len(train) / 1e6:.1f} MB, byte tokens" if where is None else f"{len(train):,} tokens, {chosen.name}"
        return train, validation, f"Python's own source ({kind})"
    train = read(config.input_bin, "input_bin")
    if config.input_val_bin is not None:
        validation = read(config.input_val_bin, "input_val_bin")
    else:  # the last twentieth is held out
        train, validation = np.split(train, [len(train) - len(train) // data.HELD_OUT])
    by = "" if where is None else f", {chosen.name}"
    return train, validation, f"{config.input_bin} ({len(train):,} tokens{by})"


def validation_set(run: Run, tokens: np.ndarray) -> list[dict[str, np.ndarray]]:
    """The fixed batches that validation runs over."""
    s, path = run.sizes, run.config.input_val_bin
    option = "input_bin" if path is None else f"input_val_bin={path!r}"
    return data.validation_batches(tokens, s.microbatches, s.rows, s.length, VALIDATION_BATCHES, option=option)


def check_corpus(run: Run, train_tokens: np.ndarray, validation_tokens: np.ndarray) -> None:
    """Check that both texts hold at least one row. Raises ValueError with the numbers."""
    c, s = run.config, run.sizes
    held_out = c.input_bin is not None and c.input_val_bin is None
    shares = data.split_note(len(train_tokens) + len(validation_tokens)) if held_out else ("", "")
    name = "input_bin" if c.input_bin is None else f"input_bin={c.input_bin!r}"
    data.check_text(train_tokens, s.length, name + shares[0])
    data.check_text(
        validation_tokens, s.length, f"input_val_bin={c.input_val_bin!r}" if c.input_val_bin else name + shares[1]
    )


def make_eval(run: Run) -> Callable[[Placed, list[dict]], float]:
    """A function (params, batches) -> mean loss of a valid token, through the pipeline forward only."""
    # Validation is of the text alone: what else a model trains by stays out.
    evaluate = jax.jit(partial(executor.eval_step, replace(run.pipeline, loss=token_loss)))

    def mean(params: Placed, batches: list[dict]) -> float:
        sums = [evaluate(params, put_batch(run, batch)) for batch in batches]
        total, count = np.asarray(jax.device_get(sums), np.float64).sum(axis=0)
        return float(total / count)

    return mean


class Hooks(NamedTuple):
    """What a run does beside its steps.

    sample, called with the parameters every `sample_every` steps and at the end; read, gives the first parameters
    instead of random ones; found, a checkpoint to go on from; stop, returns whether to save and end after a step.
    """

    sample: Callable[[Placed], None] = lambda params: None
    read: Read | None = None
    found: checkpoint.Found | None = None
    stop: Callable[[int], bool] = lambda step: False


def train(run: Run, build: Build, corpus: tuple[np.ndarray, np.ndarray], log: Log, hooks: Hooks = Hooks()) -> State:  # noqa: B008
    """Train.

    Args: build, key -> model; corpus, training and validation tokens.
    Returns: the last state. Every step and validation is logged; the step's numbers are fetched while the next one
    runs, so that the host is never waited for.
    """
    config, s = run.config, run.sizes
    batches = data.Batches(corpus[0], s.microbatches, s.rows, s.length, config.seed)
    held_out = validation_set(run, corpus[1])
    saver = checkpoint.Saver(config.save, config.max_checkpoint_keep) if config.save else None
    wire.self_test(run.mesh, run.pipeline.wire)
    state, step, evaluate = initial_state(run, build, hooks.read, hooks.found), make_step(run), make_eval(run)
    report = _reporter(run, log)
    span = parse_span(config.profile, config.num_iteration) if config.profile else range(0)
    trace = Trace(span, log.path.with_name("profile"))
    for i in range(hooks.found.step if hooks.found else 0, config.num_iteration):
        if trace.starts(i + 1):
            report(None, None, flush=True)
            trace.start(state)
            report(None, None, flush=True)  # what that took is no step's time
        with jax.profiler.StepTraceAnnotation("train", step_num=i + 1):
            batch = put_batch(run, batches.at(i))
            state, metrics = step(state, batch)
        last, stopping = i + 1 == config.num_iteration, hooks.stop(i + 1)
        due = lambda every, i=i, last=last: last or (every > 0 and (i + 1) % every == 0)
        validate, sampling = due(config.val_loss_every), due(config.sample_every)
        saving = saver is not None and (due(config.save_interval) or stopping)
        tracing = trace.ends(i + 1, stopping)
        report(i + 1, metrics, flush=validate or sampling or saving or tracing)
        if tracing:
            trace.stop(state, step.lower(state, batch).compile().as_text)
            log.say(f"the trace is in {trace.folder}")
        if saver is not None and saving:
            saver.save(i + 1, (state.params, state.opt_state, state.step), describe_run(run))
        if stopping:
            log.say(f"stopped after step {i + 1}")
            break
        if validate:
            value = evaluate(state.params, held_out)
            log.write({"step": i + 1, "val_loss": value})
            log.say(f"step {i + 1}  validation loss {value:.4f}")
        if sampling:
            hooks.sample(state.params)
        if validate or sampling or saving or tracing:
            report(None, None, flush=True)
    report(None, None, flush=True)
    if saver is not None:
        saver.wait()
    return state


def _reporter(run: Run, log: Log) -> Callable:
    """Log each step once its numbers are there: those of step i while step i+1 runs, or at once when flushing."""
    waiting: list[tuple[int, dict]] = []
    clock, used = [time.perf_counter()], run.mesh.devices.ravel().tolist()

    def report(step: int | None, metrics: dict | None, flush: bool) -> None:
        if step is not None and metrics is not None:
            waiting.append((step, metrics))
        while len(waiting) > (0 if flush else 1):
            number, values = waiting.pop(0)
            found = {name: value.tolist() for name, value in jax.device_get(values).items()}
            now = time.perf_counter()
            seconds, clock[0] = now - clock[0], now
            speed = {"tokens_per_second": run.sizes.tokens / seconds, "step_seconds": seconds}
            told = devices.figures(used, run.flops_per_token * speed["tokens_per_second"])
            log.step({"step": number, **found, **speed, **told})
        if step is None:
            clock[0] = time.perf_counter()  # validation is no step's time

    return report


def parameter_count(spec: Placed) -> int:
    """Number of parameters of the model, tied ones once and empty places not at all."""
    layout = spec.layout
    places = layout.stages * layout.chunks
    sizes = [sum(int(np.prod(a.shape)) for a in jax.tree.leaves(block)) // places for block in spec.blocks[:1]]
    outer = sum(int(np.prod(a.shape)) for a in jax.tree.leaves(spec.outer))
    return outer + sizes[0] * sum(layout.layers)
