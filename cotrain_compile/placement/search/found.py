"""Found: the fastest schedule of every way that was tried, by the name of the way.

In: a Problem and drafts of plans for it. Out: the fastest plan that the check takes. What the check
refuses is never the answer; that it was found, or that nothing could be made, is a fault of this
package, however the search goes on: `UNSOUND` has the words of all of this process, so that tests
and campaigns fail on it, and the logger `cotrain_compile` tells it at debug level.

A placement is also tried with those of its updates on the host on guesses that begin early enough.
A plan is hedged where that is all that guesses have changed: while they are held back it is the
plan that waits, which was looked for without them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from cotrain_compile.dataflow.guesses import guesses_of
from cotrain_compile.errors import PlacementError, PlanError
from cotrain_compile.machine import Tier
from cotrain_compile.placement.check.check import check
from cotrain_compile.placement.problem import Problem
from cotrain_compile.placement.residency import HOST_MODES
from cotrain_compile.placement.schedule.list_scheduler import EAGER, Tactics
from cotrain_compile.placement.schedule.schedule import Draft, draft, finished
from cotrain_compile.placement.simulate.outcomes import outcomes
from cotrain_compile.placement.work import Meter
from cotrain_compile.plan import HostRegion, Milestone, Placement, Plan

# Orders of updates on the host where they may go on in the next step.
OVERLAPPING = (Tactics(by_use=True), EAGER)


class Missing(NamedTuple):
    """What a placement lacks."""

    tier: Tier
    nbytes: int


@dataclass
class Found:
    """Schedules of `problem`, each tried with overlapping steps as well if they may overlap.

    And with updates on guesses, if the problem allows them. `beaten` are those that were the
    fastest of their way before, the last one last. `course` has each that was the fastest of all
    when it was found, with what `meter` had counted then.
    """

    problem: Problem
    overlap_steps: bool
    meter: Meter = field(default_factory=Meter)
    course: list[Milestone] = field(default_factory=list)
    drafts: dict[str, Draft] = field(default_factory=dict)
    beaten: dict[str, list[Draft]] = field(default_factory=dict)

    @cached_property
    def guessed(self) -> tuple[str, ...]:
        """The parameters whose updates may be done on guesses, if any may."""
        return tuple(guesses_of(self.problem.dataflow)) if self.problem.speculates else ()

    @property
    def fastest(self) -> Draft | None:
        return min(self.drafts.values(), key=lambda found: found.step_s, default=None)

    def fastest_s(self, recomputed: tuple[str, ...]) -> float:
        """Seconds of the fastest one that makes these values again; infinity without any."""
        own = (d for d in self.drafts.values() if d.placement.recomputed == recomputed)
        return min((found.step_s for found in own), default=math.inf)

    def keep(self, name: str, found: Draft) -> None:
        """Keep `found`, or the same placement with overlapping steps, if it is the fastest yet."""
        for candidate in (found, *on_guesses(self.problem, found, self.guessed)):
            self._keep(name, candidate)
            for overlapping in self._overlapping(candidate.placement):
                self._keep(name, overlapping)

    def keep_plan(self, plan: Plan) -> None:
        """Keep a plan of the same step, if it is the fastest of its policy."""
        found = Draft(plan.placement, plan.tasks, plan.moved, plan.predicted.makespan_s)
        self._keep(plan.placement.policy, found)

    def prefer(self, name: str, found: Draft) -> None:
        """Keep `found` in place of what that way has, be it as fast."""
        if name in self.drafts:
            self.beaten.setdefault(name, []).append(self.drafts[name])
        self.drafts[name] = found

    def drop(self, name: str) -> None:
        """Forget what a way has, and go back to what it had before, if it had anything."""
        del self.drafts[name]
        if before := self.beaten.get(name):
            self.drafts[name] = before.pop()

    def _keep(self, name: str, found: Draft) -> None:
        best = self.drafts.get(name)
        if best is None or found.step_s < best.step_s:
            fastest = self.fastest
            if fastest is None or found.step_s < fastest.step_s:
                self.course.append(Milestone(self.meter.spent, name, found.step_s))
            self.prefer(name, found)

    def _overlapping(self, placement: Placement) -> Iterator[Draft]:
        """`placement` with updates on the host that go on in the next step, where there are any."""
        if not (self.overlap_steps and HOST_MODES.intersection(placement.updates.values())):
            return
        for tactics in OVERLAPPING:
            # Not where the host has no room for what updates of two steps read.
            with suppress(PlacementError):
                yield draft(self.problem, replace(placement, overlap_steps=True), tactics=tactics)


ROUNDING = 1.0 + 1e-9


def on_guesses(problem: Problem, found: Draft, guessed: Collection[str]) -> Iterator[Draft]:
    """`found` with the updates on guesses that begin early enough, where there are any.

    Guesses may be made in updates of the parameters `guessed`.
    """
    modes = found.placement.updates
    hosted = [param for param in guessed if modes[param] in HOST_MODES]
    if not hosted or not found.placement.early_updates:
        return
    # Not where the host has no room for what they save.
    with suppress(PlacementError):
        placement = replace(found.placement, speculative=tuple(hosted))
        tried = draft(problem, placement, tactics=found.tactics)
        begun = {t.param for t in tried.tasks if isinstance(t, HostRegion) and t.guesses}
        placement = replace(placement, speculative=tuple(p for p in hosted if p in begun))
        yield replace(tried, placement=placement)


def hedged(problem: Problem, waiting: Plan, found: Draft, *, compiled: bool | None) -> Plan:
    """`waiting`, the plan of `found`, with guesses where they gain and cost nothing held back."""
    waits_s = outcomes(problem, waiting).right_s * ROUNDING
    for tried in on_guesses(problem, found, tuple(guesses_of(problem.dataflow))):
        plan = finished(problem, tried, compiled=compiled)
        gains = plan.predicted.makespan_s < waiting.predicted.makespan_s
        if plan.speculations and gains and outcomes(problem, plan).held_back_s <= waits_s:
            return plan
    return waiting


UNSOUND: list[str] = []


def sound(problem: Problem, name: str, make: Callable[[], Plan]) -> Plan:
    """What `make` makes of what was found by the way called `name`: it passes the check.

    Raises `PlanError`, which is noted, where it does not, or where it contradicts the step so much
    that no plan can be made of it.
    """
    try:
        plan = make()
        check(problem, plan)
    except PlanError as error:
        note_unsound(name, error)
        raise
    return plan


def note_unsound(name: str, error: PlanError) -> None:
    """Count what was found by the way called `name` as a fault, because of `error`."""
    UNSOUND.append(f"{name}: {error}")
    logging.getLogger("cotrain_compile").debug("dropped the plan of %s: %s", name, error)
