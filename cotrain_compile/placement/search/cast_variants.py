"""Cast variants: the faster plan of the step as it casts its parameters, and with each cast once.

In: a Problem, settings, and how a step is planned. Where nothing has to move the step stays as it
is: one copy for all uses takes more memory, and saves no seconds worth it. Else the step with each
parameter cast once is planned, and, unless its plan fetches all such copies from the host, where
that cannot gain, the step as it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from cotrain_compile.errors import PlacementError
from cotrain_compile.machine import Tier
from cotrain_compile.placement.casts import has_recasts
from cotrain_compile.placement.policies import RULES, resident
from cotrain_compile.placement.problem import Problem
from cotrain_compile.placement.schedule.find_moves import moves_of
from cotrain_compile.placement.search.orders import reported_together
from cotrain_compile.placement.search.settings import SolveSettings
from cotrain_compile.plan import Plan

# How to plan a problem with so much work and plans of the same step for smaller budgets.
Climb = Callable[[Problem, SolveSettings, Sequence[Plan]], Plan]


def best_cast(
    problem: Problem, settings: SolveSettings, incumbents: Sequence[Plan], climb: Climb
) -> Plan:
    """The faster of the two plans; raises the `PlacementError` that lacks least where none fits."""
    began_s, policy = time.perf_counter(), settings.policy
    as_written = [plan for plan in incumbents if not plan.placement.casts_once]
    if not has_recasts(problem.dataflow) or _stays(problem, policy):
        return climb(problem, settings, as_written)
    found: list[Plan] = []
    refusals: list[PlacementError] = []
    own = [_with(plan, once=False) for plan in incumbents if plan.placement.casts_once]
    try:
        step = problem.casting_once().as_its_own_step()
        plan = climb(step, replace(settings, work_limit=settings.work_limit / 2), own)
        # The rules of systems that know of no casts are theirs with each cast.
        if not plan.placement.fetched_whole:
            found.append(_told(_with(plan, once=True), problem))
            if _fetches_all(problem, found[0]):
                return found[0]
    except PlacementError as refusal:
        refusals.append(refusal)
    try:
        left_s = max(0.0, settings.time_limit_s - (time.perf_counter() - began_s))
        known_s = min((settings.known_s, *(plan.predicted.makespan_s for plan in found)))
        half = settings.work_limit / 2
        within = replace(settings, work_limit=half, time_limit_s=left_s, known_s=known_s)
        found.append(climb(problem, within, as_written))
    except PlacementError as refusal:
        refusals.append(refusal)
    if not found:
        raise min(refusals, key=lambda refusal: refusal.shortfall_bytes)
    best = min(found, key=lambda plan: plan.predicted.makespan_s)
    return best if _is_rule(policy) else reported_together(best, found, _name)


def _stays(problem: Problem, policy: str) -> bool:
    """Whether `policy` leaves the step as it is on the device."""
    if policy == "resident":
        return True
    if _is_rule(policy):
        return False
    moves = moves_of(problem, resident(problem.dataflow))
    return max(moves.slot_bytes) <= problem.budgets[Tier.DEVICE]


def _is_rule(policy: str) -> bool:
    return policy.partition(":")[0] in RULES


def _fetches_all(problem: Problem, plan: Plan) -> bool:
    """Whether every parameter that is cast more than once rests off the device."""
    again = (group.param for group in problem.dataflow.updates if group.recasts)
    return all(plan.placement.is_off_device(param) for param in again)


def _with(plan: Plan, *, once: bool) -> Plan:
    return replace(plan, placement=replace(plan.placement, casts_once=once))


def _told(plan: Plan, problem: Problem) -> Plan:
    """`plan` with a note on what it casts once."""
    updates = problem.dataflow.updates
    count = sum(bool(group.recasts) for group in updates)
    casts = count + sum(len(group.recasts) for group in updates)
    note = f"{count} weights are cast once, where the step has {casts} casts of them"
    return replace(plan, notes=(*plan.notes, note))


def _name(way: str, plan: Plan) -> str:
    return f"{way}+cast-once" if plan.placement.casts_once else way
