"""Finer: layers in more parts than what fits asks for, where a glimpse says that this is faster.

In: a Problem, and the parts that are worth a try. Out: those with the layers in as many parts more
as makes a step faster that makes all layers again, by a cover. Near the least memory a layer in few
parts leaves so little room that what is alive beside it leaves and comes back once a layer; in many
each part waits for its own launches, and all that the search does takes as much more work.
"""

from __future__ import annotations

import math

from cotrain_compile.dataflow import Dataflow, Phase
from cotrain_compile.dataflow.regions import Region
from cotrain_compile.machine import Tier
from cotrain_compile.placement.fold.fold import folded
from cotrain_compile.placement.problem import Problem
from cotrain_compile.placement.search.attempts import Attempts
from cotrain_compile.placement.search.numbers_of_parts import Splits, bytes_in_parts, in_parts
from cotrain_compile.placement.search.settings import SolveSettings
from cotrain_compile.placement.search.variants import Levels
from cotrain_compile.placement.work import Allowance, Meter

# Parts of layers that are looked at, as long as each is faster.
FINER = (8, 16, 32)
# What a layer has in parts is much where it takes more of the budget.
SMALL = 1 / 8
# A glimpse is rough: only what is so much faster in it is worth a search of its own.
TELLS = 0.8
# Where the device computes so much of the time parts gain little.
WAITS = 2.0
# A step in parts of about more ops, without those of updates, takes the search more than it has.
MOST_OPS = 16_000


def finer(problem: Problem, splits: Splits, settings: SolveSettings) -> Splits | None:
    """`splits` with layers in more parts; None where that does not look faster."""
    work = Allowance(Meter(settings.time_limit_s), settings.work_limit)
    layers = [
        region
        for region in problem.dataflow.regions
        if not any(window.joined for window in region.windows)
        and bytes_in_parts(problem.dataflow, region) > SMALL * problem.budgets[Tier.DEVICE]
    ]
    if not layers or not work.left:
        return None
    coarse = in_parts(problem, splits)
    found, best_s = None, TELLS * glimpse_s(coarse, settings, work)
    if best_s <= TELLS * WAITS * math.fsum(coarse.costs.device_s.values()):
        return None
    writing = {region.name: _writing(problem.dataflow, region) for region in layers}
    for parts in FINER:
        least = {r.name: max(splits.get(r.name, 1), min(parts, r.length)) for r in layers}
        more = {**splits, **least}
        if more == (found or splits):
            continue
        added = sum((least[r.name] - splits.get(r.name, 1)) * writing[r.name] for r in layers)
        if _ops(coarse.dataflow) + added > MOST_OPS or not work.left:
            break
        seconds = glimpse_s(in_parts(problem, more), settings, work)
        if seconds >= best_s:
            break
        found, best_s = more, seconds
    return found


def glimpse_s(problem: Problem, settings: SolveSettings, work: Allowance) -> float:
    """Seconds of a cover that makes all layers again, where that is allowed.

    Infinity where it does not fit.
    """
    problem = folded(problem)
    attempts = Attempts(problem, settings, lambda stage: None, work)
    again = Levels(problem, work.meter).uniform[-1:] if settings.recompute else []
    return min(map(attempts.try_cover, again or [attempts.step]))


def _writing(dataflow: Dataflow, region: Region) -> int:
    """How many ops each part of a region has, without views."""
    return sum(bool(dataflow.ops[dataflow.position[op.name]].writes) for op in region.ops)


def _ops(dataflow: Dataflow) -> int:
    """How many ops a step has without its updates and views."""
    return sum(bool(op.writes) and op.phase is not Phase.OPTIMIZER for op in dataflow.ops)
