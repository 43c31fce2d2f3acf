"""Sensitivity: what limits a plan, by simulating it again with one thing a little faster.

In: a Problem and a plan of it. Out: for each lane, by what share of its own speed-up the step
becomes faster: 1 where the step takes as long as that lane works, 0 where the lane does not
matter. The tasks stay as they are. Whether the device's memory limits too is read off the peak.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from cotrain_compile.machine import Tier
from cotrain_compile.placement.placed import place_plan
from cotrain_compile.placement.problem import Problem
from cotrain_compile.placement.simulate.engine import Work, simulate
from cotrain_compile.placement.simulate.predict import joined_works_of, lanes_of
from cotrain_compile.plan import Plan

# How much faster a lane is made: enough to stand out of rounding, little enough to be a slope.
FASTER = 0.02
# A peak this close to its budget, as a share, leaves no room for another large tensor.
FULL = 0.01


@dataclass(frozen=True)
class Limits:
    """What a plan's step time hangs on.

    `shares` has for each lane the relative gain of the step per relative gain of the lane;
    `full` the tiers whose peak is at the budget; none where nothing had to move.
    """

    step_s: float
    shares: Mapping[str, float]
    full: tuple[Tier, ...]

    @property
    def first(self) -> str:
        """The lane that the step hangs on most."""
        return max(self.shares, key=lambda lane: self.shares[lane])


def limits(problem: Problem, plan: Plan) -> Limits:
    """What limits `plan`, simulated again with the costs of `problem`."""
    works = joined_works_of(place_plan(problem, plan))
    step_s = _simulated_s(problem, works)
    shares = {}
    for lane in problem.machine.lanes:
        faster = [
            replace(work, seconds=work.seconds * (1 - FASTER)) if work.lane == lane else work
            for work in works
        ]
        gain = 1 - _simulated_s(problem, faster) / step_s if step_s else 0.0
        shares[lane] = max(0.0, gain / FASTER)
    return Limits(step_s, shares, tuple(tier for tier in plan.tiers if _is_full(plan, tier)))


def _simulated_s(problem: Problem, works: Sequence[Work]) -> float:
    machine = problem.machine
    return simulate(works, lanes_of(machine), machine.contention).makespan_s


def _is_full(plan: Plan, tier: Tier) -> bool:
    budget = plan.budgets[tier]
    return bool(plan.tasks) and plan.predicted.peak_bytes.get(tier, 0) >= (1 - FULL) * budget
