"""Ctrl-C at a safe moment: held back while parameters are being written."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class HeldInterrupt:
    """From `hold` to `release`, Ctrl-C is remembered; `release` raises it.

    Only the main thread gets signals; elsewhere this does nothing.
    """

    def __init__(self) -> None:
        self._previous: Any = None
        self._held = False
        self._pending = False

    def hold(self) -> None:
        if self._held or threading.current_thread() is not threading.main_thread():
            return
        self._previous = signal.signal(signal.SIGINT, self._remember)
        self._held = True

    def release(self) -> None:
        if not self._held:
            return
        signal.signal(signal.SIGINT, self._previous)
        self._held = False
        if self._pending:
            self._pending = False
            raise KeyboardInterrupt

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self._pending = True
