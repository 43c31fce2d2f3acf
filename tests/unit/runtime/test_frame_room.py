"""Frames of what a step calls lie in one piece of memory, however deep the script has called."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable

from cotrain_compile.support.collector import with_room

CALLS, DEPTHS = 500, 200


def called(number: int) -> int:
    a = b = c = d = e = f = g = h = number
    return max(a, b, c, d, e, f, g, h)


def loop() -> int:
    return sum([called(number) for number in range(CALLS)])


def faults_at(depth: int, function: Callable[[], int]) -> int:
    """Page faults of `function`, called by so many functions that call each other."""
    if depth:
        return faults_at(depth - 1, function)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    function()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def test_no_depth_of_calls_makes_each_call_of_a_loop_map_memory() -> None:
    loop()
    if sys.version_info < (3, 14):  # the one depth in some 200 that pays, as CPython is
        assert max(faults_at(depth, loop) for depth in range(DEPTHS)) >= CALLS
    roomy = with_room(lambda: loop())
    assert max(faults_at(depth, roomy) for depth in range(DEPTHS)) < CALLS / 5
