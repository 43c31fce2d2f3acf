"""Micro-batches layer by layer: graph and data say the same, and every bit stays as it is."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from cotrain_compile.errors import PlanError
from cotrain_compile.extract.extract import extract
from cotrain_compile.passes.run_by_layer import run_by_layer
from cotrain_compile.placement.check.check import check
from cotrain_compile.placement.order.by_layer import (
    OrderIsKept,
    by_layer,
    find_micro_batches,
    pack_sizes,
)
from cotrain_compile.placement.policies import resident
from cotrain_compile.placement.recompute.recomputable import recomputable
from cotrain_compile.placement.schedule.schedule import schedule
from tests.support.captured_steps import captured, differences, place, reference
from tests.support.plans.random_plans import random_plan

STEPS = (
    "two-clipped",
    *(
        pytest.param(name, marks=pytest.mark.long)
        for name in ("four-tied", "four-kept", "eight-autocast")
    ),
)


@pytest.mark.parametrize("name", STEPS)
def test_the_graph_becomes_what_the_dataflow_becomes(name: str) -> None:
    step = captured(name)
    for size in pack_sizes(step.dataflow):
        placement = replace(resident(step.dataflow), layers_per_pack=size)
        plan = schedule(step.problem(), placement)
        ordered = extract(run_by_layer(step.step.copy(), plan).verify())
        expected = by_layer(step.dataflow, size)
        assert ordered.ops == expected.ops != step.dataflow.ops
        assert {b.name: b for b in ordered.buffers} == expected.buffer
        assert ordered.updates == expected.updates


@pytest.mark.parametrize("name", STEPS)
def test_random_plans_of_packs_give_the_same_numbers(name: str) -> None:
    """Some of what they may make again they make again."""
    step, rng = captured(name), random.Random(name)
    for size in pack_sizes(step.dataflow):
        problem = step.problem().in_packs(size)
        may = sorted(recomputable(problem.dataflow))
        names = [each for each in may if rng.random() < rng.choice((0.0, 0.5, 1.0))]
        plan = random_plan(problem.recomputing(names), rng)
        check(step.problem(), plan)
        compiled = place(name, plan)
        assert not differences(step.train(compiled), reference(name))


@pytest.mark.parametrize("name", STEPS)
def test_packs_run_for_all_micro_batches_before_the_next(name: str) -> None:
    """One layer a pack: what each op of a module works for comes layer by layer."""
    dataflow = captured(name).dataflow
    found = find_micro_batches(dataflow)
    turn = dict(zip((op.name for op in dataflow.ops), found.turns, strict=True))
    forward = [turn[op.name] for op in by_layer(dataflow, 1).ops if "layers." in op.module]
    places = [(t.layer, t.micro_batch) for t in forward if t is not None]
    assert places == sorted(places)
    assert set(places) == {(i, j) for i in range(len(found.layers)) for j in range(found.count)}


def test_steps_with_dropout_keep_their_order_and_say_why() -> None:
    """Random numbers are drawn in the order of the step, whatever a plan says."""
    step = captured("dropout")
    with pytest.raises(OrderIsKept, match="both draw random numbers"):
        pack_sizes(step.dataflow)
    plan = schedule(step.problem(), resident(step.dataflow))
    forged = replace(plan, placement=replace(plan.placement, layers_per_pack=1))
    with pytest.raises(PlanError, match="does not allow: native_dropout"):
        check(step.problem(), forged)
