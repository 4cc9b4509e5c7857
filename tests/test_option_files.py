"""Options in files: what is read from TOML and YAML, and what is written comes back."""

import math
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpp import option_files

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
SCALARS = st.one_of(st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False), TEXT)
NAMES = st.from_regex(r"[a-z][a-z0-9_]{0,12}", fullmatch=True)


def read(folder: Path, name: str, text: str) -> dict[str, Any]:
    (folder / name).write_text(text, encoding="utf-8")
    return option_files.read(str(folder / name))


@given(st.dictionaries(NAMES, st.one_of(SCALARS, st.lists(SCALARS), st.none())))
def test_what_is_written_is_read(values: dict[str, Any]) -> None:
    found = tomllib.loads(option_files.to_toml(values))
    assert found == {name: value for name, value in values.items() if value is not None}
    assert {name: type(value) for name, value in found.items()} == {
        name: type(value) for name, value in values.items() if value is not None
    }


def test_odd_numbers_and_tuples_are_written() -> None:
    found = tomllib.loads(option_files.to_toml({"a": math.nan, "b": -math.inf, "c": ("x", "y"), "d": 1e-05}))
    assert math.isnan(found.pop("a"))
    assert found == {"b": -math.inf, "c": ["x", "y"], "d": 1e-05}


def test_what_utf8_cannot_hold_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^'\\udcff' in an option is no letter"):
        option_files.to_toml({"save": "a\udcff"})


@pytest.mark.parametrize(
    ("scalar", "value"),
    [
        ("1e-3", 1e-3),
        ("-2.5E+4", -2.5e4),
        (".5", 0.5),
        ("240", 240),
        ("-1", -1),
        ("true", True),
        ("False", False),
        ("no", "no"),
        ("3:5", "3:5"),
        ("2026-01-01", "2026-01-01"),
        ("'240'", "240"),
        ("none", "none"),
        ("[a, 2]", ["a", 2]),
    ],
)
def test_yaml_scalars(tmp_path: Path, scalar: str, value: Any) -> None:
    found = read(tmp_path, "a.yaml", f"x: {scalar}\n")["x"]
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(("name", "text"), [("a.toml", ""), ("a.yaml", ""), ("a.yml", "x:\ny: null\nz: ~\n")])
def test_nothing_given(tmp_path: Path, name: str, text: str) -> None:
    assert read(tmp_path, name, text) == {}


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.json", "{}", [".toml, .yaml, .yml"]),
        ("a.toml", "x = \ny = 1", ["malformed", "line 1"]),
        ("a.yaml", "x: [1\ny: 2", ["malformed", "line 2"]),
        ("a.yaml", "x: !!python/object/apply:os.getcwd []", ["malformed", "could not determine a constructor"]),
        ("a.yaml", "- x", ["holds no options", "batch_size: 2"]),
        ("a.yaml", "word", ["holds no options"]),
        ("a.toml", "batch-size = 1\nbatch_size = 2", ["batch_size is given twice"]),
    ],
)
def test_refused_files(tmp_path: Path, name: str, text: str, words: list[str]) -> None:
    with pytest.raises(ValueError, match=name) as refusal:
        read(tmp_path, name, text)
    message = str(refusal.value)
    assert message.startswith(f"config={str(tmp_path / name)!r}")
    assert "\n" not in message
    assert all(word in message for word in words), message


@pytest.mark.parametrize(("kind", "why"), [("missing", "No such file"), ("folder", "directory"), ("bytes", "UTF-8")])
def test_unreadable_files(tmp_path: Path, kind: str, why: str) -> None:
    path = tmp_path / "a.toml"
    if kind == "folder":
        path.mkdir()
    elif kind == "bytes":
        path.write_bytes(b"x = '\xff'")
    with pytest.raises(ValueError, match=why) as refusal:
        option_files.read(str(path))
    assert "\n" not in str(refusal.value)
