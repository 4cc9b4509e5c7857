"""Checkpoints: any layout to any other, exact resumes, and what is damaged is never loaded."""

import json
import shutil
import signal
from functools import partial
from pathlib import Path
from typing import Any

import hub
import jax
import jax.numpy as jnp
import killing
import numpy as np
import pytest
import reference
from safetensors.numpy import load_file

import jaxpp
import models
import run
from jaxpp import checkpoint, partition

WORDS = ["--dtype", "float32", "--sequence_length", "16", "--batch_size", "1", "--total_batch_size", "128"]
LAYOUTS = {
    "1": ["--pipeline_parallel", "1"],
    "2": ["--pipeline_parallel", "2"],
    "4": ["--pipeline_parallel", "4"],
    "2x2 chunks": ["--pipeline_parallel", "2", "--virtual_pipeline_parallel", "2"],
    "3, uneven": ["--pipeline_parallel", "3"],
    "2 x 2 replicas": ["--pipeline_parallel", "2", "--data_parallel", "2", "--zero_stage", "1"],
    "2 x 2 of tensor": ["--pipeline_parallel", "2", "--tensor_parallel", "2"],
}

REST = ("2", "4", "3, uneven")  # what these show is shown by others too


def train(folder: Path, steps: int, *words: str) -> list[dict]:
    """The metrics of a run of `steps` steps, the last of a schedule of 10."""
    common = [*WORDS, "--lr_decay_style", "none", "--num_iteration", str(steps), "--output_dir", str(folder / "out")]
    assert run.main([*common, *words]) == 0
    return [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict]]:
    """A checkpoint after 5 steps on 4 stages, and the metrics of the run that made it and went on to step 10."""
    folder = tmp_path_factory.mktemp("saved")
    where = ["--save", str(folder / "saved"), "--save_interval", "5", "--max_checkpoint_keep", "5"]
    found = train(folder, 10, *LAYOUTS["4"], *where)
    shutil.rmtree(folder / "saved" / "step-00000010")
    return folder / "saved", found


@pytest.mark.parametrize("layout", [pytest.param(n, marks=[pytest.mark.slow] * (n in REST)) for n in LAYOUTS])
def test_any_layout_goes_on(layout: str, saved: tuple[Path, list[dict]], tmp_path: Path) -> None:
    """The next 5 losses are those of the run that was not interrupted."""
    folder, want = saved
    found = train(tmp_path, 10, *LAYOUTS[layout], "--load", str(folder))
    losses = lambda lines: {line["step"]: line["loss"] for line in lines if "loss" in line}
    assert list(losses(found)) == [6, 7, 8, 9, 10]
    for step, loss in losses(found).items():
        assert loss == pytest.approx(losses(want)[step], rel=1e-5)
    assert found[-1]["val_loss"] == pytest.approx(want[-1]["val_loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("stages", "chunks", "data", "tensor"), [(1, 1, 1, 1), (2, 1, 2, 1), (2, 2, 1, 1), (3, 1, 1, 1), (2, 1, 1, 2)]
)
def test_arrays_are_equal_in_any_layout(stages: int, chunks: int, data: int, tensor: int, saved: tuple) -> None:
    """Parameters and both moments, leaf by leaf, and the step, bit by bit."""
    found = checkpoint.latest(str(saved[0]))
    assert found and found.step == 5
    build = partial(models.build, config=models.from_json(found.info["model"]))
    layout, one = partition.split_layers(8, stages, chunks), partition.split_layers(8, 1)
    mesh = jaxpp.make_mesh(pipe=stages, data=data, tensor=tensor)
    spec, want_spec = (
        jax.eval_shape(lambda at=at: partition.stack(build(jax.random.key(0)), at)) for at in (layout, one)
    )
    rest = partition.shardings(spec, mesh)
    moments = partition.shardings(spec, mesh, 1, "moment")
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    scalar = jax.ShapeDtypeStruct((), jnp.int32)
    tree = checkpoint.restore(found, (spec, scalar, spec, spec), (rest, everywhere, moments, moments))
    single = partition.shardings(want_spec, jaxpp.make_mesh())
    want = checkpoint.restore(found, (want_spec, scalar, want_spec, want_spec), (single, everywhere, single, single))
    assert int(tree[1]) == 5
    for a, b in zip((tree[0], *tree[2:]), (want[0], *want[2:]), strict=True):
        a, b = (jaxpp.unstack(jax.device_get(placed)) for placed in (a, b))
        assert all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))
        assert reference.norm(a) > 0


