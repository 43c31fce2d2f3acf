"""Orders of micro-batches: what depends on what is kept, weights move once a pass, plans gain."""

from __future__ import annotations

import gc
import random
import weakref
from collections import Counter
from dataclasses import replace

import pytest

from cotrain_compile.dataflow import Buffer, Dataflow, Op, Phase, Role
from cotrain_compile.errors import PlacementError, PlanError
from cotrain_compile.files import from_json, to_json
from cotrain_compile.machine import MEMORIES, Tier
from cotrain_compile.placement.check.check import check, check_ordered
from cotrain_compile.placement.order.by_layer import (
    OrderIsKept,
    by_layer,
    find_micro_batches,
    pack_sizes,
)
from cotrain_compile.placement.problem import Problem, formulate
from cotrain_compile.placement.recompute.recomputable import recomputable
from cotrain_compile.placement.search.solve import SolveSettings, solve
from cotrain_compile.plan import Placement, Plan
from cotrain_compile.presets import find
from tests.support.blocks import blocks, in_modules
from tests.support.nets import MIB, Training, step_of
from tests.support.nets import perceptron as chain

EIGHT = Training(micro_batches=8)
FUNCTIONAL = step_of("functional", chain(3, MIB, MIB), EIGHT)


def is_valid(step: Dataflow, ordered: Dataflow) -> bool:
    """Brute force: of any two ops that touch a buffer which one of them writes, the first comes
    first in both steps."""
    return sorted(op.name for op in step.ops) == sorted(op.name for op in ordered.ops) and not any(
        ordered.position[one.name] > ordered.position[other.name]
        for at, other in enumerate(step.ops)
        for one in step.ops[:at]
        if {*one.writes} & {*other.reads, *other.writes} or {*one.reads} & {*other.writes}
    )


def entangled(rng: random.Random) -> Dataflow:
    """Blocks and micro-batches, and a few buffers that ops anywhere read or write in their order:
    generators, statistics, what is left of another micro-batch."""
    step = blocks(rng.randint(2, 5), Training(micro_batches=rng.randint(2, 4)))
    ops = list(step.ops)
    extra = [Buffer(f"s{n}", 4, Role.BUFFER, is_input=True) for n in range(rng.randint(0, 3))]
    for buffer in extra:
        for at in sorted(rng.sample(range(len(ops)), rng.randint(1, 4))):
            op, writes = ops[at], rng.random() < 0.5
            if op.phase is Phase.OPTIMIZER:
                continue
            reads = (*op.reads, buffer.name)
            ops[at] = replace(op, reads=reads, writes=(*op.writes, *[buffer.name] * writes))
    return replace(step, ops=tuple(ops), buffers=(*step.buffers, *extra))


def test_every_order_keeps_what_depends_on_what() -> None:
    rng, kept = random.Random(0), Counter[str]()
    for _ in range(150):
        step = entangled(rng)
        size = rng.randint(1, 5)
        try:
            ordered = by_layer(step, size)
        except OrderIsKept:
            kept["kept"] += 1
            continue
        kept["another"] += ordered.ops != step.ops
        assert is_valid(step, ordered)
        check_ordered(step, ordered)
    assert min(kept["kept"], kept["another"]) >= 20


def test_the_check_knows_an_order_from_a_wrong_one() -> None:
    """Two random ops swapped: refused exactly where brute force finds a pair that has changed."""
    rng, verdicts = random.Random(1), Counter[bool]()
    step = blocks(2, Training(micro_batches=2))
    for _ in range(300):
        ops = list(step.ops)
        at = rng.randrange(len(ops) - 1)
        ops[at], ops[at + 1] = ops[at + 1], ops[at]
        swapped = replace(step, ops=tuple(ops))
        try:
            check_ordered(step, swapped)
            sound = True
        except PlanError:
            sound = False
        assert sound == is_valid(step, swapped)
        verdicts[sound] += 1
    assert min(verdicts.values()) >= 20


def test_micro_batches_and_layers_are_found_by_structure() -> None:
    found = find_micro_batches(blocks(3, Training(micro_batches=4, clipped=True)))
    assert (found.count, len(found.layers)) == (4, 3)
    assert pack_sizes(blocks(9, EIGHT)) == (1, 3, 5)


def test_in_packs_all_micro_batches_of_one_come_before_the_next() -> None:
    """The last pack goes on with its backward at once; gradients are added in their order."""
    ordered = by_layer(blocks(4, Training(micro_batches=2)), 2)
    told = [op.name.split("_")[0] + op.name[-3:] for op in ordered.ops if "_in" in op.name]
    forward, last = ["f0.0", "f1.0", "f0.1", "f1.1"], ["f2.0", "f3.0", "b3.0", "b2.0"]
    again = [name.replace(".0", ".1") for name in last]
    assert told == [*forward, *last, *again, "b1.0", "b0.0", "b1.1", "b0.1"]


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        (blocks(3), "one micro-batch"),
        (in_modules(FUNCTIONAL, {op.name: "m.0" for op in FUNCTIONAL.ops}), "single layer"),
        (FUNCTIONAL, "no numbered modules"),
    ],
)
def test_a_step_without_another_order_says_why(step: Dataflow, reason: str) -> None:
    with pytest.raises(OrderIsKept, match=reason):
        pack_sizes(step)


