"""Signals at a safe moment: held back while what a step writes is being written.

Ctrl-C, and what a scheduler sends before it takes a machine away, where the program has a handler
of its own: one that saves a checkpoint must not find half an update. An alarm (SIGALRM) is not
held: it is there to break off what hangs, a step too.

A handler of the program's may run and raise between any two lines, also of `release`. So what is
installed meanwhile passes on to the program's handler as soon as nothing is held, whether or not
that one is back in its place: no signal is ever without its handler.
"""

from __future__ import annotations

import signal
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from operator import length_hint
from types import FrameType
from typing import Any

HELD = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

# Calls in C: no other handler comes between taking a call out of its list and making it.
_call: Callable[[partial[Any]], Any] = partial.__call__


class HeldSignals:
    """From `hold` to `release`, signals of `HELD` are remembered; `release` hands them on.

    Only those that Python handles: the others end the process at once, or do nothing. Only the main
    thread gets signals; elsewhere this does nothing.
    """

    def __init__(self) -> None:
        self._is_holding = False
        self._holds_all = False
        self._handlers: dict[int, Any] = {}
        self._pending: list[partial[Any]] = []
        self._to_hand_on = iter(self._pending)

    def hold(self) -> None:
        """Begin to hold; does nothing while that goes on."""
        if self._holds_all or threading.current_thread() is not threading.main_thread():
            return
        if not length_hint(self._to_hand_on):
            self._pending = []
            self._to_hand_on = iter(self._pending)
        self._is_holding = True
        for number in HELD:
            handler = signal.getsignal(number)
            if callable(handler) and handler != self._take:
                self._handlers[number] = handler
                signal.signal(number, self._take)
        self._holds_all = True

    def release(self) -> None:
        """Call the program's handlers for what has come, in order; raises what they raise.

        Each step of it may be done twice: a handler that is back and raises breaks off the first
        time, and then the second does the rest.
        """
        try:
            self._release()
        finally:
            self._release()

    def _release(self) -> None:
        self._is_holding = self._holds_all = False
        try:
            for number, handler in list(self._handlers.items()):
                # A handler may have been replaced by one that has run.
                if signal.getsignal(number) == self._take:
                    signal.signal(number, handler)
                self._handlers.pop(number, None)
        finally:
            self._hand_on()

    def _hand_on(self) -> None:
        """Call the handler of each, also where one before it raises."""
        try:
            deque(map(_call, self._to_hand_on), maxlen=0)
        finally:
            if length_hint(self._to_hand_on):
                self._hand_on()

    def _take(self, number: int, frame: FrameType | None) -> None:
        handler = self._handlers[number]
        if self._is_holding:
            self._pending.append(partial(handler, number, frame))
        else:
            handler(number, frame)
