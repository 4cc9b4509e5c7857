"""Tokenizers and token files against the tokenizers library called on the whole text."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

import run
from jaxpp import data, feeds, tokenize, tokenizer
from jaxpp.config import Config

TEXT = bytes(data.default_corpus()[1]).decode()[:400_000] + "naïve 日本語 🙂🙂\n\n\nπ = 3.14159…\n"


def byte_level(folder: Path, size: int = 700) -> Path:
    """A BPE as GPT-2's, trained on the spot, with an end token that the file beside it names."""
    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=["<|end|>"], initial_alphabet=alphabet)
    library.train_from_iterator([TEXT], trainer)
    folder.mkdir(exist_ok=True)
    library.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    return folder


def word_pieces(folder: Path) -> Path:
    """A BPE as Mixtral's: a space before the text, words begin with their space, bytes for unknown characters."""
    library = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    library.decoder = decoders.Sequence(steps)
    special = ["<unk>", *(f"<0x{i:02X}>" for i in range(256))]
    words = [word.replace(" ", "▁") for word in TEXT[:60_000].splitlines()]
    library.train_from_iterator(words, trainers.BpeTrainer(vocab_size=600, special_tokens=special))
    library.add_special_tokens([AddedToken("</s>")])
    folder.mkdir(exist_ok=True)
    library.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": library.token_to_id("</s>")}))
    return folder


MAKERS = {"byte level": byte_level, "word pieces": word_pieces}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("tokenizers")
    return {name: str(make(root / name.replace(" ", "_"))) for name, make in MAKERS.items()}


def library(folder: str) -> Tokenizer:
    return Tokenizer.from_file(f"{folder}/tokenizer.json")


@pytest.mark.parametrize("name", MAKERS)
def test_a_tokenizer_is_the_librarys(name: str, folders: dict) -> None:
    found, want = tokenizer.load(folders[name]), library(folders[name])
    np.testing.assert_array_equal(found.encode(TEXT), want.encode(TEXT, add_special_tokens=False).ids)
    assert found.decode(found.encode(TEXT)) == TEXT
    assert found.vocab_size == want.get_vocab_size()
    assert found.end == want.token_to_id("<|end|>" if name == "byte level" else "</s>")
    assert tokenizer.load(f"{folders[name]}/tokenizer.json").identity == found.identity


def test_bytes() -> None:
    found = tokenizer.load(None)
    np.testing.assert_array_equal(found.encode("aπ"), list("aπ".encode()))
    assert found.decode(found.encode(TEXT)) == TEXT
    assert (found.vocab_size, found.end) == (256, None)


@pytest.mark.parametrize("name", [None, *MAKERS])
@given(text=st.text(max_size=40))
def test_streamed_pieces_are_the_text(name: str | None, folders: dict, text: str) -> None:
    """Joined they are what the whole decodes to, and no piece shows half a character."""
    found = tokenizer.load(None if name is None else folders[name])
    tokens = found.encode(text).tolist()
    pieces = list(tokenizer.stream(found, iter(tokens)))
    assert "".join(pieces) == found.decode(tokens)
    if tokenizer.INCOMPLETE not in found.decode(tokens):
        assert not any(tokenizer.INCOMPLETE in piece for piece in pieces)


@pytest.mark.parametrize("tokens", [[97, 256, 98], [50_000], [0xCF, 300, 0x80], [0xCF, 0x80, 999]])
def test_tokens_that_are_no_bytes(tokens: list[int]) -> None:
    """Shown as U+FFFD, streamed or not."""
    whole = tokenizer.BYTES.decode(tokens)
    assert tokenizer.INCOMPLETE in whole
    assert "".join(tokenizer.stream(tokenizer.BYTES, iter(tokens))) == whole


