"""Whether an exception is the program's own, raised by a handler of a signal: a timeout, say.

Such an exception comes out of whatever happens to run, a compile too, and says nothing about that.
Its traceback goes through the code of a handler that is installed.
"""

from __future__ import annotations

import signal
import traceback
from collections.abc import Iterator
from functools import partial
from types import CodeType


def raised_by_handler(error: BaseException) -> BaseException | None:
    """Of `error` and what has led to it, the exception that a handler raised; None for none."""
    handlers = set(_code_of_handlers())
    for one in _chain(error):
        frames = traceback.walk_tb(one.__traceback__)
        if handlers and any(frame.f_code in handlers for frame, _ in frames):
            return one
    return None


def _code_of_handlers() -> Iterator[CodeType]:
    for number in signal.valid_signals():
        handler = signal.getsignal(number)
        while isinstance(handler, partial):
            handler = handler.func
        function = getattr(handler, "__func__", handler)
        if not hasattr(function, "__code__"):  # an object that can be called
            function = vars(type(handler)).get("__call__")
        if isinstance(code := getattr(function, "__code__", None), CodeType):
            yield code


def _chain(error: BaseException) -> Iterator[BaseException]:
    """`error` last: what a handler raised has been wrapped since, and all wrappers show its lines.

    Torch keeps what it wraps as `inner_exception`.
    """
    found: list[BaseException] = []
    ahead: list[BaseException | None] = [error]
    while ahead:
        one = ahead.pop()
        if one is not None and not any(one is other for other in found):
            found.append(one)
            inner = getattr(one, "inner_exception", None)
            ahead += [one.__context__, one.__cause__]
            ahead += [inner] if isinstance(inner, BaseException) else []
    return reversed(found)
