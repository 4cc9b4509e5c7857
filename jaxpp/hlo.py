"""What the text of a compiled program says of its loops: what they copy, and which sends overlap what they compute."""

import re
from math import prod

LARGE = 2**20  # bytes of a copy that is told of
_BYTES = {"f64": 8, "f32": 4, "s32": 4, "u32": 4, "bf16": 2, "f16": 2, "s8": 1, "u8": 1, "pred": 1}
_HEAD = re.compile(r"^(?:ENTRY )?%([\w.-]+) \(.*\{$", re.MULTILINE)
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|\w+_computation)=%([\w.-]+)|branch_computations=\{([^}]*)\}")
_COPY = re.compile(r"%([\w.-]+) = \(?(\w+)\[([\d,]*)\][^=\n]* (?:copy|copy-start)\(")


def of_loops(text: str) -> dict[str, str]:
    """The computations, by name, that a program may run more than once: loops' bodies, and what these call."""
    heads = list(_HEAD.finditer(text))
    ends = [*(head.start() for head in heads[1:]), len(text)]
    every = {head[1]: text[head.end() : end] for head, end in zip(heads, ends, strict=True)}
    left, found = re.findall(r" while\(.*body=%([\w.-]+)", text), {}
    while left:
        name = left.pop()
        if name not in found:
            found[name] = every[name]
            for one, several in _CALLED.findall(every[name]):
                left += [one] if one else [n.strip(" %") for n in several.split(",")]
    return found


def large_copies(text: str, least: int = LARGE) -> dict[str, list[int]]:
    """Bytes of the copies, from `least`, that a program's loops make.

    Returns: addends, those that a product then adds its result to, in their place: of the residual stream, which the
    backward pass still needs, on a pipeline or not; and all others. Largest first.
    """
    found: dict[str, list[int]] = {"addends": [], "others": []}
    for body in of_loops(text).values():
        sums = [line for line in body.splitlines() if " custom-call(" in line and "output_to_operand_aliasing=" in line]
        for name, dtype, dims in _COPY.findall(body):
            size = _BYTES.get(dtype, 4) * prod(int(n) for n in dims.split(",") if n)
            if size >= least:
                added = any(re.search(rf"%{re.escape(name)}[,)]", line) for line in sums)
                found["addends" if added else "others"].append(size)
    return {role: sorted(sizes, reverse=True) for role, sizes in found.items()}


def overlaps(text: str) -> list[bool]:
    """For each asynchronous send of a compiled program, whether a slot (a conditional) stands between its start and its
    end in the order of execution."""
    found: dict[str, bool] = {}
    open_sends: set[str] = set()
    for line in text.splitlines():
        if begun := re.search(r"%(\S+) = .* collective-permute-start\(", line):
            open_sends.add(begun[1])
            found[begun[1]] = False
        elif ended := re.search(r"collective-permute-done\(.*?%([\w.-]+)\)", line):
            open_sends.discard(ended[1])
        elif " conditional(" in line:
            found |= dict.fromkeys(open_sends, True)
    return list(found.values())
