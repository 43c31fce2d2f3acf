"""Books: what the list scheduler keeps account of: bytes, predicted time, tasks and their names.

- `MemoryLedger`: device bytes reserved at each op and between ops, from the least bytes of `Moves`
  and a budget. What is planned is known for a whole range of slots; what is `held` lingers until a
  copy is waited for or an update has run, which can be forced at any moment. Every move that cannot
  be undone is made only where it fits in all the slots it covers.
- `Clock`: where in the step the scheduler is, and the predicted time of the device and every lane.
  Rates are those of the machine, as in `engine`, which simulates the plan in the end; here each
  copy gets its end when it is issued, so that what is issued later does not slow it down.
- `TaskList`: the tasks in order of issue, each placed among the ops that run: `issue_after` and
  `wait_before` are filled in here. A name is made once, where its task is found: nobody makes it a
  second time to refer to it, or reads anything out of it, since what a task does is in its data.
- `Pending`: device updates between their gradient and their run, each with the gap in which
  it is sure to fit. What waits for an update is planned to stay until that deadline, so the
  scheduler never paints itself into a corner: what fits with every move at the last moment fits.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

import numpy as np

from cotrain_compile.machine import Machine
from cotrain_compile.placement.schedule.moves import DeviceUpdate, Fetch
from cotrain_compile.plan import Lane, Task


class DoesNotFit(Exception):
    """The moves need `nbytes` more than the budget, at the least."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(nbytes)
        self.nbytes = nbytes


class MemoryLedger:
    """Bytes on the device: planned per slot and gap (gap k is before op k), and held now.

    What is reserved is kept free in the gaps in which an update is sure to fit, so that no copy
    made early takes its room.
    """

    def __init__(
        self, budget_bytes: int, slot_bytes: Sequence[int], gap_bytes: Sequence[int]
    ) -> None:
        self.budget_bytes = budget_bytes
        self._slot_bytes = np.array(slot_bytes, dtype=np.int64)
        self._gap_bytes = np.array(gap_bytes, dtype=np.int64)
        self._reserve_bytes = np.zeros_like(self._gap_bytes)
        self._with_reserve = self._gap_bytes.copy()  # what is planned and what is reserved
        self._held_bytes = 0

    def plan(self, nbytes: int, first_gap: int, last_gap: int) -> None:
        """`nbytes` more from gap to gap."""
        self._slot_bytes[first_gap:last_gap] += nbytes
        self._gap_bytes[first_gap : last_gap + 1] += nbytes
        self._with_reserve[first_gap : last_gap + 1] += nbytes

    def hold(self, nbytes: int, *, planned_in: int | None = None) -> None:
        """`nbytes` more from now on until they are released; no longer as planned in a gap."""
        self._held_bytes += nbytes
        if planned_in is not None:
            self._gap_bytes[planned_in] -= nbytes
            self._with_reserve[planned_in] -= nbytes

    def release(self, nbytes: int) -> None:
        """`nbytes` that were held have gone."""
        self._held_bytes -= nbytes

    def reserve(self, nbytes: int, gap: int) -> None:
        """Keep at least `nbytes` free in `gap`."""
        self._set_reserve(gap, max(int(self._reserve_bytes[gap]), nbytes))

    def plan_reserved(self, nbytes: int, first_gap: int, last_gap: int) -> None:
        """`nbytes` more from gap to gap, in the last one out of what is reserved there."""
        self.plan(nbytes, first_gap, last_gap)
        self._set_reserve(last_gap, max(0, int(self._reserve_bytes[last_gap]) - nbytes))

    def _set_reserve(self, gap: int, nbytes: int) -> None:
        self._reserve_bytes[gap] = nbytes
        self._with_reserve[gap] = self._gap_bytes[gap] + nbytes

    def require_all_to_fit(self) -> None:
        """Raise `DoesNotFit` where more is planned than the budget."""
        short = int(max(self._slot_bytes.max(), self._gap_bytes.max())) - self.budget_bytes
        if short > 0:
            raise DoesNotFit(short)

    def short_of(self, gap: int, nbytes: int) -> int:
        """How much of `nbytes` more would not fit in `gap`; negative where there is room left."""
        return self._gap_bytes.item(gap) + self._held_bytes + nbytes - self.budget_bytes

    def op_fits(self, slot: int) -> bool:
        """Whether the op in `slot` may run with all that is held."""
        return self._slot_bytes.item(slot) + self._held_bytes <= self.budget_bytes

    def free_now(self, gap: int, reserved_bytes: int) -> int:
        """How much more fits around the op after `gap`, with `reserved_bytes` in gaps."""
        gaps: int = max(self._gap_bytes[gap : gap + 2].tolist()) + reserved_bytes
        return self.budget_bytes - self._held_bytes - max(self._slot_bytes.item(gap), gaps)

    def tight_until(self, gap: int, last_gap: int, nbytes: int) -> int:
        """The last gap in which, or after which, there is no room for `nbytes` more; -1 if none is.

        From `gap` to the op before `last_gap`, as planned. What is planned behind a gap only grows,
        so that there is none in all gaps before that last one.
        """
        room = self.budget_bytes - nbytes
        slots, gaps = self._slot_bytes[gap:last_gap], self._with_reserve[gap:last_gap]
        if not len(slots) or (slots.max() <= room and gaps.max() <= room):
            return -1
        return gap + int(np.flatnonzero((slots > room) | (gaps > room))[-1])

    def fits_in(self, gap: int, nbytes: int) -> bool:
        """Whether `nbytes` more fit in the one `gap`, as planned and beside what is reserved."""
        return self._with_reserve.item(gap) + nbytes <= self.budget_bytes

    def fits_in_reserve(self, gap: int, nbytes: int) -> bool:
        """Whether `nbytes` more fit in `gap` that may take what is reserved there."""
        return self._gap_bytes.item(gap) + nbytes <= self.budget_bytes


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
        return max([self.end_s.get(name, math.inf) for name in tasks]) if tasks else 0.0

    def until(self, slot: int) -> float:
        """Seconds of device work from now to `slot`."""
        return max(0.0, self._elapsed_s[slot] - self._elapsed_s[self.gap])

    def wait_until(self, end_s: float) -> None:
        """The device does nothing until `end_s`."""
        self.now_s = max(self.now_s, end_s)


