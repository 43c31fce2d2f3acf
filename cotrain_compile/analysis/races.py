"""Races: two accesses of one buffer, one of them a write, that nothing orders.

In: the events of a step in the order in which they are issued. Out: the first race, in words. What
orders events (Lamport, "Time, clocks, and the ordering of events", CACM 1978):

- the device's own events, one after the other;
- a task comes after its issue, which is an event of the device, and after the tasks it names;
- the copies of one direction, one after the other; updates on the host may overlap each other;
- what the device does after a wait comes after the tasks waited for.

A set of tasks is an integer with a bit for each, so that a step takes little more than one `or` for
each of its edges.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from cotrain_compile.plan import Lane

# A copy waits for those before it in its direction; the host may have several workers.
IN_ORDER = (Lane.D2H, Lane.H2D)


@dataclass(frozen=True)
class StepEvent:
    """Something that the device does (`lane` DEVICE), or the issue of a task on another lane.

    A task comes after the tasks in `after`, the device goes on after them; `after_previous` are
    tasks of the step before, which count as done where it has not started them. `reads` and
    `writes` are names of buffers; to make or to free one is to write it. `ends_step` is the moment
    at which all but the tasks left to the next step belongs to the user.
    """

    name: str
    lane: Lane
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    after_previous: tuple[str, ...] = ()
    ends_step: bool = False


@dataclass(frozen=True)
class Race:
    """Task `first`, issued before `second`, may not be done with `buffer` when `second` begins.

    `missing` says in words what would order them; `buffer` is "" where it is no matter of one.
    """

    buffer: str
    first: str
    second: str
    missing: str

    def __str__(self) -> str:
        about = f", which use {self.buffer} and of which one writes it" if self.buffer else ""
        return f"nothing orders {self.first} and {self.second}{about}: {self.missing}"


def find_race(events: Sequence[StepEvent], persistent: Collection[str]) -> Race | None:
    """The first race of a step that is run again and again, None where there is none.

    Buffers that are not `persistent` are made anew in every step. The step is followed twice: tasks
    may be left to the next one, but no further.
    """
    order = _Order(_left_to_the_next(events))
    for _ in range(2):
        order.begin_step(persistent)
        for event in events:
            race = order.add(event)
            if race is not None:
                return race
    return None


class _Order:
    """What is known to be done, event after event. `left` are the tasks left to the next step."""

    def __init__(self, left: Collection[str]) -> None:
        self.left = left
        self.left_set = 0
        self.known = 0  # the tasks that the device knows to be done
        self.names: list[str] = []  # of the tasks, by bit
        self.begun_at = 0  # the first bit of this step
        self.closure: dict[str, int] = {}  # of a task of this step: it and all before it
        self.previous: dict[str, int] = {}  # the same of the step before
        self.last: dict[Lane, int] = {}  # the same of the last task on a lane
        self.readers: dict[str, int] = {}  # by buffer
        self.writers: dict[str, int] = {}

    def begin_step(self, persistent: Collection[str]) -> None:
        """Go on with the step after."""
        self.previous, self.closure = self.closure, {}
        self.begun_at = len(self.names)
        self.readers = {name: tasks for name, tasks in self.readers.items() if name in persistent}
        self.writers = {name: tasks for name, tasks in self.writers.items() if name in persistent}

    def add(self, event: StepEvent) -> Race | None:
        """The race that `event` has with one before it; where there is none, it is noted."""
        for name in event.after:
            if name not in self.closure:
                return Race("", name, event.name, "the first has not been issued yet")
        before = self._before(event)
        late = ~before & ~(self.left_set if event.ends_step else 0)
        for buffer in event.writes:
            if first := late & (self.readers.get(buffer, 0) | self.writers.get(buffer, 0)):
                return self._race(buffer, first, event)
        for buffer in event.reads:
            if first := late & self.writers.get(buffer, 0):
                return self._race(buffer, first, event)
        if event.lane is Lane.DEVICE:
            self.known = before
        else:
            self._note(event, before)
        return None

    def _before(self, event: StepEvent) -> int:
        before = self.known
        for name in event.after:
            before |= self.closure[name]
        for name in event.after_previous:
            before |= self.previous.get(name, 0)
        return before | self.last.get(event.lane, 0)

    def _note(self, task: StepEvent, before: int) -> None:
        bit = 1 << len(self.names)
        self.names.append(task.name)
        self.closure[task.name] = before | bit
        if task.lane in IN_ORDER:
            self.last[task.lane] = before | bit
        if task.name in self.left:
            self.left_set |= bit
        for buffer in task.reads:
            self.readers[buffer] = self.readers.get(buffer, 0) | bit
        for buffer in task.writes:
            self.writers[buffer] = self.writers.get(buffer, 0) | bit

    def _race(self, buffer: str, late: int, event: StepEvent) -> Race:
        number = (late & -late).bit_length() - 1
        first = self.names[number] + (" of the step before" if number < self.begun_at else "")
        if event.lane is Lane.DEVICE:
            return Race(buffer, first, event.name, f"{event.name} does not wait for the first")
        return Race(buffer, first, event.name, f"{event.name} does not come after the first")


def _left_to_the_next(events: Iterable[StepEvent]) -> frozenset[str]:
    """The tasks that only the next step waits for."""
    device = [event for event in events if event.lane is Lane.DEVICE]
    here = {name for event in device for name in event.after}
    return frozenset(name for event in device for name in event.after_previous) - here
