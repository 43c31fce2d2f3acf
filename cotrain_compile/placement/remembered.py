"""Remembered: what a function has made of a value, for as long as that very value lives.

In: a pure function of a value, and maybe of a key. Out: the same function, which makes each result
once. It goes by which object the value is: a step is too large to compare, and whoever asks again
for what is made of it wants the same object as before.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Hashable
from functools import wraps
from operator import is_
from typing import Any, TypeVar

_Value = TypeVar("_Value")
_Key = TypeVar("_Key", bound=Hashable)
_Made = TypeVar("_Made")
_ABSENT: Any = object()


class Same(tuple[_Value, ...]):
    """Values as a key: equal to these very objects alone, which live as long as the key does."""

    __slots__ = ()

    def __hash__(self) -> int:
        return hash(tuple(map(id, self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and len(self) == len(other) and all(map(is_, self, other))


def _kept_of(value: object, kept: dict[int, dict[_Key, _Made]]) -> dict[_Key, _Made]:
    """What is `kept` of a value, which is forgotten with it."""
    own = kept.get(id(value))
    if own is None:
        own = kept.setdefault(id(value), {})  # two threads may be here
        weakref.finalize(value, kept.pop, id(value), None).atexit = False
    return own


def remembered_last(
    most: float,
) -> Callable[[Callable[[_Value, _Key], _Made]], Callable[[_Value, _Key], _Made]]:
    """For a function of a value and a key: of each value the `most` results made last.

    No result may refer to its value, or that stays for ever. What raises is tried again.
    """

    def remembering(make: Callable[[_Value, _Key], _Made]) -> Callable[[_Value, _Key], _Made]:
        kept: dict[int, dict[_Key, _Made]] = {}

        @wraps(make)
        def found(value: _Value, key: _Key) -> _Made:
            own = _kept_of(value, kept)
            made: _Made = own.get(key, _ABSENT)
            if made is _ABSENT:
                made = own[key] = make(value, key)
                if len(own) > most:
                    own.pop(next(iter(own)), None)
            return made

        return found

    return remembering


def remembered(make: Callable[[_Value, _Key], _Made]) -> Callable[[_Value, _Key], _Made]:
    """The same of all keys."""
    return remembered_last(math.inf)(make)


def once(make: Callable[[_Value], _Made]) -> Callable[[_Value], _Made]:
    """The same for a function of a value alone."""

    @remembered
    def kept(value: _Value, _: None) -> _Made:
        return make(value)

    @wraps(make)
    def found(value: _Value) -> _Made:
        return kept(value, None)

    return found


def once_alike(
    inputs: Callable[[_Value], tuple[object, Hashable]],
) -> Callable[[Callable[[_Value], _Made]], Callable[[_Value], _Made]]:
    """For a function that makes the same of all values with equal `inputs`.

    These are an object, with which the results are forgotten, and a key that does not refer to it.
    """

    def remembering(make: Callable[[_Value], _Made]) -> Callable[[_Value], _Made]:
        kept: dict[int, dict[Hashable, _Made]] = {}

        @wraps(make)
        def found(value: _Value) -> _Made:
            owner, key = inputs(value)
            own = _kept_of(owner, kept)
            made: _Made = own.get(key, _ABSENT)
            if made is _ABSENT:
                made = own[key] = make(value)
            return made

        return found

    return remembering
