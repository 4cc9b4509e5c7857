"""What a run trains on and is validated on: texts, and batches of them.

Legend: B microbatch size, T sequence, M microbatches.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxpp import data, tokenize, tokenizer
from jaxpp.config import Config, Sizes

VALIDATION_BATCHES = 8


class Corpus(NamedTuple):
    """Training texts, validation texts, what they are in words, and the token that ends a document, or None."""

    texts: tuple[np.ndarray, ...]
    validation: tuple[np.ndarray, ...]
    said: str
    end: int | None


def read_texts(paths: Sequence[str], vocab_size: int, where: str | None, option: str) -> tuple[np.ndarray, ...]:
    """The tokens of files; texts by the tokenizer of `where`. Raises ValueError, naming the option."""
    found = []
    for path in paths:
        tokens = data.read_tokens(path, 2**32, option=option)
        if tokens.dtype == np.uint8 and where is not None:
            path = tokenize.cached(tokens.tobytes(), where)
        found.append(data.read_tokens(path, vocab_size, option=option))
    return tuple(found)


def load_corpus(config: Config, vocab_size: int, where: str | None = None) -> Corpus:
    """Training and validation texts. Raises ValueError for files that cannot be used.

    where: the tokenizer of text, see `tokenizer.load`; a text is tokenized once and found again by its content.
    """
    chosen = tokenizer.load(where)
    if where is not None or config.input_bin is None:  # the tokens of a file are looked at themselves
        tokenizer.check_vocabulary(chosen, vocab_size)
    if config.input_bin is None:
        if config.input_val_bin is not None:
            raise ValueError("input_val_bin is given without input_bin: give both, or neither for Python's own source")
        train, validation = data.default_corpus()
        if where is not None:
            files = [tokenize.cached(part.tobytes(), where) for part in (train, validation)]
            train, validation = (data.read_tokens(path, vocab_size) for path in files)
        kind = f"{len(train) / 1e6:.1f} MB, byte tokens" if where is None else f"{len(train):,} tokens, {chosen.name}"
        return Corpus((train,), (validation,), f"Python's own source ({kind})", chosen.end)
    texts = read_texts(config.input_bin, vocab_size, where, "input_bin")
    if config.input_val_bin is not None:
        validation = read_texts(config.input_val_bin, vocab_size, where, "input_val_bin")
    else:  # the last twentieth of each is held out
        held_out = [len(tokens) - len(tokens) // data.HELD_OUT for tokens in texts]
        validation = tuple(tokens[n:] for tokens, n in zip(texts, held_out, strict=True))
        texts = tuple(tokens[:n] for tokens, n in zip(texts, held_out, strict=True))
    by = "" if where is None else f", {chosen.name}"
    count = sum(len(tokens) for tokens in texts)
    return Corpus(texts, validation, f"{', '.join(config.input_bin)} ({count:,} tokens{by})", chosen.end)


def blamed(c: Config, corpus: Corpus) -> tuple[str, str]:
    """What an error about the training text, and about the validation text, says that it is of."""
    train, validation = (
        f"{name}={path[0]!r}" if path and len(path) == 1 else name
        for name, path in (("input_bin", c.input_bin), ("input_val_bin", c.input_val_bin))
    )
    if c.input_val_bin is not None:
        return train, validation
    count = len(corpus.texts[0]) + len(corpus.validation[0]) if corpus.texts else 0
    if c.input_bin is None or len(c.input_bin) > 1 or not count:
        return train, train
    rule = f"of {count} tokens, which is held out unless --input_val_bin is given"
    return f"{train} (all but the last twentieth {rule})", f"{train} (the last twentieth {rule})"


def make_batches(c: Config, s: Sizes, corpus: Corpus) -> data.Batches:
    """The batches that a run trains on. Raises ValueError where the corpus is too short or cannot be cut so."""
    how: dict[str, Any] = {
        "shuffle_documents": c.shuffle_documents,
        "pack_documents": c.pack_documents,
        "end": corpus.end,
    }
    return data.Batches(
        corpus.texts,
        s.microbatches,
        s.rows,
        s.length,
        c.seed,
        weights=c.data_weights,
        option=blamed(c, corpus)[0],
        **how,
    )


def evaluation_batches(c: Config, s: Sizes, corpus: Corpus, limit: int | None) -> Iterator[dict[str, np.ndarray]]:
    """At most `limit` batches of the validation texts, spread evenly; None: all. Raises ValueError like the above."""
    sizes = (s.microbatches, s.rows, s.length, limit)
    return data.validation_batches(
        corpus.validation, *sizes, end=corpus.end, pack_documents=c.pack_documents, option=blamed(c, corpus)[1]
    )


class Feeds(NamedTuple):
    """What a run trains on, and the fixed batches that it is validated on."""

    batches: data.Batches
    held_out: list[dict[str, np.ndarray]]


def make_feeds(c: Config, s: Sizes, corpus: Corpus) -> Feeds:
    """Both. Raises ValueError like `make_batches`."""
    return Feeds(make_batches(c, s, corpus), list(evaluation_batches(c, s, corpus, VALIDATION_BATCHES)))
