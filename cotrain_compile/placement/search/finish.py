"""Finish: the plan of the fastest schedule that a search has found and that passes the check.

In: what was found, maybe for the step folded, and plans that were given. Out: a plan of the step as
it is written. What was found for the folded step is scheduled again for that.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from cotrain_compile.errors import PlacementError, PlanError
from cotrain_compile.placement.problem import Problem
from cotrain_compile.placement.schedule.schedule import Draft, draft, finished
from cotrain_compile.placement.search.found import Found, hedged, sound
from cotrain_compile.placement.search.settings import SolveSettings
from cotrain_compile.plan import Plan


class NothingFits(PlacementError):
    """Nothing does of a folded step; what a user is told is about the step as it is written."""

    def __init__(self) -> None:
        super().__init__("nothing fits folded", shortfall_bytes=0)


@dataclass
class Finish:
    """How what is found becomes a plan of the step of `problem`.

    It was found for the same step folded where that `is_folded`: then `given` are plans of the step
    itself that no plan is to be slower than.
    """

    problem: Problem
    settings: SolveSettings
    is_folded: bool
    given: list[Plan] = field(default_factory=list)

    def fastest_of(self, found: Found) -> tuple[str, Plan]:
        """The fastest plan that passes the check, and the way that it was found.

        What does not pass is dropped. Raises its `PlanError` where there is nothing else, or
        `NothingFits`.
        """
        drafts = found.drafts
        while True:
            name = min(drafts, key=lambda name: drafts[name].step_s)
            try:
                plan = sound(self.problem, name, partial(self._plan_of, drafts[name]))
            except (PlanError, PlacementError):
                found.drop(name)
                if not drafts and self.is_folded:
                    raise NothingFits from None
                if not drafts:
                    raise
            else:
                return self._no_slower_than_given(name, plan)

    def _plan_of(self, found: Draft) -> Plan:
        if self.is_folded:
            found = draft(self.problem, found.placement, tactics=found.tactics)
        return self._finished(found)

    def _no_slower_than_given(self, name: str, plan: Plan) -> tuple[str, Plan]:
        given = min(self.given, key=_step_s, default=plan)
        if _step_s(plan) <= _step_s(given):
            return name, plan
        name = given.placement.policy
        found = Draft(given.placement, given.tasks, given.moved, _step_s(given))
        return name, sound(self.problem, name, partial(self._finished, found))

    def _finished(self, found: Draft) -> Plan:
        compiled = self.settings.compiled
        plan = finished(self.problem, found, compiled=compiled)
        if self.settings.speculate and self.settings.hedged:
            return hedged(self.problem, plan, found, compiled=compiled)
        return plan


def _step_s(plan: Plan) -> float:
    return plan.predicted.makespan_s
