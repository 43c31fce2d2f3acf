"""A handler that raises at any point of holding and releasing: nothing is lost, nothing is dead."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import pytest

from cotrain_compile.runtime.process import signals
from cotrain_compile.runtime.process.signals import HELD, HeldSignals


class Arrived(Exception):
    """What the program's handler raises."""


@contextmanager
def programs_handlers(called: list[int]) -> Iterator[Any]:
    def handle(number: int, frame: FrameType | None) -> None:
        called.append(number)
        raise Arrived

    before = {number: signal.signal(number, handle) for number in HELD}
    try:
        yield handle
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def arriving(number: int, at: int) -> tuple[Any, list[int]]:
    """A trace that has `number` arrive before the `at`-th line of the module; how many ran."""
    lines = [0]

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        if frame.f_code.co_filename != signals.__file__:
            return None
        if event in ("line", "call"):
            lines[0] += 1
            if lines[0] == at:
                sys.settrace(None)
                frame.f_trace = None
                signal.raise_signal(number)
        return trace

    return trace, lines


def held_and_released(number: int, at: int, before: tuple[int, ...]) -> tuple[list[int], int]:
    """The signals that the program's handlers get, and how many lines there are to arrive at."""
    called: list[int] = []
    with programs_handlers(called) as handle:
        trace, lines = arriving(number, at)
        held, traced = HeldSignals(), sys.gettrace()
        sys.settrace(trace)
        try:
            with suppress(Arrived):
                held.hold()
            for one in before:
                with suppress(Arrived):
                    signal.raise_signal(one)
            with suppress(Arrived):
                held.release()
        finally:
            sys.settrace(traced)
        assert [signal.getsignal(n) for n in HELD] == [handle] * len(HELD)
    return called, lines[0]


@pytest.mark.parametrize("before", [(), (signal.SIGTERM, signal.SIGUSR1)])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_at_any_line_is_handled_once(number: int, before: tuple[int, ...]) -> None:
    _, lines = held_and_released(number, 0, before)
    assert lines > 50
    for at in range(1, lines + 1):
        called, _ = held_and_released(number, at, before)
        assert sorted(called) == sorted([number, *before]), at


def test_two_signals_in_release_leave_every_handler_at_work() -> None:
    """The second comes while the first is dealt with: what is installed still passes on."""
    called: list[int] = []
    with programs_handlers(called):
        for first in range(1, 40):
            held = HeldSignals()
            held.hold()
            trace, _ = arriving(signal.SIGINT, first)
            sys.settrace(trace)
            try:
                with suppress(Arrived):
                    held.release()
                    signal.raise_signal(signal.SIGINT)
            finally:
                sys.settrace(None)
            for number in HELD:
                called.clear()
                with pytest.raises(Arrived):
                    signal.raise_signal(number)
                assert called == [number]
