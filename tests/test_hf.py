"""Hugging Face folders against transformers itself: the same numbers from the same files, both ways.

Legend: B microbatch size, T sequence, V vocabulary.
"""

import json
from pathlib import Path
from typing import Any

import hub
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import torch
import transformers
from safetensors import safe_open

import jaxpp
import models
import run
from jaxpp import data, feeds, partition
from models import hf, mapping
from models.generate import Sampling, generate

TOKENS_BT = hub.TOKENS_BT


def placed(source: hf.Source, stages: int = 1, chunks: int = 1) -> partition.Placed:
    """A source's parameters on a mesh of emulated devices."""
    layout = partition.split_layers(source.config.layers, stages, chunks)
    spec = jax.eval_shape(lambda: partition.stack(models.build(jax.random.key(0), source.config), layout))
    return hf.assemble(source, spec, partition.shardings(spec, jaxpp.make_mesh(pipe=stages)))


def logits(model: Any, tokens_BT: np.ndarray = TOKENS_BT) -> np.ndarray:
    @jax.jit
    def run(model: Any) -> jax.Array:
        microbatch = {"tokens": jnp.asarray(tokens_BT)}
        stream = model.embed(microbatch, None)
        for block in model.blocks:
            stream = block(stream, microbatch, None)
        return model.head(stream, model.embed)

    return np.asarray(run(model))


@pytest.mark.parametrize("case", hub.CASES)
def test_logits(case: str, tmp_path: Path) -> None:
    source = hf.open_folder(hub.save(case, tmp_path))
    want = hub.logits(hub.make(case))
    assert np.abs(want).max() > 1
    np.testing.assert_allclose(logits(jaxpp.unstack(placed(source))), want, atol=1e-4, rtol=0)


def gradients(source: hf.Source, grads: Any) -> dict[str, np.ndarray]:
    """Our gradients as tensors of theirs, through the same table."""
    layout = partition.split_layers(source.config.layers, 1)
    spec = jax.eval_shape(lambda: partition.stack(grads, layout))
    stacked = jax.jit(lambda: partition.stack(jax.tree.map(jnp.asarray, grads), layout))()
    parts = hf._parts(spec)
    jobs = hf._tensors(source.table, parts, source.config.layers)
    return {job.name: hf._make(job, hf.placed_weight(stacked), "float32") for job in jobs}


@pytest.mark.parametrize("case", ["gpt2", "gpt2 untied", "llama biases", "llama tied", "qwen3", "mixtral"])
def test_loss_and_every_gradient(case: str, tmp_path: Path) -> None:
    """Through transformers' own names; the balance loss of Mixtral included. Ours unpipelined: test_families has the
    rest."""
    source = hf.open_folder(hub.save(case, tmp_path))
    labels = np.concatenate((TOKENS_BT[:, 1:], np.full((2, 1), -100)), axis=1)
    batch = {"tokens": jnp.asarray(TOKENS_BT[None]), "labels": jnp.asarray(labels[None])}
    model = jaxpp.unstack(placed(source))
    got = reference.value_and_grad(model, batch, loss=models.training_loss(source.config))
    want_loss, want = hub.loss_and_grads(hub.make(case), TOKENS_BT)
    if case == "mixtral":  # in memory its router is called otherwise than in the file
        want = {name.replace("mlp.gate.", "block_sparse_moe.gate."): grad for name, grad in want.items()}
    assert float(got.loss) == pytest.approx(want_loss, rel=1e-5)
    found = gradients(source, got.grads)
    for name, grad in want.items():
        if ".experts." in name:  # transformers keeps experts in one tensor, and saves each by itself
            continue
        assert reference.error(found[name], grad) <= 1e-4, name
    assert {name for name in want if ".experts." not in name} <= found.keys()
    if case == "mixtral":
        for i in range(source.config.layers):
            base = f"model.layers.{i}.block_sparse_moe.experts."
            down = np.stack([found[f"{base}{e}.w2.weight"] for e in range(4)])
            up = np.stack([np.concatenate([found[f"{base}{e}.w{n}.weight"] for n in (1, 3)]) for e in range(4)])
            theirs = {name.rsplit(".", 1)[1]: grad for name, grad in want.items() if f"layers.{i}." in name}
            assert reference.error(down, theirs["down_proj"]) <= 1e-4
            assert reference.error(up, theirs["gate_up_proj"]) <= 1e-4


