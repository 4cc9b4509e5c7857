"""Runs that train adapters, start and go on from them, merge and leave them; PEFT, given the files, agrees."""

import json
import shutil
from pathlib import Path
from typing import Any

import hub
import numpy as np
import peft as theirs
import pytest
import torch
from safetensors.numpy import load_file
from test_hf import logits

import jaxpp
import run
from jaxpp import data, partition
from models.opened import open_model, spec_of

TARGETS = {
    "gpt2": ["c_attn", "c_proj", "c_fc"],
    "llama": ["all-linear"],
    "qwen3": ["v_proj", "up_proj"],
    "mixtral": ["q_proj", "k_proj", "o_proj"],
}
WORDS = ["--dtype", "float32", "--sequence_length", "16", "--batch_size", "1", "--total_batch_size", "64"]
WORDS += ["--lr_decay_style", "constant", "--warmup_iterations", "0", "--learning_rate", "0.01"]


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A Hugging Face folder of each family."""
    return {family: hub.save(family, tmp_path_factory.mktemp(family)) for family in TARGETS}


@pytest.fixture
def text(tmp_path: Path) -> str:
    data.write_tokens(tmp_path / "text.bin", np.arange(4000) % 5)
    return str(tmp_path / "text.bin")


def train(folder: Path, text: str, steps: int, *words: str) -> list[float]:
    """The losses of a run, the steps before it included where it goes on."""
    common = ["--input_bin", text, "--num_iteration", str(steps), "--output_dir", str(folder / "out")]
    assert run.main([*WORDS, *common, *words]) == 0
    lines = [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def ours(folder: str, adapters: str | None = None) -> np.ndarray:
    """Our logits of a folder's model, adapters merged."""
    opened = open_model(folder, adapters)
    spec = spec_of(opened.model)
    placed = partition.assemble(spec, partition.shardings(spec, jaxpp.make_mesh()), opened.weight)
    return logits(jaxpp.unstack(placed))


@pytest.mark.parametrize(
    "family", ["llama", *(pytest.param(n, marks=pytest.mark.slow) for n in ("gpt2", "qwen3", "mixtral"))]
)
def test_peft_loads_what_we_trained(family: str, bases: dict[str, str], text: str, tmp_path: Path) -> None:
    """Trained over 2 stages; the base beside PEFT's adapters, merged by PEFT, and exported by us: the same logits."""
    saved, checkpoints = str(tmp_path / "adapters"), str(tmp_path / "saved")
    words = ["--init_from", bases[family], "--lora_rank", "3", "--lora_alpha", "6", "--pipeline_parallel", "2"]
    words += ["--lora_target_modules", *TARGETS[family], "--lora_save_path", saved, "--save", checkpoints]
    losses = train(tmp_path, text, 6, *words)
    assert losses[-1] < losses[0] - 0.5
    base = hub.logits(hub.make(family))
    net = theirs.PeftModel.from_pretrained(hub.load(bases[family]), saved).eval()
    want = hub.logits(net)
    assert np.abs(want - base).max() > 0.05
    for got in (ours(bases[family], saved), ours(checkpoints)):
        np.testing.assert_allclose(got, want, atol=1e-4, rtol=0)
    for words in (["--load", bases[family], "--lora_load_path", saved], ["--load", checkpoints]):
        assert run.main(["export", *words, "--to", str(tmp_path / "merged")]) == 0
        np.testing.assert_allclose(hub.logits(hub.load(str(tmp_path / "merged"))), want, atol=1e-4, rtol=0)
    np.testing.assert_allclose(hub.logits(net.merge_and_unload()), want, atol=1e-4, rtol=0)


def saved_by_peft(family: str, folder: Path, **options: Any) -> tuple[str, np.ndarray]:
    """A folder that PEFT has saved, with random adapters, and the logits of its model."""
    torch.manual_seed(1)
    config = theirs.LoraConfig(**{"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM"} | options)
    net = theirs.get_peft_model(hub.load(hub.save(family, folder / "base")), config).eval()
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if "lora_B" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    net.save_pretrained(folder / "adapters")
    return str(folder / "adapters"), hub.logits(net)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_we_load_what_peft_saved(family: str, bases: dict[str, str], text: str, tmp_path: Path) -> None:
    """With PEFT's default targets; and training goes on from there, as saving at once shows."""
    folder, want = saved_by_peft(family, tmp_path)
    np.testing.assert_allclose(ours(bases[family], folder), want, atol=1e-4, rtol=0)
    words = ["--init_from", bases[family], "--lora_load_path", folder, "--lora_save_path", str(tmp_path / "again")]
    train(tmp_path, text, 1, *words, "--learning_rate", "0", "--pipeline_parallel", "3")
    before, after = (load_file(Path(each) / "adapter_model.safetensors") for each in (folder, tmp_path / "again"))
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_a_run_of_adapters_goes_on(bases: dict[str, str], text: str, tmp_path: Path, monkeypatch: Any) -> None:
    """Bit by bit on the same layout, to 1e-5 on another; a checkpoint holds no base; where that is gone, it is said."""
    base = shutil.copytree(bases["llama"], tmp_path / "base")
    words = ["--lora_rank", "2", "--lora_dropout", "0.1", "--pipeline_parallel", "2"]
    start = ["--init_from", str(base), *words]
    want = train(tmp_path / "a", text, 4, *start)
    train(tmp_path / "b", text, 2, *start, "--save", str(tmp_path / "saved"))
    size = sum(path.stat().st_size for path in (tmp_path / "saved").rglob("*") if path.is_file())
    assert size < (base / "model.safetensors").stat().st_size
    assert train(tmp_path / "c", text, 4, "--load", str(tmp_path / "saved"), "--pipeline_parallel", "2") == want[2:]
    wide = ["--pipeline_parallel", "1", "--tensor_parallel", "2"]
    assert train(tmp_path / "d", text, 4, "--load", str(tmp_path / "saved"), *wide) == pytest.approx(want[2:], rel=1e-5)
    shutil.rmtree(base)
    with pytest.raises(ValueError, match=r"holds adapters alone, and their base cannot be read: init_from='.*base'"):
        run.start_of(run.Config(load=str(tmp_path / "saved")))


