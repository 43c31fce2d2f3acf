"""A throttled link: copies on the emulated device take what the machine's link takes for them.

A link passes one copy after the other without anybody's help, where a thread that stands in for it
sleeps until a copy's end, awakes late, and would begin each copy by that much later than the link:
over hundreds of small copies a step is a tenth too long. So a link has a clock of its own. A copy
begins when it may and the one before has passed, whenever its thread is there to see that.
"""

from __future__ import annotations

from collections.abc import Callable

from cotrain_compile.runtime.network import sleep_until


class ThrottledLink:
    """One direction of a link; of one thread."""

    def __init__(self) -> None:
        self._free_s = 0.0

    def carry(
        self, copy: Callable[[], object], ready_s: float, link_s: float, copying_s: float
    ) -> None:
        """Do `copy` so that it ends when the link has passed it, `link_s` after it began.

        It may begin from `ready_s` on, by `perf_counter`. It starts `copying_s`, which it takes
        about, before its end: the bytes land as late as they may, so that a missing wait shows.
        """
        self._free_s = max(self._free_s, ready_s) + link_s
        sleep_until(self._free_s - copying_s)
        copy()
        sleep_until(self._free_s)
