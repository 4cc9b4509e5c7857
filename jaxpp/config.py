"""What a user may ask for: the options of training, and the checks that need no device.

Every refusal is a ValueError of one line that names the option, its value, the rule and a value that would work.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from jaxpp.data import check_weights
from jaxpp.mesh import AXES
from jaxpp.options import check_ranges, nearest, option
from jaxpp.partition import split_layers
from jaxpp.precision import DTYPES, parse_dtype
from jaxpp.profile import parse_span
from jaxpp.records import parse_check
from jaxpp.remat import check_remat
from jaxpp.schedules import SCHEDULES

DECAY_STYLES = ("none", "constant", "linear", "cosine", "inverse-square-root")
ZERO_GATHERS = ("step", "layer")
OPTIMIZERS = ("adamw", "sgd")
STARTS = ("model", "init_from", "llmc_filepath")  # each says which model is trained
# What a model's folder may have said.
CARRIED = ("tokenizer", "dropout", "router_balance_loss", "router_z_loss", "lora_dropout")
MOST_MICROBATCHES = 4096  # of a step; a table's row is a tick, and with more of them the tables take long to build


@dataclass(frozen=True)
class Config:
    """Train a language model through a pipeline.

    A default of None is resolved from the other options or from the devices, as its text says.
    """

    model: str | None = option(None, "model preset (default: gpt2-tiny)")
    init_from: str | None = option(None, "start from this Hugging Face folder's weights, whose model is then trained")
    llmc_filepath: str | None = option(None, "start from this GPT-2 model file of llm.c, likewise")
    dtype: str = option("bfloat16", f"dtype of compute and of the wire: {', '.join(DTYPES)}")
    pipeline_dtype: str | None = option(None, "dtype on the wire between stages (default: dtype)")
    grad_pipeline_dtype: str | None = option(None, "dtype on the backward wire (default: pipeline_dtype)")
    fp32_residual: bool = option(False, "keep the residual stream in float32", bool)
    pipeline_parallel: int | None = option(
        None, "stages (default: up to 4, as the devices allow)", int, least=1, most=4096
    )
    virtual_pipeline_parallel: int = option(1, "chunks of layers on each stage", int, least=1, most=4096)
    layer_split: tuple[int, ...] | None = option(
        None, "layers of each chunk, in the model's order (default: as even as can be)", int, many=True, least=0
    )
    data_parallel: int | None = option(
        None, "replicas of the pipeline (default: 1, with GPUs all of them)", int, least=1, most=65536
    )
    tensor_parallel: int = option(1, "ranks that share each layer", int, least=1, most=4096)
    sequence_parallel: bool = option(False, "with tensor_parallel: norms and residuals split over the sequence", bool)
    context_parallel: int = option(1, "ranks that share each sequence", int, least=1, most=4096)
    expert_parallel: int = option(1, "ranks that share the experts, each with rows of its own", int, least=1, most=4096)
    zero_stage: int = option(
        0, "over the replicas split 1: the optimizer's state, 2: gradients too, 3: parameters too", int, least=0, most=3
    )
    zero_gather: str = option(
        "step", "when zero_stage=3 gathers parameters: once a step, or each layer's whenever it runs", str, ZERO_GATHERS
    )
    schedule: str | None = option(None, f"one of {', '.join(SCHEDULES)} (default: 1f1b, with chunks interleaved)")
    remat: str = option("dots", "what forward keeps for backward: full, none, dots, or a policy of JAX")
    batch_size: int = option(2, "rows of a microbatch on one data rank", int, least=1, most=65536)
    total_batch_size: int | None = option(None, "tokens a step (default: 8 microbatches)", int, least=1)
    sequence_length: int | None = option(
        None, "tokens of a row (default: a quarter of the model's positions)", int, least=1
    )
    num_iteration: int = option(240, "steps", int, least=1)
    learning_rate: float = option(2e-3, "peak learning rate", float, least=0)
    lr_decay_style: str = option("cosine", "learning rate after the warm-up", str, DECAY_STYLES)
    warmup_iterations: int = option(10, "steps of linear warm-up", int, least=0)
    min_learning_rate: float = option(0.0, "where the decay ends", float, least=0)
    optimizer: str = option("adamw", "optimizer", str, OPTIMIZERS)
    weight_decay: float = option(0.1, "decoupled weight decay of matrices", float, least=0)
    max_skipped_steps: int = option(
        20, "with float16: end after this many steps in a row whose gradients are not finite", int, least=1
    )
    clip_grad: float = option(1.0, "largest global gradient norm, 0: no clipping", float, least=0)
    dropout: float | None = option(None, "dropout rate while training (default: the model's, 0 for presets)", float)
    tokenizer: str | None = option(
        None,
        "of text: tokenizer.json or a folder that has one (default: that of the checkpoint, of init_from, or bytes)",
    )
    input_bin: tuple[str, ...] | None = option(
        None, "training tokens: llm.c files or texts (default: Python's own source)", str, many=True
    )
    data_weights: tuple[float, ...] | None = option(
        None, "each file's share of the rows, in any unit (default: by their sizes)", float, least=0, many=True
    )
    input_val_bin: tuple[str, ...] | None = option(
        None, "validation tokens, likewise (default: the last twentieth of each file)", str, many=True
    )
    shuffle_documents: bool = option(False, "reorder whole documents, each epoch anew, before rows are cut", bool)
    pack_documents: bool = option(
        False, "keep the documents of a row apart: none sees another, and positions begin anew", bool
    )
    val_loss_every: int = option(0, "steps between validations, 0: only at the end", int, least=0)
    sample_every: int = option(0, "steps between samples of text, 0: only at the end", int, least=0)
    router_balance_loss: float | None = option(
        None, "what the load-balancing loss of experts is multiplied with (default: the model's)", float, least=0
    )
    router_z_loss: float | None = option(
        None, "what the z-loss of routers is multiplied with, likewise", float, least=0
    )
    lora_rank: int = option(0, "train adapters of this rank beside a frozen model, 0: train the model", int, least=0)
    lora_alpha: float | None = option(
        None, "the adapters' outputs are multiplied with this over their rank (default: the rank)", float, least=0
    )
    lora_dropout: float | None = option(
        None, "dropout rate of the adapters' inputs (default: that of lora_load_path, or 0)", float
    )
    lora_target_modules: tuple[str, ...] | None = option(
        None, "modules with an adapter, by PEFT's names, or all-linear (default: PEFT's for the model)", str, many=True
    )
    lora_load_path: str | None = option(
        None, "start from the adapters in this folder of PEFT's; rank, alpha and modules are then the folder's"
    )
    lora_save_path: str | None = option(None, "folder to write the adapters to at the end, in PEFT's format")
    # A key holds 32 bits of the seed, and would drop the others without a word.
    seed: int = option(0, "of weights, data order and dropout", int, least=0, most=2**32 - 1)
    save: str | None = option(None, "folder for checkpoints, the last step's among them (default: none)")
    save_interval: int = option(0, "steps between checkpoints, 0: only at the end", int, least=0)
    max_checkpoint_keep: int = option(3, "how many of the newest checkpoints stay", int, least=1)
    load: str | None = option(None, "go on from the newest whole checkpoint of this folder, and train its model")
    output_dir: str = option("output", "folder for metrics.jsonl, config.toml, tensorboard and profile")
    tensorboard: bool = option(False, "write the metrics for TensorBoard too", bool)
    profile: str | None = option(None, "trace the steps START to STOP - 1, given as START:STOP")
    precision_check: str | None = option(
        None,
        "record every step's tensors: level=1 (of each layer) or 2 (inside too), path=DIR (default: OUTPUT/precision),"
        " format=simple|md5, save_tensors=true|false, md5_tolerance=1e-3, with commas between them",
    )
    emulate_devices: int | None = option(
        None, "run on the CPU as this many devices a process (default without GPUs)", int, least=1, most=1024
    )
    xla_flags: str | None = option(
        None, "XLA's flags, over those of the environment and of jaxpp/xla_flags.py: '--xla_A=1 --xla_B=2'", dashed=True
    )
    coordinator_address: str | None = option(
        None, "host:port of process 0, with several processes (default: what SLURM or Open MPI say)"
    )
    num_processes: int | None = option(None, "how many processes there are, likewise", int, least=1, most=65536)
    process_id: int | None = option(None, "which of them this one is, from 0, likewise", int, least=0, most=65535)

    @property
    def drops(self) -> bool:
        """Whether a step needs a key, for dropout."""
        return bool(self.dropout or self.lora_dropout)

    @property
    def scales_loss(self) -> bool:
        """Whether gradients need loss scaling: float16 overflows at 65504 and loses what is below 6e-8."""
        return "float16" in (self.dtype, self.pipeline_dtype, self.grad_pipeline_dtype)

    @property
    def schedule_name(self) -> str:
        """The schedule asked for, or the default for the number of chunks."""
        return self.schedule or ("1f1b" if self.virtual_pipeline_parallel == 1 else "interleaved")

    @property
    def stages(self) -> int | None:
        """Stages, where they are given, or the layers of each chunk are."""
        return self.pipeline_parallel or len(self.layer_split or ()) // self.virtual_pipeline_parallel or None


@dataclass(frozen=True)
class Sizes:
    """What a run's numbers come to: the mesh, and a batch [microbatches, rows of all replicas, tokens of a row]."""

    pipe: int
    data: int
    microbatches: int
    rows: int
    length: int
    expert: int = 1
    context: int = 1
    tensor: int = 1

    @property
    def tokens(self) -> int:
        """Tokens a step."""
        return self.microbatches * self.rows * self.length

    @property
    def mesh(self) -> dict[str, int]:
        """Sizes of the mesh's axes, in their order."""
        return {axis: getattr(self, axis) for axis in AXES}


