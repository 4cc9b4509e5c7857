"""Hugging Face's config.json and our configs: a table of fields for each architecture.

A field is mapped to one of ours, must have one of some values, or is left out with its reason. One that no table names
is refused unless it is null, since it might change the result.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from models import mapping
from models.gpt2 import GPT2Config
from models.llama3 import Llama3Config
from models.mixtral import MixtralConfig
from models.qwen3 import Qwen3Config
from models.rope import Rope


class To(NamedTuple):
    """The field is this one of ours."""

    ours: str


class Must(NamedTuple):
    """The field may be absent or have one of these values; others are not supported."""

    values: tuple


class Skip(NamedTuple):
    """The field changes nothing here."""

    reason: str


class Extra(NamedTuple):
    """The field is read by the architecture's `extra`, together with others."""


Field = To | Must | Skip | Extra


class Architecture(NamedTuple):
    """How a `model_type` is read and written.

    name: in `architectures`. make: our config's class. extra(json) -> those of our fields that need several of theirs;
    theirs(config) -> those of their fields, the inverse.
    """

    name: str
    make: type
    table: mapping.Table
    fields: Mapping[str, Field]
    extra: Callable[[Mapping[str, Any]], dict[str, Any]]
    theirs: Callable[[Any], dict[str, Any]]


_TRAINING = Skip("of training alone, where --dropout acts; see `dropouts`")
_TEXT = Skip("a token id, which the tokenizer knows")
_COMMON: dict[str, Field] = {
    "model_type": Skip("chooses this table"),
    "architectures": Extra(),
    "transformers_version": Skip("says what wrote the file"),
    "_name_or_path": Skip("says where the file was"),
    "dtype": Skip("of the files; tensors say their own"),
    "torch_dtype": Skip("of the files; tensors say their own"),
    "use_cache": Skip("of generation"),
    "bos_token_id": _TEXT,
    "eos_token_id": _TEXT,
    "pad_token_id": _TEXT,
    "output_hidden_states": Skip("what is returned"),
    "output_attentions": Skip("what is returned"),
    "return_dict": Skip("what is returned"),
    "id2label": Skip("of classifiers"),
    "label2id": Skip("of classifiers"),
    "problem_type": Skip("of classifiers"),
    "chunk_size_feed_forward": Skip("trades memory for time"),
    "is_encoder_decoder": Must((False,)),
    "add_cross_attention": Must((False,)),
    "attention_dropout": _TRAINING,
    "initializer_range": To("std"),
    "vocab_size": To("vocab_size"),
    "tie_word_embeddings": To("tied"),
    "task_specific_params": Skip("of generation"),
    "pretraining_tp": Skip("how a product was split in pretraining; the result is the same"),
    "max_window_layers": Extra(),
}
_ROPED: dict[str, Field] = _COMMON | {
    "hidden_size": To("dim"),
    "intermediate_size": To("hidden"),
    "num_hidden_layers": To("layers"),
    "num_attention_heads": To("heads"),
    "num_key_value_heads": Extra(),
    "head_dim": To("head_dim"),
    "max_position_embeddings": To("positions"),
    "rms_norm_eps": To("epsilon"),
    "hidden_act": Must(("silu",)),
    "rope_parameters": Extra(),
    "rope_theta": Extra(),
    "rope_scaling": Extra(),
    "partial_rotary_factor": Must((1.0,)),
}
_LLAMA = {k: v for k, v in _ROPED.items() if k != "max_window_layers"}
_LLAMA |= {"attention_bias": To("attention_bias"), "mlp_bias": To("mlp_bias")}
_QWEN3 = _ROPED | {"attention_bias": To("attention_bias"), "use_sliding_window": Extra()}
_QWEN3 |= {"sliding_window": Extra(), "layer_types": Extra()}
_MIXTRAL = {k: v for k, v in _ROPED.items() if k != "max_window_layers"} | {
    "sliding_window": To("window"),
    "num_local_experts": To("experts"),
    "num_experts_per_tok": To("chosen"),
    "output_router_logits": Extra(),
    "router_aux_loss_coef": Extra(),
    "router_jitter_noise": Must((0.0,)),
}
_GPT2 = {k: v for k, v in _COMMON.items() if k != "max_window_layers"} | {
    "n_positions": To("positions"),
    "n_ctx": Skip("an old name of n_positions, which is read"),
    "n_embd": To("dim"),
    "n_layer": To("layers"),
    "n_head": To("heads"),
    "n_inner": To("hidden"),
    "layer_norm_epsilon": To("epsilon"),
    "activation_function": Must(("gelu_new", "gelu_pytorch_tanh")),
    "resid_pdrop": _TRAINING,
    "embd_pdrop": _TRAINING,
    "attn_pdrop": _TRAINING,
    "scale_attn_weights": Must((True,)),
    "scale_attn_by_inverse_layer_idx": Must((False,)),
    "reorder_and_upcast_attn": Must((False,)),
    **{f"summary_{name}": Skip("of other heads") for name in ("type", "use_proj", "activation")},
    **{f"summary_{name}": Skip("of other heads") for name in ("proj_to_labels", "first_dropout")},
}


