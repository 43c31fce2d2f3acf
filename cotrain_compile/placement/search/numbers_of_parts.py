"""Parts: in how many parts the regions of a step are worth a try.

In: a Problem. Out: for some of its regions a number of parts: the fewest with which all fits, those
beyond which little more memory is saved and no op takes much of the budget, and those in which the
largest op needs least. Memory alone is looked at.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from cotrain_compile.dataflow import Dataflow
from cotrain_compile.dataflow.regions import Region
from cotrain_compile.machine import Tier
from cotrain_compile.placement.placed import place_dataflow
from cotrain_compile.placement.policies import resident
from cotrain_compile.placement.problem import Problem
from cotrain_compile.placement.remembered import remembered
from cotrain_compile.placement.search.infeasible import floor_bytes, least_of
from cotrain_compile.placement.split import split_regions

Splits = Mapping[str, int]

# Numbers of parts that are looked at.
PARTS = (2, 4, 8, 16, 32, 64)
# More parts are worth a try where they save so much of what the step needs as a whole: each adds
# up all sums once more.
SAVES = 0.05
# An op in parts that touches no more of the budget leaves room for what is alive beside it.
SMALL = 1 / 3


def in_words(regions: Sequence[Region], splits: Splits) -> str:
    """As in "loss in 16 parts"."""
    kinds = {region.kind: splits[region.name] for region in regions if region.name in splits}
    return " and ".join(f"{kind} in {parts} parts" for kind, parts in kinds.items())


def worth_a_try(problem: Problem) -> Iterator[Splits]:
    """The fewest parts with which all fits, and those beyond which no memory is saved.

    Kind after kind of regions, each beside what those before it are best in. What is too small to
    set the peak is left whole.
    """
    chosen: dict[str, int] = {}
    fits: Splits = {}
    budget, whole = problem.budgets[Tier.DEVICE], needs_of(problem.dataflow)
    for of_kind in _by_kind(problem.dataflow):
        if not _can_matter(problem.dataflow, of_kind, whole):
            continue
        needs: dict[int, tuple[int, int]] = {1: whole}
        enough, largest = None, max(_touched(problem.dataflow, r) for r in of_kind)
        for parts in PARTS:
            names = {r.name: parts for r in of_kind}
            if any(r.length < parts for r in of_kind):
                break
            needs[parts] = needs_of(split_regions(problem.dataflow, {**chosen, **names}))
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


def needing_least(problem: Problem) -> Splits:
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


def _by_kind(dataflow: Dataflow) -> list[list[Region]]:
    """Regions by their kind, that with the op that touches most first: it sets the peak longest."""
    kinds = dict.fromkeys(region.kind for region in dataflow.regions)
    found = [[r for r in dataflow.regions if r.kind == kind] for kind in kinds]
    return sorted(found, key=lambda regions: -max(_touched(dataflow, r) for r in regions))


def _can_matter(dataflow: Dataflow, regions: Sequence[Region], needs: Sequence[int]) -> bool:
    """Whether parts of `regions` may save anything of the two that `needs` says.

    One op of theirs touches as much as any, or all that a region has in parts is much of the peak.
    """
    at_once = max(bytes_in_parts(dataflow, region) for region in regions)
    largest = max(_touched(dataflow, region) for region in regions)
    return at_once >= SAVES * needs[0] or largest > (1.0 - SAVES) * needs[1]


def bytes_in_parts(dataflow: Dataflow, region: Region) -> int:
    """The bytes of all that a region has in parts, in the whole step."""
    return sum(dataflow.buffer[b].nbytes for b in region.sliced if b in dataflow.buffer)


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


def needs_of(dataflow: Dataflow) -> tuple[int, int]:
    """Bytes of the device where nothing moves, and where all does that can."""
    placed = place_dataflow(dataflow, resident(dataflow))
    return max(placed.device_bytes), floor_bytes(dataflow)


def _least(problem: Problem, splits: Splits) -> int:
    """Bytes of the device that the step in parts needs with all that can be offloaded."""
    return least_of(in_parts(problem, splits)).nbytes


def in_parts(problem: Problem, splits: Splits) -> Problem:
    """The problem of the step in parts, as a step of its own."""
    return _as_its_own(problem, tuple(splits.items()))


@remembered
def _as_its_own(problem: Problem, splits: tuple[tuple[str, int], ...]) -> Problem:
    return problem.splitting(dict(splits)).as_its_own_step()
