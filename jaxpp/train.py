"""The training loop: state on the mesh, one jitted step, validation, and what a run reports.

Legend: B microbatch size, T sequence, M microbatches, DP data ranks.
"""

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpp import checkpoint, executor, optim, partition, precision, schedules, wire
from jaxpp.config import Config, Sizes
from jaxpp.executor import Pipeline
from jaxpp.feeds import Feeds
from jaxpp.losses import token_loss
from jaxpp.mesh import CONTEXT, ROWS
from jaxpp.metrics import Log
from jaxpp.partition import Placed
from jaxpp.probe import Probe
from jaxpp.profile import Trace, parse_span
from jaxpp.records import Recorder, watched
from jaxpp.report import reporter
from jaxpp.texts import array_names

Tree = Any
Build = Callable[[jax.Array], Any]  # key -> model with embed, blocks, head
Read = Callable[[Placed, Placed], Placed]  # shapes, shardings -> parameters


class State(NamedTuple):
    """What a step changes: parameters, optimizer state, the number of steps done, and the executor's workspace; and
    what it hands on as it is, the frozen base where only some of the parameters are trained."""

    params: Placed
    opt_state: Tree
    step: jax.Array
    workspace: Tree
    base: Placed | None = None

    @property
    def whole(self) -> Placed:
        """All parameters of the model."""
        return partition.join(self.params, self.base)


