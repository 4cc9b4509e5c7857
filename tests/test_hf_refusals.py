"""What cannot be read is refused by name: fields that change the result, tensors that do not fit, foreign files."""

import json
import struct
import warnings
from pathlib import Path
from typing import Any

import hub
import jax
import ml_dtypes
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file
from test_hf import edit, logits, placed

import jaxpp
import run
from jaxpp.config import Config
from jaxpp.losses import with_metrics
from models import hf, hf_config
from models import training_loss as loss_of

CASES = {"gpt2": "gpt2", "llama": "llama biases", "qwen3": "qwen3 sliding", "mixtral": "mixtral"}
OTHER: dict[str, Any] = {
    "model_type": "mamba",
    "architectures": ["LlamaForSequenceClassification"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 20.0},
    "num_hidden_layers": 3,
    "n_layer": 3,
    "sliding_window": 3,
    "use_sliding_window": True,
    "max_window_layers": 2,
    "layer_types": ["sliding_attention"] * 4,
    "n_inner": 30,
    "num_experts_per_tok": 1,
    "head_dim": 4,
    "num_key_value_heads": 1,
    "n_head": 4,
    "num_attention_heads": 8,
    "pad_token_id": 5,
    "problem_type": "regression",
    "attention_dropout": 0.5,
    "resid_pdrop": 0.5,
    "embd_pdrop": 0.5,
    "attn_pdrop": 0.5,
    "hidden_act": "gelu",
    "activation_function": "relu",
    "tie_word_embeddings": True,
}
FIELDS = [(family, name) for family in CASES for name in hub.make(CASES[family]).config.to_dict() if name[0] != "_"]
# What these change is no number of a forward pass: initial weights, and the longest sequence.
OTHERWISE = {"initializer_range": "std", "max_position_embeddings": "positions"}


def mutated(name: str, value: Any) -> Any:
    if name in OTHER and OTHER[name] != value:
        return OTHER[name]
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value * 2 + 1
    return "other"


def outputs(folder: str) -> np.ndarray:
    """Logits, and the loss that it would train by."""
    source = hf.open_folder(folder)
    model = jaxpp.unstack(placed(source))
    batch = {"tokens": np.asarray(hub.TOKENS_BT), "labels": np.asarray(hub.TOKENS_BT)}
    stream = model.embed(batch, None)
    for block in model.blocks:
        stream = block(stream, batch, None)
    loss = with_metrics(loss_of(source.config)(model.head, model.embed, stream, batch))[0]
    return np.append(logits(model).ravel(), loss)


@pytest.mark.parametrize(("family", "name"), FIELDS)
def test_every_field_counts_or_is_refused(family: str, name: str, tmp_path: Path) -> None:
    """Changed, a field changes the output, or is refused by name, or is one that a table leaves out with a reason."""
    folder = hub.save(CASES[family], tmp_path)
    before, config = outputs(folder), hf.read_config(folder)
    json_value = json.loads((tmp_path / "config.json").read_text()).get(name)
    edit(tmp_path, **{name: mutated(name, json_value)})
    rule = hf_config.ARCHITECTURES[family].fields.get(name)
    try:
        after = outputs(folder)
    except ValueError as error:
        assert not isinstance(rule, hf_config.Skip) or name == "model_type"
        assert (
            name in str(error) or "tensor" in str(error) or "layers that see" in str(error) or "sliding" in str(error)
        )
        assert "\n" not in str(error)
        return
    if isinstance(rule, hf_config.Skip):
        assert len(rule.reason) > 5
        np.testing.assert_array_equal(before, after)
    elif name in OTHERWISE:
        field = OTHERWISE[name]
        assert getattr(hf.read_config(folder), field) == mutated(name, json_value) != getattr(config, field)
    else:
        assert not np.array_equal(before, after)


