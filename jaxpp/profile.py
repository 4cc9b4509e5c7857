"""A trace of some steps, for xprof and Perfetto.

The schedule's slots are named in it by `jax.named_scope`, where they are defined: forward_slot, backward_slot,
forward_wire, backward_wire, and inside the slots embed and head.
"""

from pathlib import Path
from typing import Any

import jax


def parse_span(text: str, steps: int) -> range:
    """The steps (from 1) of START:STOP, STOP not among them.

    steps: how many the run has. Raises ValueError where it is malformed, empty or not within them.
    """
    start, colon, stop = text.partition(":")
    rule = f"use START:STOP, steps START to STOP - 1, for example --profile {max(1, steps - 1)}:{steps + 1}"
    if not (colon and start.isdecimal() and stop.isdecimal()):
        raise ValueError(f"profile={text!r} is not two whole numbers: {rule}")
    span = range(int(start), int(stop))
    if not span:
        raise ValueError(f"profile={text!r} has no step, START must be below STOP: {rule}")
    if span[0] < 1 or span[-1] > steps:
        raise ValueError(f"profile={text!r} is not within the steps 1 to {steps} of the run: {rule}")
    return span


class Trace:
    """Traces the steps of a span into a folder.

    Args: span, of `parse_span` (empty: nothing is traced); folder, made when the trace is written.
    """

    def __init__(self, span: range, folder: Path) -> None:
        self.span, self.folder, self.running = span, folder, False

    def starts(self, step: int) -> bool:
        """Whether the trace must be started before this step; a run that goes on may come in the midst of a span."""
        return step in self.span and not self.running

    def ends(self, step: int, last: bool) -> bool:
        """Whether the trace must be stopped after this step, which may be the last one that the run makes."""
        return self.running and (last or step + 1 not in self.span)

    def start(self, pending: Any) -> None:
        """Start once the arrays of the steps before are there."""
        jax.block_until_ready(pending)
        jax.profiler.start_trace(self.folder, create_perfetto_trace=True)
        self.running = True

    def stop(self, pending: Any) -> None:
        """Write the trace once the arrays of its steps are there."""
        jax.block_until_ready(pending)
        jax.profiler.stop_trace()
        self.running = False