class Kind(NamedTuple):
    """What a field's value must be: in words, and as a test. null: whether null says something too."""

    words: str
    test: Callable[[Any], bool]
    null: bool = False


MOST = 10**9  # of a size
_number = lambda value: type(value) in (int, float)
_SIZE = Kind(f"a whole number of 1 to {MOST}, for example 8", lambda v: type(v) is int and 1 <= v <= MOST)
_COUNT = Kind(f"a whole number of 0 to {MOST}, for example 8", lambda v: type(v) is int and 0 <= v <= MOST)
_POSITIVE = Kind("a number above 0 and below 1e30, for example 1.0", lambda v: _number(v) and 0 < v < 1e30)
_WEIGHT = Kind("a number of 0 or more, for example 0.02", lambda v: _number(v) and 0 <= v < 1e30)
_RATE = Kind("a number of 0 or more and below 1, for example 0.1", lambda v: _number(v) and 0 <= v < 1)
_FLAG = Kind("true or false", lambda v: type(v) is bool)
_WORD = Kind('a string, for example "default"', lambda v: type(v) is str)
_OBJECT = Kind('an object, for example {"rope_type": "default"}', lambda v: type(v) is dict)
# By name, of all architectures and of their ropes; fields of `Must` are held against their values instead.
_KINDS: dict[str, Kind] = {
    **dict.fromkeys(("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"), _SIZE),
    **dict.fromkeys(("max_position_embeddings", "vocab_size", "num_local_experts", "num_experts_per_tok"), _SIZE),
    **dict.fromkeys(("n_positions", "n_embd", "n_layer", "n_head"), _SIZE),
    **dict.fromkeys(("num_key_value_heads", "head_dim", "n_inner", "sliding_window"), _SIZE._replace(null=True)),
    "original_max_position_embeddings": _SIZE._replace(null=True),
    "max_window_layers": _COUNT,
    **dict.fromkeys(("rms_norm_eps", "layer_norm_epsilon"), _POSITIVE),
    **dict.fromkeys(("rope_theta", "factor", "low_freq_factor", "high_freq_factor"), _POSITIVE._replace(null=True)),
    **dict.fromkeys(("beta_fast", "beta_slow", "attention_factor"), _POSITIVE._replace(null=True)),
    **dict.fromkeys(("mscale", "mscale_all_dim"), _WEIGHT._replace(null=True)),
    **dict.fromkeys(("initializer_range", "router_aux_loss_coef"), _WEIGHT),
    **dict.fromkeys(("attention_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop"), _RATE._replace(null=True)),
    **dict.fromkeys(("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window"), _FLAG),
    "output_router_logits": _FLAG,
    "truncate": _FLAG._replace(null=True),
    **dict.fromkeys(("rope_type", "type"), _WORD._replace(null=True)),
    **dict.fromkeys(("rope_parameters", "rope_scaling"), _OBJECT._replace(null=True)),
}


