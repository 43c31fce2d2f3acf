"""Workspace: what kernels and compiled code took of the device beyond their plan, by op.

In: the problem and the plan of a step that had a dry run, and the most bytes in each of its calls.
Out: bytes by op, for the next problem of the same step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from cotrain_compile.placement.placed import place_plan
from cotrain_compile.placement.problem import Problem
from cotrain_compile.placement.recompute.rewrite import recomputed_ops
from cotrain_compile.plan import Plan

# What it unfolds or packs its input into is no value of the graph, whatever it is compiled with.
_CONVOLUTION = "convolution"


def beyond_plan(
    problem: Problem, plan: Plan, calls: Iterable[tuple[Sequence[str], int]]
) -> Mapping[str, int]:
    """By op, what the call that it ran in took beyond the most that was planned for its ops.

    `calls` has, in order, the ops of each call and the most bytes on the device while it ran. Which
    op of compiled code takes the workspace nobody knows, so each of them is given all of it: the
    most that is planned for the call is then what was measured. A convolution may have reached that
    itself, from what was planned at its own place: cut apart by the next plan, it would again.
    """
    placed = place_plan(problem, plan)
    decided = plan.placement
    again = recomputed_ops(problem.dataflow, decided.recomputed, decided.recomputed_apart)
    program, planned = placed.program, placed.device_bytes
    found: dict[str, int] = {}
    passed = -1
    for ops, most_bytes in calls:
        own = [program.slot[name] for name in ops if name in program.slot]
        # An op that was moved right before an update stands in the plan where it stood before.
        slots = [slot for slot in own if slot > passed] or own
        passed = max([passed, *slots])
        over_bytes = most_bytes - max((planned[slot] for slot in slots), default=most_bytes)
        if over_bytes > 0:
            for slot in slots:
                op = program.ops[slot]
                own_bytes = most_bytes - planned[slot]
                taken = own_bytes if _CONVOLUTION in op.target else over_bytes
                name = again.get(op.name, op.name)  # it takes as much each time it runs
                found[name] = max(taken, found.get(name, 0))
    return found


def both(first: Mapping[str, int], more: Mapping[str, int]) -> Mapping[str, int]:
    """The workspace of a plan that had the `first`, and took `more` beyond that."""
    return {op: first.get(op, 0) + more.get(op, 0) for op in (*first, *more)}


def of_convolutions(problem: Problem, workspace: Mapping[str, int]) -> Mapping[str, int]:
    """What of `workspace` convolutions take, were it theirs alone in the calls that have some.

    It is a guess, for where nothing fits that leaves room for all of it at each op of such a call.
    """
    names = {op.name for op in problem.dataflow.ops if _CONVOLUTION in op.target}
    return {name: nbytes for name, nbytes in workspace.items() if name in names}
