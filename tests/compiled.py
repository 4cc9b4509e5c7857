"""What stands in a compiled program's text."""

import re
from collections import Counter
from math import prod

KINDS = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all", "collective-permute")
_OPERATION = re.compile(rf"= (.*?) ({'|'.join(KINDS)})(?:-start)?\(")
_SHAPE = re.compile(r"\w+\[([\d,]*)\]")


def collectives(text: str, at_least: int = 1) -> Counter[str]:
    """How many collectives of each kind a program's text has, those of fewer elements left out."""
    found: Counter[str] = Counter()
    for line in text.splitlines():
        if match := _OPERATION.search(line):
            sizes = [prod(int(n) for n in shape.split(",") if n) for shape in _SHAPE.findall(match[1])]
            found[match[2]] += max(sizes, default=0) >= at_least
    return +found