def check_start(config: Config) -> None:
    """Check that one option alone says which model to start. Raises ValueError."""
    starts = [name for name in STARTS if getattr(config, name) is not None]
    if len(starts) > 1:
        raise ValueError(f"{' and '.join(starts)} each say which model to train: give one of them")


def going_on(config: Config, given: Mapping[str, Any]) -> Config:
    """The options of a run that goes on from a checkpoint, of whose options `given` some are taken over.

    Those are what it started from, unless --model says the same model, and those of `CARRIED` that are left open.
    """
    taken = [name for name in CARRIED if getattr(config, name) is None]
    taken += [] if config.model is not None else STARTS
    return replace(config, **{name: given.get(name) for name in taken})


def check(config: Config, layers: int, positions: int) -> None:
    """Check what needs no device: dtypes, ranges, the schedule, and what the model can take.

    Args: layers, positions: the model's. Raises ValueError.
    """
    parse_dtype("dtype", config.dtype)
    for name in ("pipeline_dtype", "grad_pipeline_dtype"):
        if getattr(config, name) is not None:
            parse_dtype(name, getattr(config, name))
    check_ranges(config)
    if config.data_weights is not None:
        check_weights(config.data_weights, len(config.input_bin or ()))
    if config.save_interval and config.save is None:
        raise ValueError(f"save_interval={config.save_interval} needs a folder: give --save FOLDER")
    if config.profile is not None:
        parse_span(config.profile, config.num_iteration)
    if config.precision_check is not None:
        parse_check(config.precision_check, config.output_dir)
        for name in ("tensor_parallel", "context_parallel", "expert_parallel"):
            if getattr(config, name) > 1:
                raise ValueError(
                    f"precision_check sees whole tensors, got {name}={getattr(config, name)}: use --{name} 1"
                )
    for name in ("dropout", "lora_dropout"):
        rate = getattr(config, name)
        if rate is not None and not 0 <= rate < 1:
            raise ValueError(f"{name}={rate} must be in [0, 1), for example --{name} 0.1")
    check_lora(config)
    if config.schedule is not None and config.schedule not in SCHEDULES:
        hint = nearest(config.schedule, SCHEDULES)
        raise ValueError(f"schedule={config.schedule!r} is unknown{hint} (one of {', '.join(SCHEDULES)})")
    check_remat(config.remat)
    if config.zero_gather == "layer":
        check_gather(config)
    if config.virtual_pipeline_parallel > 1 and not SCHEDULES[config.schedule_name].chunked:
        raise ValueError(
            f"schedule={config.schedule!r} has one chunk a stage, got virtual_pipeline_parallel="
            f"{config.virtual_pipeline_parallel}: use --schedule interleaved"
        )
    chunks = config.virtual_pipeline_parallel
    if (config.stages or 1) * chunks > layers:
        raise ValueError(
            f"pipeline_parallel={config.stages or 1} x virtual_pipeline_parallel={chunks} is more than the"
            f" {layers} layers of the model: use at most --pipeline_parallel {max(1, layers // chunks)}"
        )
    if config.layer_split is not None:
        split_layers(layers, config.stages or 1, chunks, config.layer_split)
    if config.min_learning_rate > config.learning_rate:
        raise ValueError(
            f"min_learning_rate={config.min_learning_rate} is above learning_rate={config.learning_rate}, where the"
            f" decay begins: use at most --min_learning_rate {config.learning_rate}"
        )
    if config.sequence_length is not None and config.sequence_length > positions:
        raise ValueError(
            f"sequence_length={config.sequence_length} is more than the {positions} positions of"
            f" the model: use at most --sequence_length {positions}"
        )


