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
