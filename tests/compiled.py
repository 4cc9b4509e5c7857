"""What stands in a compiled program's text."""

import re
from collections import Counter

KINDS = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all", "collective-permute")
_OPERATION = re.compile(rf"= (?:\()?(\w+)\[([\d,]*)\].*? ({'|'.join(KINDS)})(?:-start)?\(")


def collectives(text: str, at_least: int = 1) -> Counter[str]:
    """How many collectives of each kind a program's text has, those of fewer elements left out."""
    found: Counter[str] = Counter()
    for line in text.splitlines():
        if (match := _OPERATION.search(line)) and elements(match[2]) >= at_least:
            found[match[3]] += 1
    return found


def elements(shape: str) -> int:
    """Elements of a shape written as in the text, "2,8,24"."""
    size = 1
    for n in filter(None, shape.split(",")):
        size *= int(n)
    return size