GOING_ON = [
    (["--lora_rank", "3"], "lora_rank=3 is not that of load="),
    (["--lora_alpha", "1"], "lora_alpha=1.0 is not that of load="),
    (["--lora_target_modules", "k_proj"], "lora_target_modules=k_proj is not that of load="),
]


def test_what_contradicts_a_checkpoint(bases: dict, text: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    saved = ["--save", str(tmp_path / "saved")]
    train(tmp_path, text, 1, "--init_from", bases["llama"], "--lora_rank", "2", "--pipeline_parallel", "1", *saved)
    for words, said in GOING_ON:
        capsys.readouterr()
        assert run.main(["--load", str(tmp_path / "saved"), "--num_iteration", "2", "--input_bin", text, *words]) == 2
        error = capsys.readouterr().err
        assert said in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--lora_rank", "-1"], "lora_rank=-1 must be at least 0"),
        (["--lora_alpha", "2"], "lora_alpha=2.0 is of adapters, and lora_rank=0 makes none: use --lora_rank 8"),
        (["--lora_save_path", "x"], "lora_save_path=x is of adapters"),
        (["--lora_rank", "2", "--lora_dropout", "1"], "lora_dropout=1.0 must be in [0, 1)"),
        (
            ["--lora_rank", "2", "--lora_target_modules", "w1"],
            "'w1' is no module of gpt2 that can have an adapter",
        ),
        (["--lora_rank", "2", "--lora_save_path", "/dev/null/x"], "lora_save_path='/dev/null/x' cannot be written"),
        (["--lora_load_path", "/nowhere"], "lora_load_path='/nowhere': adapter_config.json cannot be read"),
        (["--model", "mixtral-tiny", "--lora_rank", "2", "--lora_target_modules", "up_proj"], "q_proj, k_proj, v_proj"),
    ],
)
def test_bad_options_get_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture) -> None:
    assert run.main(words) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


@pytest.fixture(scope="module")
def peft_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(saved_by_peft("llama", tmp_path_factory.mktemp("peft"))[0])


def test_generate_and_eval_take_adapters(
    bases: dict, peft_folder: Path, text: str, capsys: pytest.CaptureFixture
) -> None:
    words = ["--load", bases["llama"], "--input_bin", text, "--eval_batches", "1", "--sequence_length", "16", "--json"]
    words += ["--batch_size", "1", "--total_batch_size", "32", "--pipeline_parallel", "2"]
    found = []
    for more in ([], ["--lora_load_path", str(peft_folder)]):
        assert run.main(["eval", *words, *more]) == 0
        found.append(json.loads(capsys.readouterr().out)["loss"])
    assert abs(found[0] - found[1]) > 1e-3


def test_a_base_that_was_drawn_comes_back_from_its_seed(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    saved = str(tmp_path / "saved")
    words = ["--model", "qwen3-tiny", "--seed", "3", "--lora_rank", "2", "--pipeline_parallel", "2"]
    train(tmp_path, text, 2, *words, "--save", saved)
    want = json.loads((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()[-1])["val_loss"]
    capsys.readouterr()
    assert run.main(["eval", "--load", saved, "--eval_batches", "8", "--json", "--pipeline_parallel", "1"]) == 0
    assert json.loads(capsys.readouterr().out)["loss"] == pytest.approx(want, rel=1e-5)


def test_the_precision_check_sees_adapters_too(
    bases: dict[str, str], text: str, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors of one stage and of two are equal to rounding."""
    monkeypatch.setenv("PJRT_NPROC", "16")  # is set for good otherwise
    given = ["--init_from", bases["llama"], "--lora_rank", "2", "--precision_check", "level=2,save_tensors=true"]
    for stages in ("1", "2"):
        train(tmp_path / stages, text, 1, *given, "--pipeline_parallel", stages)
    folders = [str(tmp_path / stages / "out" / "precision") for stages in ("1", "2")]
    assert run.main(["compare", *folders, "--rtol", "1e-4"]) == 0, capsys.readouterr().out