@pytest.mark.parametrize("name", ["router_temperature", "logit_softcap", "quantization_config"])
def test_unknown_fields(name: str, tmp_path: Path) -> None:
    """Null says nothing; a value might change the result."""
    folder = hub.save("llama", tmp_path)
    edit(tmp_path, **{name: {"bits": 4}})
    with pytest.raises(ValueError, match=f"{name}=.*bits.* is no field of llama that we know"):
        hf.read_config(folder)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: None}))
    hf.read_config(folder)


@pytest.mark.parametrize(
    ("rope", "words"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "rope_type='dynamic' is not supported: one of default, linear"),
        ({"rope_type": "longrope"}, "rope_type='longrope' is not supported"),
        ({"rope_type": "llama3", "factor": 2.0}, "needs low_freq_factor"),
        ({"rope_type": "linear"}, "needs factor"),
        ({"rope_type": "linear", "factor": 2.0, "bend": 1}, "rope field 'bend' is unknown"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"rope_type": "yarn", "factor": 2.0, "mscale": 1.0, "mscale_all_dim": 0.5}, "attention_factor"),
    ],
)
def test_ropes(rope: dict, words: str, tmp_path: Path) -> None:
    folder = hub.save("llama", tmp_path)
    edit(tmp_path, rope_parameters=rope)
    with pytest.raises(ValueError, match=words):
        hf.read_config(folder)


