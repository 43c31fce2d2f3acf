"""Found: the fastest schedule of every way that was tried, by the name of the way."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from cotrain_compile.errors import PlacementError
from cotrain_compile.guesses import guesses_of
from cotrain_compile.machine import Tier
from cotrain_compile.placement.problem import Problem
from cotrain_compile.placement.residency import HOST_MODES
from cotrain_compile.placement.schedule.list_scheduler import EAGER, Tactics
from cotrain_compile.placement.schedule.schedule import Draft, draft
from cotrain_compile.placement.search.guessing import on_guesses
from cotrain_compile.placement.work import Meter
from cotrain_compile.plan import Milestone, Placement, Plan

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
