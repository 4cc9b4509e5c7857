"""Text to tokens and back: bytes, or any tokenizer.json."""

import codecs
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer as Library

from jaxpp.json_files import read_object

INCOMPLETE = "\ufffd"  # what a decoder shows for the bytes of a character that is not yet whole
_END_FILES = ("tokenizer_config.json", "config.json", "generation_config.json")


@dataclass(frozen=True)
class Tokenizer:
    """Text to tokens and back.

    name: for people. identity: changes whenever the tokens of a text may change. vocab_size: tokens are below it.
    end: the token after a document, or None. encode(text) -> int [n], without added tokens; decode(tokens) -> text.
    """

    name: str
    identity: str
    vocab_size: int
    end: int | None
    encode: Callable[[str], np.ndarray]
    decode: Callable[[Sequence[int]], str]


def _byte(token: int) -> int:
    """The byte of a token; of one that has none, a byte which no text has and which is shown as U+FFFD."""
    return int(token) if token < 256 else 0xFF


BYTES = Tokenizer(
    name="byte tokens",
    identity="bytes",
    vocab_size=256,
    end=None,
    encode=lambda text: np.frombuffer(text.encode(), np.uint8),
    decode=lambda tokens: bytes(map(_byte, tokens)).decode(errors="replace"),
)


def load(where: str | None, option: str = "tokenizer") -> Tokenizer:
    """The tokenizer of a tokenizer.json or of a folder that has one; None: bytes.

    Raises ValueError, naming the option, where there is none or it cannot be read.
    """
    if where is None:
        return BYTES
    path = Path(where) / "tokenizer.json" if Path(where).is_dir() else Path(where)
    try:
        content = path.read_bytes()
        library = Library.from_buffer(content)
    except OSError as error:
        text = f"{path.name} cannot be read ({error.strerror}): give a tokenizer.json or a folder that has one"
        raise ValueError(f"{option}={where!r}: {text}") from None
    except Exception as error:  # the library raises nothing narrower
        text = f"{path.name} is no tokenizer ({str(error).splitlines()[0]}): save it again with its library"
        raise ValueError(f"{option}={where!r}: {text}") from None
    try:
        end = _end_token(library, path.parent)
    except ValueError as error:
        raise ValueError(f"{option}={where!r}: {error}") from None
    return Tokenizer(
        name=f"tokenizer {where}",
        identity=hashlib.sha256(content).hexdigest(),
        vocab_size=library.get_vocab_size(with_added_tokens=True),
        end=end,
        encode=lambda text: np.asarray(library.encode(text, add_special_tokens=False).ids, np.uint32),
        decode=lambda tokens: library.decode([int(t) for t in tokens], skip_special_tokens=False),
    )


def _end_token(library: Library, folder: Path) -> int | None:
    """The token that ends a document, as the files beside a tokenizer.json name it."""
    for name in _END_FILES:
        try:
            found = read_object(folder / name)
        except OSError:
            continue
        token: Any = found.get("eos_token", found.get("eos_token_id"))
        token = token.get("content") if isinstance(token, dict) else token
        token = token[0] if isinstance(token, list) and token else token
        if isinstance(token, str):
            token = library.token_to_id(token)
        if type(token) is int:
            return token
    return None


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Refuse, with a ValueError, a tokenizer that has tokens which the model has not."""
    if tokenizer.vocab_size > vocab_size:
        raise ValueError(
            f"{tokenizer.name} has {tokenizer.vocab_size} tokens and the model knows {vocab_size}: give the model's own"
            f" --tokenizer, or a --model of at least {tokenizer.vocab_size} tokens"
        )


def stream(tokenizer: Tokenizer, tokens: Iterable[int]) -> Iterator[str]:
    """The text of tokens as they come, each piece as soon as its characters are whole."""
    if tokenizer.identity == BYTES.identity:
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        yield from (piece for piece in (decoder.decode(bytes([_byte(t)])) for t in tokens) if piece)
        yield decoder.decode(b"", final=True)
        return
    # Pieces depend on their neighbours (spaces), so the last finished ones are decoded along.
    kept: list[int] = []
    done = 0
    for token in tokens:
        kept.append(int(token))
        before, after = tokenizer.decode(kept[:done]), tokenizer.decode(kept)
        if len(after) > len(before) and not after.endswith(INCOMPLETE):
            yield after[len(before) :]
            kept, done = kept[done:], len(kept) - done
    yield tokenizer.decode(kept)[len(tokenizer.decode(kept[:done])) :]
