"""A throttled network: each exchange takes as long as the machine's network says.

Ranks on one machine exchange data at the speed of its memory. Here an exchange goes its real way
and then waits until that network would have brought it, too. Exchanges take turns, as on the lane
of a plan. Time counts from where this rank begins one: one that comes first waits for the others
anyway.

A throttled link: copies on the emulated device take what the machine's link takes for them.

A link passes one copy after the other without anybody's help, where a thread that stands in for it
sleeps until a copy's end, awakes late, and would begin each copy by that much later than the link:
over hundreds of small copies a step is a tenth too long. So a link has a clock of its own. A copy
begins when it may and the one before has passed, whenever its thread is there to see that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

# Linux wakes a sleeping thread this much late (prctl(2), PR_SET_TIMERSLACK).
_TIMER_SLACK_S = 50e-6


class ThrottledNetwork:
    """`seconds` has what each exchange takes, by the op that begins it."""

    def __init__(self, seconds: Mapping[str, float]) -> None:
        self._seconds = seconds
        self._free_s = 0.0
        self._under_way: dict[str, tuple[float, float]] = {}

    def start_step(self) -> None:
        """Forget what a step that failed has left under way."""
        self._under_way.clear()

    def begin(self, op: str) -> None:
        """The exchange that `op` begins takes its turn."""
        begins_s = max(self._free_s, time.perf_counter())
        self._free_s = begins_s + self._seconds[op]
        self._under_way[op] = begins_s, self._free_s

    def wait(self, op: str) -> tuple[float, float]:
        """Return when the network has brought it, with when it had begun and when it was done."""
        begins_s, done_s = self._under_way[op]
        sleep_until(done_s)
        return begins_s, done_s


def sleep_until(time_s: float) -> None:
    """Return at `time_s` of `perf_counter`, or at once where that is over."""
    time.sleep(max(0.0, time_s - time.perf_counter() - _TIMER_SLACK_S))


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
