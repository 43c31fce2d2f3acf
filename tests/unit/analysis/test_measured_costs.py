"""Measured costs: what a profile says of a step, and what starting copies costs the device."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cotrain_compile.analysis.costs import measured_costs
from cotrain_compile.placement.placed import place_plan
from cotrain_compile.placement.simulate.predict import predict
from cotrain_compile.plan import HostRegion, Lane, Placement, Plan, Span, Timeline
from tests.support.plans.sound_plans import Sound, host_update


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
    ops, plain = device_spans_s(sound, issue_s=0.0)
    _, held_up = device_spans_s(sound, issue_s=1.0)
    tasks = [task for task in sound.plan.tasks if task.issue_after != ops[-1]]
    assert tasks
    assert sum(held_up) - sum(plain) == pytest.approx(len(tasks))


@pytest.mark.parametrize("share", [0.01, 0.1, 0.5, 2.0])
def test_a_device_that_runs_ahead_waits_only_where_python_is_not_there_yet(share: float) -> None:
    """Its work is over when that behind the last place is, of those where Python comes late."""
    sound = host_update()
    ops, plain = device_spans_s(sound, issue_s=0.0)
    place: dict[str | None, int] = {None: 0}
    place |= {name: number + 1 for number, name in enumerate(ops)}
    places = [place[task.issue_after] for task in sound.plan.tasks]
    issue_s = share * sum(plain) / len(places)
    _, held_up = device_spans_s(sound, issue_s=issue_s, runs_ahead=True)
    ends_s = [
        issue_s * sum(other <= at for other in places) + sum(plain[at:])
        for at in places
        if at < len(ops)
    ]
    assert sum(held_up) == pytest.approx(max(*ends_s, sum(plain)))
    assert sum(held_up) <= sum(plain) + issue_s * len(ends_s) + 1e-12


def device_spans_s(
    sound: Sound, issue_s: float, *, runs_ahead: bool = False
) -> tuple[list[str], list[float]]:
    """Names and seconds of what the device does where starting a task takes so long."""
    machine = sound.problem.machine.but(issue_s=issue_s, runs_ahead=runs_ahead)
    problem, plan = replace(sound.problem, machine=machine), sound.plan
    timeline = predict(place_plan(problem, plan))
    spans = timeline.lane(Lane.DEVICE)
    return [span.name for span in spans], [span.end_s - span.start_s for span in spans]
