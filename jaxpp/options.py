"""Options as data: a command's options are the fields of a frozen dataclass, each made by `option`.

Every refusal is a ValueError of one line that names the option, its value, the rule and a value that would work.
"""

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, field, fields
from difflib import get_close_matches
from typing import Any, NoReturn

from jaxpp import option_files

MOST = 10**9  # of a whole number that has no bound of its own: far above what works, and it fits 32 bits
_KINDS = {int: "a whole number", float: "a number", str: "a word", bool: "true or false"}


def option(
    default: Any,
    text: str,
    type: type = str,
    choices: Sequence[str] | None = None,
    least: float | None = None,
    most: float | None = None,
    many: bool = False,
    positional: bool = False,
    dashed: bool = False,
) -> Any:
    """A dataclass field that is a command line option.

    Args: default, None where it is resolved later; text, for --help; type, str, int, float or bool (a flag); choices,
    the allowed words; least and most, the allowed range, checked by `check_ranges` (most of a whole number: MOST);
    many, one or more values, as a tuple; positional, such values are given without the name of the option; dashed,
    the value begins with dashes.
    """
    most = MOST if most is None and type is int else most
    metadata = {"help": text, "type": type, "choices": choices, "least": least, "most": most, "many": many}
    return field(default=default, metadata=metadata | {"positional": positional, "dashed": dashed})


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
    the first of `commands` is meant where none does. --config FILE of any command gives options in a file, over which
    those of the command line win.
    Returns: the command, and an instance of its class.
    Raises ValueError for an unknown command or option (with the nearest), a malformed value, one that is no choice, and
    for a file that holds such or cannot be read.
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
    parser.add_argument("--config", metavar="FILE", help="TOML or YAML file of options; the command line wins")
    for each in fields(made):
        _add(parser, each)
    found, unknown = parser.parse_known_intermixed_args(_joined(rest, made))
    for word in unknown:
        near = get_close_matches(word.split("=")[0].replace("-", "_").replace("__", "--", 1), _words(made), n=1)
        hint = f", did you mean {near[0]}?" if near else " (see --help)"
        raise ValueError(f"{word} is not an option of {command}{hint}")
    values = {each.name: getattr(found, each.name) for each in fields(made)}
    values = {name: _value(made, name, value) for name, value in values.items() if value not in (None, [])}
    return command, made(**({} if found.config is None else _of_file(made, command, found.config)) | values)


def _of_file(made: type, command: str, path: str) -> dict[str, Any]:
    """The options in a file, each of its field's type. Raises ValueError, naming the file."""
    found, known = option_files.read(path), {each.name: each for each in fields(made)}
    for name in found:
        if name not in known:
            near = nearest(name, known) or " (see --help)"
            raise ValueError(f"config={path!r}: {name} is not an option of {command}{near}")
    try:
        return {name: _typed(known[name], value) for name, value in found.items()}
    except ValueError as error:
        raise ValueError(f"config={path!r}: {error}") from None


def _typed(each: Field, value: Any) -> Any:
    """A file's value as the option's type; a whole number may stand where a number is asked for."""
    if each.metadata["many"]:
        if not isinstance(value, list):
            raise ValueError(f"{each.name}={value!r} is not a list, for example [{json.dumps(str(value))}]")
        return tuple(_of_type(each, item) for item in value)
    return _of_type(each, value)


def _of_type(each: Field, value: Any) -> Any:
    kind = each.metadata["type"]
    if type(value) is not kind and not (kind is float and type(value) is int):
        raise ValueError(f"{each.name}={value!r} is not {_KINDS[kind]}{_such_as(each)}")
    return _convert(each, value)


def _such_as(each: Field) -> str:
    example = _example(each)
    return f", for example {each.name} = {json.dumps(example)}" if isinstance(example, each.metadata["type"]) else ""


def _words(made: type) -> list[str]:
    return ["--config", *(f"--{each.name}" for each in fields(made) if not each.metadata["positional"])]


def _joined(words: Sequence[str], made: type) -> list[str]:
    """Words with a dashed option's value joined to its name, as argparse would take it for an option by itself."""
    dashed = {f"--{name}" for each in fields(made) if each.metadata["dashed"] for name in _names(each)}
    found: list[str] = []
    for word in words:
        if found and found[-1] in dashed:
            found[-1] += f"={word}"
        else:
            found.append(word)
    return found


def _names(each: Field) -> dict[str, None]:
    """An option's names without dashes before them: as its field has it, and with dashes for underscores."""
    return dict.fromkeys((each.name, each.name.replace("_", "-")))


def _add(parser: argparse.ArgumentParser, each: Field) -> None:
    names = [f"--{name}" for name in _names(each)]
    data = each.metadata
    assert each.default is not MISSING
    shown = "" if each.default is None or data["type"] is bool else f" (default: {each.default})"
    text = (data["help"] + shown).replace("%", "%%")
    if data["positional"]:
        parser.add_argument(each.name, help=text, metavar=each.name.upper(), nargs="*")
    elif data["type"] is bool:  # also --no-, for what a file says
        parser.add_argument(*names, action=argparse.BooleanOptionalAction, default=None, help=text)
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
    least, default = each.metadata["least"], each.default
    if each.metadata["type"] is str:
        return default if isinstance(default, str) else (each.metadata["choices"] or ("x",))[0]
    return max(least or 0, 1) if default is None else default


def _convert(each: Field, word: Any) -> Any:
    name, kind, choices = each.name, each.metadata["type"], each.metadata["choices"]
    if kind is bool:
        return bool(word)
    if kind is str and not word:
        raise ValueError(f"{name}={word!r} is empty: give at least one letter, for example --{name} {_example(each)}")
    if kind is str and "\0" in word:
        raise ValueError(f"{name}={word!r} has a NUL character, which no name has: take it out")
    try:
        value = kind(word)
    except (ValueError, OverflowError):
        raise ValueError(f"{name}={word!r} is not {_KINDS[kind]}, for example --{name} {_example(each)}") from None
    if choices and value not in choices:
        raise ValueError(f"{name}={word!r} is unknown{nearest(word, choices)} (one of {', '.join(choices)})")
    return value


def check_ranges(options: Any) -> None:
    """Check every number of an options' instance against its field's range. Raises ValueError."""
    for each in fields(options):
        given, least, most = getattr(options, each.name), each.metadata["least"], each.metadata["most"]
        if given is None or each.metadata["type"] not in (int, float):
            continue
        works = f"for example --{each.name} {_example(each)}"
        for value in given if each.metadata["many"] else (given,):
            if value in (math.inf, -math.inf) or value != value:
                raise ValueError(f"{each.name}={value} must be finite, {works}")
            if least is not None and value < least:
                raise ValueError(f"{each.name}={value} must be at least {least}, {works}")
            if most is not None and value > most:
                raise ValueError(f"{each.name}={value} must be at most {most}, {works}")


def check_letters(name: str, text: str) -> None:
    """Refuse, with a ValueError, text with letters that UTF-8 has not, such as bytes of another encoding."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name}={text!r} is not text in UTF-8 (letter {error.start}): type it anew, or set LC_ALL=C.UTF-8"
        ) from None
