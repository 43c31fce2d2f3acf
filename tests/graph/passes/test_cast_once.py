"""Parameters that are cast once: graph and data say the same, and every bit stays as it is."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from cotrain_compile.extract.extract import extract
from cotrain_compile.machine import Tier
from cotrain_compile.passes.cast_once import cast_once
from cotrain_compile.passes.run_by_layer import run_by_layer
from cotrain_compile.placement.casts import casts_once
from cotrain_compile.placement.check.check import check
from cotrain_compile.placement.order.by_layer import in_packs
from cotrain_compile.placement.policies import resident
from cotrain_compile.placement.recompute.recomputable import recomputable
from cotrain_compile.placement.schedule.schedule import schedule
from cotrain_compile.placement.search.settings import SolveSettings
from cotrain_compile.placement.search.solve import solve
from tests.support.captured_steps import captured, differences, place, reference
from tests.support.plans.random_plans import random_plan
from tests.support.work import LITTLE_WORK

BATCHED = pytest.param("eight-autocast", marks=pytest.mark.long)


def test_casts_of_micro_batches_and_of_checkpoints_are_found() -> None:
    """Of a weight in the checkpoint there are four, of another one for each micro-batch."""
    step = captured("recasting").dataflow
    params = {b.name: b.nbytes for b in step.buffers if b.name in step.update}
    assert all(group.low_precision for group in step.updates)
    counts = sorted(1 + len(step.update[name].recasts) for name in params)
    assert counts == [2] * 4 + [4] * 4
    for group in step.updates:
        copies = [step.buffer[name] for name in (group.low_precision, *group.recasts)]
        assert {2 * copy.nbytes for copy in copies} == {step.buffer[group.param].nbytes}
        assert all(copy.is_passing for copy in copies)


@pytest.mark.parametrize("name", ["recasting", BATCHED])
def test_the_graph_becomes_what_the_dataflow_becomes(name: str) -> None:
    step = captured(name)
    plan = schedule(step.problem(), replace(resident(step.dataflow), casts_once=True))
    found = extract(cast_once(step.step.copy(), plan).verify())
    expected = casts_once(step.dataflow)
    assert found.ops == expected.ops != step.dataflow.ops
    assert {b.name: b for b in found.buffers} == expected.buffer
    assert found.updates == expected.updates
    assert not any(group.recasts for group in found.updates)


@pytest.mark.long
def test_packs_share_the_copies_of_all_micro_batches() -> None:
    step = captured("eight-autocast")
    placement = replace(resident(step.dataflow), layers_per_pack=1, casts_once=True)
    plan = schedule(step.problem(), placement)
    found = extract(run_by_layer(cast_once(step.step.copy(), plan), plan).verify())
    expected = in_packs(casts_once(step.dataflow), 1)
    assert found.ops == expected.ops
    assert found.updates == expected.updates


@pytest.mark.parametrize("name", ["recasting", BATCHED])
def test_random_plans_that_cast_once_give_the_same_numbers(name: str) -> None:
    step, rng = captured(name), random.Random(name)
    for _ in range(4):
        problem = step.problem().casting_once()
        may = sorted(recomputable(problem.dataflow))
        names = [each for each in may if rng.random() < rng.choice((0.0, 0.5, 1.0))]
        plan = random_plan(problem.recomputing(names), rng)
        assert plan.placement.casts_once
        check(step.problem(), plan)
        assert not differences(step.train(place(name, plan)), reference(name))


def test_by_the_rule_of_zero_offload_weights_come_up_once_in_low_precision() -> None:
    """Both micro-batches and the checkpoint use the copy: half of what the weights take."""
    step = captured("recasting")
    plan = solve(step.problem(), SolveSettings("zero-offload"))
    weights = sum(step.dataflow.buffer[group.param].nbytes for group in step.dataflow.updates)
    assert plan.bytes_moved("prefetch") == weights // 2
    check(step.problem(), plan)
    assert not differences(step.train(place("recasting", plan)), reference("recasting"))


def test_where_all_fits_the_step_casts_as_it_is_written() -> None:
    step = captured("recasting")
    plan = solve(step.problem(), SolveSettings())
    assert not plan.tasks
    assert not plan.placement.casts_once


def test_in_little_memory_auto_is_no_slower_than_with_every_cast() -> None:
    step = captured("recasting")
    whole = schedule(step.problem(), resident(step.dataflow)).predicted.peak_bytes[Tier.DEVICE]
    problem = step.problem().with_budget(Tier.DEVICE, int(0.7 * whole))
    settings = SolveSettings(work_limit=LITTLE_WORK)
    plan = solve(problem, settings)
    plain = replace(
        problem.dataflow, updates=tuple(replace(g, recasts=()) for g in problem.dataflow.updates)
    )
    as_written = solve(replace(problem, dataflow=plain), settings)
    assert plan.predicted.makespan_s <= as_written.predicted.makespan_s
    check(problem, plan)
    assert not differences(step.train(place("recasting", plan)), reference("recasting"))
