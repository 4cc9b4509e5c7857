"""run.py plot: what is read, refused and drawn."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.image import imread

import run
from jaxpp import curves


def write(folder: Path, steps: int, end: str = "", base: float = 2.0) -> Path:
    """A run's metrics file: 7 records, and validation every second step."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for step in range(1, steps + 1):
        record = {"step": step, "loss": base + 8 / step, "grad_norm": 1 / step, "learning_rate": 1e-3 * step}
        lines.append(record | {"tokens_per_second": 1000.0 + step, "step_seconds": 0.1, "expert_load": [0.5, 0.5]})
        if step % 2 == 0:
            lines.append({"step": step, "val_loss": base + 9 / step})
    path = folder / "metrics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + end)
    return path


@pytest.mark.parametrize("end", ["", '{"step": 5, "lo', '{"step": 5'], ids=["whole", "cut", "cut too"])
def test_points(tmp_path: Path, end: str) -> None:
    found = curves.read(write(tmp_path, 4, end))
    assert {key: steps.tolist() for key, (steps, _) in found.items()} == {
        "loss": [1, 2, 3, 4],
        "val_loss": [2, 4],
        "learning_rate": [1, 2, 3, 4],
        "grad_norm": [1, 2, 3, 4],
        "tokens_per_second": [1, 2, 3, 4],
    }
    assert found["loss"][1].tolist() == [10.0, 6.0, 2 + 8 / 3, 4.0]


def seen(picture: np.ndarray, color: str) -> int:
    """How many points of a picture have just this colour."""
    return int((np.abs(picture[..., :3] - np.array(to_rgb(color))) < 1 / 255).all(axis=-1).sum())


def test_a_picture_of_three_runs(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Folders and files; a colour for each run, and none of another; odd names do not matter."""
    paths = [str(write(tmp_path / name / "out", 30, base=i)) for i, name in enumerate(("_a", "$x^$", "c"))]
    to = tmp_path / "new" / "curves.png"
    assert run.main(["plot", str(Path(paths[0]).parent), paths[1], paths[2], paths[2], "--to", str(to)]) == 0
    assert capsys.readouterr() == (f"wrote the curves of _a, $x^$, c to {to}\n", "")
    picture = imread(to)
    assert picture.shape[0] > 900
    assert picture.shape[1] > 1500
    found = [seen(picture, color) for color in curves.COLORS[:6]]
    assert min(found[:3]) > 1000
    assert max(found[3:]) == 0


def test_each_panel_has_its_curve(tmp_path: Path) -> None:
    """In each of the picture's five parts; a panel without a curve has none."""
    assert run.main(["plot", str(write(tmp_path, 30)), "--to", str(tmp_path / "a.png")]) == 0
    lines = [line for line in (tmp_path / "metrics.jsonl").read_text().splitlines() if "val_loss" not in line]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    assert run.main(["plot", str(tmp_path), "--to", str(tmp_path / "b.png")]) == 0
    for name, want in (("a.png", [True] * 5), ("b.png", [True, False, True, True, True])):
        picture = imread(tmp_path / name)
        height, width = picture.shape[:2]
        upper, lower = picture[height // 10 : height // 2], picture[height * 6 // 10 :]
        parts = [upper[:, i * width // 2 : (i + 1) * width // 2] for i in range(2)]
        parts += [lower[:, i * width // 3 : (i + 1) * width // 3] for i in range(3)]
        assert [seen(part, curves.COLORS[0]) > 100 for part in parts] == want


@pytest.mark.parametrize("value", ["NaN", "Infinity", "0", "-1"])
def test_odd_values_are_drawn(tmp_path: Path, value: str) -> None:
    """Where all are so, and where one is."""
    record = '{"step": 1, "loss": X, "val_loss": X, "grad_norm": X, "learning_rate": X, "tokens_per_second": X}\n'
    path = tmp_path / "metrics.jsonl"
    path.write_text(record.replace("X", value))
    assert run.main(["plot", str(path), "--to", str(tmp_path / "a.png")]) == 0
    path.write_text(path.read_text() + record.replace("X", "1.5").replace('"step": 1', '"step": 2'))
    assert run.main(["plot", str(path), "--to", str(tmp_path / "a.png")]) == 0


@pytest.mark.parametrize("count", [1, 49, 100, 1003])
def test_smoothed_is_the_mean_of_a_window(count: int) -> None:
    rng = np.random.default_rng(count)
    values = np.where(rng.random(count) < 0.1, np.nan, rng.normal(size=count))
    half = count // 50 // 2
    want = []
    for i in range(count):
        window = values[max(0, i - half) : i + half + 1]
        want.append(window[np.isfinite(window)].mean() if np.isfinite(window).any() else math.nan)
    np.testing.assert_allclose(curves.smoothed(values), want, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("given", "want"),
    [
        (["a/output", "b/output"], ["a", "b"]),
        (["a/output"], ["output"]),
        (["a", "a/x"], ["a", "a/x"]),
        (["x/a/o", "x/b/o", "x/b/p"], ["a/o", "b/o", "b/p"]),
        (["a/run.jsonl", "a"], ["a/run.jsonl", "a"]),
        (["a" * 70], ["…" + "a" * 60]),
    ],
)
def test_names(given: list[str], want: list[str]) -> None:
    files = [Path("/r") / name / ("" if name.endswith(".jsonl") else "metrics.jsonl") for name in given]
    assert curves._names(files) == want


FOREIGN = {
    "missing": (None, "cannot be read (No such file or directory): give the --output_dir of a run"),
    "empty": (b"", "has no step yet: give a run that has made one"),
    "text": (b"hello\nworld\n", "line 1 of"),
    "one line of text": (b"hello", "line 1 of"),
    "binary": (b"\x89PNG\xff\xfe", "cannot be read (it is not text)"),
    "other JSON": (b'{"a": 1}\n{"b": 2}\n', "line 1 of"),
    "a list": (b"[1, 2]\n[3]\n", "line 1 of"),
    "words": (b'{"step": 1, "loss": "low"}\n{"step": 2, "loss": 1}\n', "line 1 of"),
    "no curve": (b'{"step": 1, "accuracy": 1}\n', "has no step yet"),
    "in the midst": (b'{"step": 1, "loss": 1}\n{"step"\n{"step": 2, "loss": 1}\n', "line 2 of"),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_refused_files(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    content, words = FOREIGN[kind]
    if content is not None:
        (tmp_path / "metrics.jsonl").write_bytes(content)
    assert run.main(["plot", str(tmp_path), "--to", str(tmp_path / "a.png")]) == 2
    out, error = capsys.readouterr()
    assert (out, error.count("\n")) == ("", 1)
    assert words in error
    assert str(tmp_path / "metrics.jsonl") in error
    assert not (tmp_path / "a.png").exists()


@pytest.mark.parametrize("to", ["a.svg", "a", "folder.png", "/dev/null/a.png"])
def test_refused_pictures(to: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "folder.png").mkdir()
    assert run.main(["plot", str(write(tmp_path, 3)), "--to", str(tmp_path / to)]) == 2
    out, error = capsys.readouterr()
    assert (out, error.count("\n")) == ("", 1)
    assert error.startswith(f"error: to={str(tmp_path / to)!r}")
