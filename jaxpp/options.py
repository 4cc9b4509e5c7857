"""Options as data: a command's options are the fields of a frozen dataclass, each made by `option`.

Every refusal is a ValueError of one line that names the option, its value, the rule and a value that would work.
"""

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, field, fields
from difflib import get_close_matches
from typing import Any, NoReturn

_KINDS = {int: "a whole number", float: "a number", str: "a word"}


def option(
    default: Any,
    text: str,
    type: type = str,
    choices: Sequence[str] | None = None,
    least: float | None = None,
    most: float | None = None,
    many: bool = False,
    positional: bool = False,
) -> Any:
    """A dataclass field that is a command line option.

    Args: default, None where it is resolved later; text, for --help; type, str, int, float or bool (a flag); choices,
    the allowed words; least and most, the allowed range, checked by `check_ranges`; many, one or more values, which
    come as a tuple; positional, such values are given without the option's name.
    """
    metadata = {"help": text, "type": type, "choices": choices, "least": least, "most": most, "many": many}
    return field(default=default, metadata=metadata | {"positional": positional})


def nearest(name: str, known: Sequence[str] | Mapping[str, Any]) -> str:
    """`, did you mean 'x'?` for an unknown name, or nothing where no known one is near."""
    near = get_close_matches(name, known, n=1, cutoff=0.4)
    return f", did you mean {near[0]!r}?" if near else ""


class _Parser(argparse.ArgumentParser):
    """argparse with its errors as our ValueError of one line."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def parse(arguments: Sequence[str], commands: Mapping[str, type], prog: str = "run.py") -> tuple[str, Any]:
    """Parse a command line.

    Args: arguments, without the program's name; commands, the options' class of each command. The command stands first;
    the first of `commands` is meant where none does.
    Returns: the command, and an instance of its class.
    Raises ValueError for an unknown command or option (with the nearest), a malformed value, or one that is no choice.
    """
    command, rest = next(iter(commands)), list(arguments)
    if rest and not rest[0].startswith("-"):
        command = rest.pop(0)
    if command not in commands:
        raise ValueError(f"command={command!r} is unknown{nearest(command, commands)} (one of {', '.join(commands)})")
    made = commands[command]
    parser = _Parser(prog=f"{prog} {command}", allow_abbrev=False, description=(made.__doc__ or "").split("\n")[0])
    if command == next(iter(commands)):
        parser.epilog = f"Other commands: {', '.join(list(commands)[1:])}; see {prog} COMMAND --help."
    for each in fields(made):
        _add(parser, each)
    found, unknown = parser.parse_known_intermixed_args(rest)
    for word in unknown:
        near = get_close_matches(word.split("=")[0].replace("-", "_").replace("__", "--", 1), _words(made), n=1)
        hint = f", did you mean {near[0]}?" if near else " (see --help)"
        raise ValueError(f"{word} is not an option of {command}{hint}")
    values = {each.name: getattr(found, each.name) for each in fields(made)}
    values = {name: _value(made, name, value) for name, value in values.items() if value not in (None, [])}
    return command, made(**values)


def _words(made: type) -> list[str]:
    return [f"--{each.name}" for each in fields(made) if not each.metadata["positional"]]


def _add(parser: argparse.ArgumentParser, each: Field) -> None:
    names = dict.fromkeys((f"--{each.name}", f"--{each.name.replace('_', '-')}"))
    data = each.metadata
    assert each.default is not MISSING
    shown = "" if each.default is None or data["type"] is bool else f" (default: {each.default})"
    text = (data["help"] + shown).replace("%", "%%")
    if data["positional"]:
        parser.add_argument(each.name, help=text, metavar=each.name.upper(), nargs="*")
    elif data["type"] is bool:
        parser.add_argument(*names, action="store_true", default=None, help=text)
    else:
        metavar = "{" + ",".join(data["choices"]) + "}" if data["choices"] else data["type"].__name__.upper()
        parser.add_argument(*names, help=text, metavar=metavar, nargs="+" if data["many"] else None)


def _value(made: type, name: str, value: Any) -> Any:
    """A word of the command line as the option's type."""
    each = next(each for each in fields(made) if each.name == name)
    if each.metadata["many"]:
        return tuple(_convert(each, word) for word in value)
    return _convert(each, value)


def _example(each: Field) -> Any:
    """A value of an option that works: its default, or the least."""
    least = each.metadata["least"]
    return max(least or 0, 1) if each.default is None else each.default


def _convert(each: Field, word: Any) -> Any:
    name, kind, choices = each.name, each.metadata["type"], each.metadata["choices"]
    if kind is bool:
        return bool(word)
    try:
        value = kind(word)
    except ValueError:
        raise ValueError(f"{name}={word!r} is not {_KINDS[kind]}, for example --{name} {_example(each)}") from None
    if choices and value not in choices:
        raise ValueError(f"{name}={word!r} is unknown{nearest(word, choices)} (one of {', '.join(choices)})")
    return value


def check_ranges(options: Any) -> None:
    """Check every number of an options' instance against its field's range. Raises ValueError."""
    for each in fields(options):
        value, least, most = getattr(options, each.name), each.metadata["least"], each.metadata["most"]
        if value is None or each.metadata["type"] not in (int, float):
            continue
        works = f"for example --{each.name} {_example(each)}"
        if value in (math.inf, -math.inf) or value != value:
            raise ValueError(f"{each.name}={value} must be finite, {works}")
        if least is not None and value < least:
            raise ValueError(f"{each.name}={value} must be at least {least}, {works}")
        if most is not None and value > most:
            raise ValueError(f"{each.name}={value} must be at most {most}, {works}")
