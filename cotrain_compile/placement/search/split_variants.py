"""Split variants: the fastest plan over the numbers of parts in which regions of a step may run.

In: a Problem, settings, and how a step is planned. The step with whole ops comes first, with all of
the work, as if nothing could run in parts: so that a plan with parts is never slower than one
without. Where its plan moves anything and the device waits for it, or there is none, the step in
parts is planned as a step of its own, in a few numbers of parts: the fewest with which all fits, or
beyond which little more memory is saved and no op takes much of the budget, and where none of these
has a plan those that need least.
One that is no faster than the whole when its first relaxation is rounded goes no further.
Where all fits nothing is split.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from cotrain_compile.dataflow import Dataflow
from cotrain_compile.dataflow.regions import Region
from cotrain_compile.errors import PlacementError
from cotrain_compile.machine import Tier
from cotrain_compile.placement.casts import has_recasts
from cotrain_compile.placement.placed import place_dataflow
from cotrain_compile.placement.policies import resident
from cotrain_compile.placement.problem import Problem
from cotrain_compile.placement.remembered import remembered
from cotrain_compile.placement.search.from_whole import from_whole
from cotrain_compile.placement.search.infeasible import floor_bytes, least_of
from cotrain_compile.placement.search.orders import can_gain, reported_together
from cotrain_compile.placement.search.settings import SolveSettings
from cotrain_compile.placement.split import split_regions
from cotrain_compile.plan import Plan
from cotrain_compile.support.units import format_bytes, format_seconds

# How to plan a problem with so much work and plans of the same step for smaller budgets.
Climb = Callable[[Problem, SolveSettings, Sequence[Plan]], Plan]
Splits = Mapping[str, int]

# Numbers of parts that are looked at.
PARTS = (2, 4, 8, 16, 32, 64)
# More parts are worth a try where they save so much of what the step needs as a whole: each adds
# up all sums once more.
SAVES = 0.05
# An op in parts that touches no more of the budget leaves room for what is alive beside it.
SMALL = 1 / 3


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
    tried = [*_worth_a_try(problem), *(p.placement.splits for p in incumbents)]
    candidates = [s for n, s in enumerate(tried) if s and s not in tried[:n]]
    for splits in _with_a_last_resort(problem, candidates, found):
        own = [_with(plan, {}) for plan in incumbents if plan.placement.splits == splits]
        parts = _in_parts(problem, splits)
        own += [p for whole in found if (p := from_whole(parts, whole)) is not None]
        share = 1.0 / len(candidates)
        left_s = settings.time_limit_s - (time.perf_counter() - began_s)
        within = replace(
            settings,
            work_limit=share * settings.work_limit,
            time_limit_s=max(share * settings.time_limit_s, left_s),
            known_s=min((plan.predicted.makespan_s for plan in found), default=math.inf),
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
        smallest = _needing_least(problem)
        if smallest and smallest not in candidates:
            candidates.append(smallest)
            yield smallest


def _needing_least(problem: Problem) -> Splits:
    """The parts of each kind of regions in which the largest op needs least."""
    chosen: dict[str, int] = {}
    least = floor_bytes(problem.dataflow)
    for of_kind in _by_kind(problem.dataflow):
        before = dict(chosen)
        for parts in PARTS:
            if any(region.length < parts for region in of_kind):
                break
            splits = {**before, **{region.name: parts for region in of_kind}}
            needs = floor_bytes(split_regions(problem.dataflow, splits))
            if needs < least:
                chosen, least = splits, needs
    return chosen


def in_words(regions: Sequence[Region], splits: Splits) -> str:
    """As in "loss in 16 parts"."""
    kinds = {region.kind: splits[region.name] for region in regions if region.name in splits}
    return " and ".join(f"{kind} in {parts} parts" for kind, parts in kinds.items())


def _worth_a_try(problem: Problem) -> Iterator[Splits]:
    """The fewest parts with which all fits, and those beyond which no memory is saved.

    Kind after kind of regions, each beside what those before it are best in. What is too small to
    set the peak is left whole.
    """
    chosen: dict[str, int] = {}
    fits: Splits = {}
    budget, whole = problem.budgets[Tier.DEVICE], _needs(problem.dataflow)
    for of_kind in _by_kind(problem.dataflow):
        if not _can_matter(problem.dataflow, of_kind, whole):
            continue
        needs: dict[int, tuple[int, int]] = {1: whole}
        enough, largest = None, max(_touched(problem.dataflow, r) for r in of_kind)
        for parts in PARTS:
            names = {r.name: parts for r in of_kind}
            if any(r.length < parts for r in of_kind):
                break
            needs[parts] = _needs(split_regions(problem.dataflow, {**chosen, **names}))
            if needs[parts][0] <= budget and not fits:
                fits = {**chosen, **names}
            least = _least_in_parts(needs[parts // 2], needs[parts], parts)
            small = largest / parts <= SMALL * budget
            if enough is None and small and _is_near(needs[parts], least, whole):
                enough = parts
            if enough is not None and (fits or least[0] > budget):
                break  # more parts save little, and do not make all fit
        if max(needs) == 1:
            continue
        parts = enough or max(needs)
        if all(n >= (1.0 - SAVES) * was for n, was in zip(needs[parts], whole, strict=True)):
            continue
        beside = {**chosen, **{r.name: parts for r in of_kind}}
        if chosen and _least(problem, beside) > _least(problem, chosen):
            continue  # sums that are there as long as all parts run take more than these save
        chosen, whole = beside, needs[parts]
    if fits:
        yield fits
    if chosen and chosen != fits:
        yield chosen


def _by_kind(dataflow: Dataflow) -> list[list[Region]]:
    """Regions by their kind, that with the op that touches most first: it sets the peak longest."""
    kinds = dict.fromkeys(region.kind for region in dataflow.regions)
    found = [[r for r in dataflow.regions if r.kind == kind] for kind in kinds]
    return sorted(found, key=lambda regions: -max(_touched(dataflow, r) for r in regions))


def _can_matter(dataflow: Dataflow, regions: Sequence[Region], needs: Sequence[int]) -> bool:
    """Whether parts of `regions` may save anything of the two that `needs` says.

    One op of theirs touches as much as any, or all that a region has in parts is much of the peak.
    """
    at_once = max(
        sum(dataflow.buffer[b].nbytes for b in region.sliced if b in dataflow.buffer)
        for region in regions
    )
    largest = max(_touched(dataflow, region) for region in regions)
    return at_once >= SAVES * needs[0] or largest > (1.0 - SAVES) * needs[1]


def _touched(dataflow: Dataflow, region: Region) -> int:
    """The most bytes that an op of a region reads and makes."""
    ops = (dataflow.ops[dataflow.position[op.name]] for op in region.ops)
    return max(sum(dataflow.buffer[b].nbytes for b in {*op.reads, *op.writes}) for op in ops)


def _least_in_parts(half: Sequence[int], need: Sequence[int], parts: int) -> list[float]:
    """What is needed in most parts: each part needs its share of what is divided.

    As far as the step in `half` as many parts tells.
    """
    left = 1.0 - parts / PARTS[-1]
    return [now - left * max(0, before - now) for before, now in zip(half, need, strict=True)]


def _is_near(need: Sequence[int], least: Sequence[float], whole: Sequence[int]) -> bool:
    return all(n <= most + SAVES * was for n, most, was in zip(need, least, whole, strict=True))


def _needs(dataflow: Dataflow) -> tuple[int, int]:
    """Bytes of the device where nothing moves, and where all does that can."""
    placed = place_dataflow(dataflow, resident(dataflow))
    return max(placed.device_bytes), floor_bytes(dataflow)


def _least(problem: Problem, splits: Splits) -> int:
    """Bytes of the device that the step in parts needs with all that can be offloaded."""
    return least_of(_in_parts(problem, splits)).nbytes


def _in_parts(problem: Problem, splits: Splits) -> Problem:
    """The problem of the step in parts, as a step of its own."""
    return _as_its_own(problem, tuple(splits.items()))


@remembered
def _as_its_own(problem: Problem, splits: tuple[tuple[str, int], ...]) -> Problem:
    return problem.splitting(dict(splits)).as_its_own_step()


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
        parts = _in_parts(problem, splits)
        needs = _needs(problem.dataflow), _needs(parts.dataflow)
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
