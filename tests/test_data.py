"""Tests of jaxpp.data: every refusal's wording, the mapping and the corpus's split; test_batches.py has the rest."""

import os
import tracemalloc

import numpy as np
import pytest

from jaxpp import data
from jaxpp.data import default_corpus, read_tokens, write_tokens

U16, U32 = 20240520, 20240801


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
