"""Plan devices: a plan for each device of a step that is spread over several.

In: a `JointProblem`. Out: a `JointPlan`. Each part is planned by itself, in turn, within its device
and what the parts before it have left of the host; once as if its links were its own, and once as
if all others were always busy. Of these the one that is faster when all run is taken. No program
spans the devices, so nothing is certified about the whole step.
"""

from __future__ import annotations

from dataclasses import replace

from cotrain_compile.machine import Tier
from cotrain_compile.placement.devices.simulate_devices import joined, problem_of, staged_bytes
from cotrain_compile.placement.joint import JointPlan, JointProblem
from cotrain_compile.placement.search.solve import SolveSettings, solve
from cotrain_compile.plan import Plan


def plan_devices(problem: JointProblem, settings: SolveSettings | None = None) -> JointPlan:
    """The faster of both joint plans, each part by `settings` (the greedy, where none are given).

    Raises `PlacementError` where a part does not fit its device, or not what is left of the host.
    """
    # Each part by layers in another order would have parts wait for each other's values in a ring.
    settings = replace(settings or SolveSettings("greedy"), micro_batch_order="as-written")
    candidates = [
        joined(problem, _plans(problem, settings, crowded=crowded)) for crowded in (False, True)
    ]
    return min(candidates, key=lambda plan: plan.step_s)


def _plans(problem: JointProblem, settings: SolveSettings, *, crowded: bool) -> dict[str, Plan]:
    plans: dict[str, Plan] = {}
    host_bytes = problem.budgets[Tier.HOST] - staged_bytes(problem)
    for device in problem.parts:
        part = problem_of(problem, device, max(0, host_bytes), crowded=crowded)
        plans[device] = solve(part, settings)
        host_bytes -= plans[device].predicted.peak_bytes[Tier.HOST]
    return plans
