"""Tokens from a file to batches: llm.c token files, plain text as bytes, and a stateless index over either.

Shape letters: M microbatches, B rows of one microbatch over all data ranks, T sequence length.
A *window* is T + 1 neighbouring tokens; neighbouring windows share one, the last label of the first.
"""

import codecs
import os
import sysconfig
import zlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

IGNORED_LABEL = -100

# llm.c's token file: 256 little-endian int32 (magic, version, token count, zeros), then the tokens.
HEADER_BYTES = 1024
_DTYPE_OF_MAGIC = {20240520: np.dtype("<u2"), 20240801: np.dtype("<u4")}
# As llm.c writes them: GPT-2's tokens and Llama 3's. The layout is the same, so either magic takes both versions.
_VERSION_OF_MAGIC = {20240520: 1, 20240801: 7}
_EXPECTED = "UTF-8 text or an llm.c token file (magic 20240520: uint16, magic 20240801: uint32)"
_REWRITE = "write the file again, for example with jaxpp.data.write_tokens"

HELD_OUT = 20  # one token of so many is for validation, where no file is given for it

_TEXT_CHECK_BYTES = 1 << 20
_SCAN_TOKENS = 1 << 20

_CORPUS_TRAIN_BYTES = 4_000_000
# Tests and tables drown the prose of the sources; site-packages differ from machine to machine.
_CORPUS_SKIPPED = {"test", "tests", "idlelib", "lib2to3", "pydoc_data", "encodings", "_bundled", "__pycache__"}
_CORPUS_SKIPPED |= {"site-packages", "dist-packages"}


def read_tokens(path: str | os.PathLike, vocab_size: int, *, option: str = "input_bin") -> np.ndarray:
    """Map a token file, or a text file as bytes, without loading it.

    Args:
        path: an llm.c token file (uint16 or uint32), or UTF-8 text, whose bytes become the tokens.
        vocab_size: number of tokens that the model knows; every token must be smaller.
        option: name of the command line option that an error blames.

    Returns:
        Read-only `np.memmap` [tokens] of uint16, uint32, or uint8 for text.

    Raises:
        ValueError: one line, if the file is missing, no regular file, unreadable, empty, foreign or damaged, or holds
            a token that is not below `vocab_size`.
    """
    path = Path(path)
    try:
        tokens = _map_file(path)
        _check_vocabulary(tokens, vocab_size)
    except (OSError, ValueError) as error:
        fault = f"cannot be read ({error.strerror}); give {_EXPECTED}" if isinstance(error, OSError) else error
        # repr() keeps the message on one line even if the path holds a line break.
        raise ValueError(f"{option} {str(path)!r}: {fault}") from None
    return tokens


def _map_file(path: Path) -> np.memmap:
    size = path.stat().st_size
    if not path.is_file():
        raise ValueError(f"is {'a directory' if path.is_dir() else 'no regular file'}; give {_EXPECTED}")
    if size == 0:
        raise ValueError(f"is empty (0 bytes); give {_EXPECTED}")
    with path.open("rb") as file:
        head = file.read(_TEXT_CHECK_BYTES)
    # No text starts like this: neither magic's first byte (0x88, 0xA1) can begin a UTF-8 character.
    magic = int.from_bytes(head[:4], "little")
    if magic in _DTYPE_OF_MAGIC or path.suffix.lower() == ".bin":
        dtype, count = _read_header(head, size, magic)
        return np.memmap(path, dtype=dtype, mode="r", offset=HEADER_BYTES, shape=(count,))
    _check_text(head, size)
    return np.memmap(path, dtype=np.uint8, mode="r")


