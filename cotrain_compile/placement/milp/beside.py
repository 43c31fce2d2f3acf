"""Beside: a function that runs on a thread while its caller goes on.

Unlike a `ThreadPoolExecutor`'s, its thread is waited for by nobody but who asks for the result:
neither an error in the caller nor the end of the program waits. Nor does who asks, longer than it
says.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

from cotrain_compile.placement.milp.highs_process import Stop

T = TypeVar("T")


class Beside(Generic[T]):
    """Runs `work`, from now on. As a context, it stops what `work` solves when that ends early."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._stop = Stop()
        self._future: Future[T] = Future()
        # A daemon: Python's end does not wait for it. It runs Python alone: what it solves is in
        # another process.
        threading.Thread(target=self._run, args=(work,), name="cotrain-bound", daemon=True).start()

    def __enter__(self) -> Beside[T]:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._future.done():
            self._stop.now()

    def result(self, within_s: float) -> T | None:
        """What `work` returned, None where it has not in so many seconds; raises what it raised."""
        try:
            return self._future.result(within_s)
        except TimeoutError:
            return None

    def result_by(self, seconds: float) -> T:
        """What `work` returned; after so many seconds nothing is solved for it any more."""
        if self.result(seconds) is None:
            self._stop.now()
        return self._future.result()

    def _run(self, work: Callable[[], T]) -> None:
        try:
            with self._stop.within():
                self._future.set_result(work())
        except BaseException as error:  # for the one who asks
            self._future.set_exception(error)
