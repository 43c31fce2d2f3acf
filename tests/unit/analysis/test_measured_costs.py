"""Measured costs: what a profile says of a step, and what starting copies costs the device."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cotrain_compile.analysis.costs import measured_costs
from cotrain_compile.placement.simulate.predict import predict
from cotrain_compile.plan import HostRegion, Lane, Placement, Plan, Span, Timeline
from tests.support.plans.sound_plans import host_update


def measured(*ops_s: float, update_s: float = 0.0) -> Timeline:
    """A step of the ops op0, op1, ... one after the other, then an update of w on the host."""
    spans, end_s = [], 0.0
    for number, seconds in enumerate(ops_s):
        spans.append(Span(Lane.DEVICE, f"op{number}", end_s, end_s + seconds))
        end_s += seconds
    if update_s:
        spans.append(Span(Lane.HOST, "first", end_s, end_s + update_s))
        spans.append(Span(Lane.HOST, "update.v", end_s + update_s, end_s + 2 * update_s))
    return Timeline("measured", tuple(spans), {})


# Names say nothing: which span is the update of w is for the plan to say.
PLAN = Plan(
    "",
    "",
    {},
    Placement("", {}, {}),
    (
        HostRegion("first", "w", ("u",), None, None),
        HostRegion("update.v", "v", ("c",), None, None, makes="v_16"),
    ),
    Timeline("predicted", (), {}),
)


def test_a_profile_adds_up_to_the_median_step_though_each_step_is_slow_elsewhere() -> None:
    costs = measured_costs([measured(3, 1, 1), measured(1, 3, 1), measured(1, 1, 3)], PLAN)
    assert costs.device_s == pytest.approx({"op0": 5 / 3, "op1": 5 / 3, "op2": 5 / 3})


def test_a_profile_has_updates_by_parameter_and_leaves_casts_out() -> None:
    costs = measured_costs([measured(1, update_s=0.5), measured(1, update_s=0.7)], PLAN)
    assert costs.host_update_s == pytest.approx({"w": 0.6})
    assert measured_costs([measured(1)], PLAN).host_update_s == {}


def test_an_update_that_is_cut_by_the_end_of_a_step_is_counted_whole() -> None:
    """Overlapping steps: the end of the one before, and the beginning of the next."""
    pieces = (Span(Lane.HOST, "first", 0.0, 0.2), Span(Lane.HOST, "first", 0.7, 1.0))
    timeline = replace(measured(1), spans=pieces)
    assert measured_costs([timeline], PLAN).host_update_s == pytest.approx({"w": 0.5})


def test_a_device_that_starts_copies_itself_stands_still_for_each() -> None:
    sound = host_update()
    plan = sound.plan
    assert plan.tasks
    busy_s = []
    for issue_s in (0.0, 1.0):
        problem = replace(sound.problem, machine=sound.problem.machine.but(issue_s=issue_s))
        timeline = predict(problem, plan.placement, plan.tasks, plan.moved)
        busy_s.append(timeline.busy_s(Lane.DEVICE))
    ops = [span.name for span in timeline.lane(Lane.DEVICE)]
    held_up = [task for task in plan.tasks if task.issue_after != ops[-1]]
    assert busy_s[1] - busy_s[0] == pytest.approx(len(held_up))