def test_a_piece_comes_as_soon_as_it_is_whole() -> None:
    pieces = list(tokenizer.stream(tokenizer.BYTES, iter("aπb".encode())))
    assert pieces[:3] == ["a", "π", "b"]


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Three documents, of which one is cut into many pieces."""
    monkeypatch.setattr(tokenize, "PIECE_BYTES", 30_000)
    for i, text in enumerate((TEXT, "short\n", TEXT[1000:50_000])):
        (tmp_path / f"{i}.txt").write_text(text)
    return [str(tmp_path / f"{i}.txt") for i in range(3)]


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("name", [None, *MAKERS])
def test_token_files(name: str | None, processes: int, texts: list[str], folders: dict, tmp_path: Path) -> None:
    """Each document's tokens as if encoded whole, its end token behind it; any number of processes."""
    where, output = (None if name is None else folders[name]), str(tmp_path / "out.bin")
    done = []
    count = tokenize.write(texts, output, where, processes, done.append)
    found = tokenizer.load(where)
    want = []
    for path in texts:
        want += [*found.encode(Path(path).read_text()), *([] if found.end is None else [found.end])]
    np.testing.assert_array_equal(data.read_tokens(output, found.vocab_size), want)
    assert count == len(want)
    assert sum(done) == sum(os.path.getsize(path) for path in texts)
    pieces = list(tokenize._pieces(texts[0], found))
    # Word pieces put a space before every text they are given, so there no cut is possible.
    assert len(pieces) == 1 if name == "word pieces" else len(pieces) > 4


def test_cuts_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer that joins lines is not cut between them, but where it does not join."""
    monkeypatch.setattr(tokenize, "PIECE_BYTES", 4)
    path = tmp_path / "a.txt"
    path.write_text("aaaa\nbbbb\ncccc\n")

    def encode(text: str) -> np.ndarray:
        return np.asarray([ord(c) for c in text.replace("\nb", "\x01")])

    joins = tokenizer.Tokenizer("joins", "joins", 256, None, encode, str)
    assert [(a, b) for a, b, _ in tokenize._pieces(str(path), joins)] == [(0, 10), (10, 15)]
    assert [(a, b) for a, b, _ in tokenize._pieces(str(path), tokenizer.BYTES)] == [(0, 5), (5, 10), (10, 15)]


def test_large_vocabularies_take_four_bytes(folders: dict, texts: list[str], tmp_path: Path, monkeypatch) -> None:
    real = tokenizer.load
    large = lambda where: tokenizer.Tokenizer(*[getattr(real(where), f) for f in ("name", "identity")], 70_000, None,
                                              lambda text: np.asarray([69_999]), str)  # fmt: skip
    monkeypatch.setattr(tokenizer, "load", large)
    tokenize.write(texts[1:2], str(tmp_path / "out.bin"), None)
    found = data.read_tokens(tmp_path / "out.bin", 70_000)
    assert (found.dtype, found.tolist()) == (np.uint32, [69_999])


@pytest.mark.parametrize("output", ["0.txt", "folder/../0.txt", "link", "tokenizer.json"])
def test_an_output_that_is_read(output: str, texts: list[str], folders: dict, capsys, tmp_path: Path) -> None:
    """By whatever path it is called, an input and the tokenizer stay what they are."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(texts[0])
    library(folders["byte level"]).save(str(tmp_path / "tokenizer.json"))
    words = ["--input", *texts, "--output", str(tmp_path / output), "--tokenizer", str(tmp_path / "tokenizer.json")]
    before = (tmp_path / output).read_bytes()
    assert run.main(["tokenize", *words]) == 2
    err = capsys.readouterr().err
    assert "which is read: give another file, for example --output " in err and err.count("\n") == 1
    assert (tmp_path / output).read_bytes() == before


