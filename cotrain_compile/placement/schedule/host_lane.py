"""The host's lane in the list scheduler: casts, updates, and the new weights' way back.

In: the casts and host updates of `Moves`. Out: regions issued when their inputs are on their way
(an update on guesses first, where there is one),
and a prefetch over the old parameter for each update whose parameter is at home on the device. What
may go on in the next step is deferred, and waited for there before its first use.
"""

from __future__ import annotations

from bisect import insort
from collections import deque

from cotrain_compile.dataflow import UpdateGroup
from cotrain_compile.placement.problem import Problem
from cotrain_compile.placement.schedule import books
from cotrain_compile.placement.schedule.books import Clock, TaskList
from cotrain_compile.placement.schedule.d2h_lane import OffloadLane
from cotrain_compile.placement.schedule.moves import Moves, SpeculativeUpdate, UpdateOnHost
from cotrain_compile.plan import HostRegion, Lane, Transfer


class HostLane:
    """Updates that wait for their gradients, and new weights that wait for their way back."""

    def __init__(
        self,
        problem: Problem,
        moves: Moves,
        clock: Clock,
        tasks: TaskList,
        offloads: OffloadLane,
        *,
        by_use: bool,
    ) -> None:
        self._buffers, self._moves = problem.dataflow.buffer, moves
        self._clock, self._tasks, self._offloads = clock, tasks, offloads
        self._by_use = by_use
        order = _as_weights_are_used if by_use else _as_gradients_land
        self._waiting = deque(sorted(moves.host_updates, key=order))
        found = [update for update in moves.host_updates if update.speculation is not None]
        self._speculative = deque(sorted(found, key=_as_guesses_allow))
        self._guessed: set[str] = set()  # names of what was issued on guesses
        self._returning: list[UpdateOnHost] = []  # the first to be done first

    @property
    def is_done(self) -> bool:
        return not self._waiting and not self._returning

    def cast(self) -> None:
        """At the start of the step: make the low-precision copies."""
        for cast in self._moves.casts:
            region = HostRegion(
                cast.name,
                cast.param,
                cast.ops,
                None,
                None,
                makes=cast.makes,
                after_previous=cast.after_previous,
            )
            self._tasks.issue(region)
            self._clock.host(cast.name, cast.seconds, 0.0)

    def issue_ready(self) -> None:
        """Issue the updates whose inputs are all on their way, or that can wait no longer.

        By the use of weights, each in its turn: its inputs then go before those of others.
        """
        gap = self._clock.gap
        if self._speculative:
            self._speculate(gap)
        if not self._waiting or self._waiting[0].earliest >= gap:
            return
        held_back: deque[UpdateOnHost] = deque()
        while self._waiting and self._waiting[0].earliest < gap:
            update = self._waiting.popleft()
            due = self._by_use or update.limit <= gap
            if due or self._offloads.all_urged(update.inputs):
                self._offloads.urge(update.inputs)
                self._issue(update)
            else:
                held_back.append(update)
        self._waiting.extendleft(reversed(held_back))

    def _speculate(self, gap: int) -> None:
        """Issue the updates on guesses whose inputs are all on their way, or must be."""
        held_back: deque[UpdateOnHost] = deque()
        while self._speculative and _as_guesses_allow(self._speculative[0]) < gap:
            update = self._speculative.popleft()
            found = update.speculation
            assert found is not None
            if not self._begins_before_it_is_known(update):
                continue
            if self._offloads.all_urged(found.inputs):
                self._issue_speculation(update.group, found)
            else:
                held_back.append(update)
        self._speculative.extendleft(reversed(held_back))

    def _begins_before_it_is_known(self, update: UpdateOnHost) -> bool:
        """Whether the host has time for an update on guesses before it could have the values."""
        clock = self._clock
        known_s = clock.now_s + clock.until(update.earliest + 1)
        return update.earliest >= clock.gap and clock.free_s[Lane.HOST] < known_s

    def _issue_speculation(self, group: UpdateGroup, found: SpeculativeUpdate) -> None:
        self._guessed.add(found.name)
        self._offloads.urge(found.inputs)
        after = (*found.inputs, *found.after)
        self._tasks.issue(
            HostRegion(
                found.name,
                group.param,
                group.ops,
                None,
                None,
                after,
                after_previous=found.after_previous,
                guesses=found.guesses,
            )
        )
        self._clock.host(found.name, found.seconds, self._clock.ready(after))

    def next_return(self, until_s: float) -> UpdateOnHost | None:
        """The update whose weight may go back next, None where none is done by `until_s`."""
        first = self._returning[0] if self._returning else None
        return first if first and self._done_s(first) <= until_s else None

    def return_due(self) -> None:
        """Issue the ways back of the weights that the next op needs."""
        if self._returning:
            for update in [u for u in self._returning if u.limit <= self._clock.gap]:
                self.return_weight(update)

    def return_weight(self, update: UpdateOnHost) -> None:
        """Move the new parameter over the old one."""
        self._returning.remove(update)
        param = update.group.param
        task = Transfer(
            books.task_name("prefetch", param),
            "prefetch",
            param,
            self._buffers[param].nbytes,
            None,
            self._limit(update),
            (update.name,),
            param,
            deferred=update.next_use is not None,
        )
        self._tasks.issue(task)
        self._clock.transfer(Lane.H2D, task.name, task.nbytes, self._done_s(update))

    def _issue(self, update: UpdateOnHost) -> None:
        group, name = update.group, update.name
        guess = update.speculation
        confirms = guess.name if guess is not None and guess.name in self._guessed else ""
        after = (*update.inputs, *update.after, *([confirms] if confirms else []))
        deferred = update.next_use is not None
        self._tasks.issue(
            HostRegion(
                name,
                group.param,
                group.ops,
                None,
                self._limit(update),
                after,
                deferred=deferred,
                confirms=confirms,
            )
        )
        self._clock.host(name, 0.0 if confirms else update.seconds, self._clock.ready(after))
        if update.returns:
            insort(self._returning, update, key=self._done_s)

    def _done_s(self, update: UpdateOnHost) -> float:
        return self._clock.end_s[update.name]

    def _limit(self, update: UpdateOnHost) -> str | None:
        """Waited for at the end of the step, or before the op that reads the result."""
        program = self._moves.program
        slot = update.limit if update.next_use is None else update.next_use
        return program.ops[slot].name if slot < program.end else None


def _as_guesses_allow(update: UpdateOnHost) -> int:
    """First what may begin first on guesses."""
    assert update.speculation is not None
    return update.speculation.earliest


def _as_gradients_land(update: UpdateOnHost) -> int:
    """Keeps the host busy: first the update whose gradient can be there first."""
    return update.earliest


def _as_weights_are_used(update: UpdateOnHost) -> tuple[int, int]:
    """Lets the next step wait least: of those that may start together, first what it uses first."""
    return update.earliest, -1 if update.next_use is None else update.next_use
