"""The rules of other systems move what those systems are known to move, in plans that are sound."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotrain_compile.dataflow import Dataflow
from cotrain_compile.errors import PlacementError
from cotrain_compile.machine import Tier
from cotrain_compile.placement.check.check import check
from cotrain_compile.placement.problem import formulate
from cotrain_compile.placement.published import PUBLISHED, any_rule
from cotrain_compile.placement.schedule.schedule import schedule
from cotrain_compile.placement.search.settings import SolveSettings
from cotrain_compile.placement.search.solve import solve
from cotrain_compile.placement.wear import wear
from cotrain_compile.plan import Lane, Plan
from cotrain_compile.presets import find
from tests.support.dataflows import chain, mixed_precision_step

PLENTY = {Tier.DEVICE: 1 << 50, Tier.HOST: 1 << 50}
# Of the layers between the first and the last, whose weights are off the device from forward to
# backward.
LAYERS = 40


def plan_of(step: Dataflow, policy: str) -> Plan:
    problem = formulate(step, find("h100"), PLENTY)
    plan = schedule(problem, any_rule(policy)(step))
    check(problem, plan)
    return plan


def bytes_a_parameter(step: Dataflow, policy: str) -> tuple[float, float]:
    """Down and up, of a float32 parameter."""
    parameters = sum(step.buffer[group.param].nbytes for group in step.updates) / 4
    plan = plan_of(step, policy)
    return plan.bytes_moved("offload") / parameters, plan.bytes_moved("prefetch") / parameters


@pytest.mark.parametrize(
    ("policy", "down", "up"),
    [
        ("zero-offload", 2, 2),
        ("torchao-offload", 2, 4),
        ("zero-infinity", 2, 2 + 2),
        ("fsdp-offload", 2, 4 + 4),
    ],
)
def test_in_mixed_precision_each_moves_what_its_system_does(
    policy: str, down: float, up: float
) -> None:
    step = mixed_precision_step(LAYERS, params=1000, batch_bytes=1000)
    moved_down, moved_up = bytes_a_parameter(step, policy)
    assert moved_down == pytest.approx(down)
    assert moved_up == pytest.approx(up, rel=2 / LAYERS)


@pytest.mark.parametrize(
    ("policy", "up"), [("torchao-offload", 1), ("zero-infinity", 2), ("fsdp-offload", 2)]
)
def test_in_one_precision_weights_come_once_or_twice(policy: str, up: int) -> None:
    down, moved_up = bytes_a_parameter(chain(LAYERS), policy)
    assert down == pytest.approx(4)
    assert moved_up == pytest.approx(4 * up, rel=2 / LAYERS)


def test_on_nvme_states_and_masters_rest_on_the_drive_whatever_the_host_has_room_for() -> None:
    params = 2_000_000
    step, card = mixed_precision_step(4, params=params), find("rtx4090")
    rule = any_rule("zero-infinity-nvme")(step)
    problem = formulate(step, card, {**PLENTY, Tier.DISK: 1 << 40})
    plan = schedule(problem, rule)
    check(problem, plan)
    above = schedule(problem, any_rule("zero-infinity")(step))
    parameters, disk = 4 * params, card.disk
    assert disk is not None
    assert plan.predicted.peak_bytes[Tier.DISK] == pytest.approx(12 * parameters, rel=0.01)
    read_bytes = plan.predicted.busy_s(Lane.DISK_READ) * disk.read_bytes_per_s
    assert read_bytes / parameters == pytest.approx(12 + 2 * 4, rel=0.02)
    written = wear(problem, plan)
    assert written is not None
    assert written.step_bytes / parameters == pytest.approx(12, rel=0.01)
    for way in ("offload", "prefetch"):
        assert plan.bytes_moved(way) == above.bytes_moved(way)
    assert plan.predicted.makespan_s > above.predicted.makespan_s
    with pytest.raises(PlacementError, match=r"on disk, but there is no disk: set disk to a"):
        schedule(formulate(step, card, PLENTY), rule)


@pytest.mark.parametrize("policy", PUBLISHED)
@given(layers=st.integers(1, 6), params=st.integers(1, 2000), mixed=st.booleans())
def test_their_plans_are_sound(policy: str, layers: int, params: int, mixed: bool) -> None:
    """`plan_of` checks them."""
    step = mixed_precision_step(layers, params=params, batch_bytes=1000) if mixed else chain(layers)
    assert plan_of(step, policy).tasks


@pytest.mark.parametrize("policy", PUBLISHED)
def test_solve_takes_them_by_name(policy: str) -> None:
    problem = formulate(mixed_precision_step(4, params=1000), find("h100"), PLENTY)
    plan = solve(problem, SolveSettings(policy=policy))
    assert plan.placement.policy == policy
    assert plan.predicted.makespan_s == plan_of(problem.dataflow, policy).predicted.makespan_s
