"""What a user may ask for: the options of run.py, their parsing and the checks that need no device.

Every refusal is a ValueError of one line that names the option, its value, the rule and a value that would work.
"""

import argparse
import math
from collections.abc import Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from difflib import get_close_matches
from typing import Any, NoReturn

from jaxpp.precision import DTYPES, parse_dtype
from jaxpp.remat import check_remat
from jaxpp.schedules import SCHEDULES

DECAY_STYLES = ("none", "constant", "linear", "cosine", "inverse-square-root")
OPTIMIZERS = ("adamw", "sgd")


def _option(default: Any, text: str, type_: type = str, choices: Sequence[str] | None = None) -> Any:
    return field(default=default, metadata={"help": text, "type": type_, "choices": choices})


@dataclass(frozen=True)
class Config:
    """The options of a run. A default of None is resolved from the others or from the devices, as its text says."""

    model: str = _option("gpt2-tiny", "model preset")
    dtype: str = _option("bfloat16", f"dtype of compute and of the wire: {', '.join(DTYPES)}")
    pipeline_dtype: str | None = _option(None, "dtype on the wire between stages (default: dtype)")
    grad_pipeline_dtype: str | None = _option(None, "dtype on the backward wire (default: pipeline_dtype)")
    fp32_residual: bool = _option(False, "keep the residual stream in float32", bool)
    pipeline_parallel: int | None = _option(None, "stages (default: up to 4, as the devices allow)", int)
    virtual_pipeline_parallel: int = _option(1, "chunks of layers on each stage", int)
    data_parallel: int | None = _option(None, "replicas of the pipeline (default: 1, with GPUs all of them)", int)
    schedule: str | None = _option(None, f"one of {', '.join(SCHEDULES)} (default: 1f1b, with chunks interleaved)")
    remat: str = _option("dots", "what forward keeps for backward: full, none, dots, or a policy of JAX")
    batch_size: int = _option(2, "rows of a microbatch on one data rank", int)
    total_batch_size: int | None = _option(None, "tokens a step (default: 8 microbatches)", int)
    sequence_length: int | None = _option(None, "tokens of a row (default: a quarter of the model's positions)", int)
    num_iteration: int = _option(240, "steps", int)
    learning_rate: float = _option(2e-3, "peak learning rate", float)
    lr_decay_style: str = _option("cosine", "learning rate after the warm-up", str, DECAY_STYLES)
    warmup_iterations: int = _option(10, "steps of linear warm-up", int)
    min_learning_rate: float = _option(0.0, "where the decay ends", float)
    optimizer: str = _option("adamw", "optimizer", str, OPTIMIZERS)
    weight_decay: float = _option(0.1, "decoupled weight decay of matrices", float)
    clip_grad: float = _option(1.0, "largest global gradient norm, 0: no clipping", float)
    dropout: float = _option(0.0, "dropout rate while training", float)
    input_bin: str | None = _option(None, "training tokens: llm.c file or text (default: Python's own source)")
    input_val_bin: str | None = _option(None, "validation tokens, likewise")
    val_loss_every: int = _option(0, "steps between validations, 0: only at the end", int)
    seed: int = _option(0, "of weights, data order and dropout", int)
    output_dir: str = _option("output", "folder for metrics.jsonl")
    emulate_devices: int | None = _option(None, "run on the CPU as this many devices (default without GPUs)", int)

    @property
    def schedule_name(self) -> str:
        """The schedule asked for, or the default for the number of chunks."""
        return self.schedule or ("1f1b" if self.virtual_pipeline_parallel == 1 else "interleaved")


@dataclass(frozen=True)
class Sizes:
    """What a run's numbers come to: stages, replicas, microbatches a step, rows of one over all replicas, tokens a row.

    B in `tests` of shape [microbatches, rows, length].
    """

    pipe: int
    data: int
    microbatches: int
    rows: int
    length: int

    @property
    def tokens(self) -> int:
        """Tokens a step."""
        return self.microbatches * self.rows * self.length


