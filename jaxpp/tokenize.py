"""Text files to a token file of llm.c, by several processes.

A file is a document. A long one is cut after a line's end where that changes no token: the text around each cut is
encoded whole and in two, and the cut is made only where both agree. So the result does not depend on the number of
processes.
"""

import hashlib
import mmap
import multiprocessing
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from jaxpp import data, tokenizer
from jaxpp.options import check_ranges, option
from jaxpp.tokenizer import Tokenizer

PIECE_BYTES = 1 << 20
_AROUND = 400  # bytes on each side of a cut that are encoded to check it
_LINE_END = re.compile(rb"\n(?=[!-~])")  # before a visible ASCII character


@dataclass(frozen=True)
class TokenizeConfig:
    """Write text files as one token file of llm.c's format, for --input_bin."""

    input: tuple[str, ...] = option((), "text files, each a document", str, many=True)
    output: str | None = option(None, "the file to write")
    tokenizer: str | None = option(None, "tokenizer.json, or a folder that has one (default: bytes)")
    processes: int = option(os.cpu_count() or 1, "how many work at once", int, least=1, most=1024)


def run(config: TokenizeConfig) -> None:
    """Write the token file of a command line. Raises ValueError for what cannot be read or written."""
    check_ranges(config)
    if not config.input or config.output is None:
        raise ValueError("tokenize needs --input FILES and --output FILE, for example --input a.txt --output a.bin")
    started = time.perf_counter()
    size = sum(_size(path) for path in config.input)
    report, close = _progress(size)
    try:
        count = write(config.input, config.output, config.tokenizer, config.processes, report)
    finally:
        close()
    seconds = time.perf_counter() - started
    print(f"{count:,} tokens of {size:,} bytes in {seconds:.1f} s ({count / seconds:,.0f} tokens/s): {config.output}")


def _size(path: str) -> int:
    try:
        return Path(path).stat().st_size
    except OSError as error:
        raise ValueError(f"input {path!r} cannot be read ({error.strerror}): give text files") from None


