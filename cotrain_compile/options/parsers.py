"""Parsers: each reads one kind of value that a user gives for an option.

A `ValueError` says what the value must be, as the end of a sentence.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import Any, get_args

from cotrain_compile.errors import did_you_mean
from cotrain_compile.machine import LARGEST
from cotrain_compile.placement.published import EVERY_RULE

POLICIES = (
    "auto",
    *EVERY_RULE,
    "fraction:auto",
    "greedy",
    "lp-round",
    "ilp",
    "autotm-static",
    "autotm-synchronous",
    "autotm-asynchronous",
)
# Seconds between the plain lines of `live=True`.
LIVE_S = 30.0


def one_of(choices: Any) -> Callable[[object], str]:
    """What reads one of `choices`, a `Literal`."""
    allowed: tuple[str, ...] = get_args(choices)

    def parse(value: object) -> str:
        if value not in allowed:
            raise ValueError(
                f"one of {', '.join(map(repr, allowed))}{did_you_mean(value, allowed)}"
            )
        return str(value)

    return parse


def text(value: object) -> str:
    """A text or path that is not empty."""
    value = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(value, str) or not value:
        raise ValueError("a non-empty string")
    return value


def flag(value: object) -> bool:
    """True or False."""
    if not isinstance(value, bool):
        raise ValueError("True or False")
    return value


def units(value: object) -> float:
    """Units of work."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= LARGEST:
        raise ValueError("a number above 0: a unit is two to three seconds of one core")
    return float(value)


def seconds(value: object) -> float:
    """Seconds above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= LARGEST:
        raise ValueError("a number of seconds above 0")
    return float(value)


def fraction(value: object) -> float:
    """A fraction, below 1."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise ValueError("a fraction from 0 to below 1, such as 0.01")
    return float(value)


def interval(value: object) -> float | None:
    """Seconds between lines; None for no lines."""
    if isinstance(value, bool):
        return LIVE_S if value else None
    if not isinstance(value, int | float) or not 0 < value <= LARGEST:
        raise ValueError("True, False or a number of seconds above 0")
    return float(value)


def patience(value: object) -> float | None:
    """Seconds to wait; None for ever."""
    if value is False or value is None:
        return None
    try:
        return seconds(value)
    except ValueError:
        raise ValueError("a number of seconds above 0, or False") from None


def count(value: object) -> int:
    """A number of steps."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= LARGEST:
        raise ValueError("a number of steps, 0 or more")
    return value


def seed(value: object) -> int:
    """What the solver begins with."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
        raise ValueError("an integer from 0 to 2147483647")
    return value


def settings(value: object) -> Mapping[str, Any]:
    """Settings by name."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ValueError("a dictionary of settings by name")
    return dict(value)


def names(value: object) -> tuple[str, ...]:
    """Names or patterns."""
    given = value if isinstance(value, list | tuple) else None
    if given is None or not all(isinstance(name, str) and name for name in given):
        raise ValueError("a list of non-empty strings")
    return tuple(given)


def cores(value: object) -> tuple[int, ...]:
    """Cores that this process may use, in order and each once."""
    ours = sorted(os.sched_getaffinity(0))
    given = value if isinstance(value, list | tuple | range) else ()
    if not given or not all(type(core) is int and core in ours for core in given):
        shown = ", ".join(map(str, ours))
        raise ValueError(f"a list of core numbers, of the cores of this process ({shown})")
    return tuple(sorted(set(given)))


def policy(value: object) -> str:
    """A policy by name, or the share that `fraction:F` names."""
    name = str(value)
    if name in POLICIES:
        return name
    match = re.fullmatch(r"fraction:(\d*\.?\d+)", name)
    if match is None or not 0 <= float(match[1]) <= 1:
        near = did_you_mean(name, POLICIES)
        raise ValueError(f"one of {', '.join(POLICIES)}, or fraction:F with F from 0 to 1{near}")
    return name
