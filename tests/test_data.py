"""Tests of jaxpp.data: every refusal's wording, the mapping, the corpus's split and the order of the samples."""

import os
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpp import data
from jaxpp.data import Batches, default_corpus, read_tokens, validation_batches, write_tokens

U16, U32 = 20240520, 20240801
SIZES = st.integers(1, 5)


def token_file(magic=U16, version=1, count=3, tokens=(5, 6, 7), dtype="<u2"):
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, count
    return header.tobytes() + np.array(tokens, dtype).tobytes()


def refusal(call, *args, **kwargs):
    """Call, expect a one-line ValueError, and return its text."""
    with pytest.raises(ValueError) as caught:
        call(*args, **kwargs)
    message = str(caught.value)
    assert len(message.splitlines()) == 1, message
    return message


# Reading and writing.


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
@pytest.mark.parametrize("given_as", [list, np.int64, np.uint32])
def test_round_trip(tmp_path, dtype, given_as):
    tokens = [0, 1, np.iinfo(dtype).max, 7]
    written = tokens if given_as is list else np.array(tokens, given_as)
    write_tokens(tmp_path / "x.bin", written, dtype)
    read = read_tokens(tmp_path / "x.bin", 2**32)
    assert read.dtype == dtype and read.tolist() == tokens
    assert (tmp_path / "x.bin").stat().st_size == 1024 + 4 * np.dtype(dtype).itemsize


@pytest.mark.parametrize(("dtype", "magic", "version"), [(np.uint16, U16, 1), (np.uint32, U32, 7)])
def test_written_bytes_are_llm_c(tmp_path, dtype, magic, version):
    write_tokens(tmp_path / "x.bin", [5, 6, 7], dtype)
    expected = token_file(magic, version, dtype=np.dtype(dtype).newbyteorder("<"))
    assert (tmp_path / "x.bin").read_bytes() == expected


@pytest.mark.parametrize("version", [1, 7])
@pytest.mark.parametrize(("magic", "dtype"), [(U16, "<u2"), (U32, "<u4")])
@pytest.mark.parametrize("name", ["x.bin", "x"])
def test_either_magic_takes_both_versions(tmp_path, version, magic, dtype, name):
    (tmp_path / name).write_bytes(token_file(magic, version, dtype=dtype))
    assert read_tokens(tmp_path / name, 8).tolist() == [5, 6, 7]


@pytest.mark.parametrize(
    ("tokens", "dtype", "words"),
    [
        ([1, 65536], np.uint16, ["uint16", "65535", "65536"]),
        ([-1, 3], np.uint32, ["uint32", "-1"]),
        ([], np.uint16, ["(0,)"]),
        ([[1]], np.uint16, ["(1, 1)"]),
        ([1.5], np.uint16, ["float64"]),
        ([1], np.int32, ["np.uint16", "np.uint32", "int32"]),
    ],
)
def test_write_refuses_and_writes_nothing(tmp_path, tokens, dtype, words):
    message = refusal(write_tokens, tmp_path / "x.bin", tokens, dtype)
    assert all(word in message for word in words), message
    assert not (tmp_path / "x.bin").exists()


def test_text_is_bytes(tmp_path):
    text = "naïve ☃\n" * 3
    (tmp_path / "x.txt").write_text(text, encoding="utf-8")
    tokens = read_tokens(tmp_path / "x.txt", 256)
    assert tokens.dtype == np.uint8 and bytes(tokens) == text.encode()


@pytest.mark.parametrize("content", [token_file(), b"some text"])
def test_file_is_mapped_not_loaded(tmp_path, content):
    path = tmp_path / "x"
    path.write_bytes(content)
    tokens = read_tokens(path, 256)
    assert isinstance(tokens, np.memmap) and not tokens.flags.writeable
    with path.open("r+b") as file:  # what changes in the file changes in the tokens
        file.seek(-1, os.SEEK_END)
        file.write(b"\x7f")
    assert tokens[-1] in (0x7F, 0x7F07)