@pytest.mark.parametrize(("stages", "chunks"), [(4, 1), (2, 2), (3, 1)])
@pytest.mark.parametrize("case", ["gpt2", "mixtral"])
def test_weights_reach_every_stage(case: str, stages: int, chunks: int, tmp_path: Path) -> None:
    source = hf.open_folder(hub.save(case, tmp_path, max_shard_size="20KB"))
    assert (tmp_path / "model.safetensors.index.json").exists()
    model = jax.device_get(jaxpp.unstack(jax.device_get(placed(source, stages, chunks))))
    np.testing.assert_allclose(logits(model), hub.logits(hub.make(case)), atol=1e-4, rtol=0)


def tensors(folder: str | Path) -> dict[str, np.ndarray]:
    found = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(path, framework="numpy") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


@pytest.mark.parametrize("shard_bytes", [None, 20_000])
@pytest.mark.parametrize("case", hub.CASES)
def test_export_and_load_in_transformers(
    case: str, shard_bytes: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    origin, out = hub.save(case, tmp_path / "in"), str(tmp_path / "out")
    source = hf.open_folder(origin)
    if shard_bytes:
        monkeypatch.setattr(hf, "SHARD_BYTES", shard_bytes)
    params = placed(source, 2)
    files = hf.export(source.config, params, hf.placed_weight(params), out, "float32", origin)
    assert (len([f for f in files if f.endswith(".safetensors")]) > 1) == bool(shard_bytes)
    assert hf.read_config(out) == source.config
    want, got = tensors(origin), tensors(out)
    assert want.keys() == got.keys()
    for name, array in want.items():
        np.testing.assert_array_equal(got[name], array, err_msg=name)
    net = type(hub.make(case)).from_pretrained(out, attn_implementation="eager").eval()
    assert not any(parameter.is_meta for parameter in net.parameters())
    np.testing.assert_array_equal(hub.logits(net), hub.logits(hub.make(case)))
    assert net.config.eos_token_id == 2


def test_what_only_training_reads_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """The coefficient of an unused loss, dropout, the options of generation; files have the usual mode."""
    folder = hub.save("mixtral without balance", tmp_path / "in")
    edit(tmp_path / "in", attention_dropout=0.25)
    before = json.loads((tmp_path / "in" / "config.json").read_text())
    (tmp_path / "in" / "generation_config.json").write_text('{"temperature": 0.3}')
    assert run.main(["export", "--load", folder, "--to", str(tmp_path / "out")]) == 0
    assert "generation_config.json" in capsys.readouterr().out
    after = json.loads((tmp_path / "out" / "config.json").read_text())
    for name in ("router_aux_loss_coef", "output_router_logits", "attention_dropout", "eos_token_id"):
        assert after[name] == before[name], name
    assert (tmp_path / "out" / "generation_config.json").read_text() == '{"temperature": 0.3}'
    (tmp_path / "plain").touch()
    modes = {path.stat().st_mode for path in (*(tmp_path / "out").iterdir(), tmp_path / "plain")}
    assert len(modes) == 1


@pytest.mark.parametrize("spelling", ["in", "in/../in", "link"])
def test_an_export_onto_its_source(spelling: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder = hub.save("llama", tmp_path / "in")
    (tmp_path / "link").symlink_to(tmp_path / "in")
    before = {path.name: path.read_bytes() for path in (tmp_path / "in").iterdir()}
    capsys.readouterr()  # transformers' own bar
    assert run.main(["export", "--load", folder, "--to", str(tmp_path / spelling), "--dtype", "bfloat16"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert f"which would be overwritten: give another folder, for example --to {folder}-exported" in err
    assert {path.name: path.read_bytes() for path in (tmp_path / "in").iterdir()} == before


def test_a_tokenizer_by_its_file_is_exported(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder = hub.save("llama", tmp_path / "in")
    text = json.dumps(
        {"version": "1.0", "added_tokens": [], "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}
    )
    (tmp_path / "other.json").write_text(text)
    words = ["export", "--load", folder, "--to", str(tmp_path / "out"), "--tokenizer"]
    assert run.main([*words, str(tmp_path / "other.json")]) == 0
    assert (tmp_path / "out" / "tokenizer.json").read_text() == text
    capsys.readouterr()
    assert run.main([*words, str(tmp_path / "nowhere")]) == 2
    assert "nowhere cannot be read" in capsys.readouterr().err


def test_bfloat16_folders(tmp_path: Path) -> None:
    """Read exactly; written exactly where they were bfloat16 before."""
    net = hub.make("llama")
    net.to(torch.bfloat16).save_pretrained(tmp_path / "in")
    net.to(torch.float32)
    hub.make.cache_clear()
    source = hf.open_folder(str(tmp_path / "in"))
    params = placed(source)
    assert {a.dtype for a in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    hf.export(source.config, params, hf.placed_weight(params), str(tmp_path / "out"), "bfloat16")
    want, got = tensors(tmp_path / "in"), tensors(tmp_path / "out")
    assert {a.dtype.name for a in got.values()} == {"bfloat16"}
    assert all(np.array_equal(got[name], array) for name, array in want.items())


@pytest.mark.parametrize("case", ["gpt2", "llama rope llama3", "qwen3 sliding", "mixtral sliding"])
def test_greedy_text_is_transformers(case: str, tmp_path: Path) -> None:
    """Token for token, longer than a window and over a bucket of the cache."""
    model = jaxpp.unstack(placed(hf.open_folder(hub.save(case, tmp_path))))
    prompt = TOKENS_BT[0, :9]
    net = hub.make(case)
    options = transformers.GenerationConfig(max_new_tokens=50, do_sample=False, eos_token_id=-1, pad_token_id=-1)
    tokens = torch.tensor(prompt)[None]
    with torch.no_grad():
        found = net.generate(tokens, attention_mask=torch.ones_like(tokens), generation_config=options)
    want = found[0, 9:].tolist()
    assert list(generate(model, prompt, 50, jax.random.key(0), Sampling(0))) == want
    assert len(set(want)) > 3


def edit(folder: Path, **changes: Any) -> str:
    """Change fields of a folder's config.json; None takes one out."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None or k not in changes}))
    return str(folder)


@pytest.mark.parametrize("spelling", ["rope_type", "type"])
@pytest.mark.parametrize("name", hub.ROPES)
def test_the_old_spelling_of_ropes(name: str, spelling: str, tmp_path: Path) -> None:
    folder = Path(hub.save(f"llama rope {name}", tmp_path))
    want = hf.read_config(str(folder))
    scaling = dict(hub.ROPES[name])
    theta = scaling.pop("rope_theta")
    scaling[spelling] = scaling.pop("rope_type")
    assert hf.read_config(edit(folder, rope_parameters=None, rope_theta=theta, rope_scaling=scaling)) == want


def test_every_row_reads_what_it_writes() -> None:
    rng = np.random.default_rng(0)
    for table in (mapping.GPT2, mapping.DENSE, mapping.MIXTRAL, mapping.LLMC):
        for each in (*table.embed, *table.block, *table.head):
            size = dict(zip("dnkhfetv", (5, 4, 2, 3, 7, 2, 6, 8), strict=True))
            shape = [size[letter] for letter in each.dims.split(">")[1]]
            if len(each.pieces) > 1:
                shape.insert(each.stacked - each.experts, len(each.pieces))
            array = rng.normal(size=[3, *shape] if each.experts else shape).astype(np.float32)
            theirs: dict[str, list] = {}
            for name, piece, part in mapping.write(each, array, 1):
                theirs.setdefault(name, [np.zeros_like(part)] * piece.parts)[piece.part] = part
            joined = {
                name: np.concatenate(parts, axis=mapping.split_dim(each)) if len(parts) > 1 else parts[0]
                for name, parts in theirs.items()
            }
            assert {part.shape for part in joined.values()} == {mapping.their_shape(each, array.shape)}
            assert sorted(joined) == sorted(mapping.names(each, array.shape, 1))
            np.testing.assert_array_equal(mapping.read(each, array.shape, 1, joined.__getitem__), array)


def test_an_exported_model_has_the_validation_loss_of_our_log(tmp_path: Path) -> None:
    """Trained here, exported, and evaluated by transformers on the same rows."""
    words = ["--dtype", "float32", "--num_iteration", "3", "--pipeline_parallel", "2", "--sequence_length", "32"]
    folders = ["--save", str(tmp_path / "saved"), "--output_dir", str(tmp_path)]
    assert run.main(["train", *words, *folders]) == 0
    assert run.main(["export", "--load", str(tmp_path / "saved"), "--to", str(tmp_path / "theirs")]) == 0
    logged = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])["val_loss"]
    model = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "theirs")
    total, count = 0.0, 0
    for batch in data.validation_batches([data.default_corpus()[1]], 8, 2, 32, feeds.VALIDATION_BATCHES):
        tokens, labels = (torch.tensor(batch[name].reshape(-1, 32)).long() for name in ("tokens", "labels"))
        with torch.no_grad():
            scores = model(tokens).logits.flatten(0, 1)
        total += torch.nn.functional.cross_entropy(scores, labels.flatten(), reduction="sum").item()
        count += int((labels != data.IGNORED_LABEL).sum())
    assert abs(total / count - logged) < 1e-4
