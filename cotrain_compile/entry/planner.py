"""Planner: the problem of a step, and the plan for it, from what a user asked of plans.

In: a `StepGraph` and its dataflow, the planning part of the options, and what is known besides:
what ran before, what a dry run has found, who trains together. Out: a `Problem` and a checked
`Plan`. Nothing behind it reads that part of the options again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from cotrain_compile.analysis.costs import CostTable
from cotrain_compile.backends.devices import machine_for
from cotrain_compile.dataflow import Dataflow
from cotrain_compile.distribute.agree import ALONE, Together
from cotrain_compile.entry.choose_plan import plan_as_before, plan_for
from cotrain_compile.files import load
from cotrain_compile.graph import StepGraph
from cotrain_compile.machine import Tier
from cotrain_compile.options import as_option_error
from cotrain_compile.options.parts import PlanningOptions
from cotrain_compile.placement.check.check import check
from cotrain_compile.placement.problem import Problem, formulate
from cotrain_compile.placement.simulate.outcomes import outcomes
from cotrain_compile.plan import Placement, Plan
from cotrain_compile.support.phases import tell_phase
from cotrain_compile.support.units import format_bytes


@dataclass(frozen=True)
class Planner:
    """How a step is planned.

    Where the placement `before`, of the same training, fits it is used again. The plan keeps to
    `plan_bytes` on the device, if any; the step may take all of the budget. `workspace` has bytes
    that kernels were seen to take while they run, beside what its dataflow knows, by op. The ranks
    that train `together` have one plan.
    """

    options: PlanningOptions
    before: Placement | None = None
    plan_bytes: int | None = None
    workspace: Mapping[str, int] = field(default_factory=dict)
    together: Together = ALONE

    def problem(
        self, step: StepGraph, dataflow: Dataflow, *, captured: bool, compiled: bool
    ) -> Problem:
        """That of `step`, whose `dataflow` has the sizes to plan for, in all of the budgets.

        Its host updates run as `captured` or fused, its ops as compiled code or one by one.
        """
        if self.workspace:
            dataflow = dataflow.with_workspace(self.workspace)
        if not self.together.plans_alike:
            dataflow = dataflow.with_own_plans()
        machine = machine_for(step, self.options)
        budgets = self.together.least(self.options.budgets(machine))
        profile = profile_of(self.options)
        return formulate(dataflow, machine, budgets, profile, captured=captured, compiled=compiled)

    def plan(self, allowed: Problem) -> tuple[Problem, Plan]:
        """The problem in what the plan may take of the budgets of `allowed`, and the plan."""
        less = self.plan_bytes
        problem = allowed if less is None else allowed.with_budget(Tier.DEVICE, less)
        plan = self.together.plan(lambda: self._own(problem))
        check(problem, plan)
        if self.workspace:
            plan = replace(plan, notes=(*plan.notes, _workspace_told(self.workspace)))
        if problem is not allowed:
            plan = replace(plan, budgets=allowed.budgets)
        return problem, plan

    def _own(self, problem: Problem) -> Plan:
        """What this process finds."""
        compiled = bool(problem.compiled)
        if self.before is not None:
            again = plan_as_before(problem, self.options, self.before, compiled=compiled)
            if again is not None:
                return again
        return plan_for(problem, self.options, compiled, _tell_planning)

    def guesses_below(self, problem: Problem, plan: Plan) -> float:
        """The share of wrong guesses below which updates on guesses run, where there are any."""
        adapts = bool(plan.speculations) and self.options.speculate == "auto"
        return outcomes(problem, plan).pays_below if adapts else math.inf

    @property
    def recomputes_exactly(self) -> bool:
        """Whether what is made again has the code of what was made first, whatever surrounds it."""
        return self.options.recompute == "exact"


def profile_of(options: PlanningOptions) -> CostTable | None:
    """The measured costs in the file that `options` name.

    Raises `OptionError` naming the option where it cannot be read, `FormatError` where it is not
    what it should be.
    """
    if options.profile is None:
        return None
    with as_option_error("profile", options.profile):
        return load(options.profile, CostTable)


def _tell_planning(stage: str) -> None:
    tell_phase(f"planning: {stage}")


def _workspace_told(workspace: Mapping[str, int]) -> str:
    return (
        f"{len(workspace)} ops are planned with a workspace of up to "
        f"{format_bytes(max(workspace.values()))}, which compiled code and kernels took inside in "
        "a dry run"
    )
