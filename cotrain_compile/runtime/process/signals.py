"""Signals at a safe moment: held back while parameters are being written.

Ctrl-C, and what a scheduler sends before it takes a machine away, where the program has a handler
of its own: one that saves a checkpoint must not find half an update.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

_Signal = tuple[int, FrameType | None]

HELD = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class HeldSignals:
    """From `hold` to `release`, signals of `HELD` are remembered; `release` hands them on.

    Only those that Python handles: the others end the process at once, or do nothing. Only the main
    thread gets signals; elsewhere this does nothing.
    """

    def __init__(self) -> None:
        self._handlers: dict[int, Any] = {}
        self._pending: list[_Signal] = []

    def hold(self) -> None:
        """Begin to hold; does nothing while that goes on."""
        if self._handlers or threading.current_thread() is not threading.main_thread():
            return
        for number in HELD:
            handler = signal.getsignal(number)
            if callable(handler):
                self._handlers[number] = handler
                signal.signal(number, self._remember)

    def release(self) -> None:
        """Call the program's handlers for what has come, in order; raises what they raise."""
        handlers, self._handlers = self._handlers, {}
        for number, handler in handlers.items():
            signal.signal(number, handler)
        pending, self._pending = self._pending, []
        _hand_on(pending, handlers)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self._pending.append((number, frame))


def _hand_on(pending: Sequence[_Signal], handlers: Mapping[int, Any]) -> None:
    """Call the handler of each, also where one before it raises."""
    if pending:
        (number, frame), *others = pending
        try:
            handlers[number](number, frame)
        finally:
            _hand_on(others, handlers)
