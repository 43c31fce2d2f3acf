"""Check: is a plan sound for its problem? Written without the code that makes plans.

First the placement and the tasks must fit each other (`rules`). Ops in another order must find what
they found: the state of a generator and the order of exchanges among it. Of a step in parts nothing
outside of a region may need what only a part of it has, and no part what a later one makes. What is
made again must come out as it was (`recomputed`), and what goes in pieces must be all of it, in the
order of the step. Then the step is replayed op by op with every copy of every buffer (`replay`):
what each op and task finds there, and the bytes on both tiers. The error says which rule is broken
where.
"""

from __future__ import annotations

from collections.abc import Mapping

from cotrain_compile.dataflow import Dataflow, Role
from cotrain_compile.dataflow.regions import Region
from cotrain_compile.errors import PlanError
from cotrain_compile.machine import Tier
from cotrain_compile.placement.casts import casts_once
from cotrain_compile.placement.check.recomputed import check_recomputed
from cotrain_compile.placement.check.replay import ReplayedPeak, replay
from cotrain_compile.placement.check.rules import check_placement, check_tasks, require
from cotrain_compile.placement.order.by_layer import in_packs
from cotrain_compile.placement.pieces import in_pieces, pieces_under
from cotrain_compile.placement.problem import Problem
from cotrain_compile.placement.recompute.rewrite import recomputed
from cotrain_compile.placement.split import split_regions
from cotrain_compile.plan import Placement, Plan


def check_ordered(step: Dataflow, ordered: Dataflow) -> None:
    """Raise `PlanError` unless `ordered` has the ops of `step`, each with what it has there."""
    if ordered is step:
        return
    expected, found = _left_by(step), _left_by(ordered)
    for op in step.ops:
        if op.name not in found or ordered.ops[ordered.position[op.name]] != op:
            raise PlanError(f"unsound plan: op {op.name} is lost where micro-batches run by layer")
        for name, writer in expected[op.name].items():
            if found[op.name][name] != writer:
                raise PlanError(
                    f"unsound plan: where micro-batches run by layer, op {op.name} finds {name} as "
                    f"{found[op.name][name] or 'the step before'} has left it, not as "
                    f"{writer or 'the step before'} has"
                )
    if len(ordered.ops) != len(step.ops):
        raise PlanError("unsound plan: an op runs twice where micro-batches run by layer")


def _left_by(dataflow: Dataflow) -> Mapping[str, Mapping[str, str]]:
    """By op, which op wrote each buffer last that it touches; "" for none of the step."""
    writer: dict[str, str] = {}
    found = {}
    for op in dataflow.ops:
        found[op.name] = {name: writer.get(name, "") for name in (*op.reads, *op.writes)}
        writer.update(dict.fromkeys(op.writes, op.name))
    return found


def check_splits(dataflow: Dataflow, placement: Placement) -> None:
    """Raise `PlanError` unless every region of `placement.splits` is one of the step, in parts."""
    known = {region.name: region for region in dataflow.regions}
    for name, parts in placement.splits.items():
        _require(name in known, f"names {name}, which the step has not")
        rows = known[name].length
        _require(1 <= parts <= rows, f"has {name}, of {rows} rows, in {parts} parts")
        _check_region(dataflow, known[name])


def _check_region(dataflow: Dataflow, region: Region) -> None:
    inside = {op.name for op in region.ops}
    ops = [op for op in dataflow.ops if op.name in inside]
    made = {name for op in ops for name in op.writes}
    collected = {result.buffer for window in region.windows for result in window.collected}
    collected |= {counted.buffer for window in region.windows for counted in window.counted}
    for op in dataflow.ops:
        if op.name not in inside:
            lost = sorted(made.intersection((*op.reads, *op.writes)) - collected)
            _require(not lost, f"has {region.name}, but {op.name} needs all of {lost[:1]}")
    kept = sorted(name for name in made - collected if dataflow.buffer[name].is_output)
    _require(not kept, f"has {region.name}, whose {kept[:1]} the step gives back")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise PlanError(f"unsound plan: placement.splits {message}")


