"""Tiny random models that transformers itself builds and saves, and what it computes with them.

Legend: B microbatch size, T sequence, V vocabulary.
"""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

ROPES = {
    "linear": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 500.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "yarn by hand": {
        "rope_type": "yarn",
        "rope_theta": 500.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "beta_fast": 8.0,
        "beta_slow": 0.5,
        "attention_factor": 1.2,
        "truncate": False,
    },
}
_SMALL = {
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GPT2 = {"vocab_size": 61, "n_embd": 24, "n_layer": 4, "n_head": 3, "n_positions": 64, "initializer_range": 0.3}
_GPT2 |= {"bos_token_id": 1, "eos_token_id": 2}
FAMILIES = {"gpt2": _GPT2, "llama": _SMALL, "qwen3": _SMALL | {"head_dim": 8}, "mixtral": _SMALL}
FAMILIES["mixtral"] = _SMALL | {"num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": 0.05}
# (family, what differs): those that people use.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {}),
    "gpt2 untied": ("gpt2", {"tie_word_embeddings": False, "n_inner": 50, "layer_norm_epsilon": 1e-3}),
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True, "rms_norm_eps": 1e-2, "vocab_size": 37}),
    "llama biases": ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 12}),
    "llama without groups": ("llama", {"num_key_value_heads": 4}),
    **{f"llama rope {name}": ("llama", {"rope_parameters": rope}) for name, rope in ROPES.items()},
    "qwen3": ("qwen3", {}),
    "qwen3 tied": ("qwen3", {"tie_word_embeddings": True, "attention_bias": True, "head_dim": 16}),
    "qwen3 sliding": ("qwen3", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}),
    "mixtral": ("mixtral", {}),
    "mixtral sliding": ("mixtral", {"sliding_window": 4, "num_experts_per_tok": 3}),
    "mixtral without balance": ("mixtral", {"output_router_logits": False, "rms_norm_eps": 1e-2}),
}
_CLASSES = {
    "gpt2": (transformers.GPT2Config, transformers.GPT2LMHeadModel),
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    "mixtral": (transformers.MixtralConfig, transformers.MixtralForCausalLM),
}
TOKENS_BT = np.random.default_rng(0).integers(0, 37, (2, 21))


@cache
def make(case: str) -> Any:
    """The model of a case, none of whose parameters has a special value: biases not 0, scales not 1."""
    family, changes = CASES[case]
    config, model = _CLASSES[family]
    torch.manual_seed(0)
    net = model(config(**FAMILIES[family] | changes, attn_implementation="eager")).eval()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return net


def save(case: str, folder: Path, **options: Any) -> str:
    """Save a case's model with `save_pretrained`; returns the folder."""
    make(case).save_pretrained(folder, **options)
    return str(folder)


def load(folder: str) -> Any:
    """The model in a folder, as transformers reads it."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()


def logits(net: Any, tokens_BT: np.ndarray = TOKENS_BT) -> np.ndarray:
    """Logits [B, T, V] in float32."""
    with torch.no_grad():
        return net(torch.tensor(tokens_BT)).logits.numpy()


def loss_and_grads(net: Any, tokens_BT: np.ndarray) -> tuple[float, dict[str, np.ndarray]]:
    """Mean loss of the next token, side losses included, and the gradient of every tensor by its saved name."""
    net.zero_grad()
    tokens = torch.tensor(tokens_BT)
    loss = net(tokens, labels=tokens).loss
    loss.backward()
    return loss.item(), {name: parameter.grad.numpy() for name, parameter in net.named_parameters()}
