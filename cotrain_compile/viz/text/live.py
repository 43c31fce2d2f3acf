"""Live: how a long run is doing, in one line on stderr that is written again and again.

In: the plan of every compiled step of a training, and when a step with it has ended. On a terminal
the line replaces itself, elsewhere plain lines come far apart. A step at which no line is due costs
a look at the clock; a stderr that takes no more text ends the line, never the training.
"""

from __future__ import annotations

import os
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from typing import TextIO

from cotrain_compile.errors import OptionError
from cotrain_compile.machine import Tier
from cotrain_compile.options.parsers import LIVE_S
from cotrain_compile.options.parts import OutputOptions
from cotrain_compile.plan import Plan
from cotrain_compile.support.units import format_bytes, format_seconds
from cotrain_compile.viz.text.narrate import verbosity

VARIABLE = "COTRAIN_LIVE"
# How often a line on a terminal is written again: faster than that nobody reads.
REWRITE_S = 0.25
# Steps that a mean is taken over.
STEPS = 20


def live_interval_s(options: OutputOptions) -> float | None:
    """Seconds between plain lines; None for no line, as where nothing else is said either.

    Raises `OptionError` when the environment says anything but 0 or 1.
    """
    asked = os.environ.get(VARIABLE)
    if asked not in (None, "0", "1"):
        raise OptionError(f"{VARIABLE} is {asked!r}, but must be 0 or 1")
    if verbosity(options) == 0 or asked == "0":
        return None
    return options.live or (LIVE_S if asked else None)


def live_line(training: Hashable, options: OutputOptions) -> LiveLine | None:
    """The line that `training` has already, where it was compiled before, else a new one.

    None where `options` want none. Raises as `live_interval_s`.
    """
    interval_s = live_interval_s(options)
    if interval_s is None:
        return None
    line = _lines.get(training)
    if line is None:
        line = _lines[training] = LiveLine(interval_s)
    return line


class LiveLine:
    """The line of one training, whose plans may change; `clock` gives seconds."""

    def __init__(self, interval_s: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self._interval_s = interval_s
        self._clock = clock
        self._steps = 0
        self._planned_after: int | None = None
        # When each of the last steps ended, and what was predicted for it, in seconds.
        self._ends: deque[tuple[float, float]] = deque(maxlen=STEPS + 1)
        self._due_s = 0.0
        self._silent = False
        self._foreseen = "predicted"

    def watch(self, plan: Plan) -> Callable[[Mapping[Tier, int]], None]:
        """What to call with the peak bytes by tier of each step with `plan`."""
        predicted_s = plan.predicted.makespan_s
        self._foreseen = plan.foreseen
        if self._steps:
            self._planned_after = self._steps
        # What it took to plan is no part of a step.
        self._ends.clear()

        def step_ended(peak_bytes: Mapping[Tier, int]) -> None:
            now_s = self._clock()
            self._steps += 1
            self._ends.append((now_s, predicted_s))
            if now_s >= self._due_s and len(self._ends) > 1 and not self._silent:
                self._write(self._line(plan.budgets, peak_bytes), now_s)

        return step_ended

    def _line(self, budgets: Mapping[Tier, int], peak_bytes: Mapping[Tier, int]) -> str:
        count = len(self._ends) - 1
        took_s = (self._ends[-1][0] - self._ends[0][0]) / count
        predicted_s = sum(list(zip(*self._ends, strict=True))[1][1:]) / count
        parts = [
            f"step {self._steps:,}",
            f"{format_seconds(took_s)} a step ({format_seconds(predicted_s)} {self._foreseen})",
            *(
                f"{t} {format_bytes(peak_bytes[t])} of {format_bytes(budgets[t])}"
                for t in peak_bytes
            ),
        ]
        if self._planned_after is not None:
            parts.append(f"planned again after step {self._planned_after:,}")
        return "cotrain  " + "  ".join(parts)

    def _write(self, line: str, now_s: float) -> None:
        # Looked up anew: a program may replace its stderr, or have none. Not by a rich console,
        # which ends the program when a pipe is broken.
        stream = sys.stderr
        try:
            if stream.isatty():
                _rewrite(stream, line)
                self._due_s = now_s + min(REWRITE_S, self._interval_s)
                self._leave_in_the_end(stream)
            else:
                stream.write(f"{line}\n")
                self._due_s = now_s + self._interval_s
            stream.flush()
        except (AttributeError, OSError, ValueError):  # None, gone, closed
            self._silent = True

    def _leave_in_the_end(self, stream: TextIO) -> None:
        """Let what comes after this training not write over the line."""
        if not hasattr(self, "_end"):
            self._end = weakref.finalize(self, _end_line, stream)


# They live as long as a compiled step has them.
_lines: weakref.WeakValueDictionary[Hashable, LiveLine] = weakref.WeakValueDictionary()


def _rewrite(stream: TextIO, line: str) -> None:
    """Replace the line; the cursor goes back to its start, where the next print writes over it."""
    columns = os.get_terminal_size(stream.fileno()).columns or 80  # some terminals do not know
    stream.write(f"\r\x1b[K{line[: columns - 1]}\r")


def _end_line(stream: TextIO) -> None:
    try:
        stream.write("\n")
        stream.flush()
    except (OSError, ValueError):
        return
