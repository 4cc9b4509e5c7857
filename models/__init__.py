"""Models by name. Each is any object with an embedding, a list of blocks and a head; the library knows no more."""

from collections.abc import Callable
from dataclasses import asdict
from difflib import get_close_matches
from typing import Any

from jaxpp.losses import token_loss
from models import gpt2, llama3, mixtral, qwen3
from models.gpt2 import GPT2, GPT2Config
from models.llama3 import Llama3, Llama3Config
from models.lora import LoraSpec
from models.mixtral import Mixtral, MixtralConfig
from models.qwen3 import Qwen3, Qwen3Config
from models.rope import Rope

ModelConfig = GPT2Config | Llama3Config | Qwen3Config | MixtralConfig
PRESETS: dict[str, ModelConfig] = {**gpt2.PRESETS, **llama3.PRESETS, **qwen3.PRESETS, **mixtral.PRESETS}
FAMILIES: dict[type, Callable[..., Any]] = {
    GPT2Config: GPT2,
    Llama3Config: Llama3,
    Qwen3Config: Qwen3,
    MixtralConfig: Mixtral,
}


_OF_A_RUN = ("dropout", "std", "cudnn", "balance_loss", "z_loss")  # the same model, run or trained otherwise
_OF_ADAPTERS = ("rank", "alpha", "targets")


def config_of(name: str) -> ModelConfig:
    """The preset of a name; ValueError names the nearest and all of them."""
    if name not in PRESETS:
        near = get_close_matches(name, PRESETS, n=1, cutoff=0.4)
        hint = f", did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"model={name!r} is unknown{hint} (one of {', '.join(PRESETS)})")
    return PRESETS[name]


def build(key: Any, config: ModelConfig) -> Any:
    """A model of a config, with initial weights drawn from a key."""
    return FAMILIES[type(config)](key, config)


def to_json(config: ModelConfig) -> dict[str, Any]:
    """A config as plain data: `family`, and the fields that say what the model is; lora_* where it has adapters."""
    fields = {k: v for k, v in asdict(config).items() if k not in (*_OF_A_RUN, "lora")}
    adapters = {} if config.lora is None else {f"lora_{k}": getattr(config.lora, k) for k in _OF_ADAPTERS}
    return {"family": type(config).__name__} | fields | adapters


def from_json(fields: dict[str, Any]) -> ModelConfig:
    """The config of `to_json`."""
    family = next(made for made in FAMILIES if made.__name__ == fields["family"])
    values: dict[str, Any] = {k: v for k, v in fields.items() if k != "family" and not k.startswith("lora_")}
    if "lora_rank" in fields:
        rank, alpha, targets = (fields[f"lora_{k}"] for k in _OF_ADAPTERS)
        values["lora"] = LoraSpec(rank, alpha, targets=tuple(targets))
    if "rope" in values:
        values["rope"] = Rope(**values["rope"])
    return family(**values)


def training_loss(config: ModelConfig) -> Callable:
    """The loss that a model trains by, as the executor takes it."""
    return mixtral.training_loss(config) if isinstance(config, MixtralConfig) else token_loss
