"""What metrics, TensorBoard and logging cost a step: python benchmarks/log_cost.py

Each call fetches a step's numbers from the device, as training does, and writes them: a line on the standard output
(a file, a pipe that another thread reads, a terminal with its bar), one in metrics.jsonl, with TensorBoard an event.
Printed are the median, the mean and the 99th percentile of 2,000 calls, and the mean's part of a step of 100 ms.
"""

import os
import pty
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import jax.numpy as jnp

from jaxpp import config, mesh, train
from jaxpp.metrics import Log
from jaxpp.report import reporter

CALLS, STEP_SECONDS, PAUSE = 2000, 0.1, 0.002


def _drain(end: int) -> None:
    try:
        while os.read(end, 1 << 16):
            pass
    except OSError:  # the other end of a terminal was closed
        pass


@contextmanager
def output(kind: str, folder: Path) -> Iterator[None]:
    """The standard output as a file, a pipe or a terminal; what is written to the latter two is read and dropped."""
    if kind == "file":
        with (folder / "out.txt").open("w") as file, redirect_stdout(file):
            yield
        return
    ours, theirs = os.pipe() if kind == "pipe" else pty.openpty()
    threading.Thread(target=_drain, args=(ours,), daemon=True).start()
    with os.fdopen(theirs, "w") as file, redirect_stdout(file):
        yield


def measure(kind: str, tensorboard: bool) -> list[float]:
    """Seconds of each call of a run's report, with time between calls for what is done in the background."""
    options = config.Config(pipeline_parallel=1, num_iteration=CALLS)
    run = train.make_run(options, config.sizes(options, 4, 256), mesh.make_mesh(), 4, flops_per_token=10**9)
    values = {"loss": 2.3456789, "grad_norm": 0.4567, "learning_rate": 1.2345e-3}
    metrics = [{name: jnp.float32(value + i) for name, value in values.items()} for i in range(CALLS)]
    jax.block_until_ready(metrics)
    seconds = []
    with tempfile.TemporaryDirectory() as name, output(kind, Path(name)), Log(name, CALLS, 0, tensorboard) as log:
        report = reporter(run, log)
        for i in range(CALLS):
            start = time.perf_counter()
            report(i + 1, metrics[i], False)
            seconds.append(time.perf_counter() - start)
            time.sleep(PAUSE)
    return seconds[1:]


def main() -> None:
    """Measure each kind of output, without TensorBoard and with it."""
    for kind in ("file", "pipe", "terminal"):
        for tensorboard in (False, True):
            found = measure(kind, tensorboard)
            median, mean, most = statistics.median(found), statistics.fmean(found), sorted(found)[-len(found) // 100]
            what = f"{kind}{' and TensorBoard' if tensorboard else ''}"
            figures = f"median {median * 1e6:.0f} us, mean {mean * 1e6:.0f} us, 99% below {most * 1e6:.0f} us"
            print(f"{what:24}  {figures}, {mean / STEP_SECONDS:.2%} of {STEP_SECONDS * 1e3:.0f} ms", flush=True)


if __name__ == "__main__":
    main()