class _Parser(argparse.ArgumentParser):
    """argparse with its errors as our ValueError of one line."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def parse(arguments: Sequence[str], commands: Sequence[str] = (), prog: str = "run.py") -> tuple[str, bool, Config]:
    """Parse a command line.

    Args: arguments, without the program's name; commands, words that may stand first (the first is the default).
    Returns: the command, whether --json was given, the options.
    Raises ValueError for an unknown option (with the nearest), a malformed value, or a value outside its choices.
    """
    parser = _Parser(prog=prog, allow_abbrev=False, description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("command", nargs="?", default=commands[0], metavar="|".join(commands))
    parser.add_argument("--json", action="store_true", help="plan: print one JSON object")
    for option in fields(Config):
        _add(parser, option)
    found, unknown = parser.parse_known_args(arguments)
    known = [f"--{name}" for name in vars(found)]
    for word in unknown:
        near = get_close_matches(word.split("=")[0].replace("-", "_").replace("__", "--", 1), known, n=1)
        hint = f", did you mean {near[0]}?" if near else " (see --help)"
        raise ValueError(f"{word} is not an option{hint}")
    if found.command not in commands:
        near = get_close_matches(found.command, commands, n=1)
        hint = f", did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"command={found.command!r} is unknown{hint} (one of {', '.join(commands)})")
    options = {option.name: getattr(found, option.name) for option in fields(Config)}
    return found.command, found.json, Config(**options)


def _add(parser: argparse.ArgumentParser, option: Field) -> None:
    names = dict.fromkeys((f"--{option.name}", f"--{option.name.replace('_', '-')}"))
    kind, default = option.metadata["type"], option.default
    assert default is not MISSING
    text = option.metadata["help"] + ("" if default is None or kind is bool else f" (default: {default})")
    if kind is bool:
        parser.add_argument(*names, action="store_true", help=text)
    else:
        choices = option.metadata["choices"]
        metavar = "{" + ",".join(choices) + "}" if choices else kind.__name__.upper()
        parser.add_argument(*names, type=kind, default=default, choices=choices, help=text, metavar=metavar)


_AT_LEAST = {
    "pipeline_parallel": 1,
    "virtual_pipeline_parallel": 1,
    "data_parallel": 1,
    "batch_size": 1,
    "total_batch_size": 1,
    "sequence_length": 1,
    "num_iteration": 1,
    "warmup_iterations": 0,
    "learning_rate": 0,
    "min_learning_rate": 0,
    "weight_decay": 0,
    "clip_grad": 0,
    "val_loss_every": 0,
    "seed": 0,
    "emulate_devices": 1,
}


# A key holds 32 bits of the seed, and would drop the others without a word.
_AT_MOST = {"seed": 2**32 - 1, "emulate_devices": 1024}


def check(config: Config, layers: int, positions: int) -> None:
    """Check what needs no device: dtypes, ranges, the schedule, and what the model can take.

    Args: layers, positions: the model's. Raises ValueError.
    """
    parse_dtype("dtype", config.dtype)
    for option in ("pipeline_dtype", "grad_pipeline_dtype"):
        if getattr(config, option) is not None:
            parse_dtype(option, getattr(config, option))
    if "float16" in (config.dtype, config.pipeline_dtype, config.grad_pipeline_dtype):
        raise ValueError(
            "float16 overflows at 65504 and loses gradients below 6e-8, which needs loss scaling that training does"
            " not have: use bfloat16"
        )
    for option, least in _AT_LEAST.items():
        value = getattr(config, option)
        if value == math.inf:
            raise ValueError(f"{option}={value} must be finite, for example --{option} {max(least, 1)}")
        if value is not None and not value >= least:
            raise ValueError(f"{option}={value} must be at least {least}, for example --{option} {max(least, 1)}")
    for option, most in _AT_MOST.items():
        value = getattr(config, option)
        if value is not None and value > most:
            raise ValueError(f"{option}={value} must be at most {most}, for example --{option} {1}")
    if not 0 <= config.dropout < 1:
        raise ValueError(f"dropout={config.dropout} must be in [0, 1), for example --dropout 0.1")
    if config.schedule is not None and config.schedule not in SCHEDULES:
        near = get_close_matches(config.schedule, SCHEDULES, n=1)
        hint = f", did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"schedule={config.schedule!r} is unknown{hint} (one of {', '.join(SCHEDULES)})")
    check_remat(config.remat)
    if config.virtual_pipeline_parallel > 1 and not SCHEDULES[config.schedule_name].chunked:
        raise ValueError(
            f"schedule={config.schedule!r} has one chunk a stage, got virtual_pipeline_parallel="
            f"{config.virtual_pipeline_parallel}: use --schedule interleaved"
        )
    if (config.pipeline_parallel or 1) > layers:
        raise ValueError(f"pipeline_parallel={config.pipeline_parallel} is more than {layers} layers: use at most that")
    if config.sequence_length is not None and config.sequence_length > positions:
        raise ValueError(
            f"sequence_length={config.sequence_length} is more than the {positions} positions of"
            f" model={config.model}: use at most --sequence_length {positions}"
        )


def sizes(config: Config, layers: int, positions: int, gpus: int = 0) -> Sizes:
    """Resolve the sizes that are left open, and check that they divide.

    Args: layers, positions, of the model; gpus, how many there are (0: the CPU is emulated).
    Raises ValueError with the numbers and the nearest total_batch_size that fits.
    """
    data = config.data_parallel
    most = min(4, layers, gpus // (data or 1) if gpus else 4)
    pipe = config.pipeline_parallel or max(1, most)
    data = data or max(1, gpus // pipe)
    length = config.sequence_length or max(1, positions // 4)
    rows = config.batch_size * data
    total = config.total_batch_size
    if total is None:
        return Sizes(pipe, data, 8, rows, length)
    microbatches, rest = divmod(total, rows * length)
    if rest or not microbatches:
        nearest = [n * rows * length for n in (microbatches, microbatches + 1) if n]
        raise ValueError(
            f"total_batch_size={total} must be a multiple of batch_size x data_parallel x sequence_length ="
            f" {config.batch_size} x {data} x {length} = {rows * length}: the nearest are"
            f" {' and '.join(map(str, nearest))}"
        )
    return Sizes(pipe, data, microbatches, rows, length)