def _read_header(head: bytes, size: int, magic: int) -> tuple[np.dtype, int]:
    """Check a token file's header against its size in bytes, and return the tokens' dtype and count."""
    if magic not in _DTYPE_OF_MAGIC:
        expected = "a .bin file must be a token file with magic 20240520 (uint16) or 20240801 (uint32)"
        raise ValueError(f"has magic {magic}, but {expected}; {_REWRITE}, or rename it to .txt if it is text")
    if size < HEADER_BYTES:
        raise ValueError(f"ends after {size} bytes, within the token file's header of {HEADER_BYTES}; {_REWRITE}")
    _, version, count = (int(x) for x in np.frombuffer(head, "<i4", count=3))
    if version not in _VERSION_OF_MAGIC.values():
        raise ValueError(f"has version {version}, but only 1 (GPT-2) and 7 (Llama 3) are known; {_REWRITE}")
    if count < 1:
        raise ValueError(f"has a header that counts {count} tokens, but at least 1 is needed; {_REWRITE}")
    dtype = _DTYPE_OF_MAGIC[magic]
    held, needed = (size - HEADER_BYTES) // dtype.itemsize, HEADER_BYTES + count * dtype.itemsize
    # Like llm.c, refuse a surplus too: a count that does not fit the file means that one of the two is wrong.
    if size != needed:
        rule = f"has a header that counts {count} tokens ({needed} bytes), but holds {held} ({size} bytes)"
        raise ValueError(f"{rule}; copy it again if the copy was cut short, or {_REWRITE}")
    return dtype, count


def _check_text(head: bytes, size: int) -> None:
    """Refuse binary data, judged by its first bytes `head`: a whole pass over a huge text would buy little."""
    fault = f"a NUL byte at position {head.index(0)}" if b"\0" in head else None
    try:
        # The incremental decoder forgives a character that `head`, but not the file, cuts in two.
        codecs.getincrementaldecoder("utf-8")().decode(head, final=len(head) == size)
    except UnicodeDecodeError as error:
        fault = fault or f"byte 0x{head[error.start]:02x} at position {error.start}, which is not UTF-8"
    if fault:
        raise ValueError(f"is neither text nor a token file: it has {fault}; give {_EXPECTED}")


def _check_vocabulary(tokens: np.ndarray, vocab_size: int) -> None:
    if np.iinfo(tokens.dtype).max < vocab_size:
        return
    largest, position = -1, -1
    for start in range(0, len(tokens), _SCAN_TOKENS):
        chunk = np.asarray(tokens[start : start + _SCAN_TOKENS])
        at = int(chunk.argmax())
        if chunk[at] > largest:
            largest, position = int(chunk[at]), start + at
    if largest >= vocab_size:
        rule = f"has token {largest} at position {position}, outside the vocabulary of {vocab_size} tokens"
        remedy = f"use a model with at least {largest + 1} tokens, or a file made with this model's tokenizer"
        raise ValueError(f"{rule}; {remedy}")


def write_tokens(path: str | os.PathLike, tokens: np.ndarray, dtype: type = np.uint16) -> None:
    """Write tokens as an llm.c token file, which `read_tokens` reads back.

    Args:
        path: the file to write; one that exists is replaced.
        tokens: [tokens] integers of any dtype.
        dtype: np.uint16 (magic 20240520, version 1) or np.uint32 (magic 20240801, version 7).

    Raises:
        ValueError: if there are no tokens or more than the header can count, or if they do not fit `dtype`.
    """
    stored: np.dtype = np.dtype(dtype).newbyteorder("<")
    if stored not in _DTYPE_OF_MAGIC.values():
        raise ValueError(f"dtype must be np.uint16 or np.uint32, got {stored}")
    tokens, most = np.asarray(tokens), 2 ** (8 * stored.itemsize) - 1
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu" or not 0 < len(tokens) < 2**31:
        got = f"shape {tokens.shape} and dtype {tokens.dtype}"
        raise ValueError(f"tokens must be a 1-D array of 1 to {2**31 - 1} integers, got {got}")
    if tokens.min() < 0 or tokens.max() > most:
        raise ValueError(f"{stored} tokens must be 0 to {most}, got {tokens.min()} to {tokens.max()}")
    with open(path, "wb") as file:
        file.write(header(stored, len(tokens)))
        tokens.astype(stored).tofile(file)