def test_scan_of_a_big_file_allocates_little(tmp_path):
    count = 8 * data._SCAN_TOKENS
    with (tmp_path / "x.bin").open("wb") as file:  # a sparse file
        file.write(token_file(count=count, tokens=()))
        file.truncate(1024 + 2 * count)
        file.seek(1024 + 2 * (count - 2))
        file.write(np.array([299], "<u2").tobytes())
    tracemalloc.start()
    message = refusal(read_tokens, tmp_path / "x.bin", 299)
    assert len(read_tokens(tmp_path / "x.bin", 300)) == count
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert f"token 299 at position {count - 2}" in message
    assert peak < 2 * count / 4


@pytest.mark.parametrize("scan", [1, 2, 100])
def test_scan_names_the_first_of_the_largest(tmp_path, monkeypatch, scan):
    monkeypatch.setattr(data, "_SCAN_TOKENS", scan)
    write_tokens(tmp_path / "x.bin", [5, 70, 80, 6, 80, 70])
    assert "token 80 at position 2," in refusal(read_tokens, tmp_path / "x.bin", 64)


@pytest.mark.parametrize(("dtype", "largest"), [(np.uint16, 65535), (np.uint32, 2**32 - 1)])
def test_scan_at_the_end_of_the_dtype(tmp_path, dtype, largest):
    write_tokens(tmp_path / "x.bin", [largest], dtype)
    assert read_tokens(tmp_path / "x.bin", largest + 1).tolist() == [largest]
    assert f"token {largest} " in refusal(read_tokens, tmp_path / "x.bin", largest)


BAD_FILES = {
    "empty": (b"", ["empty", "0 bytes", "UTF-8"]),
    "truncated header": (token_file()[:1000], ["1000", "1024", "write_tokens"]),
    "magic alone": (token_file()[:4], ["4 bytes", "1024"]),
    "fewer tokens": (token_file(count=9), ["counts 9", "holds 3", "1042", "1030"]),
    "more tokens": (token_file(count=2), ["counts 2", "holds 3"]),
    "odd byte": (token_file() + b"x", ["1030", "1031"]),
    "no tokens": (token_file(count=0, tokens=()), ["counts 0", "at least 1"]),
    "negative count": (token_file(count=-4), ["counts -4"]),
    "version": (token_file(version=2), ["version 2", "1 (", "7 ("]),
    "vocabulary": (token_file(tokens=(5, 70, 6)), ["token 70", "position 1", "vocabulary of 64", "at least 71"]),
    "vocabulary, first of equals": (token_file(tokens=(5, 64, 64)), ["token 64", "position 1"]),
    "text beyond a small vocabulary": (b"az", ["token 122", "position 1", "vocabulary of 64"]),
    "NUL": (b"abc\0def", ["NUL", "position 3", str(U16), str(U32), "UTF-8"]),
    "not UTF-8": (b"abcd\xff", ["0xff", "position 4", str(U16), str(U32)]),
    "UTF-8 cut at the end of the file": ("abé".encode()[:-1], ["0xc3", "position 2"]),
    "big-endian token file": (token_file()[3::-1] + token_file()[4:], ["neither"]),
}


@pytest.mark.parametrize("case", BAD_FILES)
@pytest.mark.parametrize("option", ["input_bin", "input_val_bin"])
def test_bad_file_is_refused_in_one_line(tmp_path, case, option):
    content, words = BAD_FILES[case]
    path = tmp_path / "corpus"
    path.write_bytes(content)
    kwargs = {} if option == "input_bin" else {"option": option}
    message = refusal(read_tokens, path, 64, **kwargs)
    assert message.startswith(f"{option} {str(path)!r}: ") and "; " in message
    assert all(word in message for word in words), message