def refusal(folder: str | Path, capsys: pytest.CaptureFixture, option: str = "--init_from") -> str:
    """The one line with which run.py refuses to train from it, before anything compiles."""
    words = ["--pipeline_parallel", "1", "--sequence_length", "8", "--num_iteration", "1"]
    assert run.main([option, str(folder), *words, "--input_bin", __file__, "--output_dir", "/dev/null/x"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    return err


def retensor(folder: Path, **changes: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    for name, array in changes.items():
        name = name.replace("__", ".")
        tensors = {k: v for k, v in tensors.items() if k != name} | ({} if array is None else {name: array})
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


VOCAB = {"vocab_size": 256}


@pytest.fixture(scope="module")
def folder_of_bytes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama with a byte vocabulary, which the training text's bytes fit."""
    config = transformers.LlamaConfig(**hub.FAMILIES["llama"] | VOCAB | {"tie_word_embeddings": True})
    folder = tmp_path_factory.mktemp("bytes")
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(folder_of_bytes: Path, tmp_path: Path) -> Path:
    for path in folder_of_bytes.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model__norm__weight": None}, "tensor model.norm.weight is missing (1 in all)"),
        ({"model__extra__weight": np.ones(3, np.float32)}, "tensor model.extra.weight has no place in the model"),
        ({"model__norm__weight": np.ones(3, np.float32)}, "tensor model.norm.weight has shape [3], not [24]"),
        ({"model__norm__weight": np.ones(24, np.int8)}, "model.norm.weight is I8"),
        ({"lm_head__weight": np.ones((256, 24), np.float32)}, "lm_head.weight is not model.embed_tokens.weight"),
    ],
)
def test_tensors(changes: dict, words: str, folder: Path, capsys: pytest.CaptureFixture) -> None:
    retensor(folder, **changes)
    assert words in refusal(folder, capsys)


def test_a_tied_head_that_is_the_embedding_is_no_surplus(folder: Path) -> None:
    table = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    retensor(folder, lm_head__weight=table, model__layers__0__self_attn__rotary_emb__inv_freq=np.ones(3, np.float32))
    placed(hf.open_folder(str(folder)))


def test_folders(folder: Path, capsys: pytest.CaptureFixture) -> None:
    assert "config.json cannot be read" in refusal(folder / "nowhere", capsys)
    (folder / "model.safetensors").rename(folder / "model.bin")
    assert "no model.safetensors" in refusal(folder, capsys)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-1.safetensors"}}')
    assert "model-1.safetensors is missing" in refusal(folder, capsys)
    (folder / "model.safetensors.index.json").unlink()
    (folder / "model.safetensors").write_bytes((folder / "model.bin").read_bytes()[:-100])
    assert "model.safetensors" in refusal(folder, capsys) or "incomplete" in refusal(folder, capsys).lower()
    (folder / "config.json").write_text("{")
    assert "config.json is no JSON" in refusal(folder, capsys)


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"hidden_size": "32"}, "hidden_size='32' is not a whole number of 1 to"),
    ("llama", {"hidden_size": None}, "hidden_size=null is not a whole number of 1 to"),
    ("llama", {"hidden_size": 10**12}, "hidden_size=1000000000000 is not"),
    ("llama", {"num_hidden_layers": 2.5}, "num_hidden_layers=2.5 is not a whole number"),
    ("llama", {"num_hidden_layers": -1}, "num_hidden_layers=-1 is not"),
    ("llama", {"num_attention_heads": 0}, "num_attention_heads=0 is not"),
    ("llama", {"num_attention_heads": True}, "num_attention_heads=True is not"),
    (
        "llama",
        {"num_key_value_heads": 0},
        "num_key_value_heads=0 is not a whole number of 1 to 1000000000, for example",
    ),
    ("llama", {"num_key_value_heads": 3}, "num_attention_heads=4 must be a multiple of num_key_value_heads=3"),
    (
        "llama",
        {"num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": None},
        "hidden_size=24 must be a multiple of num_att",
    ),
    ("llama", {"head_dim": 3}, "head_dim=3 must be even"),
    ("llama", {"num_attention_heads": 8, "head_dim": None}, "hidden_size=24 / num_attention_heads=8, must be even"),
    ("llama", {"model_type": ["llama"]}, "model_type=['llama'] is not supported"),
    ("llama", {"architectures": 3}, "architectures=3 is not supported"),
    ("llama", {"rms_norm_eps": "tiny"}, "rms_norm_eps='tiny' is not a number above 0"),
    ("llama", {"rms_norm_eps": True}, "rms_norm_eps=True is not a number above 0"),
    ("llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps=nan is not"),
    ("llama", {"rms_norm_eps": float("inf")}, "rms_norm_eps=inf is not"),
    ("llama", {"rms_norm_eps": 10**400}, "rms_norm_eps=1000"),
    ("llama", {"tie_word_embeddings": "yes"}, "tie_word_embeddings='yes' is not true or false"),
    ("llama", {"attention_dropout": 1}, "attention_dropout=1 is not a number of 0 or more and below 1"),
    ("llama", {"initializer_range": -1}, "initializer_range=-1 is not a number of 0 or more"),
    ("llama", {"rope_parameters": "x"}, "rope_parameters='x' is not an object"),
    ("llama", {"rope_parameters": {"rope_type": ["linear"]}}, "rope rope_type=['linear'] is not a string"),
    ("llama", {"rope_parameters": {"rope_type": "linear", "factor": "4"}}, "rope factor='4' is not a number above 0"),
    ("llama", {"rope_parameters": hub.ROPES["llama3"] | {"low_freq_factor": 4}}, "low_freq_factor=4 must be below"),
    ("llama", {"rope_parameters": hub.ROPES["yarn by hand"] | {"truncate": 0}}, "rope truncate=0 is not true or false"),
    ("qwen3", {"max_window_layers": "all"}, "max_window_layers='all' is not a whole number of 0 to"),
    ("qwen3", {"use_sliding_window": 1}, "use_sliding_window=1 is not true or false"),
    ("mixtral", {"num_experts_per_tok": 5}, "num_experts_per_tok=5 is more than num_local_experts=4"),
    ("mixtral", {"router_aux_loss_coef": "0"}, "router_aux_loss_coef='0' is not a number"),
    ("gpt2", {"n_embd": None}, "n_embd=null is not a whole number"),
    ("gpt2", {"n_head": 5}, "n_embd=24 must be a multiple of n_head=5"),
    ("gpt2", {"resid_pdrop": 2}, "resid_pdrop=2 is not a number of 0 or more and below 1"),
]


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The config.json of each family."""
    folders = {family: hub.save(family, tmp_path_factory.mktemp(family)) for family in CASES}
    return {family: json.loads((Path(folder) / "config.json").read_text()) for family, folder in folders.items()}


@pytest.mark.parametrize(("family", "changes", "words"), WRONG)
def test_types_and_ranges(family: str, changes: dict, words: str, configs: dict, tmp_path: Path) -> None:
    """Named by folder, file and field, in one line."""
    (tmp_path / "config.json").write_text(json.dumps(configs[family] | changes))
    with pytest.raises(ValueError) as refusal:
        hf.read_config(str(tmp_path))
    assert str(refusal.value).startswith(f"init_from={str(tmp_path)!r}: config.json: ")
    assert words in str(refusal.value) and "\n" not in str(refusal.value)


@pytest.mark.parametrize("family", CASES)
def test_every_size_that_is_read_is_checked(family: str, configs: dict) -> None:
    """Each field that becomes one of ours, or several together, refuses a value of another type."""
    rules = hf_config.ARCHITECTURES[family].fields
    for name, rule in rules.items():
        if isinstance(rule, hf_config.To | hf_config.Extra) and name in configs[family]:
            with pytest.raises(ValueError, match=name):
                hf_config.read(configs[family] | {name: ["another type"]})


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("config.json", b"[1]", "config.json holds a list"),
        ("config.json", b'{"model_type": "ll\xe4ma"}', "config.json is not UTF-8 (byte 18)"),
        ("model.safetensors.index.json", b"[1]", "model.safetensors.index.json holds a list"),
        (
            "model.safetensors",
            (2).to_bytes(8, "little") + b"[]" + bytes(100),
            "model.safetensors is no safetensors file",
        ),
    ],
)
def test_foreign_files(file: str, content: bytes, words: str, folder: Path, capsys: pytest.CaptureFixture) -> None:
    (folder / file).write_bytes(content)
    assert words in refusal(folder, capsys)


@pytest.mark.parametrize(
    ("family", "rates", "dropout", "warned"),
    [
        ("gpt2", {}, 0.1, None),
        ("gpt2", dict.fromkeys(hf_config.GPT2_DROPOUTS, 0.3), 0.3, None),
        ("gpt2", dict.fromkeys(hf_config.GPT2_DROPOUTS, 0), 0.0, None),
        ("gpt2", {"attn_pdrop": 0.5}, 0.0, "resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.5: not used"),
        ("llama", {}, 0.0, None),
        ("llama", {"attention_dropout": 0.5}, 0.0, "attention_dropout=0.5: not used in training, where --dropout acts"),
        ("mixtral", {"attention_dropout": 0.5}, 0.0, "attention_dropout=0.5: not used"),
    ],
)
def test_dropout(family: str, rates: dict, dropout: float, warned: str | None, tmp_path: Path) -> None:
    """Taken as --dropout's default where it is the same dropout as ours, else warned about; --dropout wins silently."""
    folder = hub.save(family, tmp_path)
    edit(tmp_path, **rates)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = run.start_of(Config(init_from=folder))
    assert (found.config.dropout, found.model.dropout) == (dropout, dropout)
    assert [warned in str(w.message) for w in caught if warned] == [True] * bool(warned)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = run.start_of(Config(init_from=folder, dropout=0.2))
    assert (found.config.dropout, found.model.dropout) == (0.2, 0.2)


