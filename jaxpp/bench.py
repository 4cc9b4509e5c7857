"""What our training step is worth beside a peer's: both in turn on the same machine, and the ratio with its spread.

A turn of ours is a process of its own, so that it starts fresh and gives back all memory before the peer's turn; a turn
of a peer is any command that prints "N tokens/s".
"""

import json
import os
import platform
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxpp import bench_report, checkpoint, devices, feeds, mesh, train
from jaxpp.bench_report import OURS, Turn
from jaxpp.config import Config
from jaxpp.options import check_ranges, option

KINDS = ("train", "slots")  # what can be measured; run.py has a function for each
WARM_UP = 4  # steps before those that are timed; the first of them compiles
LAST_LINES = 12  # of a peer that fails
PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy")

_NUMBER = r"(\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?)"
# What a peer may say: a turn's key, how the number stands in its output, and what it is multiplied with. The last that
# is found of a key counts.
SAID = (
    ("tokens_per_second", rf"(?<![\d.,]){_NUMBER} ?tokens/s(?:ec)?\b", 1),
    ("tokens_per_second", rf'"tokens_per_second": ?{_NUMBER}', 1),
    ("peak_bytes_in_use", rf"peak {_NUMBER} ?GiB", 2**30),
    ("peak_bytes_in_use", rf'"peak_bytes": ?{_NUMBER}', 1),
    ("mfu_said", rf"MFU {_NUMBER}(?![\d.]* ?%)", 1),
    ("mfu_said", rf"MFU {_NUMBER} ?%", 0.01),
    ("loss", rf"loss {_NUMBER}", 1),
    ("loss", rf'"loss": ?{_NUMBER}', 1),
)


@dataclass(frozen=True)
class BenchConfig(Config):
    """Measure the training step: tokens/s, MFU, peak memory, in turn with peers.

    The options of training say what is trained, so that --config of a run measures its step; the text is random.
    """

    what: tuple[str, ...] = option(
        ("train",), f"what is measured: {', '.join(KINDS)}", str, KINDS, many=True, positional=True
    )
    bench_steps: int = option(15, "steps that are timed in a turn", int, least=1)
    turns: int = option(2, "turns of ours, and of each peer", int, least=1)
    peer: tuple[str, ...] | None = option(
        None, "whole command lines, each in quotes, that print 'N tokens/s' (default: none)", str, many=True
    )
    bench_layers: int | None = option(None, "only the model's first layers (default: all)", int, least=1)
    ranks: tuple[int, ...] | None = option(None, "of slots: stages to measure (default: all)", int, many=True, least=0)
    to: str = option("bench", "folder for bench.json and bench.png")


class Count(NamedTuple):
    """A way to count the FLOPs of a token: in words, and how many they are."""

    formula: str
    flops: int


def check(config: BenchConfig) -> None:
    """Check what needs neither model nor device. Raises ValueError."""
    check_ranges(config)
    if len(config.what) > 1:
        raise ValueError(f"what={' '.join(config.what)!r}: one at a time, for example bench {config.what[0]}")
    processes = mesh.started(config.num_processes)
    if processes > 1:
        raise ValueError(f"num_processes={processes}: bench measures one process: use --num_processes 1")
    if config.precision_check is not None:
        raise ValueError(f"precision_check={config.precision_check!r} is not measured by bench: leave it out")
    for command in config.peer or ():
        try:
            words = shlex.split(command)
        except ValueError as error:
            raise ValueError(f"peer={command!r} is no command line ({error}): close its quotes") from None
        if not words or shutil.which(words[0]) is None:
            raise ValueError(
                f"peer={command!r} names no program that is there: give a whole command line, for example"
                f" --peer 'python peer.py'"
            )
    stages = config.stages or 4
    for rank in config.ranks or ():
        if rank >= stages:
            raise ValueError(f"ranks={rank} must be below pipeline_parallel={stages}, for example --ranks 0")
    checkpoint.check_writable(config.to, "to")


def layers_of(config: BenchConfig, layers: int) -> int:
    """How many of a model's layers are measured. Raises ValueError where it has fewer than are asked for."""
    asked = config.bench_layers or layers
    if asked > layers:
        raise ValueError(
            f"bench_layers={asked} is more than the {layers} layers of the model: use at most --bench_layers {layers}"
        )
    return asked


def random_batches(run: train.Run, vocab: int, steps: int) -> Any:
    """Batches of random tokens, drawn from the run's seed, new ones for each of so many steps."""
    count = steps * run.sizes.tokens + run.sizes.length + 1
    tokens = np.random.default_rng(run.config.seed).integers(0, vocab, count, np.int32)
    tokens[-1] = 0  # where documents are kept apart, the end of one
    plain = replace(run.config, input_bin=None, input_val_bin=None, data_weights=None)
    return feeds.make_batches(plain, run.sizes, feeds.Corpus((tokens,), (tokens[:0],), "random tokens", 0))


