"""What a run says of its steps, without waiting for them."""

import time
from collections.abc import Callable
from typing import Any

import jax

from jaxpp import devices
from jaxpp.metrics import Log


class DivergedError(RuntimeError):
    """Training cannot go on."""


def check_skipped(most: int, step: int, metrics: dict[str, float], log: Log) -> None:
    """Say which step was skipped under loss scaling. Raises DivergedError, with advice, after too many in a row."""
    skipped = int(metrics.get("skipped_steps", 0))
    if skipped:
        log.say(f"step {step} was skipped: gradients are not finite with the loss scaled by {metrics['loss_scale']:g}")
    if skipped >= most:
        raise DivergedError(
            f"max_skipped_steps={most}: {skipped} steps in a row had gradients that are not finite: use --dtype"
            f" bfloat16 or a smaller --learning_rate, and --precision_check level=1 to find the first such value"
        )


def reporter(run: Any, log: Log) -> Callable:
    """A function that logs each step once its numbers are there: those of step i while step i+1 runs, or at once when
    flushing. run: a `train.Run`."""
    waiting: list[tuple[int, dict]] = []
    clock, used = [time.perf_counter()], run.mesh.devices.ravel().tolist()

    def report(step: int | None, metrics: dict | None, flush: bool) -> None:
        if step is not None and metrics is not None:
            waiting.append((step, metrics))
        while len(waiting) > (0 if flush else 1):
            number, values = waiting.pop(0)
            found = {name: value.tolist() for name, value in jax.device_get(values).items()}
            now = time.perf_counter()
            seconds, clock[0] = now - clock[0], now
            speed = {"tokens_per_second": run.sizes.tokens / seconds, "step_seconds": seconds}
            told = devices.figures(used, run.flops_per_token * speed["tokens_per_second"])
            log.step({"step": number, **found, **speed, **told})
            check_skipped(run.config.max_skipped_steps, number, found, log)
        if step is None:
            clock[0] = time.perf_counter()  # validation is no step's time

    return report
