"""Rows of tokens cut from a text, by epoch and place: windows, windows of shuffled documents, or packed documents.

A *document* ends with an end token, which is its last; the text's last document may lack it. A *window* is T + 1
neighbouring tokens; neighbouring windows share one, the last label of the first.

Shape letters: N rows, T sequence length, D documents.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

IGNORED_LABEL = -100
_SCAN_TOKENS = 1 << 20


def array_names(pack: bool) -> tuple[str, ...]:
    """Names of a batch's arrays, of plain or of packed rows."""
    return ("tokens", "labels", "segments", "positions") if pack else ("tokens", "labels")


def document_bounds(tokens: np.ndarray, end: int) -> np.ndarray:
    """Where documents begin, and the text's length: int64 [D + 1], ascending. Reads the whole text once."""
    parts = (slice(at, at + _SCAN_TOKENS) for at in range(0, len(tokens), _SCAN_TOKENS))
    after = [np.flatnonzero(tokens[part] == end) + part.start + 1 for part in parts]
    return np.unique(np.concatenate(([0, len(tokens)], *after)).astype(np.int64))


def permutation(count: int, *words: int) -> np.ndarray:
    """A permutation of `count` things, drawn from a few non-negative integers."""
    return np.random.Generator(np.random.PCG64(list(words))).permutation(count)


@dataclass(frozen=True, eq=False)  # arrays have no plain equality, so a text equals only itself
class Text:
    """Rows of a text, without state.

    An epoch's stream is the text, its documents in an order drawn from (seed, epoch) where they are shuffled. Plain
    rows are the stream's windows; up to T - 1 tokens at its end that fill none are left out. Packed rows are each T
    tokens of the stream: a document that the row has no room for goes on in the next one, as a piece of its own. So no
    row but the last is padded, and every epoch has the same number of rows.

    Args:
        tokens: [tokens] of any integer dtype, a memmap for example.
        length: T.
        bounds: of `document_bounds`; needed only where documents matter.
        pack: packed rows instead of plain ones.
        shuffle: the rows of an epoch in an order drawn from (seed, epoch), else in that of the stream.
        shuffle_documents: see above.
        seed, number: of the orders, non-negative; number tells several texts apart.
    """

    tokens: np.ndarray
    length: int
    bounds: np.ndarray | None = None
    pack: bool = False
    shuffle: bool = False
    shuffle_documents: bool = False
    seed: int = 0
    number: int = 0

    @property
    def count(self) -> int:
        """Number of rows of an epoch."""
        return -(-len(self.tokens) // self.length) if self.pack else max(0, len(self.tokens) - 1) // self.length

    def rows(self, epoch: int, places: np.ndarray) -> dict[str, np.ndarray]:
        """The rows at places [N] of an epoch, int32 [N, T] each; only they are read from the file.

        Plain: tokens and labels. Packed: also segments, the document's number within its row, from 1, and 0 where the
        row is padded; positions within the document's piece. Labels are -100 at a document's last token and padding.
        """
        places = self._order(epoch)[places] if self.shuffle else places
        at = places[:, None] * self.length + np.arange(self.length + 1)
        inside = at < len(self.tokens)
        at = np.minimum(at, len(self.tokens) - 1)
        if self.bounds is None:
            return _plain(np.asarray(self.tokens)[at])
        first, bounds = self._documents(epoch)
        document = np.searchsorted(bounds, at, side="right") - 1
        plain = _plain(np.asarray(self.tokens)[first[document] + at - bounds[document]])
        return _packed(plain, at, inside, document, bounds) if self.pack else plain

    @cached_property
    def _order(self) -> Callable[[int], np.ndarray]:
        # Two are kept: a batch may end an epoch and begin the next.
        return lru_cache(maxsize=2)(lambda epoch: permutation(self.count, self.seed, epoch, self.number))

    @cached_property
    def _documents(self) -> Callable[[int], tuple[np.ndarray, np.ndarray]]:
        """A function epoch -> (where each document begins in the text [D], where it does in the stream [D + 1])."""
        bounds = self.bounds
        assert bounds is not None
        if not self.shuffle_documents:
            return lambda epoch: (bounds[:-1], bounds)

        @lru_cache(maxsize=2)
        def shuffled(epoch: int) -> tuple[np.ndarray, np.ndarray]:
            order = permutation(len(bounds) - 1, self.seed, epoch, self.number, 1)
            return bounds[:-1][order], np.concatenate(([0], np.cumsum(np.diff(bounds)[order])))

        return shuffled


def _plain(found: np.ndarray) -> dict[str, np.ndarray]:
    found = found.astype(np.int32)
    return {"tokens": found[:, :-1], "labels": found[:, 1:]}


def _packed(
    plain: dict[str, np.ndarray], at: np.ndarray, inside: np.ndarray, document: np.ndarray, bounds: np.ndarray
) -> dict[str, np.ndarray]:
    """Packed rows from the T + 1 tokens of each: their places in the stream, whether it has them, their documents."""
    real, goes_on = inside[:, :-1], inside[:, 1:] & (document[:, 1:] == document[:, :-1])
    begin = np.maximum(bounds[document], at[:, :1])[:, :-1]  # of the document's piece in this row
    return {
        "tokens": np.where(real, plain["tokens"], 0),
        "labels": np.where(goes_on, plain["labels"], IGNORED_LABEL),
        "segments": np.where(real, document[:, :-1] - document[:, :1] + 1, 0).astype(np.int32),
        "positions": np.where(real, at[:, :-1] - begin, 0).astype(np.int32),
    }
