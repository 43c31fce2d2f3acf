"""Bundles: small tasks that are carried out as one, in plans that are sound, and no slower."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotrain_compile.errors import PlanError
from cotrain_compile.machine import MEMORIES, Tier
from cotrain_compile.placement.check.check import check, peaks_of
from cotrain_compile.placement.placed import place_plan
from cotrain_compile.placement.policies import rule
from cotrain_compile.placement.problem import Problem, formulate
from cotrain_compile.placement.residency import device_program
from cotrain_compile.placement.schedule import bundles
from cotrain_compile.placement.schedule.bundles import alone
from cotrain_compile.placement.schedule.schedule import schedule
from cotrain_compile.placement.simulate.predict import predict
from cotrain_compile.placement.simulate.works import starts_of
from cotrain_compile.plan import HostRegion, Plan, carried_out
from cotrain_compile.presets import find
from tests.support.dataflows import chain
from tests.support.plans.sound_plans import clipped_chain

PLENTY = dict.fromkeys(MEMORIES, 1 << 40)


def planned(layers: int = 9, policy: str = "coarse") -> tuple[Problem, Plan]:
    """Of a chain, its updates after the backward."""
    dataflow = chain(layers, width=16)
    problem = formulate(dataflow, find("h100"), PLENTY)
    return problem, schedule(problem, replace(rule(policy)(dataflow), early_updates=False))


def one_by_one(problem: Problem, plan: Plan) -> Plan:
    with mock.patch.object(bundles, "FEWEST", 1 << 30):
        return schedule(problem, plan.placement)


def largest(plan: Plan) -> list[str]:
    """The names of the bundle with the most members."""
    return [task.name for task in max(carried_out(plan.tasks), key=len)]


def test_a_step_with_many_small_updates_has_few_starts_and_takes_no_longer() -> None:
    problem, plan = planned(layers=24)
    before = one_by_one(problem, plan)
    assert len(carried_out(plan.tasks)) < 0.2 * len(before.tasks) == 0.2 * len(plan.tasks)
    assert starts_of(plan.tasks) < 0.5 * starts_of(before.tasks)
    assert plan.predicted.makespan_s <= before.predicted.makespan_s
    assert {task.name for task in plan.tasks} == {
        span.name for span in plan.predicted.spans
    }.difference(op.name for op in device_program(problem.dataflow, plan.placement, plan.moved).ops)


def test_what_rests_on_the_host_is_fetched_together_within_the_budget() -> None:
    problem, plan = planned(layers=24, policy="zero-offload")
    fetches = [task for task in plan.transfers if task.is_fetch]
    assert len(fetches) == 24
    assert {task.bundle for task in fetches} == {fetches[0].name}
    before = one_by_one(problem, plan)
    tight = problem.with_budget(Tier.DEVICE, before.predicted.peak_bytes[Tier.DEVICE])
    check(tight, schedule(tight, plan.placement))


def test_large_tensors_go_by_themselves() -> None:
    dataflow = chain(9, width=256)
    problem = formulate(dataflow, find("h100"), PLENTY)
    plan = schedule(problem, rule("zero-offload")(dataflow))
    assert len(carried_out(plan.tasks)) == len(plan.tasks)


@given(
    layers=st.integers(1, 9),
    policy=st.sampled_from(["zero-offload", "coarse", "streamed", "fraction:0.5"]),
    is_clipped=st.booleans(),
    reach=st.integers(0, 30),
    fewest=st.integers(2, 4),
)
def test_bundles_leave_a_plan_sound_and_its_peaks_known(
    layers: int, policy: str, is_clipped: bool, reach: int, fewest: int
) -> None:
    dataflow = clipped_chain() if is_clipped else chain(layers, width=16)
    problem = formulate(dataflow, find("h100"), PLENTY)
    plan = schedule(problem, rule(policy)(dataflow))
    program = device_program(dataflow, plan.placement, plan.moved)
    with mock.patch.object(bundles, "FEWEST", fewest):
        joined = bundles.Bundler(program, alone(plan.tasks)).within(reach)
    if joined is None:
        return
    predicted = predict(replace(place_plan(problem, plan), tasks=tuple(joined)))
    found = replace(plan, tasks=tuple(joined), predicted=predicted)
    check(problem, found)
    peaks = peaks_of(dataflow, found, problem.machine.host_update.workers)
    assert peaks[Tier.DEVICE].nbytes == predicted.peak_bytes[Tier.DEVICE]
    assert peaks[Tier.HOST].nbytes <= predicted.peak_bytes[Tier.HOST]
    assert sorted(task.name for task in joined) == sorted(task.name for task in plan.tasks)


def test_what_is_inside_the_updates_of_a_bundle_is_there_at_once() -> None:
    problem, plan = planned()
    regions = [task for task in plan.tasks if isinstance(task, HostRegion)]
    assert len({region.bundle for region in regions}) == 1
    parted = replace(plan, tasks=tuple(alone(plan.tasks)))
    inside = [peaks_of(problem.dataflow, found, 1)[Tier.HOST].nbytes for found in (plan, parted)]
    assert inside[0] >= inside[1]


def broken(plan: Plan, name: str, **changes: Any) -> Plan:
    return replace(
        plan, tasks=tuple(replace(t, **changes) if t.name == name else t for t in plan.tasks)
    )


def test_a_broken_bundle_is_refused() -> None:
    problem, plan = planned()
    check(problem, plan)
    first, second, *_, last = largest(plan)
    for wrong, says in (
        (broken(plan, second, bundle="other"), "not beside its other members"),
        (broken(plan, second, bundle=""), "not beside its other members"),
        (
            broken(plan, last, wait_before=problem.dataflow.ops[-1].name),
            "waited for together|names",
        ),
        (broken(plan, last, after=(first,)), "in one bundle with"),
    ):
        with pytest.raises(PlanError, match=says):
            check(problem, wrong)