class TaskList:
    """What has been issued so far. A task that nobody waits for keeps the wait it came with."""

    def __init__(self) -> None:
        self._issued: list[tuple[Task, str | None]] = []  # with the op that it is issued after
        self._waits: dict[str, str] = {}  # the op before which a task is waited for, by its name
        self._waited_for: list[str] = []
        self._last_op: str | None = None

    @property
    def tasks(self) -> list[Task]:
        """In order of issue."""
        return [
            task.between(after, self._waits.get(task.name, task.wait_before))
            for task, after in self._issued
        ]

    def issue(self, task: Task) -> None:
        """Issue `task` after the op that ran last."""
        self._issued.append((task, self._last_op))

    def wait_for(self, name: str) -> None:
        """The task called `name` is waited for before the next op, or else at the end."""
        self._waited_for.append(name)

    def run(self, ops: Sequence[str]) -> None:
        """`ops` run now: what is waited for is waited for before the first of them."""
        for name in self._waited_for:
            self._waits[name] = ops[0]
        self._waited_for.clear()
        self._last_op = ops[-1]


def task_name(verb: str, what: str) -> str:
    """The name of the task that does `verb` to the buffer or parameter `what`."""
    return f"{verb}.{what}"


@dataclass(eq=False)
class Pending:
    """A device update between its gradient and its run.

    `next_fetches` are fetched together next: the states, then a gradient that was offloaded.
    `still_to_come_bytes` is the room that it needs to run, beyond what it holds already.
    `no_room_before` is a gap before which there is sure to be none for what is fetched next.
    """

    update: DeviceUpdate
    deadline: int  # the first gap in which it is sure to fit
    order: int  # in which they are sure to fit one after the other
    planned_bytes: int  # what waits for it, planned up to its deadline
    fetched: int = 0  # how many of its fetches have been issued
    counted: bool = False  # whether that has become part of what is held
    ran: bool = False
    number: int = 0  # in which they are wanted
    before: Pending | None = None  # the piece before it, which runs first
    arrival_s: float | None = None  # when all that is fetched for it is there, once it is known
    next_fetches: tuple[Fetch, ...] = field(init=False)
    next_bytes: int = field(init=False)
    next_after: tuple[str, ...] = field(init=False)  # the tasks that these come after
    still_to_come_bytes: int = field(init=False)
    no_room_before: int = field(init=False)

    def __post_init__(self) -> None:
        self.note_fetched(0)

    @property
    def is_next(self) -> bool:
        """Whether all pieces before it have run."""
        return self.before is None or self.before.ran

    @property
    def may_be_fetched(self) -> bool:
        """Whether it has fetches left, and pieces before it have none."""
        return bool(self.next_fetches) and not (self.before and self.before.next_fetches)

    def note_fetched(self, count: int) -> None:
        """So many more of its fetches have been issued."""
        self.fetched += count
        rest = self.update.fetches[self.fetched :]
        self.next_fetches = tuple(fetch for fetch in rest if not fetch.after) or rest
        self.next_bytes = sum(fetch.nbytes for fetch in self.next_fetches)
        self.next_after = tuple(name for fetch in self.next_fetches for name in fetch.after)
        self.no_room_before = 0
        rest_bytes = sum(fetch.nbytes for fetch in rest)
        self.still_to_come_bytes = self.update.workspace_bytes + rest_bytes


