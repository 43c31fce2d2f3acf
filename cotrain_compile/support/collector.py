"""Collector: Python's garbage collector, switched off where there is next to nothing to collect.

A captured step is about twenty objects a node that the collector follows, beside half a million of
torch's own. Tracing, planning and rewriting make many more, nearly all of which stay or go by their
reference counts; yet each makes the collector go through everything, for up to a third of the time.

Room for the frames of all that a function calls, in one piece of memory with its own.

CPython (from 3.11 on) lays frames one behind the other in pieces of 16 KiB. A loop whose own frame
ends near the end of a piece has each of its calls map a new one, and unmap it at its return: a
system call and a page fault each, a third of the time of a step of small ops. Whether it does hangs
on how deep the user's script has called. A frame that no piece has room for gets one of its own,
which is larger.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import TypeVar


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


# Words of a frame. With it a piece is of 64 KiB, half of which is left to what is called.
_WORDS = 4096

F = TypeVar("F")


def with_room(function: F) -> F:
    """`function` itself, with a frame that begins a piece of memory of its own."""
    assert isinstance(function, FunctionType)
    code = function.__code__
    function.__code__ = code.replace(co_stacksize=code.co_stacksize + _WORDS)
    return function
