"""Rows of texts: windows, shuffled documents and packed documents, against documents handled one by one."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import toy
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxpp
from jaxpp import texts
from jaxpp.texts import Text, document_bounds
from models import GPT2, GPT2Config, Llama3, Llama3Config

END = 0
IGNORED = -100


def text_of(sizes, seed=0):
    """Documents of given sizes, end tokens included; no two tokens but those are equal."""
    tokens = np.arange(1, sum(sizes) + 1)
    tokens[np.cumsum(sizes) - 1] = END
    return tokens


def split(tokens):
    """The documents of a text, in plain Python."""
    found, now = [], []
    for token in tokens.tolist():
        now.append(token)
        if token == END:
            found.append(now)
            now = []
    return found + [now] * bool(now)


DOCUMENTS = st.lists(st.integers(1, 9), min_size=1, max_size=12)


@settings(max_examples=80, deadline=None)
@given(DOCUMENTS, st.integers(1, 40), st.booleans())
def test_bounds(sizes, scan, open_end):
    tokens = text_of(sizes)[: -1 if open_end and sum(sizes) > 1 else None]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(texts, "_SCAN_TOKENS", scan)
        bounds = document_bounds(tokens, END)
    assert np.diff(bounds).tolist() == [len(document) for document in split(tokens)]
    assert bounds.dtype == np.int64 and bounds[0] == 0


def stream_of(tokens, text, epoch):
    """An epoch's stream as a list of documents, which the documented permutation orders."""
    found = split(tokens)
    if not text.shuffle_documents:
        return found
    words = [text.seed, epoch, text.number, 1]
    return [found[i] for i in np.random.Generator(np.random.PCG64(words)).permutation(len(found))]


@settings(max_examples=80, deadline=None)
@given(DOCUMENTS, st.integers(1, 8), st.booleans(), st.integers(0, 3))
def test_plain_rows_are_windows_of_the_stream(sizes, length, shuffle_documents, epoch):
    tokens = text_of(sizes)
    bounds = document_bounds(tokens, END)
    text = Text(tokens, length, bounds, shuffle_documents=shuffle_documents, seed=3, number=2)
    stream = [token for document in stream_of(tokens, text, epoch) for token in document]
    assert text.count == (len(stream) - 1) // length
    rows = text.rows(epoch, np.arange(text.count))
    for i in range(text.count):
        window = stream[i * length : (i + 1) * length + 1]
        assert rows["tokens"][i].tolist() == window[:-1] and rows["labels"][i].tolist() == window[1:]


def packed(documents, length):
    """Packed rows, token by token in plain Python: (token, label, segment, position)."""
    flat = [(d, i, token) for d, document in enumerate(documents) for i, token in enumerate(document)]
    rows = []
    for start in range(0, len(flat), length):
        row, segment, position, last = [], 0, 0, None
        for d, i, token in flat[start : start + length]:
            segment, position = (segment, position + 1) if d == last else (segment + 1, 0)
            label = documents[d][i + 1] if i + 1 < len(documents[d]) else IGNORED
            row.append((token, label, segment, position))
            last = d
        rows.append(row + [(0, IGNORED, 0, 0)] * (length - len(row)))
    return np.asarray(rows)


@settings(max_examples=120, deadline=None)
@given(DOCUMENTS, st.integers(1, 8), st.booleans(), st.booleans(), st.integers(0, 3))
def test_packed_rows(sizes, length, shuffle_documents, open_end, epoch):
    tokens = text_of(sizes)[: -1 if open_end and sum(sizes) > 1 else None]
    text = Text(tokens, length, document_bounds(tokens, END), True, False, shuffle_documents, seed=3)
    want = packed(stream_of(tokens, text, epoch), length)
    found = text.rows(epoch, np.arange(text.count))
    assert list(found) == list(texts.array_names(True)) == ["tokens", "labels", "segments", "positions"]
    assert all(a.dtype == np.int32 for a in found.values())
    assert np.array_equal(np.stack(list(found.values()), axis=-1), want)


def test_shuffled_rows_are_the_same_rows():
    tokens = text_of([5, 9, 2, 7, 4])
    bounds = document_bounds(tokens, END)
    order = np.random.Generator(np.random.PCG64([7, 1, 0])).permutation(7)
    plain, mixed = (Text(tokens, 4, bounds, True, shuffle, True, seed=7) for shuffle in (False, True))
    for name, a in mixed.rows(1, np.arange(7)).items():
        assert np.array_equal(a, plain.rows(1, order)[name])


def test_documents_are_ordered_anew_each_epoch():
    tokens = text_of([5, 9, 2, 7, 4, 3, 6])
    text = Text(tokens, 35, document_bounds(tokens, END), shuffle_documents=True)
    streams = [text.rows(epoch, np.arange(1))["tokens"][0].tolist() for epoch in range(4)]
    assert len({tuple(stream) for stream in streams}) == 4


# What a model makes of packed rows.

GPT = GPT2Config(vocab_size=51, positions=16, layers=2, dim=32, heads=2, std=0.3)
LLAMA = Llama3Config(vocab_size=51, positions=16, layers=2, dim=32, heads=4, kv_heads=2, hidden=48, std=0.3)
MODELS = {"gpt2": partial(GPT2, config=GPT), "llama3": partial(Llama3, config=LLAMA)}


def own_rows(batch):
    """The documents' pieces of a packed batch, each in a row of its own: plain tokens and labels [1, N, T]."""
    found = {"tokens": [], "labels": []}
    for row, segments in enumerate(batch["segments"].reshape(-1, 16)):
        for segment in range(1, segments.max() + 1):
            mine = segments == segment
            for name, empty in (("tokens", 0), ("labels", IGNORED)):
                a = batch[name].reshape(-1, 16)[row][mine]
                found[name].append(np.pad(a, (0, 16 - len(a)), constant_values=empty))
    return {name: jnp.asarray(rows)[None] for name, rows in found.items()}


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_packed_rows_are_those_of_their_documents(name, stages):
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, 51, 93)
    tokens[[3, 4, 14, 40, 47, 66, 80]] = END
    batch = jaxpp.data.Batches([tokens], 3, 2, 16, 0, end=END, pack_documents=True).at(0)
    assert (batch["segments"] == 0).any() and batch["segments"].max() >= 3
    net = MODELS[name](jax.random.key(0))
    want = reference.value_and_grad(net, own_rows(batch))
    found = toy.run(net, {name: jnp.asarray(a) for name, a in batch.items()}, stages=stages)
    assert float(found.loss) == pytest.approx(float(want.loss), rel=1e-6)
    assert reference.error(tuple(found.grads), tuple(want.grads)) < 1e-5
    plain = reference.value_and_grad(net, {name: jnp.asarray(batch[name]) for name in ("tokens", "labels")})
    assert reference.error(tuple(plain.grads), tuple(want.grads)) > 1e-2  # what it is when documents see each other
