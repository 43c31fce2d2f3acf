"""Collector: Python's garbage collector, switched off where there is next to nothing to collect.

A captured step is about twenty objects a node that the collector follows, beside half a million of
torch's own. Tracing, planning and rewriting make many more, nearly all of which stay or go by their
reference counts; yet each makes the collector go through everything, for up to a third of the time.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_off() -> Iterator[None]:
    """Within it nothing is collected; cycles that are let go there wait until its end.

    Where the collector is off already, it stays off. Also a decorator.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