def header(dtype: np.dtype, count: int) -> bytes:
    """The header of a token file. Raises ValueError for no tokens, or more than it can count."""
    if not 0 < count < 2**31:
        raise ValueError(f"a token file holds 1 to {2**31 - 1} tokens, not {count}: split the text")
    magic = next(m for m, d in _DTYPE_OF_MAGIC.items() if d.itemsize == np.dtype(dtype).itemsize)
    words = np.zeros(HEADER_BYTES // 4, "<i4")
    words[:3] = magic, _VERSION_OF_MAGIC[magic], count
    return words.tobytes()


def default_corpus() -> tuple[np.ndarray, np.ndarray]:
    """Return text that every machine has, the sources of Python's standard library, split by file.

    Returns:
        (train, validation): read-only uint8 [bytes] each, valid UTF-8, about 4 MB and a twentieth of that.

    Raises:
        ValueError: if this Python comes without its sources.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    train, validation, train_bytes = [], [], 0
    for name, path in _corpus_files(root):
        text = path.read_bytes().decode(errors="ignore").encode()  # an old source in Latin-1 loses its accents
        # By name, so that a file stays on its side in every version of Python.
        if zlib.crc32(name.encode()) % 20 == 0:
            validation.append(text)
        elif train_bytes < _CORPUS_TRAIN_BYTES:
            train.append(text)
            train_bytes += len(text)
        else:
            break
    if not train or not validation:
        raise ValueError(f"input_bin: not given, and {str(root)!r} has no Python sources to use instead; give a file")
    return np.frombuffer(b"\n\n".join(train), np.uint8), np.frombuffer(b"\n\n".join(validation), np.uint8)


def _corpus_files(root: Path) -> list[tuple[str, Path]]:
    found = []
    for folder, folders, names in os.walk(root):
        # Pruned in place: os.walk then never enters site-packages, which may be large.
        folders[:] = set(folders) - _CORPUS_SKIPPED
        # _sysconfigdata*.py is no source but this machine's build settings, at times in two nearly equal copies.
        paths = [Path(folder, n) for n in names if n.endswith(".py") and not n.startswith("_sysconfigdata")]
        # is_file: distributions link some sources to elsewhere, and a link may be broken.
        found += [(path.relative_to(root).as_posix(), path) for path in paths if path.is_file()]
    return sorted(found)


@lru_cache(maxsize=4)
def _permutation(windows: int, seed: int, epoch: int) -> np.ndarray:
    order = np.random.Generator(np.random.PCG64([seed, epoch])).permutation(windows)
    order.flags.writeable = False  # the cache hands the same array to every caller
    return order


def _check_sizes(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")


def _count_windows(tokens: np.ndarray, sequence_length: int, option: str) -> int:
    if len(tokens) < sequence_length + 1:
        rule = f"{len(tokens)} tokens, and {sequence_length + 1} (sequence_length {sequence_length} + 1) are needed"
        remedy = f"give a longer file, or a sequence_length of at most {len(tokens) - 1}"
        raise ValueError(f"{option}: the text has {rule}; {remedy if len(tokens) > 1 else 'give a longer file'}")
    return (len(tokens) - 1) // sequence_length


def check_text(tokens: np.ndarray, sequence_length: int, what: str) -> None:
    """Check that a text fills one row. Raises ValueError that says how many tokens `what` has and needs."""
    _count_windows(tokens, sequence_length, what)


def split_note(count: int) -> tuple[str, str]:
    """What an error says of the training and the validation part of a file of `count` tokens."""
    rule = f"of {count} tokens, which is held out unless --input_val_bin is given"
    return f" (all but the last twentieth {rule})", f" (the last twentieth {rule})"


def _gather(tokens: np.ndarray, which: np.ndarray, sequence_length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the windows `which` [n] as inputs and labels, int32 [n, T] each; only they are read from the file."""
    windows = np.lib.stride_tricks.sliding_window_view(tokens, sequence_length + 1)[::sequence_length]
    chosen = windows[which].astype(np.int32)
    return np.ascontiguousarray(chosen[:, :-1]), np.ascontiguousarray(chosen[:, 1:])


@dataclass(frozen=True, eq=False)  # arrays have no plain equality, so a batch source equals only itself
class Batches:
    """Training batches by step number, with no state: a resumed run asks for its next step and gets the right one.

    Sample i of the run, counted over steps, microbatches and rows in that order, is window `i % windows` of epoch
    `i // windows`; every epoch holds each window exactly once, in an order drawn from (seed, epoch). Up to T - 1 tokens
    at the end of the text that fill no window are never used.

    Args:
        tokens: [tokens] of any integer dtype, a memmap for example.
        microbatches, rows, sequence_length: M, B and T, as above.
        seed: a non-negative integer.
        shuffle: False keeps the order of the file.
        option: name of the command line option that an error blames.

    Raises:
        ValueError: one line, if the text is shorter than T + 1 tokens, a size is below 1 or the seed is negative.
    """

    tokens: np.ndarray
    microbatches: int
    rows: int
    sequence_length: int
    seed: int
    shuffle: bool = True
    option: str = "input_bin"

    def __post_init__(self) -> None:
        _check_sizes(microbatches=self.microbatches, rows=self.rows, sequence_length=self.sequence_length)
        if self.seed < 0:
            raise ValueError(f"seed must be at least 0, got {self.seed}")
        _count_windows(self.tokens, self.sequence_length, self.option)

    @property
    def windows(self) -> int:
        """Number of windows of the text, which is the number of samples of an epoch."""
        return _count_windows(self.tokens, self.sequence_length, self.option)

    def at(self, step: int) -> dict[str, np.ndarray]:
        """Return step `step`'s batch, counted from 0: {"tokens", "labels"}, int32 [M, B, T] each."""
        assert step >= 0, step
        size = self.microbatches * self.rows
        epochs, places = np.divmod(np.arange(step * size, (step + 1) * size), self.windows)
        if self.shuffle:
            for epoch in range(int(epochs[0]), int(epochs[-1]) + 1):
                mine = epochs == epoch
                places[mine] = _permutation(self.windows, self.seed, epoch)[places[mine]]
        inputs, labels = _gather(self.tokens, places, self.sequence_length)
        shape = (self.microbatches, self.rows, self.sequence_length)
        return {"tokens": inputs.reshape(shape), "labels": labels.reshape(shape)}


def validation_batches(
    tokens: np.ndarray, microbatches: int, rows: int, sequence_length: int, limit: int, *, option: str = "input_val_bin"
) -> list[dict[str, np.ndarray]]:
    """Return a fixed set of batches for evaluation: windows in the order of the file, spread evenly over it.

    Args:
        tokens, microbatches, rows, sequence_length, option: as for `Batches`.
        limit: the most batches to return; fewer if the text has no more windows.

    Returns:
        At least one {"tokens", "labels"}, int32 [M, B, T] each; rows that pad the last batch have tokens 0 and
        labels -100, so that all shapes are equal.

    Raises:
        ValueError: one line, if the text is shorter than T + 1 tokens or a size is below 1.
    """
    _check_sizes(microbatches=microbatches, rows=rows, sequence_length=sequence_length, limit=limit)
    windows, size = _count_windows(tokens, sequence_length, option), microbatches * rows
    count = min(windows, limit * size)
    inputs, labels = _gather(tokens, np.arange(count) * windows // count, sequence_length)
    padding = ((0, -count % size), (0, 0))
    shape = (-1, microbatches, rows, sequence_length)
    inputs = np.pad(inputs, padding).reshape(shape)
    labels = np.pad(labels, padding, constant_values=IGNORED_LABEL).reshape(shape)
    return [{"tokens": x, "labels": y} for x, y in zip(inputs, labels, strict=True)]
