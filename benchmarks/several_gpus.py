"""The pipeline on several GPUs of one host: correctness, throughput, scaling, a peer. One call of under ten minutes:

    python benchmarks/several_gpus.py --json several.json --png several.png \
        --peer "torchrun --nproc-per-node {devices} benchmarks/torch_peer.py {sizes}"
    python benchmarks/several_gpus.py --tiny --seconds 900      # on 4 emulated CPU devices, to try it

Emulated devices share the cores: their speeds, and the scaling that is missed there, say nothing.

Every part is a process of its own, since JAX keeps a GPU's memory while it runs; the peer runs in turn with ours. A
part that fails, or that takes longer than its share of --seconds, keeps what it had found and does not stop the others;
one that no longer fits is skipped. A summary is printed last, and the exit code is 1 where a bound is missed.

--peer is any command whose last line is a JSON object with "tokens_per_second"; {devices} and {sizes} in it stand for
the number of GPUs and for the options of torch_peer.py that say the model, microbatches and schedule of ours.
"""

import argparse
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))

from several_parts import PARTS, SCALES, Scale, layouts_of

from jaxpp.curves import COLORS, GRID, INK

Found = dict[str, dict[str, Any]]  # results by part and key
BOUNDS = {"float32": 1e-5, "bfloat16": 2e-2, "scaling": 0.95, "peer": 1.10}
WIRE_NAMES = {"float32": "f32", "bfloat16": "bf16"}
LEAVE = 6  # seconds kept for the picture and the summary


class Step(NamedTuple):
    """A part in its turn: the shares of all seconds that it needs to begin, and that it may take."""

    name: str
    part: str  # of several_parts, or "peer"
    needs: float
    most: float


def steps_of(pairs: int) -> list[Step]:
    """All parts, those that matter most first."""
    first = [Step("correctness", "correctness", 0.08, 0.25), Step("llama", "llama", 0.1, 0.4)]
    turns = [(Step(f"ours {i}", "ours", 0.05, 0.2), Step(f"peer {i}", "peer", 0.05, 0.25)) for i in range(pairs)]
    last = [Step("scaling", "scaling", 0.08, 0.3), Step("wire", "wire", 0.04, 0.15), Step("gpt2", "gpt2", 0.1, 0.45)]
    return [*first, *(step for pair in turns for step in pair), *last]


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", default="several_gpus.json", help="the results")
    parser.add_argument("--png", default="several_gpus.png", help="the picture")
    parser.add_argument("--peer", help="a command that prints a peer's tokens_per_second, see above")
    parser.add_argument("--pairs", type=int, default=2, help="turns of ours and the peer")
    parser.add_argument("--seconds", type=float, default=570, help="for all parts together")
    parser.add_argument("--devices", type=int, help="how many GPUs (default: all, up to 8)")
    parser.add_argument("--parts", nargs="+", default=[*PARTS, "peer"], choices=[*PARTS, "peer"], help="only these")
    parser.add_argument("--tiny", action="store_true", help="tiny models on 4 emulated CPU devices")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    return parser.parse_args()


