"""Clock: where in the step the list scheduler is, and predicted time of the device and every lane.

Rates are those of the machine, as in `engine`, which simulates the plan in the end; here each copy
gets its end when it is issued, so that what is issued later does not slow it down.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from cotrain_compile.machine import Machine
from cotrain_compile.plan import Lane


class Clock:
    """Predicted time in gap `gap`, which is before the op in slot `gap`.

    `now_s` is the time of the device, `free_s` when each other lane has no work left, `end_s` when
    each issued task is done. `elapsed_s[k]` is the device time of the ops before slot k.
    """

    def __init__(self, machine: Machine, elapsed_s: Sequence[float]) -> None:
        self._machine, self._elapsed_s = machine, elapsed_s
        self.gap = 0
        self.now_s = 0.0
        self.free_s = dict.fromkeys(machine.lanes, 0.0)
        self.end_s: dict[str, float] = {}

    def transfer(self, lane: Lane, name: str, nbytes: int, ready_s: float) -> None:
        """Put a copy on `lane`, slowed by the links that are busy meanwhile."""
        machine = self._machine
        start_s = max(self.now_s, ready_s, self.free_s[lane])
        seconds = machine.copy_s(nbytes, *machine.links[lane].ends)
        busy = [other for other in machine.links if other != lane and self.free_s[other] > start_s]
        at_s, left_s = start_s, seconds
        while busy:
            slower = machine.slowdown(lane, busy)
            until_s = min(self.free_s[other] for other in busy)
            done_s = min(left_s, (until_s - at_s) / slower)
            at_s, left_s = at_s + done_s * slower, left_s - done_s
            busy = [other for other in busy if self.free_s[other] > until_s]
        self.free_s[lane] = self.end_s[name] = at_s + left_s

    def host(self, name: str, seconds: float, ready_s: float) -> None:
        """Put work on the host's workers."""
        start_s = max(self.now_s, ready_s, self.free_s[Lane.HOST])
        self.end_s[name] = start_s + seconds
        self.free_s[Lane.HOST] = start_s + seconds / self._machine.lanes[Lane.HOST]

    def ready(self, tasks: Sequence[str]) -> float:
        """When all of `tasks` are done; infinity where one has not been issued."""
        return max((self.end_s.get(name, math.inf) for name in tasks), default=0.0)

    def until(self, slot: int) -> float:
        """Seconds of device work from now to `slot`."""
        return max(0.0, self._elapsed_s[slot] - self._elapsed_s[self.gap])

    def wait_until(self, end_s: float) -> None:
        """The device does nothing until `end_s`."""
        self.now_s = max(self.now_s, end_s)
