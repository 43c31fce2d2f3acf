"""Stopwatch: what finding a plan takes, by the clock and of processors.

A computer that others use shows in the one and hardly in the other: processor time is that of this
process and of those in which HiGHS solves, some of it at the same time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from cotrain_compile.placement.milp.highs_process import end_waiting


@dataclass
class Took:
    """Seconds; 0 until it is over."""

    wall_s: float = 0.0
    processor_s: float = 0.0


@contextmanager
def stopwatch() -> Iterator[Took]:
    """Measure what happens within."""
    took = Took()
    before_s, began = _processor_s(), time.monotonic()
    try:
        yield took
    finally:
        took.wall_s = time.monotonic() - began
        took.processor_s = _processor_s() - before_s


def _processor_s() -> float:
    end_waiting()  # only those that have ended are counted
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system
