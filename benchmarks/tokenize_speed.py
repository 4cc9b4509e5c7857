"""Tokens a second of `run.py tokenize` with one process and with two: python benchmarks/tokenize_speed.py"""

import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from jaxpp import data, tokenize


def main() -> None:
    """Train a byte-level BPE of 8,000 tokens on Python's own source and tokenize that, in pairs, three times."""
    corpus = bytes(data.default_corpus()[0])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        library = Tokenizer(models.BPE())
        library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        library.decoder = decoders.ByteLevel()
        library.train_from_iterator([corpus.decode()], trainers.BpeTrainer(vocab_size=8000, show_progress=False))
        library.save(str(folder / "tokenizer.json"))
        (folder / "text.txt").write_bytes(corpus * 4)
        for _ in range(3):
            for processes in (1, 2):
                start = time.perf_counter()
                count = tokenize.write([str(folder / "text.txt")], str(folder / "out.bin"), name, processes)
                seconds = time.perf_counter() - start
                print(f"{processes} processes: {count:,} tokens in {seconds:.1f} s, {count / seconds:,.0f} tokens/s")


if __name__ == "__main__":
    main()
