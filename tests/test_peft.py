"""Adapters in PEFT's format, against PEFT itself: the same logits from the same files, both ways; what is refused.

Legend: B microbatch size, T sequence, V vocabulary.
"""

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import hub
import numpy as np
import peft as theirs
import pytest
import torch
from safetensors.numpy import load_file, save_file
from test_hf import logits

import jaxpp
import run
from jaxpp import partition
from models import hf, hf_config, opened, peft
from models.lora import LoraParam, LoraSpec

TARGETS = {
    "gpt2": ("c_attn", "c_proj"),  # both of its modules of that name
    "llama": ("q_proj", "k_proj", "o_proj", "up_proj", "down_proj"),
    "qwen3": ("v_proj", "gate_proj"),
    "mixtral": ("q_proj", "k_proj", "v_proj", "o_proj"),
}


@pytest.fixture(params=TARGETS)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


def config_of(family: str, folder: str, targets: tuple[str, ...] | None = None) -> Any:
    """Our config of a folder's model, with adapters."""
    names = peft.targets_of(family, targets or TARGETS[family])
    return dataclasses.replace(hf.read_config(folder), lora=LoraSpec(3, 5.0, 0.0, names))


def joined(model: Any, folder: str, adapters: hf.Weight) -> Any:
    """Our model of a folder with adapters beside it."""
    spec = opened.spec_of(model)
    trained, frozen = partition.split(spec, LoraParam)
    rest = [partition.shardings(half, jaxpp.make_mesh()) for half in (trained, frozen)]
    base = hf.assemble(hf.open_folder(folder), frozen, rest[1])
    return jaxpp.unstack(partition.join(partition.assemble(trained, rest[0], adapters), base))


def drawn(model: Any) -> hf.Weight:
    """Random adapters, lora_b too."""
    spec, _ = partition.split(opened.spec_of(model), LoraParam)
    shapes = {path: a.shape[2:] for path, a in peft.mapping.paths(spec.blocks[0]).items()}

    def weight(part: str, path: str, layer: int | None) -> np.ndarray:
        rng = np.random.default_rng([sorted(shapes).index(path), layer or 0])
        return (rng.normal(size=shapes[path]) * 0.2).astype(np.float32)

    return weight


def of_peft(family: str, folder: str | Path) -> Any:
    return theirs.PeftModel.from_pretrained(copy.deepcopy(hub.make(family)), str(folder)).eval()


def exported(folder: Path) -> np.ndarray:
    """Logits of transformers for a folder."""
    kind = type(hub.make(json.loads((folder / "config.json").read_text())["model_type"]))
    return hub.logits(kind.from_pretrained(folder, attn_implementation="eager").eval())


def test_peft_loads_ours(family: str, tmp_path: Path) -> None:
    """The same logits, far from the base's; and merged and exported, as PEFT merges."""
    base = hub.save(family, tmp_path / "base")
    model = config_of(family, base)
    adapters = drawn(model)
    peft.write(str(tmp_path / "ours"), model, adapters, base)
    want = logits(joined(model, base, adapters))
    net = of_peft(family, tmp_path / "ours")
    np.testing.assert_allclose(want, hub.logits(net), atol=1e-4, rtol=0)
    assert np.abs(want - hub.logits(hub.make(family))).max() > 0.1
    words = ["--load", base, "--lora_load_path", str(tmp_path / "ours"), "--to", str(tmp_path / "merged")]
    assert run.main(["export", *words]) == 0
    np.testing.assert_allclose(exported(tmp_path / "merged"), hub.logits(net.merge_and_unload()), atol=1e-4, rtol=0)
    assert {path.stat().st_mode for path in (tmp_path / "ours").iterdir()} == {
        (tmp_path / "merged" / "config.json").stat().st_mode
    }


@pytest.mark.parametrize("all_linear", [False, True])
def test_we_load_pefts(family: str, all_linear: bool, tmp_path: Path) -> None:
    base = hub.save(family, tmp_path / "base")
    torch.manual_seed(1)
    targets = peft.ALL if all_linear else list(TARGETS[family])
    chosen = theirs.LoraConfig(
        r=3, lora_alpha=5, target_modules=targets, task_type="CAUSAL_LM", init_lora_weights=False
    )
    net = theirs.get_peft_model(copy.deepcopy(hub.make(family)), chosen).eval()
    net.save_pretrained(tmp_path / "theirs")
    if family == "mixtral" and all_linear:  # PEFT then adapts the experts too
        with pytest.raises(ValueError, match=r"pattern=.*gate_up_proj.* is not supported: only adapters without it"):
            peft.read_spec(str(tmp_path / "theirs"), family)
        return
    spec = peft.read_spec(str(tmp_path / "theirs"), family)
    assert spec == config_of(family, base, (peft.ALL,) if all_linear else None).lora
    model = dataclasses.replace(hf.read_config(base), lora=spec)
    got = logits(joined(model, base, opened.adapters_in(str(tmp_path / "theirs"), model)))
    np.testing.assert_allclose(got, hub.logits(net), atol=1e-4, rtol=0)
    # Written again they are the same tensors under the same names.
    peft.write(str(tmp_path / "again"), model, opened.adapters_in(str(tmp_path / "theirs"), model), base)
    before, after = (load_file(tmp_path / name / peft.TENSORS) for name in ("theirs", "again"))
    assert before.keys() == after.keys() and all(np.array_equal(before[name], after[name]) for name in before)