def _check_kinds(json: Mapping[str, Any], where: str = "") -> None:
    """Check every field that `_KINDS` has. Raises ValueError, naming the field after `where`."""
    for name, value in json.items():
        kind = _KINDS.get(name)
        if kind is not None and not (kind.null if value is None else kind.test(value)):
            shown = "null" if value is None else repr(value)
            raise ValueError(f"{where}{name}={shown} is not {kind.words}{', or null' if kind.null else ''}")


# What transformers takes where the file leaves the field out, and we have another default or none.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"epsilon": 1e-6, "head_dim": None, "tied": False},
    "qwen3": {"epsilon": 1e-6, "head_dim": 128, "tied": False},
    "mixtral": {"epsilon": 1e-5, "head_dim": None, "tied": False},
    "gpt2": {},
}
_ROPE_FIELDS = {
    "factor": "factor",
    "low_freq_factor": "low",
    "high_freq_factor": "high",
    "original_max_position_embeddings": "original",
    "beta_fast": "fast",
    "beta_slow": "slow",
    "truncate": "truncate",
    "attention_factor": "scale",
}
_ROPE_NEEDS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "beta_fast", "beta_slow", "truncate", "attention_factor", "original_max_position_embeddings"),
}
_ROPE_OPTIONAL = ("beta_fast", "beta_slow", "truncate", "attention_factor")


def _rope(json: Mapping[str, Any]) -> Rope:
    """Both spellings: `rope_parameters`, and `rope_theta` beside `rope_scaling`."""
    given = dict(json.get("rope_parameters") or json.get("rope_scaling") or {})
    _check_kinds(given, "rope ")
    theta = given.pop("rope_theta", None) or json.get("rope_theta") or 10_000.0
    kind = given.pop("rope_type", None) or given.pop("type", None) or "default"
    given.pop("type", None)
    if kind not in _ROPE_NEEDS:
        raise ValueError(f"rope_type={kind!r} is not supported: one of {', '.join(_ROPE_NEEDS)}")
    if kind == "yarn" and given.get("mscale") and given.get("mscale_all_dim"):
        raise ValueError("rope mscale and mscale_all_dim are not supported: give attention_factor instead")
    partial = given.pop("partial_rotary_factor", 1.0)
    if partial not in (None, 1.0):
        raise ValueError(f"rope partial_rotary_factor={partial} is not supported, only 1.0")
    fields: dict[str, Any] = {}
    for name in _ROPE_NEEDS[kind]:
        value = given.pop(name, None)
        if value is None and name == "original_max_position_embeddings":
            value = json["max_position_embeddings"]
        if value is None and name not in _ROPE_OPTIONAL:
            raise ValueError(f"rope_type={kind!r} needs {name}, which config.json leaves out")
        if value is not None:
            fields[_ROPE_FIELDS[name]] = value
    if kind == "llama3" and fields["low"] >= fields["high"]:
        raise ValueError(
            f"rope low_freq_factor={fields['low']} must be below high_freq_factor={fields['high']}, for example 1 and 4"
        )
    left = {name: value for name, value in given.items() if value is not None}
    harmless = (
        {"original_max_position_embeddings", "mscale", "mscale_all_dim"} if kind in ("default", "yarn") else set()
    )
    if left.keys() - harmless:
        raise ValueError(f"rope field {min(left.keys() - harmless)!r} is unknown for rope_type={kind!r}: take it out")
    return Rope(theta=float(theta), kind=kind, **fields)


def _their_rope(rope: Rope) -> dict[str, Any]:
    if rope.kind == "default":
        return {"rope_theta": rope.theta, "rope_scaling": None}
    found = {name: getattr(rope, _ROPE_FIELDS[name]) for name in _ROPE_NEEDS[rope.kind]}
    scaling = {"rope_type": rope.kind} | {name: value for name, value in found.items() if value is not None}
    return {"rope_theta": rope.theta, "rope_scaling": scaling}


