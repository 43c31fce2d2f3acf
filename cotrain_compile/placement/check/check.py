"""Check: is a plan sound for its problem? Written without the code that makes plans.

First the placement and the tasks must fit each other (`rules`), ops in another order must find what
they found (`ordered`), what is made again must come out as it was (`recomputed`), and what goes in
pieces must be all of it (`pieces`). Then the step
is replayed op by op with every copy of every buffer (`replay`): what each op and task finds there,
and the bytes on both tiers. The error says which rule is broken where.
"""

from __future__ import annotations

from collections.abc import Mapping

from cotrain_compile.dataflow import Dataflow
from cotrain_compile.errors import PlanError
from cotrain_compile.machine import Tier
from cotrain_compile.placement.check.ordered import check_ordered
from cotrain_compile.placement.check.pieces import check_pieces
from cotrain_compile.placement.check.recomputed import check_recomputed
from cotrain_compile.placement.check.replay import Peak, replay
from cotrain_compile.placement.check.rules import check_placement, check_tasks, require
from cotrain_compile.placement.check.split import check_splits
from cotrain_compile.placement.order.by_layer import in_packs
from cotrain_compile.placement.pieces import in_pieces, pieces_under
from cotrain_compile.placement.problem import Problem
from cotrain_compile.placement.recompute.rewrite import recomputed
from cotrain_compile.placement.split.rewrite import split_regions
from cotrain_compile.plan import Plan


def check(problem: Problem, plan: Plan) -> None:
    """Raise `PlanError` unless `plan` computes the step of `problem` within the plan's budgets."""
    dataflow = problem.dataflow
    if plan.fingerprint != dataflow.fingerprint:
        raise PlanError(
            f"the plan was made for step {plan.fingerprint}, this step is {dataflow.fingerprint}; "
            "make a new plan for it"
        )
    spaces = set(problem.machine.spaces)
    named = set(plan.budgets) | {Tier.DISK} == spaces | {Tier.DISK}
    require(named, "every space of the machine but a drive needs a budget, and no other")
    workers = problem.machine.host_update.workers
    for space, peak in peaks_of(dataflow, plan, workers).items():
        check_budget(space, peak, plan.budgets.get(space, 0))


def peaks_of(dataflow: Dataflow, plan: Plan, host_workers: int) -> Mapping[Tier, Peak]:
    """The peak in each space; `PlanError` unless `plan` computes `dataflow`, in whatever memory."""
    check_splits(dataflow, plan.placement)
    dataflow = split_regions(dataflow, plan.placement.splits)
    ordered = in_packs(dataflow, plan.placement.layers_per_pack)
    check_ordered(dataflow, ordered)
    check_recomputed(ordered, plan.placement)
    dataflow = recomputed(ordered, plan.placement.recomputed)
    check_placement(dataflow, plan.placement)
    whole, dataflow = dataflow, in_pieces(dataflow, pieces_under(dataflow, plan.placement))
    check_pieces(whole, dataflow)
    check_tasks(dataflow, plan)
    return replay(dataflow, plan, host_workers)


def check_budget(tier: str, peak: Peak, budget_bytes: int) -> None:
    """Raise `PlanError` unless `peak` is within the budget of its space."""
    if peak.nbytes > budget_bytes:
        raise PlanError(
            f"unsound plan: {peak.nbytes} bytes on the {tier} {peak.where}, budget {budget_bytes}, "
            f"{peak.nbytes - budget_bytes} too many; make a new plan for this budget"
        )
