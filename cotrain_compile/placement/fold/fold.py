"""Fold: the problem of a step with fewer ops, for who looks for a plan.

In: a Problem. Out: that of the same step with each update in one op or two, and without views that
tell a plan nothing. It takes the same time, and needs the same memory but for `EXCESS`. A placement
of this step is one of the step as written; a schedule is not.
"""

from __future__ import annotations

import math
from dataclasses import replace

from cotrain_compile.analysis.costs import CostTable
from cotrain_compile.dataflow import Dataflow
from cotrain_compile.placement.fold.updates import folded_updates
from cotrain_compile.placement.fold.views import without_views
from cotrain_compile.placement.problem import Problem
from cotrain_compile.placement.remembered import Same, remembered


def folded(problem: Problem) -> Problem:
    """The problem of a step as it is written with fewer ops, which cost what they did.

    The same problem where nothing folds, or the host runs updates op by op.
    """
    if problem.captured or problem.written is not None:
        return problem
    made = _folded(problem.dataflow, Same([problem.costs]))
    if made is None:
        return problem
    dataflow, costs = made
    whole = problem.whole_bytes.items()
    return replace(
        problem,
        dataflow=dataflow,
        costs=costs,
        whole_bytes={name: nbytes for name, nbytes in whole if name in dataflow.buffer},
    )


@remembered
def _folded(dataflow: Dataflow, costs: Same[CostTable]) -> tuple[Dataflow, CostTable] | None:
    """The step with fewer ops, and what they cost; None where it has as many."""
    updates = folded_updates(dataflow)
    found = without_views(updates.dataflow).behind(updates)
    if len(found.parts) == len(dataflow.ops):
        return None
    (whole,) = costs
    known, unknown = whole.device_s, frozenset(whole.unknown)
    return found.dataflow, replace(
        whole,
        device_s={op: math.fsum(known[n] for n in of) for op, of in found.parts.items()},
        unknown=tuple(op for op, of in found.parts.items() if not unknown.isdisjoint(of)),
    )
