"""Tokens from files to batches: llm.c token files, plain text as bytes, and a stateless index over either.

Memory maps and an index of its own, not grain: less code, and no iterator whose state a checkpoint would have to hold.

Shape letters: M microbatches, B rows of one microbatch over all data ranks, T sequence length.
"""

import codecs
import os
import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from jaxpp import mixture
from jaxpp.texts import IGNORED_LABEL, Text, array_names, document_bounds

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


def _check_sizes(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")


def _check_length(tokens: np.ndarray, sequence_length: int, option: str, which: str) -> None:
    if len(tokens) < sequence_length + 1:
        rule = f"{len(tokens)} tokens, and {sequence_length + 1} (sequence_length {sequence_length} + 1) are needed"
        remedy = f"give a longer file, or a sequence_length of at most {len(tokens) - 1}"
        raise ValueError(f"{option}: {which} has {rule}; {remedy if len(tokens) > 1 else 'give a longer file'}")


def _cut(
    texts: Sequence[np.ndarray], sequence_length: int, option: str, end: int | None, documents: str | None, **how: Any
) -> tuple[Text, ...]:
    """Cut texts into rows. documents: the option that needs to know where they end, or None; how: fields of `Text`."""
    if documents is not None and end is None:
        raise ValueError(
            f"{documents} needs the token that ends a document, and byte tokens have none: give --tokenizer, the one"
            f" that the text was made with, whose folder names its end token"
        )
    found = []
    for i, tokens in enumerate(texts):
        which = "the text" if len(texts) == 1 else f"text {i + 1} of {len(texts)}"
        _check_length(tokens, sequence_length, option, which)
        bounds = None if documents is None or end is None else document_bounds(tokens, end)
        found.append(Text(tokens, sequence_length, bounds, number=i, **how))
    return tuple(found)


@dataclass(frozen=True, eq=False)  # arrays have no plain equality, so a batch source equals only itself
class Batches:
    """Training batches by step number, with no state: a resumed run asks for its next step and gets the right one.

    Sample i of the run, counted over steps, microbatches and rows in that order, is the next row of the text that
    `mix` says. Every epoch of a text holds each of its rows exactly once, in an order drawn from (seed, epoch). That
    order is of windows by default: it needs no document's end, and mixes the parts of a long document too.

    Args:
        texts: one or more [tokens] of any integer dtype, memmaps for example.
        microbatches, rows, sequence_length: M, B and T, as above.
        seed: a non-negative integer.
        shuffle: False keeps the order of the file.
        weights: each text's share of the samples, in any unit; default its number of rows.
        end: the token that ends a document, which the following two need.
        shuffle_documents: reorder whole documents, per epoch, before rows are cut (and these then shuffled).
        pack_documents: rows whose documents do not see each other, see `texts.Text`.
        option: name of the command line option that an error blames.

    Raises:
        ValueError: one line, if a text is shorter than T + 1 tokens, a size is below 1, the seed is negative, weights
            are not one a text and above 0, or a document's end is not known.
    """

    texts: Sequence[np.ndarray]
    microbatches: int
    rows: int
    sequence_length: int
    seed: int
    shuffle: bool = True
    weights: Sequence[float] | None = None
    end: int | None = None
    shuffle_documents: bool = False
    pack_documents: bool = False
    option: str = "input_bin"

    def __post_init__(self) -> None:
        _check_sizes(microbatches=self.microbatches, rows=self.rows, sequence_length=self.sequence_length)
        if self.seed < 0:
            raise ValueError(f"seed must be at least 0, got {self.seed}")
        check_weights(self.weights, len(self.texts))
        for text in self.cut:
            if text.bounds is not None and len(text.bounds) == 2 and text.tokens[-1] != self.end:
                raise ValueError(
                    f"{self.option}: text {text.number + 1} of {len(self.texts)} has no token {self.end}, which ends a"
                    f" document: give the tokenizer that it was made with"
                )

    @cached_property
    def cut(self) -> tuple[Text, ...]:
        """The texts, cut into rows."""
        wanted = [name for name in ("shuffle_documents", "pack_documents") if getattr(self, name)]
        how = {"pack": self.pack_documents, "shuffle": self.shuffle, "shuffle_documents": self.shuffle_documents}
        documents = wanted[0] if wanted else None
        return _cut(self.texts, self.sequence_length, self.option, self.end, documents, seed=self.seed, **how)

    @cached_property
    def mix(self) -> mixture.Mixture:
        """Which text each sample is from."""
        return mixture.make(self.weights or [text.count for text in self.cut])

    def order(self) -> dict[str, Any]:
        """What the order of the samples depends on beside seed and sizes, as plain data."""
        named = {name: getattr(self, name) for name in ("shuffle_documents", "pack_documents")}
        named |= {"split_at_token": self.end if any(named.values()) else None}
        return named | {"corpus_tokens": [len(a) for a in self.texts], "weights_of_files": self.mix.parts.tolist()}

    def at(self, step: int, rows: slice = slice(None)) -> dict[str, np.ndarray]:
        """Return step `step`'s batch, counted from 0: int32 [M, B, T] of each of `texts.array_names`.

        rows: only these of each microbatch, as a slice of the B; the others are not read.
        """
        texts, epochs, places = (a.reshape(self.microbatches, -1)[:, rows] for a in self._locate(step))
        shape = (*texts.shape, self.sequence_length)
        found = {name: np.empty(shape, np.int32) for name in array_names(self.pack_documents)}
        for i, epoch in sorted(set(zip(texts.ravel().tolist(), epochs.ravel().tolist(), strict=True))):
            mine = (texts == i) & (epochs == epoch)
            for name, a in self.cut[i].rows(epoch, places[mine]).items():
                found[name][mine] = a
        return found

    def epochs_begun(self, step: int) -> list[tuple[int, int]]:
        """(text, epoch), both counted from 0, of the epochs but the first that begin within a step."""
        texts, epochs, places = self._locate(step)
        begun = (places == 0) & (epochs > 0)
        return list(zip(texts[begun].tolist(), epochs[begun].tolist(), strict=True))

    def _locate(self, step: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Text, epoch, and place in the epoch of each of a step's samples [M * B]."""
        assert step >= 0, step
        size = self.microbatches * self.rows
        texts, samples = self.mix.locate(np.arange(step * size, (step + 1) * size))
        return texts, *np.divmod(samples, np.asarray([text.count for text in self.cut])[texts])


def check_weights(weights: Sequence[float] | None, texts: int) -> None:
    """Check that there is one weight, above 0, for each text. Raises ValueError."""
    if weights is not None and len(weights) != texts:
        given = f"data_weights={' '.join(map(str, weights))} has {len(weights)} weights for {texts} files of input_bin"
        raise ValueError(f"{given}: give one for each file, or none to go by their sizes")
    for weight in weights or ():
        if not 0 < weight < float("inf"):
            raise ValueError(f"data_weights={weight} must be above 0 and finite: leave out a file that has no share")


def validation_batches(
    texts: Sequence[np.ndarray],
    microbatches: int,
    rows: int,
    sequence_length: int,
    limit: int | None,
    *,
    end: int | None = None,
    pack_documents: bool = False,
    option: str = "input_val_bin",
) -> Iterator[dict[str, np.ndarray]]:
    """A fixed set of batches for evaluation: rows in the order of the texts, spread evenly over them.

    Args:
        texts, microbatches, rows, sequence_length, end, pack_documents, option: as for `Batches`.
        limit: the most batches, or None for all; fewer if the texts have no more rows.

    Returns:
        An iterator, of at least one batch as `Batches.at` returns them; rows that pad the last one have labels -100
        and 0 in all else, so that all shapes are equal.

    Raises:
        ValueError: at once and in one line, if a text is shorter than T + 1 tokens, a size is below 1 or a document's
            end is not known.
    """
    size = microbatches * rows
    limits = {} if limit is None else {"limit": limit}
    _check_sizes(microbatches=microbatches, rows=rows, sequence_length=sequence_length, **limits)
    documents = "pack_documents" if pack_documents else None
    cut = _cut(texts, sequence_length, option, end, documents, pack=pack_documents)
    firsts = np.cumsum([0, *(text.count for text in cut)])  # numbers of each text's first row, over all texts
    total = int(firsts[-1])
    count = total if limit is None else min(total, limit * size)

    def batch(start: int) -> dict[str, np.ndarray]:
        chosen = np.arange(start, min(start + size, count)) * total // count
        those = np.searchsorted(firsts, chosen, side="right") - 1
        found = {name: np.zeros((size, sequence_length), np.int32) for name in array_names(pack_documents)}
        found["labels"][:] = IGNORED_LABEL
        for i in np.unique(those).tolist():
            for name, a in cut[i].rows(0, chosen[those == i] - firsts[i]).items():
                found[name][: len(chosen)][those == i] = a
        return {name: a.reshape(microbatches, rows, sequence_length) for name, a in found.items()}

    return (batch(start) for start in range(0, count, size))
