"""Files of one JSON object: what is none is refused by name."""

from pathlib import Path

import pytest

from jaxpp import json_files


def test_an_object_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"é": [1, null]}', encoding="utf-8")
    assert json_files.read_object(tmp_path / "a.json") == {"é": [1, None]}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"[1]", "a.json holds a list, not an object"),
        (b'"x"', "a.json holds a string"),
        (b"null", "a.json holds null"),
        (b"2.5", "a.json holds a number"),
        (b"true", "a.json holds a number or truth value"),
        (b"{", "a.json is no JSON (Expecting property name enclosed in double quotes, line 1)"),
        (b"", "a.json is no JSON"),
        (b'{"a": "\xff"}', "a.json is not UTF-8 (byte 7)"),
        (b"[" * 200_000, "a.json is nested too deeply"),
        (b'{"a": ' + b"9" * 5000 + b"}", "a.json is no JSON that can be read (Exceeds the limit"),
    ],
)
def test_refusals(content: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(ValueError) as refusal:
        json_files.read_object(tmp_path / "a.json")
    assert str(refusal.value).startswith(words) and "\n" not in str(refusal.value)
