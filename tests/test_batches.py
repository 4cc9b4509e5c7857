"""Tests of jaxpp.data's batches: the order of the samples, several texts, documents, epochs and validation."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_data import refusal

from jaxpp import data
from jaxpp.data import Batches, read_tokens, validation_batches, write_tokens

SIZES = st.integers(1, 5)


def window_numbers(batch, length):
    """The window of each row, for tokens that count up from 0."""
    return (batch["tokens"][..., 0] // length).ravel().tolist()


@settings(max_examples=60, deadline=None)
@given(SIZES, SIZES, st.integers(1, 7), st.integers(1, 23), st.integers(0, 6), st.integers(0, 2**40), st.booleans())
def test_each_window_exactly_once_an_epoch(micro, rows, length, windows, rest, seed, shuffle):
    tokens = np.arange(windows * length + 1 + rest % length, dtype=np.uint16)
    batches = Batches([tokens], micro, rows, length, seed, shuffle)
    assert [text.count for text in batches.cut] == [windows]
    steps = -(-3 * windows // (micro * rows))
    seen = []
    for step in range(steps):
        batch = batches.at(step)
        for part in batch.values():
            assert part.shape == (micro, rows, length) and part.dtype == np.int32
        assert np.array_equal(batch["labels"], batch["tokens"] + 1)
        assert np.array_equal(batch["tokens"] % length, np.broadcast_to(np.arange(length), (micro, rows, length)))
        seen += window_numbers(batch, length)
    for epoch in range(3):
        order = seen[epoch * windows : (epoch + 1) * windows]
        assert sorted(order) == list(range(windows))
        assert shuffle or order == sorted(order)


@pytest.mark.parametrize("split", [(1, 12), (2, 6), (3, 4), (12, 1)])
def test_samples_do_not_depend_on_the_split(split):
    tokens = np.random.default_rng(0).integers(0, 1000, 500)
    whole = Batches([tokens], 4, 3, 8, seed=5)
    other = Batches([tokens], *split, 8, seed=5)
    for step in (0, 4, 5, 11):
        for key in ("tokens", "labels"):
            assert np.array_equal(whole.at(step)[key].reshape(12, 8), other.at(step)[key].reshape(12, 8))


def test_any_step_in_any_order():
    tokens = np.arange(301)
    batches = Batches([tokens], 2, 3, 4, seed=1)
    ahead = {step: batches.at(step)["tokens"] for step in (40, 3, 12, 0)}
    for step in range(41):
        now = Batches([tokens], 2, 3, 4, seed=1).at(step)["tokens"]
        assert step not in ahead or np.array_equal(now, ahead[step])


def test_order_is_the_documented_permutation():
    batches = Batches([np.arange(101)], 1, 10, 10, seed=9)
    for epoch in range(3):
        order = np.random.Generator(np.random.PCG64([9, epoch])).permutation(10)
        assert window_numbers(batches.at(epoch), 10) == order.tolist()


def test_seed_and_epoch_change_the_order():
    tokens = np.arange(401)
    first, second = (window_numbers(Batches([tokens], 1, 40, 10, seed=2).at(step), 10) for step in (0, 1))
    other = window_numbers(Batches([tokens], 1, 40, 10, seed=3).at(0), 10)
    assert first != second and first != other and first != sorted(first)


def test_changing_a_batch_changes_no_other():
    tokens = np.arange(41, dtype=np.int32)
    batches = Batches([tokens], 1, 4, 10, seed=0)
    before = batches.at(0)["labels"].copy()
    batch = batches.at(0)
    batch["tokens"][:] = -1
    assert np.array_equal(batch["labels"], before) and np.array_equal(batches.at(0)["labels"], before)
    assert np.array_equal(tokens, np.arange(41))


def test_batches_from_a_mapped_file(tmp_path):
    write_tokens(tmp_path / "x.bin", np.arange(100, 121), np.uint32)
    batch = Batches([read_tokens(tmp_path / "x.bin", 200)], 1, 2, 10, seed=0, shuffle=False).at(0)
    assert batch["tokens"].tolist() == [[list(range(100, 110)), list(range(110, 120))]]
    assert type(batch["tokens"]) is np.ndarray and batch["tokens"].flags.c_contiguous


@pytest.mark.parametrize("length", [10, 11, 400])
@pytest.mark.parametrize("count", [0, 1, 10])
def test_text_shorter_than_a_window(length, count):
    for option, call in (
        ("input_bin", lambda: Batches([np.arange(count)], 1, 1, length, seed=0)),
        ("input_val_bin", lambda: validation_batches([np.arange(count)], 1, 1, length, 3)),
    ):
        message = refusal(call)
        assert message.startswith(f"{option}: ")
        assert f"{count} tokens" in message and f" {length + 1} " in message and "longer file" in message
        assert ("at most 9" in message) == (count == 10) and "at most 0" not in message


@pytest.mark.parametrize("name", ["microbatches", "rows", "sequence_length", "limit"])
def test_sizes_below_one(name):
    sizes = {"microbatches": 2, "rows": 2, "sequence_length": 2, "limit": 2} | {name: 0}
    assert f"{name} must be at least 1, got 0" in refusal(validation_batches, [np.arange(99)], **sizes)
    if sizes.pop("limit"):
        assert f"{name} must be at least 1, got 0" in refusal(Batches, [np.arange(99)], **sizes, seed=0)


def test_negative_seed():
    assert "-1" in refusal(Batches, [np.arange(99)], 1, 1, 1, seed=-1)


# Validation.


@settings(max_examples=60, deadline=None)
@given(SIZES, SIZES, st.integers(1, 7), st.integers(1, 60), st.integers(1, 9))
def test_validation_covers_evenly(micro, rows, length, windows, limit):
    tokens = np.arange(windows * length + 1, dtype=np.uint16)
    batches = list(validation_batches([tokens], micro, rows, length, limit))
    size = micro * rows
    count = min(windows, limit * size)
    assert len(batches) == -(-count // size) <= limit
    for batch in batches:
        for part in batch.values():
            assert part.shape == (micro, rows, length) and part.dtype == np.int32
    inputs = np.concatenate([b["tokens"].reshape(size, length) for b in batches])
    labels = np.concatenate([b["labels"].reshape(size, length) for b in batches])
    assert (labels[count:] == -100).all() and (inputs[count:] == 0).all()
    assert np.array_equal(labels[:count], inputs[:count] + 1)
    chosen = inputs[:count, 0] // length
    gaps = np.diff(np.append(chosen, windows))
    assert chosen[0] == 0 and gaps.min() >= 1 and gaps.max() - gaps.min() <= 1


# Several texts, documents, epochs.

END = 0
KINDS = {
    "windows": {},
    "in order": {"shuffle": False},
    "documents": {"end": END, "shuffle_documents": True},
    "packed": {"end": END, "pack_documents": True},
    "packed, documents": {"end": END, "pack_documents": True, "shuffle_documents": True},
}


def numbered(count, first, every):
    """A text of different tokens from `first` on, with an end token at every so many places and at its end."""
    tokens = np.arange(first, first + count)
    tokens[every - 1 :: every] = END
    tokens[-1] = END
    return tokens


def three_texts():
    """Of 60, 36 and 12 rows of 5, packed or not, so that one epoch of all is 108 samples."""
    return [numbered(300, 1, 17), numbered(180, 1001, 11), numbered(60, 2001, 7)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("several", [False, True])
def test_two_epochs_with_a_restart_have_every_token_twice(kind, several):
    """The index is made anew in the middle of an epoch and asked for the next step; one epoch ends within a step."""
    texts = three_texts()[: 3 if several else 1]
    if "pack_documents" not in KINDS[kind]:
        texts = [np.append(text, END) for text in texts]  # the last window's last label
    size, total = 8, 2 * (108 if several else 60)
    make = lambda: Batches(texts, 2, 4, 5, 11, **KINDS[kind])
    assert sum(text.count for text in make().cut) == total // 2
    first, again = make(), make()
    steps = [(first if step < 5 else again).at(step) for step in range(total // size)]
    for name in ("tokens", "labels"):
        found = np.sort(np.concatenate([batch[name].ravel() for batch in steps]))
        if "shuffle_documents" in KINDS[kind] and "pack_documents" not in KINDS[kind]:
            # The epoch's last token is no input, and the first no label: which these are changes with the order.
            found, want = found[found % 1000 > 0], np.sort(np.concatenate([*texts, *texts]))
            want = want[want % 1000 > 0]
            assert np.setdiff1d(found, want).size == 0 and len(want) - len(found) <= 2 * len(texts)
            assert np.unique(found, return_counts=True)[1].max() == 2
            continue
        if name == "tokens":
            cut = [text if "pack_documents" in KINDS[kind] else text[:-1] for text in texts]
            assert np.array_equal(found, np.sort(np.concatenate([*cut, *cut])))
        else:
            inner = [text[1:] for text in texts]
            if "pack_documents" in KINDS[kind]:  # neither a document's first token is a label, nor padding
                inner = [text[1:][text[:-1] != END] for text in texts]
            valid = found[found != data.IGNORED_LABEL]
            assert np.array_equal(valid, np.sort(np.concatenate([*inner, *inner])))


@pytest.mark.parametrize("kind", KINDS)
def test_given_rows_are_those_of_the_whole_batch(kind):
    batches = Batches(three_texts(), 3, 6, 4, seed=4, weights=(0.5, 0.2, 0.3), **KINDS[kind])
    for step in (0, 7):
        whole = batches.at(step)
        for rows in (slice(0, 2), slice(2, 6), slice(5, None), slice(1, 6, 2), slice(0, 0)):
            part = batches.at(step, rows)
            assert list(part) == list(whole)
            assert all(np.array_equal(part[name], whole[name][:, rows]) for name in whole)


def test_other_rows_are_not_read():
    read = []

    class Text(data.Text):
        def rows(self, epoch, places):
            read.extend(places.tolist())
            return super().rows(epoch, places)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "Text", Text)
        batches = Batches([np.arange(101)], 2, 5, 10, seed=0, shuffle=False)
        assert window_numbers(batches.at(0, slice(1, 3)), 10) == read == [1, 2, 6, 7]


@pytest.mark.parametrize("weights", [(0.5, 0.3, 0.2), (1, 1, 1), None])
def test_every_prefix_has_each_text_by_its_weight(weights):
    texts = three_texts()
    batches = Batches(texts, 2, 3, 5, seed=4, weights=weights, end=END, pack_documents=True)
    shares = np.asarray(weights or (60, 36, 12)) / sum(weights or (60, 36, 12))
    tokens = np.concatenate([batches.at(step)["tokens"].reshape(6, 5) for step in range(60)])
    origin = tokens.max(axis=1) // 1000  # of each row
    counts = np.cumsum(origin[:, None] == np.arange(3), axis=0)
    assert (abs(counts - np.arange(1, 361)[:, None] * shares) < 1 + 1e-9).all()
    for i, rows in enumerate((60, 36, 12)):  # every epoch of a text has each row once
        mine = tokens[origin == i]
        for at in range(0, len(mine) - rows + 1, rows):
            assert np.array_equal(np.sort(mine[at : at + rows].ravel()), np.sort(texts[i]))


def test_texts_of_one_size_have_orders_of_their_own():
    texts = [np.arange(0, 401), np.arange(1000, 1401)]
    found = Batches(texts, 1, 80, 10, seed=2).at(0)["tokens"][0, :, 0]
    assert not np.array_equal(found[found < 1000], found[found >= 1000] - 1000)


def test_epochs_begun():
    batches = Batches([np.arange(51), np.arange(21)], 1, 4, 10, seed=0, weights=(1, 1))  # 5 and 2 rows
    begun = [batches.epochs_begun(step) for step in range(6)]
    assert begun == [[], [(1, 1)], [(1, 2), (0, 1)], [(1, 3)], [(1, 4)], [(0, 2), (1, 5)]]


def test_the_order_as_plain_data():
    changes = [{}, {"weights": (1, 2)}, {"shuffle_documents": True}, {"pack_documents": True}]
    texts = [numbered(100, 1, 7), numbered(50, 1, 7)]
    found = [Batches(texts, 1, 1, 10, seed=0, end=END, **change).order() for change in changes]
    assert found[0] == {
        "shuffle_documents": False,
        "pack_documents": False,
        "split_at_token": None,
        "corpus_tokens": [100, 50],
        "weights_of_files": [9, 4],
    }
    assert (
        found[1]["weights_of_files"] == [1, 2] and found[2]["shuffle_documents"] and found[3]["split_at_token"] == END
    )
    assert all(found[i] != found[j] for i in range(4) for j in range(i))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"pack_documents": True}, ["pack_documents needs the token", "give --tokenizer"]),
        ({"shuffle_documents": True}, ["shuffle_documents needs the token", "give --tokenizer"]),
        ({"shuffle_documents": True, "end": 9999}, ["input_bin: text 1 of 3 has no token 9999"]),
        ({"weights": (1, 2)}, ["data_weights=1 2 has 2 weights for 3 files", "one for each file"]),
        ({"weights": (1, 0, 1)}, ["data_weights=0 must be above 0"]),
        ({"sequence_length": 100}, ["input_bin: text 3 of 3 has 60 tokens", "at most 59"]),
    ],
)
def test_refusals_of_several_texts(options, words):
    message = refusal(
        Batches, three_texts(), **{"microbatches": 1, "rows": 1, "sequence_length": 5, "seed": 0} | options
    )
    assert all(word in message for word in words), message


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("limit", [None, 2, 7])
def test_validation_over_several_texts(packed, limit):
    batches = list(validation_batches(three_texts(), 2, 5, 5, limit, end=END, pack_documents=packed))
    cut = Batches(three_texts(), 1, 1, 5, 0, end=END, pack_documents=packed, shuffle=False).cut
    rows = [text.rows(0, np.arange(text.count)) for text in cut]
    total = sum(text.count for text in cut)
    count = min(total, 10 * limit) if limit else total
    for name in batches[0]:
        every = np.concatenate([part[name] for part in rows])
        found = np.concatenate([batch[name].reshape(10, 5) for batch in batches])
        assert np.array_equal(found[:count], every[np.arange(count) * total // count])
        assert (found[count:] == (data.IGNORED_LABEL if name == "labels" else 0)).all()
        assert all(batch[name].shape == (2, 5, 5) and batch[name].dtype == np.int32 for batch in batches)
    assert len(batches) == -(-count // 10)