def measure(run: train.Run, build: train.Build, vocab: int, counts: Mapping[str, Count], steps: int) -> Turn:
    """Time steps of training on random tokens, each alone: its batch is there before, its results after.

    Args: vocab, tokens that there are; counts, of the FLOPs of a token, by the key of the MFU that each gives; steps,
    those that are timed.
    Returns: the turn, and under `about` what all turns share.
    """
    batches, rows = random_batches(run, vocab, WARM_UP + steps), train.rows_here(run)
    state, step, seconds, metrics = train.initial_state(run, build), train.make_step(run), [], {}
    for i in range(WARM_UP + steps):
        batch = jax.block_until_ready(train.put_batch(run, batches.at(i, rows), rows))
        start = time.perf_counter()
        with jax.transfer_guard("disallow"):
            state, metrics = step(state, batch)
        jax.block_until_ready((state, metrics))
        seconds.append(time.perf_counter() - start)
    timed = seconds[WARM_UP:]
    speed = run.sizes.tokens / statistics.median(timed)
    used = run.mesh.devices.ravel().tolist()
    told = {name: devices.figures(used, each.flops * speed) for name, each in counts.items()}
    return {
        "tokens_per_second": speed,
        "step_ms": [1e3 * s for s in timed],
        "step_ms_median": 1e3 * statistics.median(timed),
        "compile_seconds": seconds[0] - statistics.median(timed),
        "loss": float(metrics["loss"]),
        **{name: found["mfu"] for name, found in told.items() if "mfu" in found},
        **{name: n for found in told.values() for name, n in found.items() if name == "peak_bytes_in_use"},
        "about": {
            "device": used[0].device_kind,
            "devices": len(used),
            "peak_flops": devices.peak_flops(used[0].device_kind),
            "xla_flags": os.environ.get("XLA_FLAGS", ""),
            "tokens_per_step": run.sizes.tokens,
            "sizes": asdict(run.sizes),
            "flops_per_token": {name: each._asdict() for name, each in counts.items()},
        },
    }


def in_a_process(function: Callable[[Any], Turn], argument: Any) -> Turn:
    """What a function returns, run in a new process that then ends. Raises what it raises."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, argument).result()


def parse_peer(text: str) -> Turn:
    """What a peer's output says of it, see `SAID`."""
    found: Turn = {}
    for key, pattern, scale in SAID:
        for match in re.finditer(pattern, text):
            found[key] = float(match[1].replace(",", "")) * scale
    return found


def run_peer(command: str) -> Turn:
    """A turn of a peer. Raises RuntimeError, with its last lines, where it fails or says no tokens a second."""
    try:
        done = subprocess.run(
            shlex.split(command), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
    except OSError as error:
        raise RuntimeError(f"peer={command!r} cannot be run ({error.strerror})") from None
    found = parse_peer(done.stdout)
    if not done.returncode and found.get("tokens_per_second"):
        return found
    wrong = f"ended with exit code {done.returncode}" if done.returncode else "printed no 'N tokens/s'"
    last = "\n".join(done.stdout.splitlines()[-LAST_LINES:])
    raise RuntimeError(f"peer={command!r} {wrong}; its last lines:\n{last}")


def order(turns: int, peers: Sequence[str]) -> list[str]:
    """Who runs when: ours before each turn of each peer, so that what is compared stands side by side."""
    groups = [(OURS, peer) for peer in peers] or [(OURS,)]
    return [who for _ in range(turns) for group in groups for who in group]


def ratios(turns: Sequence[Turn]) -> dict[str, dict[str, Any]]:
    """By peer, our tokens/s over its: of each adjacent pair, their median, least and most."""
    found: dict[str, list[float]] = {}
    for ours, theirs in pairwise(turns):
        if theirs["who"] != OURS:
            found.setdefault(theirs["who"], []).append(ours["tokens_per_second"] / theirs["tokens_per_second"])
    return {
        who: {"each": each, "median": statistics.median(each), "min": min(each), "max": max(each)}
        for who, each in found.items()
    }


def facts(config: BenchConfig, name: str) -> dict[str, Any]:
    """What every bench.json begins with; name, of what is measured."""
    return {
        "what": config.what[0],
        "name": name,
        "command": shlex.join(["python", *sys.argv]),
        "versions": {"python": platform.python_version(), **{package: version(package) for package in PACKAGES}},
        "options": asdict(config),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }


def once(config: BenchConfig, function: Callable[[Any], dict[str, Any]], name: str) -> None:
    """Measure something by one function of the config, in a process of its own, and write bench.json."""
    path = Path(config.to) / "bench.json"
    path.write_text(json.dumps(facts(config, name) | in_a_process(function, config), indent=1) + "\n", encoding="utf-8")
    print(f"wrote {path}", flush=True)


def against(config: BenchConfig, turn: Callable[[Any], Turn], name: str) -> int:
    """Measure in turn, and write bench.json after each turn, then bench.png and a table.

    Args: turn, of ours, given the config in a process of its own; name, of what is measured.
    Returns: the exit code, 1 where a turn fails; what was measured before is written then too.
    Raises ValueError for options that our turn refuses.
    """
    found: dict[str, Any] = facts(config, name) | {"turns": [], "ratios": {}}
    path, failed = Path(config.to) / "bench.json", ""
    for i, who in enumerate(order(config.turns, config.peer or ()), 1):
        try:
            one = in_a_process(turn, config) if who == OURS else run_peer(who)
        except RuntimeError as error:  # of XLA too, where memory does not suffice, and of a process that is killed
            failed = f"turn {i}, {who}: {error}"
            break
        found |= one.pop("about", {})
        found["turns"].append({"who": who, **one})
        found["ratios"] = ratios(found["turns"])
        path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print(f"turn {i}, {who}: {one['tokens_per_second']:,.0f} tokens/s", flush=True)
    if found["turns"]:
        bench_report.draw(found, str(path.with_suffix(".png")))
        print("\n".join(bench_report.lines(found)))
        print(f"wrote {path} and {path.with_suffix('.png')}", flush=True)
    if failed:
        print(f"error: {failed}", file=sys.stderr)
    return 1 if failed else 0