def test_token_files_have_the_usual_mode(texts: list[str], tmp_path: Path) -> None:
    tokenize.write(texts[1:2], str(tmp_path / "out.bin"), None)
    assert (tmp_path / "out.bin").stat().st_mode == Path(texts[1]).stat().st_mode


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("config.json", b"[1]", "config.json holds a list"),
        ("tokenizer_config.json", b"\xff", "tokenizer_config.json is not UTF-8"),
        ("tokenizer_config.json", b"{", "tokenizer_config.json is no JSON"),
    ],
)
def test_files_beside_a_tokenizer(name: str, content: bytes, words: str, folders: dict, tmp_path: Path) -> None:
    library(folders["byte level"]).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=r"^tokenizer=") as refusal:
        tokenizer.load(str(tmp_path))
    assert words in str(refusal.value)


def test_the_command(folders: dict, texts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    output = str(tmp_path / "out.bin")
    words = ["tokenize", "--input", *texts, "--output", output, "--tokenizer", folders["byte level"]]
    assert run.main([*words, "--processes", "1"]) == 0
    count = len(data.read_tokens(output, 700))
    assert capsys.readouterr().out.startswith(f"{count:,} tokens of ")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "tokenize needs --input FILES and --output FILE"),
        (["--input", "TEXT"], "tokenize needs"),
        (["--input", "nowhere.txt", "--output", "OUT"], "input 'nowhere.txt' cannot be read"),
        (["--input", "BINARY", "--output", "OUT"], "is no UTF-8 text (byte 1)"),
        (["--input", "EMPTY", "--output", "OUT"], "not 0"),
        (["--input", "TEXT", "--output", "FOLDER"], "is a folder: give a file, for example --output "),
        (["--input", "", "--output", "OUT"], "input='' is empty"),
        (["--input", "TEXT", "--output", ""], "output='' is empty"),
        (["--input", "TEXT", "--output", "/nowhere/x.bin"], "output '/nowhere/x.bin' cannot be written"),
        (["--input", "TEXT", "--output", "OUT", "--tokenizer", "nowhere"], "tokenizer='nowhere': nowhere cannot be"),
        (["--input", "TEXT", "--output", "OUT", "--tokenizer", "TEXT"], "is no tokenizer"),
        (["--input", "TEXT", "--output", "OUT", "--tokenizer", "FOLDER"], "tokenizer.json cannot be read"),
        (["--input", "TEXT", "--output", "OUT", "--processes", "0"], "processes=0 must be at least 1"),
    ],
)
def test_refusals(words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    files = {"TEXT": b"text", "BINARY": b"a\xff", "EMPTY": b""}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    names = {name: str(tmp_path / name) for name in (*files, "OUT")} | {"FOLDER": str(tmp_path)}
    assert run.main(["tokenize", *(names.get(word, word) for word in words)]) == 2
    _, err = capsys.readouterr()
    assert said in err and err.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(files)
    assert not list(tmp_path.parent.glob(f"*{tmp_path.name}.*"))


def test_training_text_is_tokenized_once(folders: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found again by content: another text, or another tokenizer, makes another file."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "a.txt").write_text(TEXT)
    config = Config(input_bin=(str(tmp_path / "a.txt"),))
    where = folders["byte level"]
    (tokens,), (held_out,), said, end = feeds.load_corpus(config, 700, where)
    want = tokenizer.load(where)
    np.testing.assert_array_equal(np.concatenate((tokens, held_out)), [*want.encode(TEXT), want.end])
    assert end == want.end
    assert want.name in said
    monkeypatch.setattr(tokenize, "write", lambda *_: pytest.fail("tokenized again"))
    (again,), *_ = feeds.load_corpus(config, 700, where)
    np.testing.assert_array_equal(again, tokens)
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    feeds.load_corpus(config, 1000, folders["word pieces"])
    (tmp_path / "a.txt").write_text(TEXT + "x")
    feeds.load_corpus(config, 700, where)
    assert len(list((tmp_path / "cache" / "jaxpp").iterdir())) == 3


def test_a_tokenizer_larger_than_the_model(folders: dict, capsys: pytest.CaptureFixture) -> None:
    assert run.main(["--tokenizer", folders["byte level"], "--input_bin", __file__]) == 2
    assert "has 700 tokens and the model knows 256" in capsys.readouterr().err