def test_defaults_are_pefts(family: str) -> None:
    known = theirs.utils.constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    assert peft.targets_of(family, None) == tuple(known[family])


def folder_of(tmp_path: Path, **changes: Any) -> tuple[str, Any]:
    """Adapters of the llama with changes of their config; and the base's config."""
    base = hub.save("llama", tmp_path / "base")
    model = config_of("llama", base)
    peft.write(str(tmp_path / "ours"), model, drawn(model), base)
    path = tmp_path / "ours" / peft.CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return str(tmp_path / "ours"), model


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"use_dora": True}, "use_dora=True is not supported"),
        ({"use_rslora": True}, "use_rslora=True is not supported"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save=['lm_head'] is not supported"),
        ({"bias": "all"}, "bias='all' is not supported: only 'none'"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern={'q_proj': 8} is not supported"),
        ({"alpha_pattern": {"q_proj": 8}}, "alpha_pattern={'q_proj': 8} is not supported"),
        ({"layers_to_transform": [0, 1]}, "layers_to_transform=[0, 1] is not supported"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa' is not supported: only True or False or"),
        ({"peft_type": "LOHA"}, "peft_type='LOHA' is not supported"),
        ({"task_type": "SEQ_CLS"}, "task_type='SEQ_CLS' is not supported"),
        ({"something_new": 3}, "something_new=3 is not supported"),
        ({"r": 0}, "r=0 is not a whole number of 1 or more"),
        ({"lora_alpha": "x"}, "lora_alpha='x' is not a number"),
        ({"lora_dropout": 1.0}, "lora_dropout=1.0 is not in [0, 1)"),
        ({"target_modules": "q_.*"}, "target_modules='q_.*' is not a list of names"),
        ({"target_modules": ["lm_head"]}, "target_modules='lm_head' is no module of llama that can have an adapter"),
    ],
)
def test_configs_that_are_refused(changes: dict, said: str, tmp_path: Path) -> None:
    folder, _ = folder_of(tmp_path, **changes)
    with pytest.raises(ValueError) as error:
        peft.read_spec(folder, "llama")
    assert said in str(error.value) and "\n" not in str(error.value)
    assert str(error.value).startswith(f"lora_load_path={folder!r}: {peft.CONFIG}: ")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("missing", "layers.3.self_attn.q_proj.lora_B.weight is missing (1 in all)"),
        ("surplus", "layers.9.x has no place in the model's adapters (1 in all)"),
        ("shape", "layers.0.self_attn.q_proj.lora_A.weight has shape [24, 3], not [3, 24]"),
        ("gone", "cannot be read (No such file or directory)"),
    ],
)
def test_tensors_that_are_refused(change: str, said: str, tmp_path: Path) -> None:
    folder, model = folder_of(tmp_path)
    path, prefix = tmp_path / "ours" / peft.TENSORS, "base_model.model.model."
    tensors = load_file(path)
    name = f"{prefix}layers.0.self_attn.q_proj.lora_A.weight"
    if change == "missing":
        del tensors[f"{prefix}layers.3.self_attn.q_proj.lora_B.weight"]
    elif change == "surplus":
        tensors[f"{prefix}layers.9.x"] = tensors[name]
    elif change == "shape":
        tensors[name] = np.ascontiguousarray(tensors[name].T)
    save_file(tensors, path)
    if change == "gone":
        path.unlink()
    with pytest.raises(ValueError) as error:
        opened.adapters_in(folder, model)
    assert said in str(error.value) and str(error.value).startswith(f"lora_load_path={folder!r}: ")


def test_experts_have_no_adapters() -> None:
    with pytest.raises(
        ValueError, match=r"lora_target_modules='w1' is no module of mixtral .* use some of q_proj, k_proj"
    ):
        peft.targets_of("mixtral", ("q_proj", "w1"))
    assert hf_config.ARCHITECTURES.keys() == peft.MODULES.keys()
