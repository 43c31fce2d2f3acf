"""The list scheduler: one pass through the step that gives every move its place in it.

In: a Problem, its Moves and Tactics. Out: tasks in order of issue, and the ops that were moved.
Times are predictions (`engine.simulate` has the last word), memory is exact: see
`books`. The lane down is in `offloads`, the host's in `host_work`; here are the gaps, the
updates on the device and the lane up.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from itertools import islice

from cotrain_compile.machine import Tier
from cotrain_compile.placement.problem import Problem
from cotrain_compile.placement.schedule.books import (
    Clock,
    MemoryLedger,
    Pending,
    TaskList,
    with_deadlines,
)
from cotrain_compile.placement.schedule.d2h_lane import OffloadLane
from cotrain_compile.placement.schedule.exchanges_ahead import elapsed_with_stalls
from cotrain_compile.placement.schedule.host_lane import HostLane
from cotrain_compile.placement.schedule.moves import Fetch, Moves
from cotrain_compile.plan import Lane, MovedOps, Task, Transfer

# Of so many updates the first whose states fit is fetched.
CANDIDATES = 8

Heap = list[tuple[float, int, Pending]]


@dataclass(frozen=True)
class Tactics:
    """How the list scheduler chooses; which choice is best is found by trying.

    `lookahead` is how long before its use a move up may be issued, as a fraction of the step. With
    `patient`, states are fetched strictly in order, largest first, though they wait for room that
    smaller ones could use at once. With `by_use`, updates on the host that may start at the same
    time go in the order in which the next step uses their weights, where steps overlap. With
    `by_layer`, the updates of a layer on the device run at one place, see `hoisted_updates`.
    """

    lookahead: float = math.inf
    patient: bool = False
    by_use: bool = False
    by_layer: bool = False


EAGER = Tactics()


class ListScheduler:
    """Schedules the moves of one placement; raises `DoesNotFit` at once. `run` once."""

    def __init__(self, problem: Problem, moves: Moves, tactics: Tactics) -> None:
        self.problem, self.moves, self.program = problem, moves, moves.program
        unlimited = tactics.lookahead == math.inf
        self.lookahead_s = math.inf if unlimited else tactics.lookahead * moves.elapsed_s[-1]
        self.candidates = 1 if tactics.patient else CANDIDATES
        self.elapsed_s = elapsed_with_stalls(problem, self.program.ops, moves.elapsed_s)
        self.clock = Clock(problem.machine, self.elapsed_s)
        self.ledger = MemoryLedger(problem.budgets[Tier.DEVICE], moves.slot_bytes, moves.gap_bytes)
        self.tasks = TaskList()
        self.offloads = OffloadLane(problem.machine, moves, self.clock, self.ledger, self.tasks)
        self.host = HostLane(
            problem, moves, self.clock, self.tasks, self.offloads, by_use=tactics.by_use
        )
        self.fetches = deque(moves.fetches)
        self.no_room_before = 0  # a gap before which there is sure to be none for the first of them
        self.upcoming = deque(with_deadlines(moves.device_updates, self.ledger, self.program.end))
        self.pending: list[Pending] = []
        # Heaps of them; what has run, or needs other bytes since, is left in one until it comes up.
        self.uncounted: Heap = []  # by deadline
        self.by_limit: Heap = []  # those that may run now, by their limit
        self.by_room: Heap = []  # by the bytes that they need, negative
        # By these, too, and by when they are there: those whose states are there or on their way.
        self.fetched: Heap = []
        self.arriving: Heap = []
        self.bare = deque[Pending]()  # those that need no states
        # In order: those that have states at home.
        self.unfetched = [pending for pending in self.upcoming if pending.next_fetches]
        self.moved: list[MovedOps] = []
        self.moved_ops: set[str] = set()

    def run(self) -> tuple[list[Task], tuple[MovedOps, ...]]:
        """Tasks in order of issue, and moved ops."""
        self.host.cast()
        for slot, op in enumerate(self.program.ops):
            op_s = self.elapsed_s[slot + 1] - self.elapsed_s[slot]
            self.clock.gap = slot
            self._open_gap()
            if self.pending:
                self._run_ready_updates()
                self._force_updates_that_would_not_fit_later()
            while not self.ledger.op_fits(slot):
                self._force()
            self._bring_what_is_needed()
            self._feed_lanes(op_s)
            self.clock.now_s += op_s
            self.tasks.run((op.name,))
        self.clock.gap = self.program.end
        self._finish()
        return self.tasks.tasks, tuple(self.moved)

    def _finish(self) -> None:
        """After the last op that stays: what is left of updates and copies."""
        self._open_gap()
        while self.pending:
            self._feed_lanes(math.inf)
            self.offloads.take_back()
            self._run_update(self._first_there() or self.pending[0])
        self._feed_lanes(math.inf)
        assert self.host.is_done and not (self.fetches or self.upcoming)

    # One gap.

    def _open_gap(self) -> None:
        """Take note of what the op before the gap has made possible."""
        gap = self.clock.gap
        if gap in self.moves.opening:
            self.offloads.open_gap()
        while self.upcoming and self.upcoming[0].update.earliest < gap:
            pending = self.upcoming.popleft()
            self.pending.append(pending)
            heappush(self.uncounted, (pending.deadline, pending.number, pending))
            if not pending.update.fetches:
                self.bare.append(pending)
        while self.uncounted and self.uncounted[0][0] <= gap:
            *_, pending = heappop(self.uncounted)
            if not pending.ran:
                # From here on it may run at any time, so that what it holds can be forced out.
                pending.counted = True
                heappush(self.by_limit, (pending.update.limit, pending.number, pending))
                _note_room(self.by_room, pending)
                self.ledger.hold(pending.planned_bytes, planned_in=gap)
        self.offloads.take_back()
        self.host.issue_ready()

    def _counted(self) -> list[Pending]:
        """The updates that may run at any time."""
        return [pending for pending in self.pending if pending.counted]

    def _force(self) -> None:
        """Give back some of what is held: wait for an offload, or run an update."""
        if not self.offloads.force():
            held = self._counted()
            assert held, "nothing is held, and yet the step does not fit"
            self._run_update(min(held, key=self._arrival_s))

    def _force_updates_that_would_not_fit_later(self) -> None:
        after = self.clock.gap + 1
        while _first(self.by_limit):
            in_time = after <= self.by_limit[0][0]
            if in_time and self.ledger.short_of(after, self._reserved()) <= 0:
                return
            ready = self._counted()
            self._run_update(max(ready, key=lambda pending: pending.still_to_come_bytes))

    def _reserved(self) -> int:
        """Room for the largest of the updates that may run now, in bytes."""
        return _most_room(self.by_room)

    def _still_to_come_beside(self, pending: Pending) -> int:
        """The most that another update needs whose states are there or on their way, in bytes."""
        nbytes = _most_room(self.fetched)
        if not self.fetched or self.fetched[0][2] is not pending:
            return nbytes
        own = heappop(self.fetched)
        nbytes = _most_room(self.fetched)
        heappush(self.fetched, own)
        return nbytes

    def _short_of(self, pending: Pending) -> int:
        """How many bytes are missing for the run of an update in this gap."""
        return self.ledger.short_of(self.clock.gap, pending.still_to_come_bytes)

    # Updates on the device.

    def _run_ready_updates(self) -> None:
        """Run the updates whose states have arrived, or that need none."""
        while (pending := self._first_ready()) is not None:
            self._run_update(pending)
            self.offloads.take_back()

    def _first_ready(self) -> Pending | None:
        """What has just arrived first, so that it is sent home early; then what needs nothing."""
        early: Heap = []
        found = None
        while found is None and _first(self.arriving) is not None:
            if self.arriving[0][0] > self.clock.now_s:
                break
            early.append(heappop(self.arriving))
            if self._may_run(early[-1][2]):
                found = early[-1][2]
        for entry in early:
            heappush(self.arriving, entry)
        if found is None and self._first_bare() is not None:
            found = next((pending for pending in self.bare if self._may_run(pending)), None)
        return found

    def _first_bare(self) -> Pending | None:
        while self.bare and self.bare[0].ran:
            self.bare.popleft()
        return self.bare[0] if self.bare else None

    def _first_there(self) -> Pending | None:
        """What has just arrived first, then what needs nothing, then what arrives next, if any."""
        bare = self._first_bare()
        arriving = _first(self.arriving)
        if arriving is not None and (bare is None or self.arriving[0][0] <= self.clock.now_s):
            return arriving
        return bare

    def _may_run(self, pending: Pending) -> bool:
        if not (pending.counted and pending.is_next) or pending.ran:
            return False
        return self._arrival_s(pending) <= self.clock.now_s and self._short_of(pending) <= 0

    def _arrival_s(self, pending: Pending) -> float:
        if pending.next_fetches:
            return math.inf
        if pending.arrival_s is None:
            pending.arrival_s = self.clock.ready([fetch.name for fetch in pending.update.fetches])
        return pending.arrival_s

    def _run_update(self, pending: Pending) -> None:
        """Run an update now, waiting for what it needs, and send its results home."""
        while not pending.is_next:
            self._run_update(self._first_of(pending))
        if pending.ran:
            return
        update = pending.update
        self._feed_lanes(update.seconds)
        while self._short_of(pending) > 0:
            if self.offloads.unfinished:
                self._force()
            elif not self._run_another(pending):
                return
        while pending.next_fetches:
            self._fetch_states(pending)
        self.pending.remove(pending)
        pending.ran = True
        for fetch in update.fetches:
            self.tasks.wait_for(fetch.name)
        self.clock.wait_until(self._arrival_s(pending))
        self.clock.now_s += update.seconds
        ops = tuple(name for name in update.ops if name not in self.moved_ops)
        self.moved_ops.update(ops)
        gap = self.clock.gap
        self.moved.append(MovedOps(ops, self.program.ops[gap - 1].name if gap else None))
        self.tasks.run(ops)
        self.ledger.release(pending.planned_bytes if pending.counted else 0)
        for name in update.stores:
            self.offloads.store(name, self.problem.dataflow.buffer[name].nbytes)

    def _first_of(self, pending: Pending) -> Pending:
        """The first piece of its update that has not run."""
        while pending.before is not None and not pending.before.ran:
            pending = pending.before
        return pending

    def _run_another(self, pending: Pending) -> bool:
        """Run first what has its states already, or was planned to; whether `pending` waits still.

        Where that is `pending` itself, its states came early, into room that what was planned
        before it has not given back yet: that runs, as far as it fits.
        """
        ready = [other for other in self.pending if other.counted or other is pending]
        first = min(ready, key=lambda other: (not other.fetched, other.order))
        if first is pending:
            others = (other for other in ready if other is not pending and other.is_next)
            fitting = [other for other in others if self._short_of(other) <= 0]
            assert fitting, f"{pending.update.params}: no room for the update"
            first = min(fitting, key=lambda other: other.order)
        self._run_update(first)
        return pending in self.pending

    def _fetch_states(self, pending: Pending) -> None:
        fetches = pending.next_fetches
        for fetch in fetches:
            self._issue_fetch(fetch)
        nbytes, is_first = pending.next_bytes, not pending.fetched
        pending.note_fetched(len(fetches))
        if nbytes or is_first:  # else it needs what it did
            _note_room(self.fetched, pending)
        if not pending.next_fetches:
            self.unfetched.remove(pending)
            heappush(self.arriving, (self._arrival_s(pending), pending.number, pending))
        pending.planned_bytes += nbytes
        if pending.counted:
            if nbytes:  # else it needs what it did
                _note_room(self.by_room, pending)
            self.ledger.hold(nbytes)
        else:
            self.ledger.plan(nbytes, self.clock.gap, pending.deadline)

    # Lanes.

    def _feed_lanes(self, ahead_s: float) -> None:
        """Give every lane work until `ahead_s` from now, as far as there is work that fits."""
        until_s = self.clock.now_s + ahead_s
        self.offloads.feed(until_s)
        self.host.issue_ready()
        while self.clock.free_s[Lane.H2D] < until_s and self._bring_next(until_s):
            pass

    def _bring_what_is_needed(self) -> None:
        """The fetches that the next op cannot do without."""
        gap = self.clock.gap
        while self.fetches and self.fetches[0].need <= gap:
            fetch = self._first_fetch()
            self._issue_fetch(fetch)
            self.ledger.plan(fetch.nbytes, gap, gap)
        self.host.return_due()
        for name in self.moves.needed_at.get(gap, ()):
            self.tasks.wait_for(name)
            self.clock.wait_until(self.clock.end_s[name])

    def _issue_fetch(self, fetch: Fetch) -> None:
        self.offloads.urge(fetch.after)
        self.tasks.issue(
            Transfer(
                fetch.name,
                "prefetch",
                fetch.buffer,
                fetch.nbytes,
                None,
                None,
                fetch.after,
                after_previous=fetch.after_previous,
            )
        )
        self.clock.transfer(Lane.H2D, fetch.name, fetch.nbytes, self.clock.ready(fetch.after))

    def _bring_next(self, until_s: float) -> bool:
        """Issue the most urgent move up that fits; False when there is none."""
        update = self.host.next_return(until_s)
        if not (update or self.fetches or self.unfetched):
            return False
        choices: list[tuple[float, Callable[[], None]]] = []
        free_bytes = self.ledger.free_now(self.clock.gap, self._reserved())
        if self.fetches and self._may_fetch(self.fetches[0], until_s, free_bytes):
            choices.append((self.clock.until(self.fetches[0].need), self._fetch_next))
        gap = self.clock.gap
        fetchable = (pending for pending in self.unfetched if pending.may_be_fetched)
        for pending in islice(fetchable, self.candidates):
            if pending.still_to_come_bytes > free_bytes or gap < pending.no_room_before:
                continue
            urgency_s = self.clock.until(pending.update.earliest + 1)
            if self._may_fetch_states(pending, urgency_s, until_s):
                choices.append((urgency_s, partial(self._fetch_states, pending)))
                break
        if update:
            choices.append(
                (self.clock.until(update.limit), partial(self.host.return_weight, update))
            )
        if not choices:
            return False
        bring = min(choices, key=lambda choice: choice[0])[1]
        bring()
        return True

    def _fetch_next(self) -> None:
        fetch = self._first_fetch()
        self.ledger.plan(fetch.nbytes, self.clock.gap, fetch.need)
        self._issue_fetch(fetch)

    def _first_fetch(self) -> Fetch:
        self.no_room_before = 0
        return self.fetches.popleft()

    def _may_fetch(self, fetch: Fetch, until_s: float, free_bytes: int) -> bool:
        gap, need = self.clock.gap, fetch.need
        if fetch.nbytes > free_bytes or gap < self.no_room_before:
            return False
        if self.clock.until(need) > self.lookahead_s or self.clock.ready(fetch.after) > until_s:
            return False
        self.no_room_before = self.ledger.tight_until(gap, need, fetch.nbytes)
        return self.no_room_before < 0 and self.ledger.fits_in(need, fetch.nbytes)

    def _may_fetch_states(self, pending: Pending, urgency_s: float, until_s: float) -> bool:
        if urgency_s > self.lookahead_s or self.clock.ready(pending.next_after) > until_s:
            return False
        gap, nbytes = self.clock.gap, pending.next_bytes
        # It is not sure to run before its deadline, so what is fetched must fit until there.
        last_gap = max(pending.deadline, gap)
        if not self.ledger.fits_in_reserve(last_gap, pending.still_to_come_bytes):
            pending.no_room_before = last_gap
            return False
        rest = max(pending.still_to_come_bytes - nbytes, self._still_to_come_beside(pending))
        if not self.ledger.fits_in_reserve(last_gap, rest + nbytes):
            return False
        pending.no_room_before = self.ledger.tight_until(gap, last_gap, nbytes)
        return pending.no_room_before < 0


def _note_room(heap: Heap, pending: Pending) -> None:
    heappush(heap, (-pending.still_to_come_bytes, pending.order, pending))


def _most_room(heap: Heap) -> int:
    """The most bytes that one in the heap needs, 0 where none is left."""
    while (pending := _first(heap)) is not None:
        if pending.still_to_come_bytes == -heap[0][0]:
            return pending.still_to_come_bytes
        heappop(heap)
    return 0


def _first(heap: Heap) -> Pending | None:
    """The first in the heap that has not run."""
    while heap and heap[0][2].ran:
        heappop(heap)
    return heap[0][2] if heap else None
