"""Files that hold one JSON object, which others wrote."""

import json
from pathlib import Path
from typing import Any


def read_object(path: Path) -> dict[str, Any]:
    """The object in a file. Raises OSError, and ValueError of one line that names the file where it holds none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path.name} is not UTF-8 (byte {error.start}): save it as that") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path.name} is no JSON ({error.msg}, line {error.lineno}): copy it again") from None
    except RecursionError:
        raise ValueError(f"{path.name} is nested too deeply: copy it again") from None
    except ValueError as error:  # a number of thousands of digits
        raise ValueError(f"{path.name} is no JSON that can be read ({error}): copy it again") from None
    if not isinstance(found, dict):
        kind = {list: "a list", str: "a string", type(None): "null"}.get(type(found), "a number or truth value")
        raise ValueError(f"{path.name} holds {kind}, not an object ({{...}}): copy it again")
    return found


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines; a last line that a kill cut short is left out.

    Raises ValueError of one line that names the file, and the line that is none.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ValueError(f"{str(path)!r} cannot be read ({why})") from None
    found = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except ValueError:
            if number == len(lines) > 1:
                break
            record = None
        if not isinstance(record, dict):
            raise ValueError(f"line {number} of {str(path)!r} is no JSON object")
        found.append(record)
    return found
