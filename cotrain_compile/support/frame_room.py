"""Room for the frames of all that a function calls, in one piece of memory with its own.

CPython (from 3.11 on) lays frames one behind the other in pieces of 16 KiB. A loop whose own frame
ends near the end of a piece has each of its calls map a new one, and unmap it at its return: a
system call and a page fault each, a third of the time of a step of small ops. Whether it does hangs
on how deep the user's script has called. A frame that no piece has room for gets one of its own,
which is larger.
"""

from __future__ import annotations

from types import FunctionType
from typing import TypeVar

# Words of a frame. With it a piece is of 64 KiB, half of which is left to what is called.
_WORDS = 4096

F = TypeVar("F")


def with_room(function: F) -> F:
    """`function` itself, with a frame that begins a piece of memory of its own."""
    assert isinstance(function, FunctionType)
    code = function.__code__
    function.__code__ = code.replace(co_stacksize=code.co_stacksize + _WORDS)
    return function