def test_a_model_and_a_folder(folder: Path, capsys: pytest.CaptureFixture) -> None:
    assert run.main(["--init_from", str(folder), "--model", "llama3-tiny"]) == 2
    assert "model and init_from each say which model to train" in capsys.readouterr().err


def llmc_file(path: Path, version: int = 3, **header: int) -> Any:
    """A model file as llm.c writes it, from transformers' GPT-2; returns that."""
    net = hub.make("gpt2")
    dtype = np.float32 if version == 3 else ml_dtypes.bfloat16
    tensors = {name: parameter.detach().numpy() for name, parameter in net.named_parameters()}
    layers = lambda name, f=lambda a: a: [np.stack([f(tensors[f"transformer.h.{i}.{name}"]) for i in range(4)])]
    flip = lambda a: a.T
    padded = np.zeros((64, 24), np.float32)
    padded[:61] = tensors["transformer.wte.weight"]
    parts = [padded, tensors["transformer.wpe.weight"], *layers("ln_1.weight"), *layers("ln_1.bias")]
    parts += layers("attn.c_attn.weight", flip) + layers("attn.c_attn.bias")
    parts += layers("attn.c_proj.weight", flip) + layers("attn.c_proj.bias")
    parts += layers("ln_2.weight") + layers("ln_2.bias") + layers("mlp.c_fc.weight", flip) + layers("mlp.c_fc.bias")
    parts += layers("mlp.c_proj.weight", flip) + layers("mlp.c_proj.bias")
    parts += [tensors["transformer.ln_f.weight"], tensors["transformer.ln_f.bias"]]
    sizes = {"magic": 20240326, "version": version, "T": 64, "V": 61, "L": 4, "N": 3, "D": 24, "Vp": 64} | header
    head = struct.pack("<256i", *sizes.values(), *[0] * 248)
    path.write_bytes(head + b"".join(np.ascontiguousarray(part, dtype).tobytes() for part in parts))
    return net


