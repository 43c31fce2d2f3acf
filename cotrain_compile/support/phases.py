"""Phases: what of a first step is going on, for whoever shows it: tracing, planning, compiling.

What takes long says so by `tell_phase`, without knowing who listens, if anybody does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_listener: ContextVar[Callable[[str], None] | None] = ContextVar("phases", default=None)


def tell_phase(phase: str) -> None:
    """Say what is done from now on, as "compiling: 12/34": behind the last colon is a count."""
    if (listener := _listener.get()) is not None:
        listener(phase)


def is_listened() -> bool:
    """Whether phases that are told now go anywhere."""
    return _listener.get() is not None


@contextmanager
def told_to(listener: Callable[[str], None]) -> Iterator[None]:
    """Phases that are told inside go to `listener`."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


@contextmanager
def also_told_to(listener: Callable[[str], None]) -> Iterator[None]:
    """Phases that are told inside go to `listener`, and to whoever hears them already."""
    before = _listener.get()

    def both(phase: str) -> None:
        if before is not None:
            before(phase)
        listener(phase)

    with told_to(both):
        yield