def gpus() -> int:
    """How many GPUs the host has, the largest of 8, 4 and 2 that there are. Raises ValueError for fewer than 2."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout.count("GPU ")
    except FileNotFoundError:
        listed = 0
    if listed < 2:
        raise ValueError(f"{listed} GPUs are too few: use --tiny for emulated devices, or say --devices 2, 4 or 8")
    return next(n for n in (8, 4, 2) if n <= listed)


def run_part(o: argparse.Namespace) -> None:
    """Be one part: start JAX, and write each result to the file --out as soon as it is there."""
    if o.tiny:
        import jaxpp  # noqa: PLC0415

        jaxpp.emulate_devices(o.devices)
    import jax  # noqa: PLC0415

    found: dict[str, Any] = {"about": {"device": jax.devices()[0].device_kind, "jax": jax.__version__}}
    path = Path(o.out)

    def note(key: str, values: dict) -> None:
        found[key] = values
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(found))
        partial.replace(path)
        print(f"  {key}: { ({k: v for k, v in values.items() if k not in ('step_seconds',)}) }", flush=True)

    PARTS[o.part](o.devices, SCALES["tiny" if o.tiny else "full"], note)


def sizes_text(scale: Scale) -> str:
    """The options of torch_peer.py for what ours runs."""
    model, rows, length = scale.shapes["llama"]
    names = {"layers": model.layers, "dim": model.dim, "heads": model.heads, "kv-heads": model.attention.kv_heads}
    names |= {"hidden": model.hidden, "vocab": model.vocab_size, "sequence": length, "microbatch": rows}
    names |= {"microbatches": scale.microbatches[1], "schedule": "1f1b"}
    return " ".join(f"--{name} {value}" for name, value in names.items())


def run_command(command: list[str], seconds: float, environment: dict[str, str]) -> tuple[str | None, str]:
    """Run a command for at most so long; what went wrong, or None, and its output. Its children end with it."""
    with tempfile.TemporaryFile("w+") as output:
        try:
            process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )
        except OSError as error:
            return str(error), ""
        wrong = None
        try:
            code = process.wait(seconds)
            wrong = f"exit code {code}" if code else None
        except subprocess.TimeoutExpired:
            wrong = f"took longer than {seconds:.0f} s"
        finally:
            end_group(process)
        output.seek(0)
        return wrong, output.read()


def end_group(process: subprocess.Popen) -> None:
    """End a process that still runs and its group: asked first, so that a launcher ends its own children."""
    for sent in (signal.SIGTERM, signal.SIGKILL):
        try:
            if process.poll() is None:
                os.killpg(process.pid, sent)
                process.wait(10)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def run_step(step: Step, o: argparse.Namespace, seconds: float, folder: Path) -> dict[str, Any]:
    """Run a part, or the peer; its status and its results."""
    here, environment = Path(__file__).resolve(), dict(os.environ)
    environment.setdefault("JAX_COMPILATION_CACHE_DIR", str(folder / "compiled"))
    environment.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    environment.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
    out = folder / f"{step.name.replace(' ', '_')}.json"
    if step.part == "peer":
        sizes = sizes_text(SCALES["tiny" if o.tiny else "full"])
        command = shlex.split(o.peer.replace("{devices}", str(o.devices)).replace("{sizes}", sizes))
    else:
        command = [sys.executable, str(here), "--part", step.part, "--out", str(out), "--devices", str(o.devices)]
        command += ["--tiny"] if o.tiny else []
    wrong, output = run_command(command, seconds, environment)
    found: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    if step.part == "peer" and wrong is None:
        try:
            found = {"peer": json.loads(output.strip().splitlines()[-1])}
            float(found["peer"]["tokens_per_second"])
        except (IndexError, KeyError, TypeError, ValueError) as error:
            found, wrong = {}, f"its last line is no JSON object with tokens_per_second ({error})"
    status = {"status": "done"} if wrong is None else {"status": "failed", "error": wrong, "output": output[-3000:]}
    return status | {"results": found}


def run_all(o: argparse.Namespace, keep: Callable[[Found], None]) -> Found:
    """Run all parts that fit into the time; keep, called with what is found after each."""
    found: Found = {}
    began = time.monotonic()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        for step in steps_of(o.pairs):
            left = o.seconds - LEAVE - (time.monotonic() - began)
            if step.part not in o.parts or (step.name.startswith(("ours", "peer")) and not o.peer):
                found[step.name] = {"status": "not asked for", "results": {}}
                continue
            if left < step.needs * o.seconds:
                found[step.name] = {"status": f"skipped: {left:.0f} s were left", "results": {}}
            else:
                start = time.monotonic()
                found[step.name] = run_step(step, o, min(left, step.most * o.seconds), Path(folder))
                found[step.name]["seconds"] = time.monotonic() - start
            seconds, error = found[step.name].get("seconds", 0), found[step.name].get("error", "")
            print(f"{step.name}: {found[step.name]['status']} {error} ({seconds:.0f} s)", flush=True)
            keep(found)
    return found


def results(found: Found, *parts: str) -> dict[str, dict]:
    """What some parts found, without what failed."""
    every = {key: values for part in parts for key, values in found.get(part, {}).get("results", {}).items()}
    return {key: values for key, values in every.items() if key != "about" and "error" not in values}


def measured_bubbles(timed: dict[str, dict]) -> dict[str, float]:
    """The bubble of each case that was timed at two M: what of a step is not M times the slope between the two."""
    groups: dict[str, list[tuple[str, int, float]]] = {}
    for key, case in timed.items():
        seconds = statistics.median(case["step_seconds"])
        groups.setdefault(key.rpartition(" ")[0], []).append((key, case["microbatches"], seconds))
    pairs = [sorted(group, key=lambda row: row[1]) for group in groups.values() if len(group) == 2]
    slopes = {id(pair): (pair[1][2] - pair[0][2]) / (pair[1][1] - pair[0][1]) for pair in pairs}
    return {key: 1 - m * slopes[id(pair)] / seconds for pair in pairs for key, m, seconds in pair}


def scaling(found: Found, devices: int) -> dict[int, float]:
    """Layers trained a second and GPU over those of one GPU, the simulated bubble taken out, by number of stages."""
    cases = results(found, "scaling")
    known = {case["devices"]: case for key, case in cases.items() if key.startswith("PP=")}
    full = best_1f1b(found)
    known |= {devices: full} if full else {}
    if 1 not in known:
        return {}
    speed = {n: case["tokens_per_second"] * case["layers"] / n for n, case in known.items()}
    return {n: speed[n] / speed[1] / (1 - case["bubble_simulated"]) for n, case in sorted(known.items())}


def best_1f1b(found: Found) -> dict | None:
    """1F1B of the LLaMA over all devices at the larger M, where it was timed."""
    cases = [case for key, case in results(found, "llama").items() if case["schedule"] == "1f1b"]
    return max(cases, key=lambda case: case["microbatches"]) if len(cases) == 2 else None


def turns(found: Found) -> list[tuple[float, float]]:
    """Tokens a second of ours and of the peer, turn by turn."""
    rates = lambda name: [case["tokens_per_second"] for case in results(found, name).values()]
    pairs = [(rates(f"ours {i}"), rates(f"peer {i}")) for i in range(len(found))]
    return [(a[0], b[0]) for a, b in pairs if a and b]


class Row(NamedTuple):
    """A line of the summary: what, its value, what is asked for ("" where nothing is), and met, missed or not run."""

    what: str
    value: str
    bound: str
    verdict: str


def row(what: str, value: float | None, bound: str = "", good: bool | None = None, form: str = ".3g") -> Row:
    """A line of a number, or of one that was not found."""
    verdict = "not run" if value is None else "" if good is None else "met" if good else "missed"
    return Row(what, "" if value is None else format(value, form), bound, verdict)


def correct_rows(found: Found, devices: int) -> Iterator[Row]:
    """Loss, gradients and permutes of every layout; in float32 the worst leaf counts, in bfloat16 all as one vector."""
    part = found.get("correctness", {}).get("results", {})
    for layout in layouts_of(devices):
        for dtype, judged in (("float32", "leaf_error"), ("bfloat16", "gradient_error")):
            case, bound = part.get(f"{layout}, {dtype}", {}), BOUNDS[dtype]
            for what, key in (("loss", "loss_error"), ("gradients", judged)):
                value = case.get(key)
                yield row(f"{layout}, {dtype}: {what}", value, f"<= {bound:g}", value is not None and value <= bound)
            kinds = case.get("permutes")
            name, said = WIRE_NAMES[dtype], ", ".join(f"{n} {kind}" for kind, n in (kinds or {}).items()) or "none"
            good = kinds is not None and all(kind.startswith(f"{name}[") for kind in kinds)
            verdict = "not run" if kinds is None else "met" if good else "missed"
            yield Row(f"{layout}, {dtype}: permutes", "" if kinds is None else said, f"all {name}", verdict)
            if "error" in case:
                yield Row(f"{layout}, {dtype}: error", case["error"][:80], "", "missed")


def speed_rows(found: Found) -> Iterator[Row]:
    """Throughput, bubble and memory of every case that was timed."""
    timed = results(found, "llama", "gpt2")
    bubbles = measured_bubbles(timed)
    for key, case in timed.items():
        used = f"MFU {case['mfu']:.3f}, " if "mfu" in case else ""
        used += f"bubble {bubbles[key]:.3f}" if key in bubbles else "bubble not measured"
        used += f" (simulated {case['bubble_simulated']:.3f}), {case['compiler_bytes'] / 2**30:.2f} GiB compiled"
        used += f", {case['peak_bytes_so_far'] / 2**30:.1f} peak so far" if "peak_bytes_so_far" in case else ""
        yield Row(key, f"{case['tokens_per_second']:,.0f} tokens/s, {used}", "", "")
    for part in ("llama", "gpt2", "scaling"):
        for key, case in found.get(part, {}).get("results", {}).items():
            if "error" in case:
                yield Row(key, case["error"][:100], "", "not run")
    for key, case in results(found, "wire").items():
        value = f"{case['seconds'] * 1e6:.1f} us a hop of {case['bytes'] / 2**20:.2f} MiB"
        yield Row(f"wire, {key}", f"{value}, {case['bytes_per_second'] / 1e9:.1f} GB/s", "", "")


def scaling_rows(found: Found, devices: int) -> Iterator[Row]:
    """Scaling over stages, stages against replicas, ours against the peer."""
    efficiency = scaling(found, devices)
    for n in [n for n in (2, 4, 8) if n <= devices]:
        value, bound = efficiency.get(n), BOUNDS["scaling"]
        yield row(f"scaling, PP {n} over linear", value, f">= {bound:g}", value is not None and value >= bound, ".3f")
    replicas, full = results(found, "scaling").get(f"DP={devices}"), best_1f1b(found)
    ratio = full["tokens_per_second"] / replicas["tokens_per_second"] if replicas and full else None
    yield row(f"tokens/s, PP {devices} over DP {devices} with ZeRO 1", ratio, form=".3f")
    ratios = [a / b for a, b in turns(found)]
    value, bound = statistics.median(ratios) if ratios else None, BOUNDS["peer"]
    good = value is not None and value >= bound
    yield row("tokens/s, ours over the peer's (median)", value, f">= {bound:g}", good, ".3f")
    if ratios:
        yield Row("  of each turn", ", ".join(f"{ratio:.3f}" for ratio in ratios), "", "")


def summary(found: Found, devices: int) -> list[Row]:
    """All lines."""
    return [*correct_rows(found, devices), *speed_rows(found), *scaling_rows(found, devices)]


def print_rows(rows: list[Row]) -> None:
    """The summary as a table."""
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    for row in rows:
        print("  ".join(f"{cell:{width}}" for cell, width in zip(row, (*widths, 0), strict=True)).rstrip())


def draw(found: Found, devices: int, to: str) -> None:
    """The picture: speed by schedule and M, bubbles, scaling, ours against the peer."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(13, 8.5), dpi=130, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    axes: dict[str, Any] = dict(zip(("speed", "bubble", "scaling", "peer"), figure.subplots(2, 2).flat, strict=True))
    timed = results(found, "llama", "gpt2")
    bars(axes["speed"], {key: case["tokens_per_second"] for key, case in timed.items()}, COLORS[0])
    bubbles = measured_bubbles(timed)
    for key, value in bubbles.items():
        model, schedule, _ = key.split(" ")
        place = ("1f1b", "interleaved", "gpipe").index(schedule)
        mark = "o" if model == "llama" else "s"
        axes["bubble"].plot(
            timed[key]["bubble_simulated"], value, mark, color=COLORS[place], label=f"{model} {schedule}"
        )
    most = max([0.1, *bubbles.values(), *(timed[key]["bubble_simulated"] for key in bubbles)])
    axes["bubble"].plot([0, most], [0, most], color=GRID, zorder=0)
    efficiency = scaling(found, devices)
    axes["scaling"].plot(list(efficiency), list(efficiency.values()), "o-", color=COLORS[0], label="over linear")
    axes["scaling"].axhline(BOUNDS["scaling"], color=COLORS[1], linestyle="--", label=f"bound {BOUNDS['scaling']}")
    axes["scaling"].set_ylim(0, max([1.1, *(1.1 * value for value in efficiency.values())]))
    axes["scaling"].set_xticks([n for n in (1, 2, 4, 8) if n <= devices])
    for i, (name, color) in enumerate((("ours", COLORS[0]), ("peer", COLORS[1]))):
        rates = [pair[i] for pair in turns(found)]
        axes["peer"].bar([n + 0.4 * i for n in range(len(rates))], rates, 0.38, color=color, label=name)
    axes["peer"].set_xticks(
        [n + 0.2 for n in range(len(turns(found)))], [f"turn {n + 1}" for n in range(len(turns(found)))]
    )
    titles = {
        "speed": f"tokens/s over {devices} devices, by model, schedule and M",
        "bubble": "measured bubble over the simulated one",
        "scaling": "speed a device over that of one, by stages, bubble taken out",
        "peer": "tokens/s, ours and the peer's in turn",
    }
    for name, title in titles.items():
        axes[name].set_title(title, loc="left", fontsize=11, fontweight="bold", color=INK)
        handles, labels = axes[name].get_legend_handles_labels()
        unique = dict(zip(labels, handles, strict=True))
        if unique:
            axes[name].legend(unique.values(), unique.keys(), frameon=False, fontsize=9)
    figure.savefig(to, format="png")


