"""Orders: the fastest plan over the orders in which the micro-batches of a step may run.

In: a Problem, settings, and how a step in one order is planned. The order that the step has comes
first. Where its plan moves anything and is slower than the device alone, or there is none, the same
is done for the step in packs of one layer, and of more as long as that is faster.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from cotrain_compile.dataflow import Phase
from cotrain_compile.errors import PlacementError
from cotrain_compile.placement.order.by_layer import OrderIsKept, pack_sizes
from cotrain_compile.placement.problem import Problem
from cotrain_compile.placement.search.settings import SolveSettings
from cotrain_compile.placement.work import Allowance, Meter
from cotrain_compile.plan import Plan

# How to plan a problem in the order of its ops, with so much work, and with plans of that order for
# smaller budgets.
Climb = Callable[[Problem, Allowance, Sequence[Plan]], Plan]


def best_order(
    problem: Problem, settings: SolveSettings, incumbents: Sequence[Plan], climb: Climb
) -> Plan:
    """The fastest plan over the orders that `settings` allow.

    A note says where micro-batches were to run by layer and cannot. Raises the `PlacementError` of
    the order that lacks least where none fits.
    """
    work = Allowance(Meter(settings.time_limit_s), settings.work_limit)
    sizes, kept = _sizes(problem, settings)
    found: dict[int, Plan] = {}
    refusals: list[PlacementError] = []
    for number, size in enumerate(_in_turn(problem, sizes, settings, found)):
        if found and not work.left:
            break
        until = work.part(1.0 / (1 + len(sizes) - number))  # for those that may follow
        own = [_within(plan, 0) for plan in incumbents if plan.placement.layers_per_pack == size]
        try:
            found[size] = _within(climb(_ordered(problem, size), until, own), size)
        except PlacementError as refusal:
            refusals.append(refusal)
    if not found:
        raise min(refusals, key=lambda refusal: refusal.shortfall_bytes)
    best = min(found.values(), key=_step_s)
    notes = (*best.notes, f"micro_batch_order is 'by-layer', but {kept}") if kept else best.notes
    return replace(reported_together(best, tuple(found.values()), _name), notes=notes)


def _sizes(problem: Problem, settings: SolveSettings) -> tuple[tuple[int, ...], str]:
    """The sizes of packs to try, and why there are none where they were asked for."""
    asked = settings.micro_batch_order
    if asked == "as-written" or (asked == "auto" and settings.policy != "auto"):
        return (), ""
    try:
        return pack_sizes(problem.dataflow), ""
    except OrderIsKept as reason:
        return (), str(reason) if asked == "by-layer" else ""


def _in_turn(
    problem: Problem, sizes: Sequence[int], settings: SolveSettings, found: Mapping[int, Plan]
) -> Iterator[int]:
    """The orders to try, 0 for the step's own, in the light of what is `found` so far."""
    if not sizes or settings.micro_batch_order != "by-layer":
        yield 0
        if 0 in found and not can_gain(problem, settings, found[0]):
            return
    before_s = math.inf
    for size in sizes:
        yield size
        step_s = _step_s(found[size]) if size in found else math.inf
        if step_s >= before_s:
            return
        before_s = step_s


def can_gain(problem: Problem, settings: SolveSettings, plan: Plan) -> bool:
    """Whether something moves, and the device waits for it."""
    moves = bool(plan.tasks or plan.placement.recomputed)
    passes = (op.name for op in problem.dataflow.ops if op.phase is not Phase.OPTIMIZER)
    alone_s = math.fsum(problem.costs.device_s[name] for name in passes)
    return moves and _step_s(plan) > (1.0 + settings.gap) * alone_s


def _step_s(plan: Plan) -> float:
    return plan.predicted.makespan_s


def _ordered(problem: Problem, size: int) -> Problem:
    """The problem of the step in that order, as a step of its own."""
    return problem.in_packs(size).as_its_own_step()


def _within(plan: Plan, size: int) -> Plan:
    """The same plan for the step whose micro-batches run in packs of so many layers."""
    return replace(plan, placement=replace(plan.placement, layers_per_pack=size))


def reported_together(
    best: Plan, found: Sequence[Plan], called: Callable[[str, Plan], str]
) -> Plan:
    """`best`, whose report is about all that was `found`: what each takes, and the least bound.

    A way to a plan is `called` by what sets that plan apart.
    """
    reports = [plan.report for plan in found if plan.report is not None]
    if best.report is None or len(found) == 1:
        return best
    bound_s = min(report.lower_bound_s for report in reports)
    step_s = _step_s(best)
    simulated_s = {
        called(way, plan): seconds
        for plan in found
        if plan.report is not None
        for way, seconds in plan.report.simulated_s.items()
    }
    report = replace(
        best.report,
        seconds=math.fsum(report.seconds for report in reports),
        lower_bound_s=bound_s,
        gap=step_s / bound_s - 1.0 if bound_s else 0.0,
        simulated_s=simulated_s,
        work=math.fsum(report.work for report in reports),
        bound_work=math.fsum(report.bound_work for report in reports),
    )
    named = replace(best.placement, policy=called(best.placement.policy, best))
    return replace(best, placement=named, report=report)


def _name(way: str, plan: Plan) -> str:
    size = plan.placement.layers_per_pack
    return f"{way}+packs:{size}" if size else way