@pytest.mark.parametrize(("content", "magic"), [(b"text", 0x74786574), (b"\1\0\0\0", 1), (b"", 0), (b"\2", 2)])
def test_foreign_bin_is_refused(tmp_path, content, magic):
    path = tmp_path / "x.BIN"
    path.write_bytes(content + b" and more" * 200 if len(content) == 4 else content)
    words = [f"magic {magic}", str(U16), str(U32), "write_tokens"] if content else ["empty"]
    message = refusal(read_tokens, path, 64)
    assert all(word in message for word in words), message


def test_paths_that_are_no_file(tmp_path):
    assert "No such file" in refusal(read_tokens, tmp_path / "missing.bin", 64)
    assert "directory" in refusal(read_tokens, tmp_path, 64)
    assert "No such file" in refusal(read_tokens, f"{tmp_path}/two\nlines", 64)
    os.mkfifo(tmp_path / "pipe")
    assert "no regular file" in refusal(read_tokens, tmp_path / "pipe", 64)


def test_text_check_is_bounded_and_allows_a_cut_character(tmp_path):
    bound = data._TEXT_CHECK_BYTES
    content = b"a" * (bound - 1) + "é".encode() + b"\0"  # the bound cuts é in two, and the NUL is past it
    (tmp_path / "x").write_bytes(content)
    assert len(read_tokens(tmp_path / "x", 256)) == bound + 2
    (tmp_path / "y").write_bytes(b"a" * (bound - 1) + b"\xff" + b"a" * 9)
    assert f"position {bound - 1}" in refusal(read_tokens, tmp_path / "y", 256)


# The default corpus.


def test_corpus_is_text_of_a_sensible_size():
    train, validation = default_corpus()
    assert train.dtype == validation.dtype == np.uint8
    assert 1_000_000 < len(train) < 4_600_000 and 30_000 < len(validation) < len(train) / 5
    for side in (train, validation):
        assert bytes(side).decode("utf-8") and not (side == 0).any()
    for side, again in zip((train, validation), default_corpus(), strict=True):
        assert np.array_equal(side, again)


def test_corpus_sides_share_no_block():
    train, validation = (bytes(side) for side in default_corpus())
    shared = [at for at in range(0, len(validation) - 2048, 1024) if validation[at : at + 2048] in train]
    assert not shared


def fake_stdlib(monkeypatch, root, files):
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    monkeypatch.setattr(data.sysconfig, "get_paths", lambda: {"stdlib": str(root)})


def test_corpus_splits_by_name_and_skips(tmp_path, monkeypatch):
    kept = {f"pkg/m{i:03}.py": b"file %d" % i for i in range(200)} | {"a.py": b"latin \xe9", "z.py": b"last"}
    skipped = ["test/a.py", "pkg/tests/a.py", "site-packages/a.py", "ensurepip/_bundled/a.py", "b.txt"]
    fake_stdlib(monkeypatch, tmp_path, kept | dict.fromkeys(skipped, b"skipped"))
    (tmp_path / "broken.py").symlink_to(tmp_path / "nowhere.py")
    train, validation = (bytes(side).decode().split("\n\n") for side in default_corpus())
    assert set(train).isdisjoint(validation)
    assert sorted(train + validation) == sorted(text.decode(errors="ignore") for text in kept.values())
    assert train[0] == "latin " and train[-1] == "last"
    assert 3 <= len(validation) <= 25
    (tmp_path / "pkg" / "m000.py").unlink()  # a file that goes moves no other
    fewer = [bytes(side).decode().split("\n\n") for side in default_corpus()]
    assert set(fewer[0]) <= set(train) and set(fewer[1]) <= set(validation)


def test_corpus_without_sources(tmp_path, monkeypatch):
    fake_stdlib(monkeypatch, tmp_path, {"os.pyc": b"x"})
    message = refusal(default_corpus)
    assert "input_bin" in message and str(tmp_path) in message


# Batches.


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