def with_deadlines(
    updates: Sequence[DeviceUpdate], ledger: MemoryLedger, end: int
) -> list[Pending]:
    """`updates`, sorted by `earliest`, with the gaps up to `end` in which they are sure to fit.

    Plans in `ledger` what waits for them until then, reserves what they need to run. Returns them
    in the order in which they are wanted; raises `DoesNotFit`.
    """
    found = _last_moments(updates, ledger, end)
    pieces: dict[tuple[tuple[str, ...], int | None], Pending] = {
        (pending.update.params, pending.update.number): pending for pending in found
    }
    for pending in found:
        if pending.update.number:
            pending.before = pieces[pending.update.params, pending.update.number - 1]
        first_gap = pending.update.earliest + 1
        ledger.plan_reserved(pending.planned_bytes, first_gap, pending.deadline)
    ledger.require_all_to_fit()
    # Of those that may run at the same time the largest go first: the end of the step waits for
    # the last one's way back.
    nbytes = Counter[tuple[str, ...]]()
    for update in updates:
        nbytes[update.params] += update.fetched_bytes

    def order(pending: Pending) -> tuple[int, int, tuple[str, ...], int]:
        update = pending.update
        of_param = update.params if update.number is not None else ()
        return update.earliest, -nbytes[update.params], of_param, update.number or 0

    found.sort(key=order)
    for number, pending in enumerate(found):
        pending.number = number
    return found


def _last_moments(updates: Sequence[DeviceUpdate], ledger: MemoryLedger, end: int) -> list[Pending]:
    """In every gap the updates that fit, the smallest first; reserves what is there as they run.

    Each run only frees memory, so nothing that fits in another order is missed.
    """
    found: list[Pending] = []
    waiting: list[tuple[int, int, DeviceUpdate]] = []  # a heap: bytes to run, number, update
    waiting_bytes = 0
    of_pieces: dict[tuple[str, ...], int] = {}  # the most that one so far needs: they go in turn
    upcoming = deque(enumerate(updates))
    first_gap = updates[0].earliest + 1 if updates else end + 1
    for gap in range(first_gap, end + 1):
        while upcoming and upcoming[0][1].earliest < gap:
            number, update = upcoming.popleft()
            needed = _needed_to_run(update)
            if update.number is not None:
                needed = of_pieces[update.params] = max(needed, of_pieces.get(update.params, 0))
            heappush(waiting, (needed, number, update))
            waiting_bytes += update.waiting_bytes
        while waiting:
            needed_bytes, _, update = waiting[0]
            there = waiting_bytes + needed_bytes
            short = ledger.short_of(gap, there)
            if short > 0 and gap >= min(other.limit for *_, other in waiting):
                raise DoesNotFit(short)
            if short > 0:
                break
            heappop(waiting)
            waiting_bytes -= update.waiting_bytes
            found.append(Pending(update, gap, len(found), update.waiting_bytes))
            ledger.reserve(there, gap)
    return found


def _needed_to_run(update: DeviceUpdate) -> int:
    return update.fetched_bytes + update.workspace_bytes
