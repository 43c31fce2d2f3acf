"""Offloaded on disk: values rest there at last, and it is told how long a drive bears it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cotrain_compile.errors import PlanError
from cotrain_compile.machine import Machine, Tier
from cotrain_compile.machine.parts import WRITES_BORNE
from cotrain_compile.placement.check.check import check
from cotrain_compile.placement.problem import Problem, formulate
from cotrain_compile.placement.schedule.schedule import schedule
from cotrain_compile.placement.search.reuse_placement import reuse_placement
from cotrain_compile.placement.search.solve import SolveSettings, solve
from cotrain_compile.placement.wear import wear
from cotrain_compile.plan import Lane, Placement, Plan
from cotrain_compile.plan.on_disk import write_room_bytes
from cotrain_compile.presets import find
from tests.support.dataflows import chain

WIDTH, BATCH, LAYERS = 2048, 1 << 15, 6
STEP = chain(LAYERS, width=WIDTH, batch=BATCH)
VALUE_BYTES = STEP.buffer["h0"].nbytes
CARD = find("rtx4090")


def problem_of(host_bytes: int, disk_budget: int = 1 << 40, machine: Machine = CARD) -> Problem:
    """On a device with room for about half of the values."""
    budgets = {Tier.DEVICE: (LAYERS // 2 + 2) * VALUE_BYTES, Tier.HOST: host_bytes}
    return formulate(STEP, machine, budgets | ({Tier.DISK: disk_budget} if disk_budget else {}))


def offloaded(problem: Problem) -> Placement:
    plan = solve(problem, SolveSettings("greedy", work_limit=2, recompute=False))
    return plan.placement


IN_MEMORY = problem_of(1 << 40, 0)
OFFLOADED = offloaded(IN_MEMORY)


def plan_within(host_bytes: int, machine: Machine = CARD) -> tuple[Problem, Plan]:
    problem = problem_of(host_bytes, machine=machine)
    plan = schedule(problem, OFFLOADED)
    check(problem, plan)
    return problem, plan


def scarce() -> int:
    """Half of what the host holds without a drive."""
    return schedule(IN_MEMORY, OFFLOADED).predicted.peak_bytes[Tier.HOST] // 2


def test_values_rest_there_where_the_host_has_no_room_for_them() -> None:
    _, plan = plan_within(scarce())
    there = plan.placement.offloaded_to_disk
    assert 0 < len(there) < len(OFFLOADED.offloaded)
    assert plan.predicted.peak_bytes[Tier.DISK] == len(there) * VALUE_BYTES
    assert write_room_bytes(STEP, plan.placement) > 0
    nbytes, disk = len(there) * VALUE_BYTES, CARD.disk
    assert disk is not None
    for lane, rate in (
        (Lane.DISK_READ, disk.read_bytes_per_s),
        (Lane.DISK_WRITE, disk.write_bytes_per_s),
    ):
        assert nbytes / rate * 0.999 <= plan.predicted.busy_s(lane) <= 2 * nbytes / rate
    assert not plan_within(1 << 40)[1].placement.offloaded_to_disk


@pytest.mark.parametrize("policy", ["greedy", "lp-round", "auto"])
def test_no_plan_is_below_its_bound(policy: str) -> None:
    problem = problem_of(scarce())
    plan = solve(problem, SolveSettings(policy, work_limit=2))
    check(problem, plan)
    if plan.report is not None:
        assert plan.report.lower_bound_s <= plan.predicted.makespan_s * (1 + 1e-9)


def test_what_is_not_offloaded_is_not_on_disk() -> None:
    problem, plan = plan_within(scarce())
    for name in ("loss", "w0", "x"):
        wrong = replace(plan, placement=replace(plan.placement, offloaded_to_disk=(name,)))
        with pytest.raises(PlanError, match="offloaded_to_disk names"):
            check(problem, wrong)


def test_the_wear_of_the_drive_is_told() -> None:
    problem, plan = plan_within(scarce())
    worn, disk = wear(problem, plan), CARD.disk
    assert worn is not None
    assert disk is not None
    written = len(plan.placement.offloaded_to_disk) * VALUE_BYTES
    assert worn.step_bytes == worn.value_bytes == written
    assert worn.day_bytes == pytest.approx(written * 86400 / plan.predicted.makespan_s)
    assert worn.steps == pytest.approx(WRITES_BORNE * disk.capacity_bytes / written)
    assert worn.words.endswith("to the 1,200 TB that the drive is rated for (assumed)")
    rated = CARD.with_disk(replace(disk, rated_bytes=7e14))
    assert rated.disk == replace(disk, rated_bytes=7e14)
    worn = wear(*plan_within(scarce(), rated))
    assert worn is not None
    assert worn.words.endswith("to the 700 TB that the drive is rated for")
    assert wear(*plan_within(1 << 40)) is None


def test_a_placement_used_again_leaves_out_what_the_step_does_not_know() -> None:
    problem, plan = plan_within(scarce())
    placement = plan.placement
    with_more = replace(
        placement,
        offloaded=(*placement.offloaded, "gone"),
        refetched=("gone",),
        offloaded_to_disk=(*placement.offloaded_to_disk, "gone"),
    )
    anew = reuse_placement(problem, with_more)
    assert anew is not None
    check(problem, anew)
    assert anew.placement == placement