def _llama_extra(json: Mapping[str, Any]) -> dict[str, Any]:
    return {"rope": _rope(json), "kv_heads": json.get("num_key_value_heads") or json["num_attention_heads"]}


def _llama_theirs(config: Any) -> dict[str, Any]:
    return {"num_key_value_heads": config.kv_heads, "hidden_act": "silu", **_their_rope(config.rope)}


def _qwen3_extra(json: Mapping[str, Any]) -> dict[str, Any]:
    """All layers must see alike, since the stages run one program."""
    layers = json["num_hidden_layers"]
    window = json.get("sliding_window", 4096) if json.get("use_sliding_window") else None
    from_layer = json.get("max_window_layers", 28)
    default = ["sliding_attention" if window and i >= from_layer else "full_attention" for i in range(layers)]
    if json.get("layer_types") not in (None, default):
        raise ValueError(
            f"layer_types={json['layer_types']} are not what use_sliding_window and max_window_layers say: {default}"
        )
    kinds = set(default)
    if len(kinds) > 1:
        raise ValueError(
            f"layers that see differently ({', '.join(sorted(kinds))}) are not supported: max_window_layers must be 0"
            f" or {layers}"
        )
    return _llama_extra(json) | {"window": window if kinds == {"sliding_attention"} else None}


def _qwen3_theirs(config: Any) -> dict[str, Any]:
    sliding = config.window is not None
    window = {"use_sliding_window": sliding, "sliding_window": config.window}
    window["max_window_layers"] = 0 if sliding else config.layers
    return _llama_theirs(config) | window


def _mixtral_extra(json: Mapping[str, Any]) -> dict[str, Any]:
    """As in transformers, the balance loss counts where the router's logits are asked for."""
    coefficient = json.get("router_aux_loss_coef", 0.001) if json.get("output_router_logits") else 0.0
    return _llama_extra(json) | {"balance_loss": coefficient}


def _mixtral_theirs(config: Any) -> dict[str, Any]:
    asked = config.balance_loss > 0
    balance = {"output_router_logits": asked} | ({"router_aux_loss_coef": config.balance_loss} if asked else {})
    return _llama_theirs(config) | balance


GPT2_DROPOUTS = ("resid_pdrop", "embd_pdrop", "attn_pdrop")


def _gpt2_extra(json: Mapping[str, Any]) -> dict[str, Any]:
    """Its three dropouts act where ours does, so that they are ours where they agree."""
    rates = dropouts(json)
    return {"dropout": rates["resid_pdrop"] if len(set(rates.values())) == 1 else 0.0}


def dropouts(json: Mapping[str, Any]) -> dict[str, float]:
    """The rates of dropout that a config.json gives, with those that transformers takes where it gives none."""
    names = dict.fromkeys(GPT2_DROPOUTS, 0.1) if json.get("model_type") == "gpt2" else {"attention_dropout": 0.0}
    return {name: json.get(name, rate) or 0.0 for name, rate in names.items()}


def unused_dropout(json: Mapping[str, Any]) -> str | None:
    """What to warn of where a config.json asks for a dropout that we have not, which acts on other places."""
    rates = dropouts(json)
    if not any(rates.values()) or ("resid_pdrop" in rates and len(set(rates.values())) == 1):
        return None
    said = ", ".join(f"{name}={rate}" for name, rate in rates.items())
    return (
        f"config.json: {said}: not used in training, where --dropout acts on attention, residuals and embeddings alike"
    )


ARCHITECTURES = {
    "gpt2": Architecture(
        "GPT2LMHeadModel",
        GPT2Config,
        mapping.GPT2,
        _GPT2,
        _gpt2_extra,
        lambda config: {"activation_function": "gelu_new"},
    ),
    "llama": Architecture("LlamaForCausalLM", Llama3Config, mapping.DENSE, _LLAMA, _llama_extra, _llama_theirs),
    "qwen3": Architecture("Qwen3ForCausalLM", Qwen3Config, mapping.DENSE, _QWEN3, _qwen3_extra, _qwen3_theirs),
    "mixtral": Architecture(
        "MixtralForCausalLM", MixtralConfig, mapping.MIXTRAL, _MIXTRAL, _mixtral_extra, _mixtral_theirs
    ),
}


