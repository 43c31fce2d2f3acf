"""How often each function is called in a run: what shows quadratic work without a clock."""

from __future__ import annotations

import cProfile
from collections import Counter
from collections.abc import Callable, Mapping
from types import CodeType

Function = tuple[str, int, str]
"""File, line and name; methods that dataclasses generate share theirs."""


def calls_in(run: Callable[[], object]) -> Mapping[Function, int]:
    """Calls of every function, generators by their steps and builtins included."""
    profile = cProfile.Profile()
    profile.runcall(run)
    calls: Counter[Function] = Counter()
    for entry in profile.getstats():
        calls[_function(entry.code)] += entry.callcount
    return calls


def _function(code: CodeType | str) -> Function:
    if isinstance(code, str):
        return "", 0, code
    return code.co_filename, code.co_firstlineno, code.co_name


def growing_faster(
    small: Mapping[Function, int], large: Mapping[Function, int], times: float, *, least: int
) -> dict[Function, tuple[int, int]]:
    """The functions called at least `least` times that grow by more than `times`, with calls."""
    return {
        function: (small.get(function, 0), calls)
        for function, calls in large.items()
        if calls >= least and calls > times * small.get(function, 0)
    }
