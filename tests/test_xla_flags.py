"""XLA's flags: which the installed one knows, whose word counts, and what is refused."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import run
from jaxpp import mesh, xla_flags
from jaxpp.commands import EvalConfig, of_eval
from jaxpp.config import Config
from jaxpp.xla_flags import FLAGS, Flag

ROOT = Path(__file__).parent.parent
TABLE = (Flag("xla_gpu_autotune_level", "1", "of a test"), Flag("xla_gpu_of_another_version", "1", "of a test"))
OURS = "--xla_gpu_autotune_level=1"


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A function: names of flags -> from now on there is a CUDA plugin that knows these alone."""

    def install(*names: str) -> None:
        path = tmp_path / "jax_plugins" / "xla_cuda13" / "xla_cuda_plugin.so"
        path.parent.mkdir(parents=True)
        path.write_bytes(b"\0".join([b"", *(name.encode() for name in names), b""]))
        monkeypatch.syspath_prepend(tmp_path)

    return install


@pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag.name)
def test_the_table(flag: Flag) -> None:
    assert re.fullmatch(r"xla_\w+", flag.name) and flag.value and flag.reason
    assert [each.name for each in FLAGS].count(flag.name) == 1
    assert xla_flags.known(flag.name)
    xla_flags.check(f"--{flag.name}={flag.value}")


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("xla_cpu_multi_thread_eigen", True),
        ("xla_gpu_autotune_level", True),
        ("xla_force_host_platform_device_count", True),
        ("xla_gpu_autotune_leve", False),
        ("gpu_autotune_level", False),
        ("xla_gpu_nonsense", False),
    ],
)
def test_known(name: str, want: bool) -> None:
    assert xla_flags.known(name) == want


def test_known_to_every_library(plugin: Callable[..., None]) -> None:
    plugin("xla_gpu_autotune_level", "an_xla_gpu_shard_autotuning", "xla_gpu_of_another_version")
    names = ("xla_gpu_autotune_level", "xla_gpu_shard_autotuning", "xla_gpu_of_another_version")
    assert [xla_flags.known(name) for name in names] == [True, False, False]


@pytest.mark.parametrize(
    ("before", "given", "want"),
    [
        ("", None, [OURS]),
        ("--xla_of_the_user=1", None, [OURS, "--xla_of_the_user=1"]),
        ("--xla_gpu_autotune_level=2", None, [OURS, "--xla_gpu_autotune_level=2"]),
        (
            "--xla_gpu_autotune_level=2",
            "--xla_gpu_autotune_level=3",
            [OURS, "--xla_gpu_autotune_level=2", "--xla_gpu_autotune_level=3"],
        ),
    ],
)
def test_the_order(
    before: str, given: str | None, want: list[str], plugin: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Table, environment, option; of the table what every library knows, and nothing where GPUs are not used."""
    monkeypatch.setattr(xla_flags, "FLAGS", TABLE)
    for installed, gpu in ((False, True), (True, True), (True, False)):
        if installed and gpu:
            plugin("xla_gpu_autotune_level")
        monkeypatch.setenv("XLA_FLAGS", before)
        xla_flags.apply(given, gpu)
        assert os.environ["XLA_FLAGS"].split() == (want if installed and gpu else want[1:])


@pytest.mark.parametrize("emulated", [None, 8])
def test_nothing_is_set_on_emulated_devices(
    emulated: int | None, plugin: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(xla_flags, "FLAGS", TABLE)
    monkeypatch.setattr(mesh, "emulate_devices", lambda count: None)
    monkeypatch.setattr(mesh, "set_host_devices", lambda count: None)
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=1")
    plugin("xla_gpu_autotune_level")
    run.start_devices(Config(emulate_devices=emulated))
    assert os.environ["XLA_FLAGS"] == ("--xla_a=1" if emulated else f"{OURS} --xla_a=1")


def test_the_last_word_counts_and_comes_in_time() -> None:
    """In a process where JAX has not started yet: XLA itself says which value it has read."""
    code = (
        "import run; from jaxlib.xla_client import CompileOptions;"
        "run.start_devices(run.Config(emulate_devices=1, xla_flags='--xla_backend_optimization_level=2'));"
        "print(CompileOptions().executable_build_options.debug_options.xla_backend_optimization_level)"
    )
    environment = os.environ | {"XLA_FLAGS": "--xla_backend_optimization_level=1"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split()) == (0, ["2"]), done.stderr


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("xla_gpu_autotune_level=1", "'xla_gpu_autotune_level=1' does not begin with --xla_ and a name, for example"),
        ("--xla_gpu_autotune_level 1", "'1' does not begin with --xla_"),
        ("--xla_=1", "'--xla_=1' does not begin with --xla_"),
        ("--xla_gpu_autotune_levle=1", "no flag that this JAX knows, did you mean 'xla_gpu_autotune_level'?"),
        ("--xla_gpu_autotune_level=high", "refused by XLA (Couldn't interpret value high for flag xla_gpu_autotune_"),
        ("--xla_shape=1", "refused by XLA (Unknown flag in XLA_FLAGS: --xla_shape=1)"),  # a name, but of no flag
    ],
)
def test_refusals(
    given: str, words: str, capsys: pytest.CaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_of_the_user=1")
    words_given = ["--output_dir", str(tmp_path / "out"), "--num_iteration", "1", "--xla_flags", given]
    assert run.main(words_given) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: xla_flags={given!r}") and words in error and error.count("\n") == 1
    assert os.environ["XLA_FLAGS"] == "--xla_of_the_user=1" and not (tmp_path / "out").exists()


def test_evaluation_takes_what_is_given_to_it() -> None:
    info = {"options": {"xla_flags": "--xla_a=1"}, "fixed": {"sequence_length": 8, "tokens_per_step": 16}}
    assert of_eval(EvalConfig(xla_flags="--xla_b=1"), info).xla_flags == "--xla_b=1"
    assert of_eval(EvalConfig(), info).xla_flags is None
