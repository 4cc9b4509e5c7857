"""XLA's flags: a table of those that a run sets, each with its reason, and what a user gives over them.

XLA reads XLA_FLAGS once, at JAX's first operation, and ends the process at a flag that it does not know, as flags come
and go between its versions. Its libraries hold the name of each flag that they know as a C string, so they are asked
without starting anything. Of a flag that is given twice XLA takes the last.
"""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import NamedTuple

from jaxpp.options import nearest


class Flag(NamedTuple):
    """A flag of XLA that is set on GPUs, and why."""

    name: str
    value: str
    reason: str


FLAGS = (Flag("xla_gpu_enable_triton_gemm", "false", "cuBLAS's products alone: GPT-2's step is 2% shorter on an H200"),)
# What reads XLA_FLAGS: each package's libraries, in its folder. The second is there only with GPUs.
_LIBRARIES = {"jaxlib": "*jax_common.*", "jax_plugins": "xla_cuda*/xla_cuda_plugin.so"}
_FORM = re.compile(r"--(xla_\w+)(=.*)?", re.ASCII)
_EXAMPLE = 'for example --xla_flags "--xla_gpu_autotune_level=2"'
_PARSE = "from jaxlib.xla_client import CompileOptions; CompileOptions().executable_build_options.debug_options"


def libraries(package: str) -> list[Path]:
    """The libraries of a package that read XLA_FLAGS, found without importing it; none where it is not installed."""
    spec = find_spec(package)
    folders = (spec and spec.submodule_search_locations) or ()
    return [path for folder in folders for path in Path(folder).glob(_LIBRARIES[package])]


def known(name: str) -> bool:
    """Whether every library that reads XLA_FLAGS knows a flag, given without its dashes."""
    return all(_holds(path, name) for package in _LIBRARIES for path in libraries(package))


def _holds(path: Path, name: str) -> bool:
    """Whether a file has a name as a C string, or as one's last word."""
    word = name.encode() + b"\0"
    with path.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as text:
        at = text.find(word)
        while at > 0 and re.match(rb"\w", text[at - 1 : at]):  # the end of a longer name
            at = text.find(word, at + 1)
    return at >= 0


def _candidates() -> list[str]:
    """What may be flags of the installed jaxlib, for a hint; some are other names of XLA's."""
    found: set[bytes] = set()
    for path in libraries("jaxlib"):
        with path.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as text:
            found.update(re.findall(rb"\0(xla_\w+)(?=\0)", text))
    return sorted(name.decode() for name in found)


def check(given: str) -> None:
    """Check what --xla_flags says. Raises ValueError for a word that is no flag, an unknown one, a value of no use."""
    for word in given.split():
        form = _FORM.fullmatch(word)
        if form is None:
            raise ValueError(f"xla_flags={given!r}: {word!r} does not begin with --xla_ and a name, {_EXAMPLE}")
        if not known(form[1]):
            hint = nearest(form[1], _candidates()) or f", {_EXAMPLE}"
            raise ValueError(f"xla_flags={given!r}: {form[1]} is no flag that this JAX knows{hint}")
    # Values are read by XLA alone, which aborts at a bad one: another process finds out, in 0.2 s.
    environment = os.environ | {"XLA_FLAGS": given}
    done = subprocess.run([sys.executable, "-c", _PARSE], env=environment, capture_output=True, text=True, check=False)
    if done.returncode:  # a signal's or not: where a machine supervises its processes, an abort may end in an exit code
        said = [line.partition("] ")[2] for line in done.stderr.splitlines() if "] " in line]
        raise ValueError(f"xla_flags={given!r} is refused by XLA ({said[0] if said else 'it aborts'}), {_EXAMPLE}")


def apply(given: str | None, gpu: bool) -> None:
    """Set XLA_FLAGS to the table's flags, then the environment's, then those given, of which the last of a name counts.

    Must run before the first JAX operation, which reads them.

    Args: given, the words of --xla_flags; gpu, whether GPUs may be used, which the table is for: it is left out without
    them or JAX's CUDA plugin, and so is a flag of it that this JAX does not know. Raises ValueError for what is given
    and of no use.
    """
    if given is not None:
        check(given)
    table = FLAGS if gpu and libraries("jax_plugins") else ()
    ours = [f"--{flag.name}={flag.value}" for flag in table if known(flag.name)]
    words = [*ours, *os.environ.get("XLA_FLAGS", "").split(), *(given or "").split()]
    os.environ["XLA_FLAGS"] = " ".join(words)