def bars(axes: Any, values: dict[str, float], color: str) -> None:
    """Horizontal bars with names, the first one above."""
    drawn = axes.barh(range(len(values)), list(values.values()), color=color)
    axes.bar_label(drawn, fmt="{:,.0f}", padding=3, fontsize=8)
    axes.margins(x=0.12)
    axes.set_yticks(range(len(values)), list(values), fontsize=8)
    axes.invert_yaxis()


def main() -> int:
    """Run the parts, write JSON and picture, print the summary."""
    o = options()
    o.devices = o.devices or (4 if o.tiny else gpus())
    if o.part:
        run_part(o)
        return 0
    whole = {"devices": o.devices, "scale": "tiny" if o.tiny else "full", "peer": o.peer}

    def keep(found: Found) -> None:
        rows = [each._asdict() for each in summary(found, o.devices)]
        bubbles = measured_bubbles(results(found, "llama", "gpt2"))
        more = {"bubbles": bubbles, "scaling": scaling(found, o.devices), "turns": turns(found), "summary": rows}
        Path(o.json).write_text(json.dumps(whole | more | {"parts": found}, indent=1))

    found = run_all(o, keep)
    draw(found, o.devices, o.png)
    rows = summary(found, o.devices)
    print_rows(rows)
    return int(any(row.verdict == "missed" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
