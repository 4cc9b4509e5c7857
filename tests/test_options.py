"""Options from the command line and from files, of any command."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import models
import run
from jaxpp.options import option, parse
from models import GPT2Config


@dataclass(frozen=True)
class Options:
    """Of a command that does nothing."""

    rows: int = option(2, "rows", int, least=1)
    rate: float = option(0.5, "rate", float)
    word: str | None = option(None, "word")
    kind: str = option("one", "kind", str, ("one", "two"))
    loud: bool = option(False, "loud", bool)
    many_words: tuple[str, ...] = option((), "words", many=True)
    flags_of: str | None = option(None, "flags", dashed=True)


@dataclass(frozen=True)
class Places:
    """Of a command with words without a name."""

    places: tuple[str, ...] = option(("here",), "places", many=True, positional=True)
    to: str = option("there", "to")


COMMANDS = {"do": Options, "go": Places}


@pytest.fixture(params=["toml", "yaml"])
def config(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """A function: options -> the path of a file with them, in either format."""

    def write(**values: Any) -> str:
        sign = " = " if request.param == "toml" else ": "
        path = tmp_path / f"options.{request.param}"
        path.write_text("".join(f"{name}{sign}{json.dumps(value)}\n" for name, value in values.items()))
        return str(path)

    return write


def test_options_of_a_file(config: Any) -> None:
    path = config(rows=3, rate=1, word="a b", kind="two", loud=True, many_words=["x", "y"])
    want = Options(3, 1.0, "a b", "two", True, ("x", "y"))
    assert parse(["do", "--config", path], COMMANDS) == ("do", want)
    assert parse([f"--config={path}"], COMMANDS) == ("do", want)
    assert isinstance(parse(["--config", path], COMMANDS)[1].rate, float)


def test_the_command_line_wins(config: Any) -> None:
    path = config(rows=3, rate=1.0, kind="two", loud=True, many_words=["x"])
    given = ["--rows", "4", "--config", path, "--kind=one", "--no-loud", "--many-words", "y", "z"]
    assert parse(given, COMMANDS)[1] == Options(4, 1.0, None, "one", False, ("y", "z"))


def test_dashes_and_underscores(config: Any) -> None:
    assert parse(["--config", config(**{"many-words": ["x"]})], COMMANDS)[1].many_words == ("x",)


@pytest.mark.parametrize("flags", ["--rows", "--a=1", "--a=1 --b", "-a", "a"])
def test_a_value_may_begin_with_dashes(flags: str) -> None:
    for words in (["--flags_of", flags], ["--flags-of", flags], [f"--flags_of={flags}"]):
        assert parse(["--rows", "3", *words, "--loud"], COMMANDS)[1] == Options(3, loud=True, flags_of=flags)
    with pytest.raises(ValueError, match="--flags_of"):
        parse(["--flags_of"], COMMANDS)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"row": 3}, "row is not an option of do, did you mean 'rows'?"),
        ({"zzz": 3}, "zzz is not an option of do (see --help)"),
        ({"config": "x"}, "config is not an option of do"),
        ({"rows": "3"}, "rows='3' is not a whole number, for example rows = 2"),
        ({"rows": 3.0}, "rows=3.0 is not a whole number"),
        ({"rows": True}, "rows=True is not a whole number"),
        ({"rows": [3]}, "rows=[3] is not a whole number"),
        ({"rate": "fast"}, "rate='fast' is not a number, for example rate = 0.5"),
        ({"rate": False}, "rate=False is not a number"),
        ({"word": 3}, "word=3 is not a word"),
        ({"loud": 1}, "loud=1 is not true or false, for example loud = false"),
        ({"loud": "yes"}, "loud='yes' is not true or false"),
        ({"kind": "tow"}, "kind='tow' is unknown, did you mean 'two'? (one of one, two)"),
        ({"many_words": "x"}, "many_words='x' is not a list, for example [\"x\"]"),
        ({"many_words": ["x", 2]}, "many_words=2 is not a word"),
    ],
)
def test_refused_values(config: Any, values: dict[str, Any], words: str) -> None:
    path = config(**values)
    with pytest.raises(ValueError, match=r"^config=") as refusal:
        parse(["do", "--config", path], COMMANDS)
    message = str(refusal.value)
    assert message.startswith(f"config={path!r}: {words}")
    assert "\n" not in message


@pytest.mark.parametrize(
    ("words", "want"),
    [
        ([], Places()),
        (["a"], Places(("a",))),
        (["a", "b", "--to", "c"], Places(("a", "b"), "c")),
        (["--to", "c", "a", "b"], Places(("a", "b"), "c")),
        (["a", "--to", "c", "b"], Places(("a", "b"), "c")),
    ],
)
def test_words_without_a_name(words: list[str], want: Places) -> None:
    assert parse(["go", *words], COMMANDS) == ("go", want)


def test_places_of_a_file(config: Any) -> None:
    path = config(places=["x", "y"])
    assert parse(["go", "--config", path], COMMANDS)[1].places == ("x", "y")
    assert parse(["go", "z", "--config", path], COMMANDS)[1].places == ("z",)


@pytest.mark.parametrize("words", [["do", "x"], ["do", "--louder"], ["go", "--place", "x"], ["do", "--no-rows"]])
def test_unknown_words(words: list[str]) -> None:
    with pytest.raises(ValueError, match=f"^{words[1]} is not an option of {words[0]}"):
        parse(words, COMMANDS)


@pytest.mark.parametrize("command", run.COMMANDS)
def test_every_command_takes_a_file(command: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "c.toml").write_text("nothing = 1\n")
    assert run.main([command, "--config", str(tmp_path / "c.toml")]) == 2
    assert f"c.toml': nothing is not an option of {command}" in capsys.readouterr().err


def losses(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line.get("loss", line.get("val_loss")) for line in lines]


def test_the_written_file_repeats_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was left to the devices is in it: on one that takes other defaults, the run would be the same."""
    monkeypatch.setattr(run, "sampler", lambda *_: lambda _: None)
    monkeypatch.setitem(
        models.PRESETS, "gpt2-tiny", GPT2Config(vocab_size=256, positions=64, layers=2, dim=32, heads=2)
    )
    given = [
        "--num_iteration",
        "3",
        "--batch_size",
        "1",
        "--dropout",
        "0.1",
        "--learning-rate",
        "3e-3",
        "--sequence_length",
    ]
    assert (
        run.main([*given, "16", "--fp32_residual", "--pipeline_dtype", "float32", "--output_dir", str(tmp_path / "a")])
        == 0
    )
    path = tmp_path / "a" / "config.toml"
    plan = parse(["plan", "--config", str(path)], {name: made.options for name, made in run.COMMANDS.items()})[1]
    assert (plan.pipeline_parallel, plan.data_parallel, plan.total_batch_size) == (2, 1, 8 * 16)
    assert (plan.model, plan.schedule, plan.fp32_residual, plan.learning_rate) == ("gpt2-tiny", "1f1b", True, 3e-3)
    before = path.read_text()
    assert run.main(["--config", str(path), "--output_dir", str(tmp_path / "b")]) == 0
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    after = (tmp_path / "b" / "config.toml").read_text()
    assert after == before.replace(str(tmp_path / "a"), str(tmp_path / "b"))
