"""A process of its own, in which nothing has run yet: to trace for a card that is not there.

A process that has run a backward without a card traces for none, since torch counts cards once.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from typing import TypeVar

from tests.fake_cuda.absent_library import compile_once

T = TypeVar("T")


def run_fresh(function: Callable[..., T], *arguments: object) -> T:
    """What `function`, of a module, returns there; it raises what that raises."""
    return _pool().submit(function, *arguments).result()


@cache
def _pool() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, get_context("spawn"), initializer=compile_once)
