"""OffloadLane: the lane from device to host in the list scheduler, and the memory it gives back.

In: the sends of `Moves` as they become possible. Out: tasks issued in order of urgency, and waits
for those that are done or whose memory is needed. A source that is kept for its copy alone is
`held` until that wait.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass

from cotrain_compile.machine import Machine, Tier
from cotrain_compile.placement.schedule import books
from cotrain_compile.placement.schedule.books import Clock, MemoryLedger, TaskList
from cotrain_compile.placement.schedule.moves import Moves, Send
from cotrain_compile.plan import Lane, Transfer


@dataclass(frozen=True, eq=False)
class _Flight:
    """An issued offload whose wait has not been placed; the `nbytes` held for it go with it."""

    name: str
    nbytes: int
    holds_from: int


class OffloadLane:
    """Sends that are ready, and those on their way."""

    def __init__(
        self, machine: Machine, moves: Moves, clock: Clock, ledger: MemoryLedger, tasks: TaskList
    ) -> None:
        self._machine, self._moves = machine, moves
        self._clock, self._ledger, self._tasks = clock, ledger, tasks
        # By name; `_early` free no memory yet, as they are still read, and `_weights` never do.
        self._urgent: OrderedDict[str, Send] = OrderedDict()  # most urgent first
        self._early: OrderedDict[str, Send] = OrderedDict()
        self._weights: OrderedDict[str, Send] = OrderedDict()
        self._flights: list[_Flight] = []

    @property
    def unfinished(self) -> bool:
        """Whether there are sends or flights that give memory back when forced."""
        return bool(self._urgent) or self._first_due() is not None

    def open_gap(self) -> None:
        """Take note of what the op before the gap has made possible."""
        gap = self._clock.gap
        for send in self._moves.sends_ready_after.get(gap - 1, ()):
            self._add(send)
        for send in self._moves.sends_held_from.get(gap, ()):
            self._ledger.hold(send.nbytes)
            if send.name in self._early:
                self._urgent[send.name] = self._early.pop(send.name)

    def store(self, buffer: str, nbytes: int) -> None:
        """Send a fetched `buffer` back over its home; its copy is held until it is there."""
        gap = self._clock.gap
        self._ledger.hold(nbytes)
        name = books.task_name("store", buffer)
        send = Send(name, buffer, nbytes, gap - 1, gap, buffer)
        self._urgent[send.name] = send

    def feed(self, until_s: float) -> None:
        """Give the lane work until `until_s`."""
        free_s = self._clock.free_s
        if not (self._urgent or self._early or self._weights):
            return
        for queue in (self._urgent, self._early):
            while queue and free_s[Lane.D2H] < until_s:
                if self._would_hold_up_a_scalar(next(iter(queue.values()))):
                    break
                self._issue(queue.popitem(last=False)[1])
        while self._weights and free_s[Lane.D2H] < until_s:
            self._issue(self._weights.popitem(last=False)[1])

    def urge(self, names: Collection[str]) -> None:
        """Issue those of `names` now that have not been yet: something waits for them."""
        if not names:
            return
        for queue in (self._urgent, self._early, self._weights):
            found = {name for name in names if name in queue}
            # Only several have an order to keep; to look for it takes the whole queue.
            for name in [name for name in queue if name in found] if len(found) > 1 else found:
                self._issue(queue.pop(name))

    def all_urged(self, names: Collection[str]) -> bool:
        """Whether none of `names` waits among the urgent."""
        return self._urgent.keys().isdisjoint(names)

    def take_back(self) -> None:
        """Wait for the flights that are done."""
        done: list[_Flight] = []
        for flight in self._flights:  # which end one after the other
            if self._clock.end_s[flight.name] > self._clock.now_s:
                break
            if flight.holds_from <= self._clock.gap:
                done.append(flight)
        for flight in done:
            self._wait_for(flight)

    def force(self) -> bool:
        """Wait for the flight that ends first, or issue a send; False where there is neither."""
        if due := self._first_due():
            self._wait_for(due)
        elif self._urgent:
            self._issue(self._urgent.popitem(last=False)[1])
        else:
            return False
        return True

    def _add(self, send: Send) -> None:
        if send.holds_from is not None and send.holds_from > self._clock.gap and not send.is_small:
            queue = self._early
        elif send.is_small or send.holds_from is not None:
            queue = self._urgent
        else:
            queue = self._weights
        queue[send.name] = send
        if send.is_small:
            queue.move_to_end(send.name, last=False)

    def _issue(self, send: Send) -> None:
        self._tasks.issue(
            Transfer(
                send.name,
                "offload",
                send.buffer,
                send.nbytes,
                None,
                None,
                destination=send.destination,
            )
        )
        self._clock.transfer(Lane.D2H, send.name, send.nbytes, 0.0)
        if send.holds_from is not None:
            self._flights.append(_Flight(send.name, send.nbytes, send.holds_from))

    def _would_hold_up_a_scalar(self, send: Send) -> bool:
        """Whether a small copy that host updates wait for comes up long before this one ends."""
        ahead_s = 0.25 * self._machine.copy_s(send.nbytes, Tier.DEVICE, Tier.HOST)
        slots, clock = self._moves.scalar_slots, self._clock
        following = bisect_left(slots, clock.gap)
        return following < len(slots) and clock.until(slots[following] + 1) < ahead_s

    def _first_due(self) -> _Flight | None:
        """The flight that ends first of those whose waits would give memory back in this gap."""
        due = (flight for flight in self._flights if flight.holds_from <= self._clock.gap)
        return next(due, None)

    def _wait_for(self, flight: _Flight) -> None:
        self._flights.remove(flight)
        self._ledger.release(flight.nbytes)
        self._tasks.wait_for(flight.name)
        self._clock.wait_until(self._clock.end_s[flight.name])
