"""A trace of some steps, for xprof and Perfetto.

The schedule's slots are named in it: `jax.named_scope` gives the names of `SCOPES` to what they compute, where they are
defined, and the compiled program's instructions carry them. xprof knows that; in the file for Perfetto, where an event
has its instruction's name alone, they are put before it.
"""

import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

SCOPES = ("forward_slot", "backward_slot", "forward_wire", "backward_wire", "head", "embed")
_INSTRUCTION = re.compile(r'^\s*(?:ROOT )?%?([\w.-]+) = .*?\bop_name="([^"]*)"', re.MULTILINE)


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
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # a step is made of what the devices do, and each call in Python would be seen
        jax.profiler.start_trace(self.folder, profiler_options=options)
        self.running = True

    def stop(self, pending: Any, compiled: Callable[[], str]) -> None:
        """Write the trace once the arrays of its steps are there; compiled gives the text of the compiled step."""
        jax.block_until_ready(pending)
        jax.profiler.stop_trace()
        self.running = False
        for path in self.folder.glob("**/*.trace.json.gz"):
            named = path.with_name("perfetto_trace.json.gz")
            if named.exists():  # of an earlier run
                continue
            with gzip.open(path, "rt") as file:
                found = json.load(file)
            name_slots(found["traceEvents"], slot_names(compiled()))
            with gzip.open(named, "wt", compresslevel=5) as file:
                json.dump(found, file)


def slot_names(compiled: str) -> dict[tuple[str, str], str]:
    """The scopes around an instruction, such as backward_slot/head, by module and name, from a compiled program's text;
    instructions outside of all are left out."""
    module = compiled.removeprefix("HloModule ").split(",", 1)[0]
    found = {name: [part for part in op.split("/") if part in SCOPES] for name, op in _INSTRUCTION.findall(compiled)}
    return {(module, name): "/".join(scopes) for name, scopes in found.items() if scopes}


def name_slots(events: list[dict[str, Any]], slots: dict[tuple[str, str], str]) -> None:
    """Put the slots' names before those of the instructions, in events as the profiler writes them."""
    for event in events:
        told = event.get("args", {})
        slot = slots.get((told.get("hlo_module"), told.get("hlo_op")))
        if slot is not None:
            event["name"] = f"{slot} {event['name']}"
