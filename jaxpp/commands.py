"""The options of the commands beside training, and what those take over from a run."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from jaxpp.config import Config
from jaxpp.options import option
from jaxpp.precision import DTYPES

MERGED = "merge the adapters in this folder of PEFT's into the model of load"


@dataclass(frozen=True)
class PlanConfig(Config):
    """Show what a training run will cost: schedule, memory and wire, without touching a device."""

    json: bool = option(False, "print one JSON object", bool)
    devices_per_host: int = option(8, "devices of a host, to say what crosses between hosts", int, least=1, most=4096)
    measure: bool = option(False, "time a layer, embedding and head on one device here, and balance layers by it", bool)


def of_a_layer(config: Config) -> Config:
    """The options of a small pipeline whose slots say what a layer costs."""
    own = {"pipeline_parallel": None, "data_parallel": None, "layer_split": None, "schedule": None}
    own |= {"virtual_pipeline_parallel": 1, "zero_stage": 0, "zero_gather": "step", "total_batch_size": None}
    return replace(config, **own)


@dataclass(frozen=True)
class GenerateConfig:
    """Continue a prompt with a trained model."""

    load: str | None = option(None, "folder of a Hugging Face model, or of checkpoints")
    prompt: str | None = option(None, "text to continue")
    max_new_tokens: int = option(200, "the most tokens to add", int, least=1)
    temperature: float = option(0.8, "what logits are divided by, 0: always the likeliest token", float, least=0)
    top_k: int = option(0, "only the k likeliest tokens, 0: all", int, least=0)
    top_p: float = option(1.0, "only the likeliest tokens whose chances sum to p", float, least=0, most=1)
    seed: int = option(0, "of the draws", int, least=0, most=2**32 - 1)
    dtype: str = option("float32", f"dtype of compute: {', '.join(DTYPES)}", str, DTYPES)
    tokenizer: str | None = option(None, "tokenizer.json or a folder that has one (default: that of load, or bytes)")
    lora_load_path: str | None = option(None, MERGED)


@dataclass(frozen=True)
class EvalConfig:
    """Loss and perplexity of a model over a text.

    An option left out is as in the run that a checkpoint is of. Those of the layout, and with a Hugging Face folder all
    others too, are then as for training.
    """

    load: str | None = option(None, "folder of a Hugging Face model, or of checkpoints")
    input_bin: tuple[str, ...] | None = option(
        None, "tokens: llm.c files or texts (default: those that the run kept for validation)", str, many=True
    )
    eval_batches: int | None = option(None, "batches, spread evenly over the text (default: all)", int, least=1)
    tokenizer: str | None = option(None, "of text (default: that of load)")
    pack_documents: bool | None = option(None, "keep the documents of a row apart", bool)
    sequence_length: int | None = option(None, "tokens of a row", int, least=1)
    batch_size: int | None = option(None, "rows of a microbatch on one data rank", int, least=1)
    total_batch_size: int | None = option(None, "tokens a batch", int, least=1)
    dtype: str | None = option(None, "dtype of compute (default with a Hugging Face folder: float32)")
    pipeline_dtype: str | None = option(None, "dtype on the wire between stages")
    pipeline_parallel: int | None = option(None, "stages", int, least=1)
    virtual_pipeline_parallel: int | None = option(None, "chunks of layers on each stage", int, least=1)
    data_parallel: int | None = option(None, "replicas of the pipeline", int, least=1)
    tensor_parallel: int | None = option(None, "ranks that share each layer", int, least=1)
    context_parallel: int | None = option(None, "ranks that share each sequence", int, least=1)
    expert_parallel: int | None = option(None, "ranks that share the experts", int, least=1)
    emulate_devices: int | None = option(None, "run on the CPU as this many devices", int, least=1, most=1024)
    xla_flags: str | None = option(None, "XLA's flags, over those of the environment and of the table", dashed=True)
    json: bool = option(False, "print one JSON object: loss, perplexity, tokens", bool)
    lora_load_path: str | None = option(None, MERGED)


# What an evaluation takes over from the run that a checkpoint is of: all that changes the loss, nothing of the layout.
OF_A_RUN = ("tokenizer", "input_bin", "input_val_bin", "pack_documents", "batch_size", "dtype")
OF_A_RUN += ("pipeline_dtype", "grad_pipeline_dtype", "fp32_residual")


def of_eval(config: EvalConfig, info: Mapping[str, Any]) -> Config:
    """The options of training that an evaluation goes by: those given, else a checkpoint's, else the defaults.

    info: what `train.describe_run` said of the checkpoint's run; empty for a Hugging Face folder.
    """
    chosen: dict[str, Any] = {"dtype": "float32"}
    if info:
        saved, fixed = info["options"], info["fixed"]
        chosen = {name: tuple(v) if isinstance(v := saved[name], list) else v for name in OF_A_RUN if name in saved}
        chosen |= {"sequence_length": fixed["sequence_length"], "total_batch_size": fixed["tokens_per_step"]}
    given = {each.name: getattr(config, each.name) for each in fields(Config) if hasattr(config, each.name)}
    chosen |= {name: value for name, value in given.items() if value is not None}
    return Config(**chosen)


@dataclass(frozen=True)
class ExportConfig:
    """Write a model as a Hugging Face folder, for transformers and vLLM."""

    load: str | None = option(None, "folder of a Hugging Face model, or of checkpoints")
    to: str | None = option(None, "folder to write")
    dtype: str = option("float32", f"dtype of the files: {', '.join(DTYPES)}", str, DTYPES)
    tokenizer: str | None = option(None, "folder whose tokenizer is copied (default: that of load)")
    lora_load_path: str | None = option(None, MERGED)
