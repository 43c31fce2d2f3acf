"""Pending updates: those on the device between their gradient and their run, with a deadline each.

In: the device updates of `Moves` and the `MemoryLedger`. Out: the gap in which each is sure to
fit. What waits for an update is planned to stay until that deadline: so the scheduler never
paints itself into a corner: what fits with every move at the last moment always fits.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from cotrain_compile.placement.schedule.books import DoesNotFit, MemoryLedger
from cotrain_compile.placement.schedule.moves import DeviceUpdate, Fetch


@dataclass(eq=False)
class Pending:
    """A device update between its gradient and its run.

    `next_fetches` are fetched together next: the states, then a gradient that was away.
    `still_to_come_bytes` is the room that it needs to run, beyond what it holds already.
    """

    update: DeviceUpdate
    deadline: int  # the first gap in which it is sure to fit
    order: int  # in which they are sure to fit one after the other
    planned_bytes: int  # what waits for it, planned up to its deadline
    fetched: int = 0  # how many of its fetches have been issued
    counted: bool = False  # whether that has become part of what is held
    ran: bool = False
    before: Pending | None = None  # the piece before it, which runs first
    arrival_s: float | None = None  # when all that is fetched for it is there, once it is known
    next_fetches: tuple[Fetch, ...] = field(init=False)
    still_to_come_bytes: int = field(init=False)

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

    return sorted(found, key=order)


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
