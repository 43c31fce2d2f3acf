"""From whole: the plan of a step, as a plan of the same step with some regions in parts.

In: the problem of the step in parts, and the plan for it as it is. Out: a plan in parts that does
the same with all that is whole, and recomputes the parts of what that recomputes. What leaves the
device is chosen anew (`cover`): in parts less is there at once, so that less has to. A search goes
on from it, and finishes what it ends with.
"""

from __future__ import annotations

from dataclasses import replace

from cotrain_compile.dataflow.regions import whole_name
from cotrain_compile.errors import PlacementError
from cotrain_compile.machine import Tier
from cotrain_compile.placement.problem import Problem
from cotrain_compile.placement.recompute.recomputable import recomputable
from cotrain_compile.placement.schedule.schedule import as_drafted, draft
from cotrain_compile.placement.search.cover import covered
from cotrain_compile.plan import Plan


def from_whole(problem: Problem, whole: Plan) -> Plan | None:
    """The plan `whole` in the parts of `problem`; None where it does not fit, or is in parts."""
    before = whole.placement
    if before.splits or before.layers_per_pack or before.overlap_steps:
        return None
    if before.casts_once:
        problem = problem.casting_once()
    names = frozenset(before.recomputed)
    may = recomputable(problem.dataflow)
    parts = {b.name: whole_name(b.name) for b in problem.dataflow.buffers if b.name in may}
    again = tuple(name for name, of in parts.items() if of in names)
    apart = tuple(name for name in again if parts[name] in before.recomputed_apart)
    left = problem.recomputing(again, apart)
    placement = replace(
        before,
        recomputed=again,
        recomputed_apart=apart,
        offloaded=tuple(name for name in before.offloaded if name in left.dataflow.buffer),
        refetched=(),
    )
    placement, moves = covered(left, placement, problem.budgets[Tier.DEVICE])
    if max(moves.slot_bytes) > problem.budgets[Tier.DEVICE]:
        return None
    try:
        return as_drafted(problem, draft(problem, placement, moves=moves))
    except PlacementError:
        return None