def _progress(size: int) -> tuple[Callable[[int], None], Callable[[], None]]:
    """A bar where the output is a terminal; (report bytes done, close)."""
    if not sys.stdout.isatty():
        return (lambda done: None), (lambda: None)
    bar = Progress(TextColumn("tokenizing"), BarColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    task = bar.add_task("", total=size)
    bar.start()
    return (lambda done: bar.advance(task, done)), bar.stop


def write(
    paths: Sequence[str],
    output: str,
    where: str | None,
    processes: int = 1,
    report: Callable[[int], None] = lambda done: None,
) -> int:
    """Write the tokens of text files, the end token after each where the tokenizer has one; returns their number.

    Args: where, of `tokenizer.load`; report, called with the bytes that were done. The file is written under another
    name and renamed. Raises ValueError.
    """
    chosen = tokenizer.load(where)
    dtype = np.dtype(np.uint16 if chosen.vocab_size <= 2**16 else np.uint32)
    target = Path(output)
    _check_target(target, [*paths, *_files_of(where)])
    hidden = target.with_name(f".{target.name}.{os.getpid()}")  # opened plainly, so that the file has the usual mode
    try:
        try:
            with hidden.open("wb") as file:
                file.write(bytes(data.HEADER_BYTES))
                count = 0
                for tokens, size in _encoded(paths, chosen, where, processes):
                    file.write(tokens.astype(dtype).tobytes())
                    count += len(tokens)
                    report(size)
                file.seek(0)
                file.write(data.header(dtype, count))
            os.replace(hidden, target)
        finally:
            hidden.unlink(missing_ok=True)
    except OSError as error:
        raise ValueError(f"output {output!r} cannot be written ({error.strerror}): give a file in a folder") from None
    return count


def _files_of(where: str | None) -> list[str]:
    """A tokenizer's own file, of `tokenizer.load`."""
    return [] if where is None else [str(Path(where) / "tokenizer.json" if Path(where).is_dir() else where)]


def _check_target(target: Path, read: Sequence[str]) -> None:
    """Check that a file can be written without losing one that is read. Raises ValueError."""
    if target.is_dir() or not target.name:
        raise ValueError(
            f"output {str(target)!r} is a folder: give a file, for example --output {target / 'tokens.bin'}"
        )
    if not target.parent.is_dir():
        raise ValueError(f"output {str(target)!r} cannot be written (No such folder): give a file in a folder")
    for path in read:
        if target.exists() and Path(path).exists() and os.path.samefile(path, target):
            raise ValueError(
                f"output {str(target)!r} is {path!r}, which is read: give another file, for example --output {path}.bin"
            )


def _encoded(
    paths: Sequence[str], chosen: Tokenizer, where: str | None, processes: int
) -> Iterator[tuple[np.ndarray, int]]:
    """Tokens of each piece in order, and its bytes."""
    jobs = ((path, *piece) for path in paths for piece in _pieces(path, chosen))
    if processes == 1:
        for job in jobs:
            yield _encode(chosen, *job), job[2] - job[1]
        return
    # Spawned: JAX's threads do not survive a fork.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context, initializer=_start_worker, initargs=(where,)) as pool:
        while some := list(islice(jobs, 8 * processes)):  # not all at once: their tokens are held until written
            for job, tokens in zip(some, pool.map(_work, some), strict=True):
                yield tokens, job[2] - job[1]


_mine: list[Tokenizer] = []  # a worker process's tokenizer


def _start_worker(where: str | None) -> None:
    _mine.append(tokenizer.load(where))


def _work(job: tuple[str, int, int, bool]) -> np.ndarray:
    return _encode(_mine[0], *job)


def _encode(chosen: Tokenizer, path: str, start: int, stop: int, last: bool) -> np.ndarray:
    with open(path, "rb") as file:
        file.seek(start)
        content = file.read(stop - start)
    try:
        tokens = chosen.encode(content.decode())
    except UnicodeDecodeError as error:
        place = start + error.start
        raise ValueError(f"input {path!r} is no UTF-8 text (byte {place}): convert it, or leave it out") from None
    return np.append(tokens, chosen.end) if last and chosen.end is not None else tokens


def _pieces(path: str, chosen: Tokenizer) -> Iterator[tuple[int, int, bool]]:
    """(start, stop, whether it is the file's last) of the pieces of a file."""
    try:
        size = Path(path).stat().st_size
        if size == 0:
            return
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            start = 0
            while start < size:
                stop = _cut(content, start + PIECE_BYTES, chosen) if start + PIECE_BYTES < size else size
                yield start, stop, stop == size
                start = stop
    except OSError as error:
        raise ValueError(f"input {path!r} cannot be read ({error.strerror}): give text files") from None


def _cut(content: mmap.mmap, after: int, chosen: Tokenizer) -> int:
    """The first line's end from `after` on where a cut changes no token, or the end of the file."""
    for match in _LINE_END.finditer(content, after):
        at = match.end()
        left, right = content[at - _AROUND : at], content[at : at + _AROUND]
        left, right = (part.decode(errors="ignore") for part in (left, right))
        both = np.concatenate((chosen.encode(left), chosen.encode(right)))
        if np.array_equal(chosen.encode(left + right), both):
            return at
    return len(content)


def cached(content: bytes, where: str | None, folder: Path | None = None) -> Path:
    """A token file of a text, made once and found again by the text's and the tokenizer's content.

    folder: of the cache, default $XDG_CACHE_HOME/jaxpp or ~/.cache/jaxpp.
    """
    folder = folder or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxpp"
    name = hashlib.sha256(content + tokenizer.load(where).identity.encode()).hexdigest()[:32]
    target = folder / f"{name}.bin"
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, suffix=".txt") as text:
            text.write(content)
            text.flush()
            write([text.name], str(target), where)
    return target