def test_a_resumed_run_is_bitwise_the_unbroken_one(tmp_path: Path) -> None:
    """Killed twice in the middle of what it did, dropout and all; then stopped by SIGTERM."""
    unbroken = killing.start(tmp_path / "a", 10)
    said, _ = unbroken.communicate()
    assert unbroken.returncode == 0, said
    killing.kill_and_resume(tmp_path / "b", 10, 2, seed=0)
    assert killing.losses(tmp_path / "b") == killing.losses(tmp_path / "a")
    killing.kill_and_resume(tmp_path / "c", 10, 1, seed=1, with_signal=signal.SIGTERM)
    assert killing.losses(tmp_path / "c") == killing.losses(tmp_path / "a")


def folder_of(family: str, folder: Path) -> str:
    """A Hugging Face folder; Mixtral's with a tokenizer of four words."""
    hub.save(family, folder)
    if family == "mixtral":
        words = {"type": "WordLevel", "vocab": {"the": 0, "of": 1, "and": 2, "?": 3}, "unk_token": "?"}
        text = {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}, "model": words}
        (folder / "tokenizer.json").write_text(json.dumps(text))
    return str(folder)


@pytest.mark.parametrize("family", [pytest.param("gpt2", marks=pytest.mark.slow), "mixtral"])
def test_a_run_from_a_folder_goes_on(family: str, tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture) -> None:
    """By the same command, or by --load alone when the weights are gone; all losses are the unbroken run's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = folder_of(family, tmp_path / "in")
    if family == "gpt2":
        jaxpp.data.write_tokens(tmp_path / "text.bin", np.arange(3000) % 61)
    else:
        (tmp_path / "text.txt").write_text("the king of and " * 300)
    text = str(next(tmp_path.glob("text.*")))
    words = ["--pipeline_parallel", "1", "--input_bin", text]
    start, keep = ["--init_from", folder], ["--save", str(tmp_path / "saved"), "--load", str(tmp_path / "saved")]
    want = train(tmp_path / "unbroken", 2, *words, *start)
    train(tmp_path, 1, *words, *start, *keep)
    for path in (tmp_path / "in").glob("*.safetensors"):
        path.unlink()
    capsys.readouterr()
    found = train(tmp_path, 2, *words, *(start if family == "gpt2" else []), *keep)
    said = capsys.readouterr().out
    assert f"going on from {tmp_path / 'saved' / 'step-00000001'}" in said and f"training {folder} (" in said
    losses = lambda lines: [line["loss"] for line in lines if "loss" in line]
    assert losses(found) == losses(want)
    options = (tmp_path / "out" / "config.toml").read_text()
    assert f'init_from = "{folder}"' in options and "model = " not in options
    assert ("no samples: the model's 61 tokens are not bytes" in said) == (family == "gpt2")
    alone = run.start_of(run.Config(load=str(tmp_path / "saved")))
    assert ("dropout 0.1" in said) == (alone.config.dropout == alone.model.dropout == 0.1) == (family == "gpt2")
    assert ("router_balance_loss = 0.05" in options) == (f'tokenizer = "{folder}"' in options) == (family == "mixtral")


def test_load_alone_takes_the_checkpoints_model(saved: tuple[Path, list[dict]], tmp_path: Path) -> None:
    """--init_from of what does not exist is not looked at; the same --model may be said, another is refused."""
    for words in (["--init_from", str(tmp_path / "nowhere")], ["--model", "gpt2-tiny"], []):
        config = run.parse(["--load", str(saved[0]), *words], {"train": run.Config})[1]
        found = run.start_of(config)
        assert models.to_json(found.model) == models.to_json(models.config_of("gpt2-tiny"))
        assert found.source is None and found.config.init_from is None
    with pytest.raises(ValueError, match="has no checkpoint"):
        run.start_of(run.Config(load=str(tmp_path), save=str(tmp_path / "x")))
    assert run.start_of(run.Config(load=str(tmp_path), save=f"{tmp_path}/x/..")).found is None


def small(folder: Path, step: int = 1) -> tuple[Path, dict[str, Any]]:
    """A checkpoint of a few arrays."""
    arrays = {"0": {"all": np.arange(1000.0)}, "1": {"all": np.full((3, 4), step)}}
    folder.mkdir(exist_ok=True)
    return checkpoint.write(folder, step, arrays, {"step": step}), arrays


def files(path: Path) -> list[Path]:
    return sorted(p for p in path.rglob("*") if p.is_file() and p.stat().st_size)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


DAMAGES = {
    "cut short": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "a bit flipped": flip,
    "removed": Path.unlink,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over(damage: str, tmp_path: Path) -> None:
    """Whichever of its files it is; with nothing else, it is refused."""
    whole, _ = small(tmp_path / "whole")
    for i, file in enumerate(files(whole)):
        folder = tmp_path / str(i)
        shutil.copytree(tmp_path / "whole", folder)
        newest = folder / "step-00000002"
        shutil.copytree(whole, newest)
        DAMAGES[damage](newest / file.relative_to(whole))
        with pytest.warns(UserWarning, match="step-00000002 is passed over: "):
            found = checkpoint.latest(str(folder))
        assert found and found.path.name == "step-00000001"
        shutil.rmtree(folder / "step-00000001")
        with pytest.warns(UserWarning), pytest.raises(ValueError, match="no checkpoint that is whole"):
            checkpoint.latest(str(folder))


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    saver = checkpoint.Saver(str(tmp_path / "saved"), keep=2)
    dead = tmp_path / "saved" / ".step-00000001.999999999"
    dead.mkdir()
    for step in (1, 2, 10, 11):
        saver.save(step, (jnp.ones(3) * step,), {})
    saver.wait()
    assert sorted(p.name for p in (tmp_path / "saved").iterdir()) == ["step-00000010", "step-00000011"]
    found = checkpoint.latest(str(tmp_path / "saved"))
    assert found and found.info == {"step": 11}
    one = checkpoint.latest(str(tmp_path / "saved" / "step-00000010"))
    assert one and one.step == 10


def test_a_save_is_of_the_moment_it_was_asked_for(tmp_path: Path) -> None:
    """What happens to the array afterwards, even donation, is not in it."""
    saver = checkpoint.Saver(str(tmp_path), keep=1)
    a = jnp.arange(100_000.0)
    saver.save(1, (a,), {})
    jax.jit(lambda a: a * 0 - 1, donate_argnums=0)(a).block_until_ready()
    saver.wait()
    found = checkpoint.latest(str(tmp_path))
    assert found
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    (got,) = checkpoint.restore(found, (jax.ShapeDtypeStruct((100_000,), jnp.float32),), (here,))
    np.testing.assert_array_equal(got, np.arange(100_000.0))


def test_a_failed_save_is_not_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saver = checkpoint.Saver(str(tmp_path), keep=1)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "write", full)
    saver.save(1, (jnp.ones(3),), {})
    with pytest.raises(OSError, match="No space left"):
        saver.wait()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--load", "SAVED", "--model", "gpt2-tiny", "--init_from", "x"], "model and init_from each say which model"),
        (["--save", "FILE"], "/file' cannot be written (File exists): use another folder"),
        (["--load", "EMPTY"], "has no checkpoint: give a folder that --save has written to"),
        (["--load", "SAVED", "--model", "llama3-tiny"], "checkpoint's model has "),
        (["--load", "SAVED", "--optimizer", "sgd"], "run has optimizer='adamw', this run 'sgd'"),
        (["--load", "SAVED", "--seed", "1"], "run has seed=0, this run 1"),
        (["--load", "SAVED", "--sequence_length", "32"], "run has sequence_length=16, this run 32"),
        (["--load", "SAVED", "--num_iteration", "5"], "is at step 5, and num_iteration=5 leaves nothing to do"),
        (["--save_interval", "5"], "save_interval=5 needs a folder: give --save FOLDER"),
        (["--save", "/dev/null/x"], "save='/dev/null/x' cannot be written"),
    ],
)
def test_refusals(words: list[str], said: str, saved: tuple, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    names = {"SAVED": str(saved[0]), "EMPTY": str(tmp_path / "empty"), "FILE": str(tmp_path / "file")}
    common = [*WORDS, "--pipeline_parallel", "2", "--num_iteration", "9", "--output_dir", str(tmp_path / "out")]
    assert run.main([*common, *(names.get(word, word) for word in words)]) == 2
    out, err = capsys.readouterr()
    assert said in err and err.count("\n") == 1
    assert out == "" and not (tmp_path / "out").exists()


def test_generate_and_export_from_a_checkpoint(saved: tuple, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """The exported tensors are the checkpoint's parameters."""
    words = ["generate", "--load", str(saved[0]), "--prompt", "import ", "--max_new_tokens", "5"]
    assert run.main(words) == 0
    assert capsys.readouterr().out.startswith("import ")
    assert run.main(["export", "--load", str(saved[0]), "--to", str(tmp_path / "hf")]) == 0
    found = checkpoint.latest(str(saved[0]))
    assert found
    table = checkpoint.weights(found, 0, 8)("embed", "tokens", None)
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    np.testing.assert_array_equal(tensors["transformer.wte.weight"], table)
    capsys.readouterr()
    outputs = []
    for folder in (saved[0], tmp_path / "hf"):
        assert run.main(["generate", "--load", str(folder), "--prompt", "def f(", "--temperature", "0"]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1]
