"""Remembered: what a function has made of a value, for as long as that very value lives.

In: a pure function of a value and a key. Out: the same function, which makes each result once. It
goes by which object the value is: a step is too large to compare, and whoever asks again for what
is made of it wants the same object as before.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from functools import wraps
from typing import TypeVar

_Value = TypeVar("_Value")
_Key = TypeVar("_Key", bound=Hashable)
_Made = TypeVar("_Made")


def remembered(make: Callable[[_Value, _Key], _Made]) -> Callable[[_Value, _Key], _Made]:
    """`make`, whose results are kept with their value; none may refer to it, or it stays for ever.

    What raises is tried again.
    """
    kept: dict[int, dict[_Key, _Made]] = {}

    @wraps(make)
    def found(value: _Value, key: _Key) -> _Made:
        own = kept.get(id(value))
        if own is None:
            own = kept.setdefault(id(value), {})  # two threads may be here
            weakref.finalize(value, kept.pop, id(value), None).atexit = False
        if key not in own:
            own[key] = make(value, key)
        return own[key]

    return found
