"""Models by name. Each is any object with an embedding, a list of blocks and a head; the library knows no more."""

from collections.abc import Callable
from difflib import get_close_matches
from typing import Any

from jaxpp.losses import token_loss
from models import gpt2, llama3, mixtral, qwen3
from models.gpt2 import GPT2, GPT2Config
from models.llama3 import Llama3, Llama3Config
from models.mixtral import Mixtral, MixtralConfig
from models.qwen3 import Qwen3, Qwen3Config

ModelConfig = GPT2Config | Llama3Config | Qwen3Config | MixtralConfig
PRESETS: dict[str, ModelConfig] = {**gpt2.PRESETS, **llama3.PRESETS, **qwen3.PRESETS, **mixtral.PRESETS}
FAMILIES: dict[type, Callable[..., Any]] = {
    GPT2Config: GPT2,
    Llama3Config: Llama3,
    Qwen3Config: Qwen3,
    MixtralConfig: Mixtral,
}


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


def training_loss(config: ModelConfig) -> Callable:
    """The loss that a model trains by, as the executor takes it."""
    return mixtral.training_loss(config) if isinstance(config, MixtralConfig) else token_loss