def test_llmc_files(tmp_path: Path) -> None:
    """Padded rows of the vocabulary are left out."""
    net = llmc_file(tmp_path / "model.bin")
    source = hf.open_llmc(str(tmp_path / "model.bin"))
    assert source.config.vocab_size == 61
    model = jaxpp.unstack(jax.device_get(placed(source, 2)))
    np.testing.assert_allclose(logits(model), hub.logits(net), atol=1e-4, rtol=0)
    llmc_file(tmp_path / "half.bin", version=5)
    half = jaxpp.unstack(placed(hf.open_llmc(str(tmp_path / "half.bin"))))
    pairs = zip(jax.tree.leaves(half), jax.tree.leaves(model), strict=True)
    assert all(np.array_equal(a, np.asarray(b).astype(ml_dtypes.bfloat16).astype(np.float32)) for a, b in pairs)


@pytest.mark.parametrize(
    ("header", "cut", "words"),
    [
        ({"N": 0}, 0, "N=0, D=24, padded V=64: all must be 1 or more, D a multiple of N"),
        ({"N": 5}, 0, "N=5, D=24"),
        ({"V": 65}, 0, "V=65, L=4, N=3, D=24, padded V=64"),
        ({"L": -4}, 0, "L=-4"),
        ({"magic": 20240520}, 0, "begins with 20240520, a model file of llm.c with 20240326"),
        ({"version": 1}, 0, "has version 1: only 3 (float32) and 5 (bfloat16)"),
        ({}, 4, "bytes, its header's sizes need"),
        ({"L": 5}, 0, "bytes, its header's sizes need"),
    ],
)
def test_llmc_refusals(header: dict, cut: int, words: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = tmp_path / "model.bin"
    llmc_file(path, **header)
    path.write_bytes(path.read_bytes()[: -cut or None])
    assert words in refusal(path, capsys, "--llmc_filepath")
    assert "cannot be read" in refusal(tmp_path / "nothing.bin", capsys, "--llmc_filepath")


def test_training_from_a_folder_starts_from_its_weights(folder: Path, tmp_path: Path) -> None:
    """The first step's loss, at no learning rate, is transformers' on the same tokens."""
    words = ["--init_from", str(folder), "--pipeline_parallel", "4", "--sequence_length", "16", "--dtype", "float32"]
    words += ["--num_iteration", "1", "--learning_rate", "0", "--output_dir", str(tmp_path / "out")]
    assert run.main([*words, "--total_batch_size", "128"]) == 0
    first = json.loads((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()[0])
    tokens, _ = jaxpp.data.default_corpus()
    batch = jaxpp.data.Batches([tokens], 4, 2, 16, 0).at(0)
    net = transformers.LlamaForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        found = net(torch.tensor(batch["tokens"].reshape(-1, 16))).logits.log_softmax(-1)
    chosen = found.gather(-1, torch.tensor(batch["labels"].reshape(-1, 16)).long()[..., None])
    assert first["loss"] == pytest.approx(-chosen.mean().item(), abs=1e-5)
