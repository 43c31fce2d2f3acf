"""Split variants: the fastest plan over the numbers of parts in which regions of a step may run.

In: a Problem, settings, and how a step is planned. The step with whole ops comes first, with all of
the work, as if nothing could run in parts: so that a plan with parts is never slower than one
without. Where its plan moves anything and the device waits for it, or there is none, the step in
parts is planned as a step of its own: in a few numbers of parts (`numbers_of_parts.py`), before
those with layers in more (`finer.py`), and where none has a plan in those that need least. One that
is no faster than the whole when its first relaxation is rounded goes no further.
Where all fits nothing is split.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from cotrain_compile.errors import PlacementError
from cotrain_compile.machine import Tier
from cotrain_compile.placement.casts import has_recasts
from cotrain_compile.placement.problem import Problem
from cotrain_compile.placement.search.finer import finer
from cotrain_compile.placement.search.from_whole import from_whole
from cotrain_compile.placement.search.infeasible import floor_bytes
from cotrain_compile.placement.search.numbers_of_parts import (
    Splits,
    in_parts,
    in_words,
    needing_least,
    needs_of,
    worth_a_try,
)
from cotrain_compile.placement.search.orders import can_gain, reported_together
from cotrain_compile.placement.search.settings import SolveSettings
from cotrain_compile.plan import Plan
from cotrain_compile.support.units import format_bytes, format_seconds

# How to plan a problem with so much work and plans of the same step for smaller budgets.
Climb = Callable[[Problem, SolveSettings, Sequence[Plan]], Plan]
# Of all work, for the parts that would do where layers in more parts look faster.
COARSE_SHARE = 0.25


def best_split(
    problem: Problem, settings: SolveSettings, incumbents: Sequence[Plan], climb: Climb
) -> Plan:
    """The fastest plan over the numbers of parts that `settings` allow.

    Raises the `PlacementError` of the one that lacks least where none fits.
    """
    whole = [plan for plan in incumbents if not plan.placement.splits]
    regions = problem.dataflow.regions
    if not (settings.split and settings.policy == "auto" and regions):
        return climb(problem, settings, whole)
    began_s = time.perf_counter()
    found: list[Plan] = []
    refused: list[tuple[Splits, PlacementError]] = []
    # To see that nothing fits is quick; what that lacks is said where no others fit either.
    unsaid: list[tuple[Splits, Callable[[], Plan]]] = []
    if _is_too_large(problem):
        unsaid.append(({}, partial(climb, problem, settings, whole)))
    else:
        try:
            found.append(climb(problem, settings, whole))
            if not can_gain(problem, settings, found[0]):
                return found[0]
        except PlacementError as refusal:
            refused.append(({}, refusal))
    tried = [*worth_a_try(problem), *(p.placement.splits for p in incumbents)]
    candidates = [s for n, s in enumerate(tried) if s and s not in tried[:n]]
    left_s = max(0.0, settings.time_limit_s - (time.perf_counter() - began_s))
    looking = replace(settings, time_limit_s=left_s)
    more = finer(problem, candidates[-1], looking) if candidates else None
    candidates = [*([more] if more else []), *candidates]
    for splits in _with_a_last_resort(problem, candidates, found):
        own = [_with(plan, {}) for plan in incumbents if plan.placement.splits == splits]
        parts = in_parts(problem, splits)
        own += [p for whole in found if (p := from_whole(parts, whole)) is not None]
        share = 1.0 / len(candidates)
        if more:
            share = 1.0 if splits is more else COARSE_SHARE / (len(candidates) - 1)
        left_s = settings.time_limit_s - (time.perf_counter() - began_s)
        within = replace(
            settings,
            work_limit=share * settings.work_limit,
            time_limit_s=max(share * settings.time_limit_s, left_s),
            known_s=min((plan.predicted.makespan_s for plan in found), default=math.inf),
            bound_limit=settings.bound_units if more else None,
        )
        if _is_too_large(parts):
            unsaid.append((splits, partial(climb, parts, within, own)))
            continue
        try:
            plan = climb(parts, within, own)
            found.append(_told_apart(_with(plan, splits)))
        except PlacementError as refusal:
            refused.append((splits, refusal))
    if not found:
        refused += ((splits, _refusal(climb_on)) for splits, climb_on in unsaid)
        raise _least_of(problem, refused)
    best = min(found, key=lambda plan: plan.predicted.makespan_s)
    notes = (*best.notes, *_notes(problem, best, candidates))
    return replace(reported_together(best, found, lambda way, plan: way), notes=notes)


def _with_a_last_resort(
    problem: Problem, candidates: list[Splits], found: Sequence[Plan]
) -> Iterator[Splits]:
    """`candidates`, and where none has led to a plan the parts that need least, added to them."""
    yield from tuple(candidates)
    if not found:
        smallest = needing_least(problem)
        if smallest and smallest not in candidates:
            candidates.append(smallest)
            yield smallest


def _with(plan: Plan, splits: Splits) -> Plan:
    return replace(plan, placement=replace(plan.placement, splits=splits))


def _told_apart(plan: Plan) -> Plan:
    """A plan in parts whose ways have names of their own."""
    suffix = f"+parts:{'-'.join(map(str, dict.fromkeys(plan.placement.splits.values())))}"
    placement, report = plan.placement, plan.report
    if report is not None:
        ways = {way + suffix: seconds for way, seconds in report.simulated_s.items()}
        report = replace(report, simulated_s=ways)
    named = replace(placement, policy=placement.policy + suffix)
    return replace(plan, placement=named, report=report)


def _is_too_large(problem: Problem) -> bool:
    """Whether no plan fits, by what one op touches. Of a step with recasts nothing is said: cast
    once it may need less.
    """
    too_large = floor_bytes(problem.dataflow) > problem.budgets[Tier.DEVICE]
    return too_large and not has_recasts(problem.dataflow)


def _refusal(climb: Callable[[], Plan]) -> PlacementError:
    try:
        climb()
    except PlacementError as refusal:
        return refusal
    raise AssertionError("a plan with less memory than one of its ops takes")


def _least_of(problem: Problem, refused: Sequence[tuple[Splits, PlacementError]]) -> PlacementError:
    """The refusal that lacks least, of the whole or in parts."""
    whole = next(refusal for splits, refusal in refused if not splits)
    in_parts = ((splits, refusal) for splits, refusal in refused if splits)
    told = [whole, *(_told(problem, splits, refusal, whole) for splits, refusal in in_parts)]
    return min(told, key=lambda refusal: (refusal.tier is Tier.HOST, refusal.shortfall_bytes))


def _told(
    problem: Problem, splits: Splits, refusal: PlacementError, whole: PlacementError
) -> PlacementError:
    """`refusal` of the step in parts, with what it needs as a whole."""
    regions = problem.dataflow.regions
    if Tier.HOST in (whole.tier, refusal.tier):
        return refusal
    needs = problem.budgets[Tier.DEVICE] + whole.shortfall_bytes
    kinds = " and ".join(dict.fromkeys(r.kind for r in regions if r.name in splits))
    text = (
        f"with the {in_words(regions, splits)} {refusal}; with a whole {kinds} it needs "
        f"{format_bytes(needs)}"
    )
    return PlacementError(text, shortfall_bytes=refusal.shortfall_bytes, tier=refusal.tier)


def _notes(problem: Problem, best: Plan, tried: Sequence[Splits]) -> Iterator[str]:
    """What the parts of the plan save and cost, and what its bound is about."""
    regions, splits = problem.dataflow.regions, best.placement.splits
    if splits:
        parts = in_parts(problem, splits)
        needs = needs_of(problem.dataflow), needs_of(parts.dataflow)
        saved = max(a - b for a, b in zip(*needs, strict=True))
        more_s = math.fsum(parts.costs.device_s[op.name] for op in parts.dataflow.ops)
        more_s -= math.fsum(problem.costs.device_s[op.name] for op in problem.dataflow.ops)
        yield (
            f"{in_words(regions, splits)}: {format_bytes(max(0, saved))} less, "
            f"{format_seconds(max(0.0, more_s))} more; equal to the whole up to rounding "
            "(split='off' leaves it whole)"
        )
    if tried and best.report is not None and best.report.lower_bound_s:
        told = "; ".join(in_words(regions, each) for each in tried)
        yield f"the bound is about the step as it is and with {told}: about no other parts"