def test_parameters_written_between_micro_batches_keep_the_order() -> None:
    step = blocks(2, Training(micro_batches=2))
    ops = list(step.ops)
    first = next(at for at, op in enumerate(ops) if op.name == "f_in0.1")
    ops.insert(first, Op("early", "test.early", Phase.OPTIMIZER, ("g_w0", "w0"), ("w0",)))
    with pytest.raises(OrderIsKept, match=r"micro-batch 2 in .* both touch"):
        pack_sizes(replace(step, ops=tuple(ops)))


# Plans.


def eight(budget_mib: int) -> Problem:
    """Four blocks with parameters of 16 MiB each, eight micro-batches."""
    step = in_larger(blocks(4, EIGHT))
    budgets = {Tier.DEVICE: budget_mib * MIB, Tier.HOST: 1 << 40}
    return formulate(step, find("rtx4090"), budgets)


def in_larger(step: Dataflow) -> Dataflow:
    """Parameters, states and gradients eight times as large; all ops may run again."""
    large = [b for b in step.buffers if b.name.split("_")[-1][0] in "wv" and b.nbytes == MIB]
    names = {b.name for b in large}
    buffers = (replace(b, nbytes=8 * MIB) if b.name in names else b for b in step.buffers)
    ops = (replace(op, target="aten.mul.Tensor") for op in step.ops)
    return replace(step, buffers=tuple(buffers), ops=tuple(ops))


def solved(
    problem: Problem, order: str, *, recompute: bool = True, work_limit: float = 5.0
) -> Plan:
    settings = SolveSettings(work_limit=work_limit, micro_batch_order=order, recompute=recompute)
    plan = solve(problem, settings)
    check(problem, plan)
    return plan


@pytest.fixture(scope="module")
def tight() -> Problem:
    return eight(90)


def test_each_streamed_weight_moves_once_a_pass(tight: Problem) -> None:
    """Eight micro-batches, weights that do not fit: one copy for the forward, one for the backward,
    and one more of what is updated on the device."""
    plan = solved(tight, "by-layer", work_limit=1.0)
    params = [b.name for b in tight.dataflow.buffers if b.role is Role.PARAM]
    times = Counter(task.buffer for task in plan.transfers if task.is_fetch)
    streamed = [name for name in params if plan.placement.homes[name] is Tier.HOST]
    assert len(streamed) >= len(params) // 2
    assert all(1 <= times[name] <= 2 for name in streamed)
    assert plan.placement.layers_per_pack


def test_auto_is_the_faster_of_both_orders() -> None:
    """In what the order of the step needs at the least, so that many weights have to move.

    With nothing made again the program of either order is solved long before its time ends.
    """
    plan = solved(eight(180), "auto", recompute=False)
    assert plan.report is not None
    ways = plan.report.simulated_s
    written_s = min(seconds for way, seconds in ways.items() if "+packs:" not in way)
    assert plan.predicted.makespan_s == pytest.approx(min(ways.values()))
    assert plan.predicted.makespan_s < 0.9 * written_s
    assert plan.placement.policy.endswith(f"+packs:{plan.placement.layers_per_pack}")
    assert plan.report.lower_bound_s <= plan.predicted.makespan_s
    assert from_json(to_json(plan), Plan) == plan


def test_where_everything_fits_the_order_is_the_steps_own() -> None:
    plan = solved(eight(4096), "auto")
    assert not plan.tasks
    assert not plan.placement.layers_per_pack


def test_less_memory_will_do_by_layer() -> None:
    with pytest.raises(PlacementError) as written:
        solved(eight(2), "as-written")
    with pytest.raises(PlacementError) as packs:
        solved(eight(2), "by-layer")
    assert packs.value.shortfall_bytes < written.value.shortfall_bytes


def test_what_was_asked_for_and_cannot_be_is_told() -> None:
    step = blocks(3)
    problem = formulate(step, find("rtx4090"), dict.fromkeys(MEMORIES, 1 << 40))
    plan = solve(problem, SolveSettings("resident", micro_batch_order="by-layer"))
    assert "micro_batch_order is 'by-layer', but the step has one micro-batch" in plan.notes[-1]


def test_a_step_is_rewritten_from_what_is_written_whatever_was_asked_before() -> None:
    step = blocks(4, Training(micro_batches=2))
    problem = formulate(step, find("rtx4090"), dict.fromkeys(MEMORIES, 1 << 40))
    names = tuple(sorted(recomputable(step))[:2])
    both = problem.in_packs(1).recomputing(names)
    assert problem.recomputing(names).in_packs(1) == both
    assert both.recomputing(names[:1]) == problem.in_packs(1).recomputing(names[:1])
    assert both.in_packs(2).in_packs(1) == both
    assert both.under(Placement("as written", {}, {})) == problem
    again = both.as_its_own_step()
    assert again.dataflow is both.dataflow
    assert again.under(Placement("as written", {}, {})) is again


def test_what_is_made_of_a_step_is_made_once_and_goes_with_it() -> None:
    step = blocks(4, Training(micro_batches=2))
    ordered = by_layer(step, 1)
    assert by_layer(step, 1) is ordered
    assert by_layer(replace(step), 1) is not ordered
    left = weakref.ref(ordered)
    del step, ordered
    gc.collect()
    assert left() is None