@dataclass(frozen=True)
class Run:
    """Everything of a run that does not change: the options, the sizes, the mesh and what is built from them.

    loss: see `executor.value_and_grad`. model: the model as JSON, for checkpoints. order: what the order of the data
    depends on, likewise. flops_per_token: that the model needs, forward and backward (0: not known). recorder: of the
    precision checker. trained: the type of the variables that are trained, where the others rest; None: all are.
    """

    config: Config
    sizes: Sizes
    mesh: Any
    layout: partition.Layout
    loss: Callable = token_loss
    model: dict[str, Any] = field(default_factory=dict)
    flops_per_token: int = 0
    order: dict[str, Any] = field(default_factory=dict)
    recorder: Recorder | None = None
    trained: type | None = None

    @property
    def pipeline(self) -> Pipeline:
        """The executor's description of the pipeline."""
        c, s = self.config, self.sizes
        chosen = precision.resolve(c.dtype, c.pipeline_dtype, c.grad_pipeline_dtype, c.fp32_residual)
        table = schedules.build(c.schedule_name, s.pipe, s.microbatches, c.virtual_pipeline_parallel)
        more = {name: getattr(c, name) for name in ("zero_stage", "zero_gather", "sequence_parallel")}
        if self.recorder is None:
            return Pipeline(table, self.mesh, chosen, c.remat, self.loss, **more)
        probe = Probe(self.recorder.check.level, self.recorder)
        return Pipeline(table, self.mesh, chosen, "none", self.loss, **more, probe=probe)

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
        made = optim.make(self.config.optimizer, self.rate, self.config.weight_decay, 0.0)
        return optim.with_loss_scale(made) if self.config.scales_loss else made

    def batch_spec(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes of a batch, int32 [M, DP*B, T]."""
        shape = (self.sizes.microbatches, self.sizes.rows, self.sizes.length)
        return {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name in array_names(self.config.pack_documents)}

    def key_spec(self) -> jax.ShapeDtypeStruct | None:
        """Shape of a step's key; None without dropout."""
        return jax.eval_shape(lambda: jax.random.key(0)) if self.config.drops else None


def make_run(config: Config, sizes: Sizes, mesh: Any, layers: int, **fields: Any) -> Run:
    """Describe a run; fields, loss and model of `Run`. Raises ValueError where layers and stages do not fit."""
    layout = partition.split_layers(layers, sizes.pipe, config.virtual_pipeline_parallel, config.layer_split)
    return Run(config, sizes, mesh, layout, **fields)


def placed_spec(run: Run, build: Build) -> Placed:
    """Shapes of the placed parameters; nothing is allocated."""
    return jax.eval_shape(lambda: partition.stack(build(jax.random.key(0)), run.layout))


def halves(run: Run, placed: Placed) -> tuple[Placed, Placed | None]:
    """The parameters that are trained, and the frozen base, None where all are trained.

    The base rests in the dtype that the step computes in: a step casts it to that anyway, and nothing is added to it.
    """
    trained, base = partition.split(placed, run.trained)
    return trained, jax.tree.map(lambda a: a.astype(run.pipeline.precision.compute), base)


def halves_spec(run: Run, build: Build) -> tuple[Placed, Placed | None]:
    """Shapes of both."""
    return jax.eval_shape(partial(halves, run), placed_spec(run, build))


def at_rest_of(run: Run, params: Placed) -> tuple[Placed, Placed]:
    """Shardings of the parameters, and of what the optimizer keeps for each."""
    param, moment = (partition.shardings(params, run.mesh, run.config.zero_stage, of) for of in ("param", "moment"))
    return param, moment


def state_spec(run: Run, build: Build) -> tuple[tuple, tuple]:
    """Shapes, and shardings, of what a checkpoint holds: trained parameters, optimizer state, step."""
    spec, _ = halves_spec(run, build)
    at_rest, moments = at_rest_of(run, spec)
    opt_spec = jax.eval_shape(run.optimizer.init, spec)
    like_params = optax.tree_utils.tree_map_params(
        run.optimizer, lambda _, s: s, opt_spec, moments, transform_non_params=lambda _: _everywhere(run.mesh)
    )
    return (spec, opt_spec, jax.ShapeDtypeStruct((), jnp.int32)), (at_rest, like_params, _everywhere(run.mesh))


def initial_state(
    run: Run,
    build: Build,
    read: Read | None = None,
    found: checkpoint.Found | None = None,
    read_trained: Read | None = None,
) -> State:
    """Parameters, optimizer state and workspace, each made on the devices where it rests.

    Args: read, gives the parameters instead of random ones, with a frozen base that alone; found, a checkpoint that all
    but the base is read from; read_trained, gives the trained parameters beside a base.
    """
    (spec, opt_spec, step_spec), (at_rest, like_params, everywhere) = state_spec(run, build)
    _, base_spec = halves_spec(run, build)
    workspace = executor.new_workspace(run.pipeline, spec, run.batch_spec(), run.key_spec(), base_spec)

    def make(half: int, of: Placed, where: Placed, read: Read | None) -> Placed:
        if read is not None:
            return read(of, where)
        draw = jax.jit(lambda key: halves(run, partition.stack(build(key), run.layout))[half], out_shardings=where)
        return cast(Placed, draw(jax.random.key(run.config.seed)))

    base = None if base_spec is None else make(1, base_spec, at_rest_of(run, base_spec)[0], read)
    if found is not None:
        shardings = (at_rest, like_params, everywhere)
        params, opt_state, step = checkpoint.restore(found, (spec, opt_spec, step_spec), shardings)
        return State(params, opt_state, step, workspace, base)
    params = make(0, spec, at_rest, read if base is None else read_trained)
    opt_state = jax.jit(run.optimizer.init, out_shardings=like_params)(params)
    return State(params, opt_state, jax.device_put(jnp.zeros((), jnp.int32), everywhere), workspace, base)


def describe_run(run: Run) -> dict[str, Any]:
    """What a checkpoint says of its run: the model, what must not change, and all options."""
    fixed = {"optimizer": run.config.optimizer, "seed": run.config.seed}
    fixed |= {"tokens_per_step": run.sizes.tokens, "sequence_length": run.sizes.length, **run.order}
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
        if config.drops:
            key = jax.random.fold_in(jax.random.key(config.seed), state.step)
        scale = cast(Any, state.opt_state).scale if config.scales_loss else None
        result = executor.train_step(pipeline, state.params, batch, key, state.workspace, scale, state.base)
        at_rest, moments = at_rest_of(run, state.params)
        # Each rank updates the part whose moments it has.
        grads = jax.lax.with_sharding_constraint(result.grads, moments)
        norm = optim.global_norm(grads)
        if config.clip_grad:
            shrink = jnp.minimum(1.0, config.clip_grad / jnp.maximum(norm, 1e-12))
            grads = jax.tree.map(lambda g: g * shrink, grads)
        # optax's types know no trees but their own
        updates, opt_state = optimizer.update(cast(Any, grads), state.opt_state, cast(Any, state.params))
        put = jax.lax.with_sharding_constraint
        opt_state = optax.tree_utils.tree_map_params(optimizer, put, opt_state, moments)
        params = put(cast(Placed, optax.apply_updates(cast(Any, state.params), updates)), at_rest)
        metrics: dict[str, Any] = {
            "loss": result.loss,
            "grad_norm": norm,
            "learning_rate": rate(state.step),
            **result.metrics,
        }
        if config.scales_loss:
            metrics |= {"loss_scale": scale, "skipped_steps": cast(Any, opt_state).skipped}
        return State(params, opt_state, state.step + 1, result.workspace, state.base), metrics

    return jax.jit(step, donate_argnums=0)


def batch_sharding(run: Run) -> NamedSharding:
    """Where a batch's arrays lie: rows over the replicas, sequences over their parts."""
    return NamedSharding(run.mesh, PartitionSpec(None, ROWS, CONTEXT))


def rows_here(run: Run) -> slice:
    """The rows of a microbatch that devices of this process read."""
    shape = (run.sizes.microbatches, run.sizes.rows, run.sizes.length)
    held: Any = batch_sharding(run).addressable_devices_indices_map(shape).values()
    parts = [index[1].indices(shape[1]) for index in held]
    return slice(min(first for first, _, _ in parts), max(last for _, last, _ in parts))


def put_batch(run: Run, batch: dict[str, np.ndarray], rows: slice = slice(None)) -> dict[str, jax.Array]:
    """Place a batch on the mesh. rows: those of each microbatch that the arrays hold, at least `rows_here`."""
    where, first = batch_sharding(run), rows.start or 0
    if jax.process_count() == 1:
        return jax.device_put(batch, where)

    def put(a: np.ndarray) -> jax.Array:
        whole = (a.shape[0], run.sizes.rows, *a.shape[2:])

        def part(index: Any) -> np.ndarray:
            start, stop, _ = index[1].indices(whole[1])
            return a[index[0], start - first : stop - first, *index[2:]]

        return jax.make_array_from_callback(whole, where, part)

    return {name: put(a) for name, a in batch.items()}


class Evaluation(NamedTuple):
    """Mean loss of a valid token, its exponential, and the number of valid tokens."""

    loss: float
    perplexity: float
    tokens: int


def make_eval(run: Run) -> Callable[[Placed, Iterable[dict]], Evaluation]:
    """A function (params, batches) -> evaluation, through the pipeline forward only."""
    # Validation is of the text alone: what else a model trains by stays out.
    evaluate = jax.jit(partial(executor.eval_step, replace(run.pipeline, loss=token_loss, probe=None)))

    def mean(params: Placed, batches: Iterable[dict]) -> Evaluation:
        sums, waiting = np.zeros(2), None
        for batch in batches:
            running = evaluate(params, put_batch(run, batch))
            if waiting is not None:  # fetched while the next one runs, so that batches do not pile up on the devices
                sums += jax.device_get(waiting)
            waiting = running
        total, count = sums + jax.device_get(waiting)
        loss = float(total / count)
        return Evaluation(loss, math.exp(min(loss, 700.0)), int(count))

    return mean


class Hooks(NamedTuple):
    """What a run does beside its steps.

    sample, called with the parameters every `sample_every` steps and at the end; read and read_trained, give the first
    parameters, see `initial_state`; found, a checkpoint to go on from; stop, returns whether to save and end after a
    step.
    """

    sample: Callable[[Placed], None] = lambda params: None
    read: Read | None = None
    read_trained: Read | None = None
    found: checkpoint.Found | None = None
    stop: Callable[[int], bool] = lambda step: False


def train(run: Run, build: Build, feeds: Feeds, log: Log, hooks: Hooks = Hooks()) -> State:  # noqa: B008
    """Train.

    Args: build, key -> model; feeds, of `make_feeds`.
    Returns: the last state. Every step and validation is logged; the step's numbers are fetched while the next one
    runs, so that the host is never waited for.
    """
    config = run.config
    saver = checkpoint.Saver(config.save, config.max_checkpoint_keep) if config.save else None
    wire.self_test(run.mesh, run.pipeline.wire)
    state = initial_state(run, build, hooks.read, hooks.found, hooks.read_trained)
    step, evaluate = make_step(run), make_eval(run)
    step = watched(run.recorder, step, log.say)
    report, rows = reporter(run, log), rows_here(run)
    span = parse_span(config.profile, config.num_iteration) if config.profile else range(0)
    trace = Trace(span, log.path.with_name("profile"))
    for i in range(hooks.found.step if hooks.found else 0, config.num_iteration):
        if trace.starts(i + 1):
            report(None, None, flush=True)
            trace.start(state)
            report(None, None, flush=True)  # what that took is no step's time
        for text, epoch in feeds.batches.epochs_begun(i):
            name = f" of {config.input_bin[text]}" if config.input_bin and len(config.input_bin) > 1 else ""
            log.say(f"epoch {epoch + 1}{name} begins with step {i + 1}")
        with jax.profiler.StepTraceAnnotation("train", step_num=i + 1):
            batch = put_batch(run, feeds.batches.at(i, rows), rows)
            with jax.transfer_guard("disallow"):  # unasked, it would make host and device wait for each other
                state, metrics = step(state, batch)
        last, stopping = i + 1 == config.num_iteration, hooks.stop(i + 1)
        due = lambda every, i=i, last=last: last or (every > 0 and (i + 1) % every == 0)
        validate, sampling = due(config.val_loss_every), due(config.sample_every)
        saving = saver is not None and (due(config.save_interval) or stopping)
        tracing = trace.ends(i + 1, stopping)
        report(i + 1, metrics, flush=validate or sampling or saving or tracing or run.recorder is not None)
        if tracing:
            trace.stop(state, step.lower(state, batch).compile().as_text)
            log.say(f"the trace is in {trace.folder}")
        if saver is not None and saving:
            saver.save(i + 1, (state.params, state.opt_state, state.step), describe_run(run))
        if stopping:
            log.say(f"stopped after step {i + 1}")
            break
        if validate:
            found = evaluate(state.whole, feeds.held_out)
            log.write({"step": i + 1, "val_loss": found.loss, "perplexity": found.perplexity})
            log.say(f"step {i + 1}  validation loss {found.loss:.4f}  perplexity {found.perplexity:.2f}")
        if sampling:
            hooks.sample(state.whole)
        if validate or sampling or saving or tracing:
            report(None, None, flush=True)
    report(None, None, flush=True)
    if saver is not None:
        saver.wait()
    return state


def parameter_count(spec: Placed) -> int:
    """Number of parameters of the model, tied ones once and empty places not at all."""
    layout = spec.layout
    places = layout.stages * layout.chunks
    sizes = [sum(int(np.prod(a.shape)) for a in jax.tree.leaves(block)) // places for block in spec.blocks[:1]]
    outer = sum(int(np.prod(a.shape)) for a in jax.tree.leaves(spec.outer))
    return outer + sizes[0] * sum(layout.layers)
