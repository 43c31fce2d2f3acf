"""On disk: what the host has no room for rests there; no plan is better than its bound."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from cotrain_compile.errors import OptionError, PlacementError, PlanError
from cotrain_compile.files import load, save
from cotrain_compile.machine import Machine, Tier
from cotrain_compile.placement.check.check import check
from cotrain_compile.placement.check.rules import check_placement
from cotrain_compile.placement.policies import coarse, streamed, zero_offload
from cotrain_compile.placement.problem import Problem, formulate
from cotrain_compile.placement.schedule.schedule import schedule
from cotrain_compile.placement.search.solve import SolveSettings, solve
from cotrain_compile.plan import Lane, Plan
from cotrain_compile.plan.on_disk import disk_bytes, may_rest_on_disk, room_bytes
from cotrain_compile.presets import find
from tests.support.dataflows import mixed_precision_step

PARAMS, LAYERS = 20_000_000, 4
STATES = 2 * 4 * PARAMS * LAYERS
STEP = mixed_precision_step(LAYERS, params=PARAMS)
CARD = find("rtx4090")


def problem_of(host_bytes: int, disk_budget: int = 1 << 40, machine: Machine = CARD) -> Problem:
    """On a device that holds weights, gradients and one layer's states."""
    device_bytes = (4 + 2 + 2) * PARAMS * LAYERS + 16 * PARAMS
    budgets = {Tier.DEVICE: device_bytes, Tier.HOST: host_bytes}
    return formulate(STEP, machine, {**budgets, Tier.DISK: disk_budget} if disk_budget else budgets)


def needed_without() -> int:
    """What the host holds by ZeRO-Offload's rule."""
    problem = problem_of(1 << 40, 0)
    return schedule(problem, zero_offload(STEP)).predicted.peak_bytes[Tier.HOST]


def on_disk(plan: Plan) -> list[str]:
    return [name for name, tier in plan.placement.homes.items() if tier is Tier.DISK]


@pytest.mark.parametrize(
    "policy",
    [
        "zero-offload",
        "coarse",
        "auto",
        "greedy",
        *(pytest.param(n, marks=pytest.mark.long) for n in ("lp-round", "ilp")),
    ],
)
def test_a_step_fits_a_host_that_has_no_room_for_its_states(policy: str) -> None:
    scarce = needed_without() - STATES // 2
    settings = SolveSettings(policy, work_limit=2)
    problem = problem_of(scarce)
    plan = solve(problem, settings)
    check(problem, plan)
    assert all(plan.predicted.peak_bytes[t] <= plan.budgets[t] for t in plan.tiers)
    if policy in ("zero-offload", "coarse"):
        assert on_disk(plan)
        with pytest.raises(PlacementError, match=r"or let states rest on a drive \(option disk\)"):
            solve(problem_of(scarce, 0), settings)
    elif plan.report is not None:
        assert plan.report.lower_bound_s <= plan.predicted.makespan_s * (1 + 1e-9)


def test_as_few_states_rest_there_as_are_enough() -> None:
    enough = needed_without()
    plans = [
        schedule(problem_of(host), zero_offload(STEP))
        for host in (enough, enough - STATES // 4, enough - STATES // 2)
    ]
    counts = [len(on_disk(plan)) for plan in plans]
    assert counts[0] == 0
    assert 0 < counts[1] < counts[2] <= 2 * LAYERS
    seconds = [plan.predicted.makespan_s for plan in plans]
    assert seconds == sorted(seconds)


def test_what_rests_there_crosses_both_ways_of_the_drive_once_a_step() -> None:
    plan = schedule(problem_of(needed_without() - STATES // 2), zero_offload(STEP))
    nbytes, disk = disk_bytes(STEP, plan.placement), CARD.disk
    assert disk is not None
    assert plan.predicted.peak_bytes[Tier.DISK] == nbytes
    for lane, rate in (
        (Lane.DISK_READ, disk.read_bytes_per_s),
        (Lane.DISK_WRITE, disk.write_bytes_per_s),
    ):
        least_s = nbytes / rate
        assert least_s * 0.999 <= plan.predicted.busy_s(lane) <= 2 * least_s
    assert plan.predicted.makespan_s >= nbytes / disk.write_bytes_per_s


def test_a_slower_drive_takes_longer() -> None:
    assert CARD.disk is not None
    slow = CARD.with_disk(replace(CARD.disk, write_bytes_per_s=3e8))
    host = needed_without() - STATES // 2
    fast_s, slow_s = (
        schedule(problem_of(host, machine=machine), zero_offload(STEP)).predicted.makespan_s
        for machine in (CARD, slow)
    )
    assert slow_s > 2 * fast_s


def test_rooms_are_counted_and_a_byte_too_few_is_refused() -> None:
    problem = problem_of(needed_without() - STATES // 2)
    plan = schedule(problem, zero_offload(STEP))
    rooms = room_bytes(STEP, plan.placement)
    assert 0 < rooms < STATES // 8
    for tier, nbytes in plan.predicted.peak_bytes.items():
        tight = replace(plan, budgets={**plan.budgets, tier: nbytes})
        check(problem, tight)
        with pytest.raises(PlanError, match=rf"bytes on the {tier} .* 1 too many"):
            check(problem, replace(plan, budgets={**plan.budgets, tier: nbytes - 1}))


def test_only_what_the_host_updates_may_rest_there() -> None:
    problem = problem_of(1 << 40)
    by_rule = {rule: schedule(problem, rule(STEP)) for rule in (zero_offload, coarse, streamed)}
    for rule, plan in by_rule.items():
        for name in ("p32_0", "m_0"):
            homes = {**plan.placement.homes, name: Tier.DISK}
            resting = replace(plan, placement=replace(plan.placement, homes=homes))
            allowed = rule is zero_offload or (rule is coarse and name == "m_0")
            with nullcontext() if allowed else pytest.raises(PlanError, match="at home on disk"):
                check_placement(STEP, resting.placement)


def test_weights_follow_where_all_states_are_not_enough() -> None:
    """And are read twice: for the cast at the beginning, and for their update."""
    scarce = needed_without() - STATES - 2 * 4 * PARAMS
    plan = schedule(problem_of(scarce), zero_offload(STEP))
    check(problem_of(scarce), plan)
    there = set(on_disk(plan))
    weights = {name for name in there if name in STEP.update}
    assert len(weights) >= 2
    assert there - weights == {s for g in STEP.updates for s in may_rest_on_disk(STEP, g)}
    nbytes = disk_bytes(STEP, plan.placement) + 4 * PARAMS * len(weights)
    assert CARD.disk is not None
    assert plan.predicted.busy_s(Lane.DISK_READ) >= nbytes / CARD.disk.read_bytes_per_s


def test_a_drive_that_is_too_small_does_not_help() -> None:
    with pytest.raises(PlacementError, match="host_memory_budget"):
        schedule(problem_of(needed_without() - STATES // 2, 1 << 20), zero_offload(STEP))


def test_a_machine_without_a_drive_is_told_so() -> None:
    with pytest.raises(OptionError, match="has no drive"):
        problem_of(1 << 40, machine=CARD.with_disk(None))


def test_a_plan_and_a_machine_with_a_drive_come_back_from_files(tmp_path: Path) -> None:
    plan = schedule(problem_of(needed_without() - STATES // 2), zero_offload(STEP))
    save(plan, tmp_path / "plan.json")
    save(CARD, tmp_path / "machine.json")
    assert load(tmp_path / "plan.json", Plan) == plan
    assert find(str(tmp_path / "machine.json")).disk == CARD.disk