def check_cast_once(whole: Dataflow, dataflow: Dataflow) -> None:
    """Raise `PlanError` unless `dataflow` is `whole` but for copies of parameters, equal to others.

    A copy that is left out is made of a parameter alone, as the one in its place is, which comes
    before it; nothing writes the parameter before the last of them.
    """
    left = {op.name for op in dataflow.ops}
    made_of: dict[str, tuple[str, str]] = {}  # the parameter and the op, by what it makes
    instead: dict[str, str] = {}
    of_group = {n: group for group in whole.updates for n in (group.low_precision, *group.recasts)}
    first: dict[str, str] = {}
    written: set[str] = set()
    for op in whole.ops:
        made = [n for n in op.writes if whole.buffer[n].role is not Role.WORKSPACE]
        group = of_group.get(made[0]) if len(made) == 1 else None
        is_cast = group is not None and op.reads == (group.param,)
        if group is not None and is_cast:
            of = first.setdefault(group.param, made[0])
            made_of[made[0]] = group.param, op.target
            if op.name not in left:
                same = made_of[of] == made_of[made[0]] and group.param not in written
                same &= whole.buffer[of].nbytes == whole.buffer[made[0]].nbytes
                require(same and of != made[0], f"{made[0]} is no copy of {group.param} like {of}")
                instead[made[0]] = of
        require(is_cast or op.name in left, f"the plan leaves out {op.name}")
        written.update(op.writes)
    kept = [op for op in whole.ops if op.name in left]
    for op, now in zip(kept, dataflow.ops, strict=True):
        reads = tuple(dict.fromkeys(instead.get(name, name) for name in op.reads))
        require((now.name, now.reads) == (op.name, reads), f"{op.name} reads {now.reads}")


def check_pieces(whole: Dataflow, dataflow: Dataflow) -> None:
    """Raise `PlanError` unless each update in pieces does what it does in `whole`, to all of it."""
    covered: dict[str, int] = {}
    for piece, name in dataflow.pieces.wholes.items():
        covered[name] = covered.get(name, 0) + dataflow.buffer[piece].nbytes
    for name, nbytes in covered.items():
        size = whole.buffer[name].nbytes
        require(nbytes == size, f"the pieces of {name} have {nbytes} bytes of {size}")
    for param, parts in dataflow.pieces.parts.items():
        _check_update(whole, dataflow, param, parts)


def _check_update(
    whole: Dataflow, dataflow: Dataflow, param: str, parts: tuple[tuple[str, ...], ...]
) -> None:
    group, number = whole.update[param], len(parts)
    require(group.elements > 0, f"{param} is updated in pieces, but not element by element")
    done = sum(len(part) for part in parts)
    ops = [whole.ops[whole.position[name]] for name in group.ops]
    full = [
        op
        for op in ops
        if any(whole.buffer[n].nbytes >= group.elements for n in (*op.reads, *op.writes))
    ]
    once = len(ops) - len(full)
    require(
        done == once + number * len(full) and len(full) == len(parts[-1]),
        f"the pieces of the update of {param} run {done} ops, where it has {len(full)} for each "
        f"of {number} pieces and {once} more",
    )
    # Single numbers are made once, with the first piece, which comes where all of it was done.
    numbers = [op for op in ops if op not in full]
    last = ops.index(full[-1])
    first = [*(op for op in numbers if ops.index(op) < last), *full]
    first += [op for op in numbers if ops.index(op) > last]
    for part in parts:
        targets = [dataflow.ops[dataflow.position[name]].target for name in part]
        own = [op.target for op in (first if part is parts[0] else full)]
        require(targets == own, f"a piece of the update of {param} runs other ops than the update")
    places = [dataflow.position[name] for part in parts[1:] for name in part]
    require(places == sorted(places), f"the pieces of the update of {param} are shuffled")


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


def peaks_of(dataflow: Dataflow, plan: Plan, host_workers: int) -> Mapping[Tier, ReplayedPeak]:
    """The peak in each space; `PlanError` unless `plan` computes `dataflow`, in whatever memory."""
    check_splits(dataflow, plan.placement)
    dataflow = split_regions(dataflow, plan.placement.splits)
    if plan.placement.casts_once:
        whole, dataflow = dataflow, casts_once(dataflow)
        check_cast_once(whole, dataflow)
    pieces = pieces_under(dataflow, plan.placement)
    ordered = in_packs(dataflow, plan.placement.layers_per_pack)
    check_ordered(dataflow, ordered)
    check_recomputed(ordered, plan.placement)
    dataflow = recomputed(ordered, plan.placement.recomputed, plan.placement.recomputed_apart)
    check_placement(dataflow, plan.placement)
    whole, dataflow = dataflow, in_pieces(dataflow, pieces)
    check_pieces(whole, dataflow)
    check_tasks(dataflow, plan)
    return replay(dataflow, plan, host_workers)


def check_budget(tier: str, peak: ReplayedPeak, budget_bytes: int) -> None:
    """Raise `PlanError` unless `peak` is within the budget of its space."""
    if peak.nbytes > budget_bytes:
        raise PlanError(
            f"unsound plan: {peak.nbytes} bytes on the {tier} {peak.where}, budget {budget_bytes}, "
            f"{peak.nbytes - budget_bytes} too many; make a new plan for this budget"
        )