def check_gather(config: Config) -> None:
    """Check what gathering by layer needs. Raises ValueError."""
    if config.zero_stage != 3:
        raise ValueError(f"zero_gather='layer' is of zero_stage=3, got {config.zero_stage}: use --zero_stage 3")
    if config.remat in ("none", "everything_saveable"):
        raise ValueError(
            f"zero_gather='layer' with remat={config.remat!r} would keep every gathered layer for the backward: use"
            f" --remat dots"
        )
    if config.precision_check is not None:
        raise ValueError("precision_check needs remat none, which zero_gather='layer' cannot: use --zero_gather step")


def check_lora(config: Config) -> None:
    """Check that no option is of adapters where none are asked for. Raises ValueError."""
    for name in ("lora_alpha", "lora_dropout", "lora_target_modules", "lora_save_path"):
        value = getattr(config, name)
        if value is not None and not config.lora_rank and config.lora_load_path is None:
            shown = " ".join(value) if isinstance(value, tuple) else value
            raise ValueError(f"{name}={shown} is of adapters, and lora_rank=0 makes none: use --lora_rank 8")


def check_split(config: Config, heads: int, hidden: int, experts: int, length: int) -> None:
    """Check that layers and sequences divide over their ranks.

    Args: heads, hidden (of the MLP), experts (0: none), of the model; length, tokens of a row.
    Raises ValueError with the numbers.
    """
    tensor, context, expert = config.tensor_parallel, config.context_parallel, config.expert_parallel
    if config.sequence_parallel and tensor == 1:
        raise ValueError("sequence_parallel is of tensor_parallel=2 or more, got 1: use --tensor_parallel 2")
    if expert > 1 and not experts:
        raise ValueError(f"expert_parallel={expert} is of models with experts, this model has none: leave it out")
    rules = (
        ("tensor_parallel", tensor, heads, "attention heads"),
        ("tensor_parallel", tensor, hidden, "columns of the MLP"),
        ("context_parallel", context, heads // tensor, "attention heads of a rank"),
        ("expert_parallel", expert, experts, "experts"),
        ("context_parallel", context, length, "tokens of a row"),
        ("tensor_parallel", tensor if config.sequence_parallel else 1, length // context, "tokens of a row on a rank"),
    )
    for name, ways, size, what in rules:
        if size % ways:
            fits = max(n for n in range(1, ways) if size % n == 0)
            longer = f" or a sequence_length of {-(-size // ways) * ways * length // size}" if "tokens" in what else ""
            raise ValueError(f"{name}={ways} must divide the {size} {what}: use --{name} {fits}{longer}")


def sizes(config: Config, layers: int, positions: int, gpus: int = 0) -> Sizes:
    """Resolve the sizes that are left open, and check that they divide.

    Args: layers, positions, of the model; gpus, how many there are (0: the CPU is emulated).
    Raises ValueError with the numbers and the nearest total_batch_size that fits.
    """
    data, others = config.data_parallel, {name: getattr(config, f"{name}_parallel") for name in AXES[2:]}
    inner = prod(others.values())
    most = min(4, layers // config.virtual_pipeline_parallel, gpus // ((data or 1) * inner) if gpus else 4)
    pipe = config.stages or max(1, most)
    data = data or max(1, gpus // (pipe * inner))
    length = config.sequence_length or max(1, positions // 4)
    ranks = data * config.expert_parallel
    rows = config.batch_size * ranks
    total = config.total_batch_size
    if total is None:
        return Sizes(pipe, data, 8, rows, length, **others)
    microbatches, rest = divmod(total, rows * length)
    if rest or not microbatches:
        fits = [n * rows * length for n in (microbatches, microbatches + 1) if n]
        raise ValueError(
            f"total_batch_size={total} must be a multiple of batch_size x data_parallel x"
            f"{' expert_parallel x' if config.expert_parallel > 1 else ''} sequence_length ="
            f" {config.batch_size} x {ranks} x {length} = {rows * length}: the nearest"
            f" {'are' if len(fits) > 1 else 'is'} {' and '.join(map(str, fits))}"
        )
    if microbatches > MOST_MICROBATCHES:
        raise ValueError(
            f"total_batch_size={total} is {microbatches} microbatches of {rows * length} tokens, and a schedule has at"
            f" most {MOST_MICROBATCHES}: raise batch_size, or use at most --total_batch_size"
            f" {MOST_MICROBATCHES * rows * length}"
        )
    return Sizes(pipe, data, microbatches, rows, length, **others)


def resolved(config: Config, sizes: Sizes) -> Config:
    """The options with those filled in that were left to the model or the devices: what repeats a run elsewhere."""
    return replace(
        config,
        schedule=config.schedule_name,
        pipeline_parallel=sizes.pipe,
        data_parallel=sizes.data,
        sequence_length=sizes.length,
        total_batch_size=sizes.tokens,
    )