def kind_of(config: Any) -> str:
    """The `model_type` of one of our configs."""
    return next(name for name, found in ARCHITECTURES.items() if found.make is type(config))


def read(json: Mapping[str, Any]) -> Any:
    """Our config from theirs. Raises ValueError, naming the field, for what would change the result and is not ours."""
    kind = json.get("model_type")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        raise ValueError(f"model_type={kind!r} is not supported: one of {', '.join(ARCHITECTURES)}")
    found = ARCHITECTURES[kind]
    if json.get("architectures") not in (None, [found.name]):
        raise ValueError(f"architectures={json['architectures']} is not supported: only {found.name} of {kind}")
    _check_kinds({name: value for name, value in json.items() if name in found.fields})
    ours: dict[str, Any] = dict(_DEFAULTS[kind])
    for name, value in json.items():
        rule = found.fields.get(name)
        if rule is None and value is not None:
            raise ValueError(f"{name}={value!r} is no field of {kind} that we know: take it out if it changes nothing")
        if isinstance(rule, To) and (value is not None or rule.ours in ("window", "hidden", "head_dim")):
            ours[rule.ours] = value
        elif isinstance(rule, Must) and value is not None and value not in rule.values:
            raise ValueError(f"{name}={value!r} is not supported: only {' or '.join(map(repr, rule.values))}")
    needed = {rule.ours: name for name, rule in found.fields.items() if isinstance(rule, To)}
    try:
        config = found.make(**ours, **found.extra(json))
    except (TypeError, KeyError):
        absent = sorted(name for name in needed.values() if name not in json)
        raise ValueError(f"config.json of {kind} lacks fields that are needed, one of {', '.join(absent)}") from None
    _check_sizes(config)
    return config


def _check_sizes(config: Any) -> None:
    if isinstance(config, GPT2Config):
        if config.dim % config.heads:
            raise ValueError(f"n_embd={config.dim} must be a multiple of n_head={config.heads}")
        return
    spec, given = config.attention, config.head_dim is not None
    if spec.heads % spec.kv_heads:
        raise ValueError(f"num_attention_heads={spec.heads} must be a multiple of num_key_value_heads={spec.kv_heads}")
    if not given and config.dim % config.heads:
        raise ValueError(
            f"hidden_size={config.dim} must be a multiple of num_attention_heads={config.heads} where head_dim is not"
            f" given: give it"
        )
    if spec.head_dim % 2:
        source = "" if given else f", which is hidden_size={config.dim} / num_attention_heads={config.heads},"
        raise ValueError(f"head_dim={spec.head_dim}{source} must be even, since rope turns pairs: for example 64")
    if isinstance(config, MixtralConfig) and config.chosen > config.experts:
        raise ValueError(
            f"num_experts_per_tok={config.chosen} is more than num_local_experts={config.experts}: use at most that"
        )


def write(config: Any, source: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Their config from ours; source, a config.json of theirs whose other fields (token ids, and what
    only training reads) are kept."""
    found = ARCHITECTURES[kind_of(config)]
    kept = {name for name, rule in found.fields.items() if isinstance(rule, Skip)} | {"router_aux_loss_coef"}
    json = dict.fromkeys((name for name in found.fields if name in GPT2_DROPOUTS), config.dropout)
    json |= {name: value for name, value in (source or {}).items() if name in kept & found.fields.keys()}
    json |= {"model_type": kind_of(config), "architectures": [found.name]}
    json |= {name: getattr(config, rule.ours) for name, rule in found.fields.items() if isinstance(rule, To)}
    return json | found.theirs(config)
