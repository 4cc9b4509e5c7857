"""Options in a file: read from TOML or YAML, written as TOML."""

import json
import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import yaml


class _Loader(yaml.SafeLoader):
    """The safe loader with the scalars of YAML 1.2, as most expect them: 1e-3 is a number; on, 3:5 and 2026-01-01 are
    words."""

    yaml_implicit_resolvers: ClassVar[dict] = {}


for _tag, _pattern, _first in (
    ("null", r"~|null|", ["~", "n", ""]),
    ("bool", r"true|false|True|False", list("tfTF")),
    ("int", r"[-+]?(0|[1-9]\d*)", list("-+0123456789")),
    ("float", r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?|[-+]?\.inf|\.nan", list("-+.0123456789")),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"(?:{_pattern})$"), _first)


def _yaml(text: str) -> Any:
    try:
        found = yaml.load(text, Loader=_Loader)  # a subclass of the safe loader
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None
    return {} if found is None else found


READERS: dict[str, Callable[[str], Any]] = {".toml": tomllib.loads, ".yaml": _yaml, ".yml": _yaml}


def read(path: str) -> dict[str, Any]:
    """The options of a file, by their names with underscores; those that are null are left out.

    path: of a TOML or YAML file, by its suffix. Raises ValueError, naming the file, where it cannot be read, is neither
    of them, is malformed, is no table of names, or has a name twice.
    """
    reader = READERS.get(Path(path).suffix)
    if reader is None:
        raise ValueError(f"config={path!r} is neither TOML nor YAML: give a file that ends in {', '.join(READERS)}")
    try:
        found = reader(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"config={path!r} cannot be read ({error.strerror}): give a file with options") from None
    except UnicodeDecodeError:
        raise ValueError(f"config={path!r} is not text in UTF-8: save it as that") from None
    except ValueError as error:
        raise ValueError(f"config={path!r} is malformed: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"config={path!r} holds no options: write lines like batch_size{_sign(path)}2")
    options = {}
    for key, value in found.items():
        name = str(key).replace("-", "_")
        if name in options:
            raise ValueError(f"config={path!r}: {name} is given twice, with dashes and with underscores: keep one")
        options[name] = value
    return {name: value for name, value in options.items() if value is not None}


def _sign(path: str) -> str:
    return " = " if path.endswith(".toml") else ": "


def to_toml(values: Mapping[str, Any]) -> str:
    """TOML text of a table of strings, numbers, bools and lists of them, whose names need no quotes; None is left out.

    Raises ValueError for a string that UTF-8 cannot hold, such as some file names.
    """
    text = "".join(f"{name} = {_value(value)}\n" for name, value in values.items() if value is not None)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        letter = error.object[error.start]
        raise ValueError(f"{letter!r} in an option is no letter that UTF-8 has: rename what it stands in") from None
    return text


def _value(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, str):  # JSON's escapes are TOML's, but JSON lets one control character stand
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value).lower() if isinstance(value, bool) else repr(value)
