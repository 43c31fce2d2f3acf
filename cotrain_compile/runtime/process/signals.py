"""Signals at a safe moment: held back while a step writes.

Ctrl-C, and what a scheduler sends before it takes a machine away, where the program has a handler
of its own: one that saves a checkpoint must not find half a step.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

# SIGALRM is not among them: a timeout is there to end a step that hangs.
HELD = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class HeldSignals:
    """From `hold` to `release`, signals of `HELD` are remembered; `release` hands them on.

    Only those that Python handles: the others end the process at once, or do nothing. Only the main
    thread gets signals; elsewhere this does nothing.

    A handler of the program may raise between any two lines. No signal is lost for it: what comes
    while handlers are called waits for its turn, and a handler of ours that is still in place when
    nothing is held any more calls the program's at once.
    """

    def __init__(self) -> None:
        self._is_holding = False
        self._pending: list[tuple[int, FrameType | None]] = []
        self._programs_own: dict[int, Any] = {}

    def hold(self) -> None:
        """Begin to hold; does nothing while that goes on."""
        if self._is_holding or threading.current_thread() is not threading.main_thread():
            return
        self._is_holding = True
        for number in HELD:
            handler = signal.getsignal(number)
            if callable(handler) and handler != self._take:
                self._programs_own[number] = handler
                signal.signal(number, self._take)

    def release(self) -> None:
        """Call the program's handlers for what has come, in order; raises what they raise."""
        if not self._is_holding:
            return
        try:
            try:
                self._hand_on()
            finally:
                self._put_back()
        finally:  # a signal whose handler is back in its place may have broken off the first
            self._put_back()

    def _put_back(self) -> None:
        for number, handler in self._programs_own.items():
            if signal.getsignal(number) == self._take:  # no handler has set another meanwhile
                signal.signal(number, handler)

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self._is_holding:
            self._pending.append((number, frame))
        else:
            self._programs_own[number](number, frame)

    def _hand_on(self) -> None:
        """Call handlers until nothing is left, also where one raises; then nothing is held."""
        # Python looks for signals where it calls or jumps back: none comes within this expression.
        self._is_holding = self._pending != []
        if self._is_holding:
            number, frame = self._pending.pop(0)
            try:
                self._programs_own[number](number, frame)
            finally:
                self._hand_on()
