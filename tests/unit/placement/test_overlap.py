"""Overlapping steps as plans: what they cost, what they hold, and which of them are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from typer.testing import CliRunner

from cotrain_compile import files
from cotrain_compile.cli.main import app
from cotrain_compile.dataflow import Dataflow
from cotrain_compile.errors import PlacementError, PlanError
from cotrain_compile.machine import MEMORIES, Tier
from cotrain_compile.placement.check.check import check
from cotrain_compile.placement.check.replay import replay
from cotrain_compile.placement.placed import place_plan
from cotrain_compile.placement.policies import rule
from cotrain_compile.placement.problem import Problem, formulate
from cotrain_compile.placement.schedule.list_scheduler import Tactics
from cotrain_compile.placement.schedule.schedule import schedule
from cotrain_compile.placement.search.solve import SolveSettings, solve
from cotrain_compile.placement.simulate.predict import predict_steady_state
from cotrain_compile.plan import Lane, Placement, Plan, Task, Transfer, UpdateMode
from cotrain_compile.presets import find
from tests.support.dataflows import chain, mixed_precision_step
from tests.support.examples import examples
from tests.support.plans.sound_plans import chain_that_reads_a_weight_late, clipped_chain
from tests.support.random_problems import PLENTY, fits, problems

ROUNDING = 1 + 1e-9
STEPS = {
    "chain": chain(3),
    "clipped": clipped_chain(),
    "mixed": mixed_precision_step(3),
}
WEIGHT = 4 * 64 * 64  # bytes, of a chain


def at_the_end(dataflow: Dataflow) -> Placement:
    """All updates on the host after the backward; parameters rest on the device."""
    return replace(rule("coarse")(dataflow), early_updates=False)


def overlapping_plan(dataflow: Dataflow, policy: str = "", **homes: Tier) -> Plan:
    """One with everything deferred that may be, `homes` of parameters changed.

    Of the placement `at_the_end`, or of `policy`.
    """
    placement = rule(policy)(dataflow) if policy else at_the_end(dataflow)
    streamed = {p: UpdateMode.HOST_STREAMED for p, tier in homes.items() if tier is Tier.HOST}
    placement = replace(
        placement,
        overlap_steps=True,
        homes={**placement.homes, **homes},
        updates={**placement.updates, **streamed},
    )
    return schedule(problem_of(dataflow), placement, tactics=Tactics(by_use=True))


def problem_of(dataflow: Dataflow) -> Problem:
    return formulate(dataflow, find("rtx4090"), dict.fromkeys(MEMORIES, PLENTY))


PLANS = {
    **{name: (step, overlapping_plan(step)) for name, step in STEPS.items()},
    "part on the device": (STEPS["chain"], overlapping_plan(STEPS["chain"], "fraction:0.4")),
    "weight on the host": (STEPS["clipped"], overlapping_plan(STEPS["clipped"], w1=Tier.HOST)),
    "master on the host": (STEPS["mixed"], overlapping_plan(STEPS["mixed"], p32_1=Tier.HOST)),
}
CASES = st.sampled_from(sorted(PLANS)).map(PLANS.__getitem__)


# What they take.


@given(problems(most=2))
@examples(3)
def test_to_overlap_is_never_slower_and_never_beats_its_bound(problem: Problem) -> None:
    assume(not fits(problem, problem.budgets[Tier.DEVICE]))
    alone, plan = (
        solve(problem, SolveSettings(overlap_steps=overlap)) for overlap in (False, True)
    )
    check(problem, plan)
    assert plan.placement.overlap_steps or not plan.deferred
    assert alone.report is not None
    assert plan.report is not None
    assume("time" not in alone.report.status)  # the first solver run is the same in both
    step_s = plan.predicted.makespan_s
    assert step_s <= alone.predicted.makespan_s * ROUNDING
    assert step_s <= min(alone.report.simulated_s.values()) * ROUNDING
    assert plan.report.gap >= -1e-6
    bound_s = plan.report.lower_bound_s
    assert 0 < bound_s <= min(plan.report.simulated_s.values()) * ROUNDING
    assert bound_s <= alone.report.lower_bound_s * (1 + 1e-3)  # the solver's gap


@pytest.mark.parametrize("name", PLANS)
def test_the_timeline_of_a_step_is_that_of_the_steady_state(name: str) -> None:
    """As long as the mean of many steps, or as the longer of two that take turns."""
    dataflow, plan = PLANS[name]
    problem = problem_of(dataflow)
    placed = place_plan(problem, plan)
    period_s = predict_steady_state(placed, steps=20).period_s
    assert period_s * (1 - 1e-9) <= plan.predicted.makespan_s <= period_s * 1.01
    ops, spans = placed.program.ops, plan.predicted.spans
    assert {s.name for s in spans} == {x.name for x in (*ops, *plan.tasks)}
    assert min(span.start_s for span in spans) == pytest.approx(0)
    assert len([s for s in spans if s.lane == Lane.DEVICE]) == len(ops)


def test_an_update_goes_on_under_the_next_forward() -> None:
    """Where the host takes longest, a step is shorter by what it does under the forward."""
    dataflow = mixed_precision_step(4, params=1_000_000, batch_bytes=40_000_000)
    problem = problem_of(dataflow)
    placement = at_the_end(dataflow)
    alone = schedule(problem, placement)
    plan = schedule(problem, replace(placement, overlap_steps=True), tactics=Tactics(by_use=True))
    saved_s = alone.predicted.makespan_s - plan.predicted.makespan_s
    forward_s = sum(problem.costs.device_s[op.name] for op in dataflow.ops if op.phase == "forward")
    assert saved_s > 0.3 * forward_s
    assert plan.predicted.makespan_s >= max(plan.predicted.busy_s(lane) for lane in Lane)


@pytest.mark.parametrize("name", PLANS)
def test_the_device_holds_what_it_holds_without_overlap(name: str) -> None:
    """And the host once more what deferred updates read, up to the wait for them."""
    dataflow, plan = PLANS[name]
    placement = replace(plan.placement, overlap_steps=False)
    alone = schedule(problem_of(dataflow), placement)
    peaks, peaks_alone = plan.predicted.peak_bytes, alone.predicted.peak_bytes
    assert peaks[Tier.DEVICE] == peaks_alone[Tier.DEVICE]
    assert peaks_alone[Tier.HOST] < peaks[Tier.HOST] < 2 * peaks_alone[Tier.HOST]
    for tier, peak in replay(dataflow, plan).items():
        assert peak.nbytes <= peaks[tier]


def test_host_memory_is_that_counted_by_hand() -> None:
    """Three states; three gradients and weights of the step before, and of this one."""
    _, plan = PLANS["chain"]
    assert plan.predicted.peak_bytes[Tier.HOST] == (3 + 2 * 6) * WEIGHT


@pytest.mark.parametrize(("workers", "at_once"), [(1, 1), (2, 2), (9, 3)])
def test_updates_that_run_at_once_hold_their_values_at_once(workers: int, at_once: int) -> None:
    """The widened gradient inside each of three updates; the check counts as the plan does."""
    dataflow, alone = PLANS["mixed"]
    problem = problem_of(dataflow)
    host = replace(problem.machine.host_update, workers=workers)
    problem = replace(problem, machine=problem.machine.but(host_update=host))
    plan = schedule(problem, alone.placement, tactics=Tactics(by_use=True))
    widened = plan.predicted.peak_bytes[Tier.HOST] - alone.predicted.peak_bytes[Tier.HOST]
    assert widened == (at_once - 1) * 4 * 1000
    peak = replay(dataflow, plan, workers)[Tier.HOST].nbytes
    assert peak - replay(dataflow, plan)[Tier.HOST].nbytes == widened
    with pytest.raises(PlanError, match="bytes on the host"):
        check(problem, replace(plan, budgets={**plan.budgets, Tier.HOST: peak - 1}))


def test_what_the_step_returns_is_not_deferred() -> None:
    step = STEPS["chain"]
    buffers = [replace(b, is_output=b.is_output or b.name == "w1") for b in step.buffers]
    plan = overlapping_plan(replace(step, buffers=tuple(buffers)))
    assert {task.name for task in plan.deferred} == {
        f"{kind}.{param}" for kind in ("update", "prefetch") for param in ("w0", "w2")
    }


def test_what_the_step_uses_after_its_update_is_not_deferred() -> None:
    plan = overlapping_plan(chain_that_reads_a_weight_late())
    assert not {task.name for task in plan.deferred}.intersection(("update.w1", "prefetch.w1"))
    assert len(plan.deferred) == 4


def test_without_room_on_the_host_steps_do_not_overlap() -> None:
    """The plan of one step still fits."""
    step = STEPS["clipped"]
    problem = problem_of(step)
    alone = schedule(problem, rule("zero-offload")(step))
    host_bytes = alone.predicted.peak_bytes[Tier.HOST]
    tight = problem.with_budget(Tier.HOST, host_bytes)
    plan = solve(tight, SolveSettings("zero-offload", overlap_steps=True))
    assert not plan.deferred
    with pytest.raises(PlacementError, match="host_memory_budget"):
        schedule(tight, PLANS["clipped"][1].placement)


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_that_overlaps_can_be_saved_and_loaded(name: str) -> None:
    _, plan = PLANS[name]
    assert plan.deferred
    assert files.from_json(files.to_json(plan), Plan) == plan


def test_the_command_line_lets_steps_overlap_when_asked(tmp_path: Path) -> None:
    files.save(STEPS["clipped"], tmp_path / "step.json")
    output = str(tmp_path / "plan.json")
    command = ["solve", str(tmp_path / "step.json"), "--machine", "rtx4090", "-o", output]
    command += ["--policy", "fraction:0.4"]
    told = []
    for asked in ([], ["--overlap-steps"]):
        result = CliRunner().invoke(app, [*command, *asked])
        assert result.exit_code == 0, result.output
        told.append(result.output)
    plan = files.load(output, Plan)
    check(replace(problem_of(STEPS["clipped"]), budgets=plan.budgets), plan)
    assert plan.placement.overlap_steps
    assert "may end in the next step" not in told[0]
    assert "1 updates on the host may end in the next step" in told[1]


# Which are refused.


def changed(plan: Plan, name: str, **changes: object) -> Plan:
    tasks = [replace(t, **changes) if t.name == name else t for t in plan.tasks]  # type: ignore[arg-type]
    return replace(plan, tasks=tuple(tasks))


@given(CASES, st.data())
def test_no_wait_in_the_next_step_can_be_left_out(
    case: tuple[Dataflow, Plan], data: st.DataObject
) -> None:
    step, plan = case
    task = data.draw(st.sampled_from(plan.deferred))
    with pytest.raises(PlanError, match="no op there waits for it"):
        check(problem_of(step), changed(plan, task.name, wait_before=None))


@given(CASES, st.data())
def test_no_weight_can_be_used_before_it_is_back(
    case: tuple[Dataflow, Plan], data: st.DataObject
) -> None:
    """The wait for a way back is before the first op that touches the weight, or refused."""
    step, plan = case
    backs = [task for task in plan.deferred if isinstance(task, Transfer)]
    task = data.draw(st.sampled_from(backs))
    ops = [op.name for op in place_plan(problem_of(step), plan).program.ops]
    assert task.wait_before is not None
    after = ops[ops.index(task.wait_before) + 1 :]
    late = changed(plan, task.name, wait_before=data.draw(st.sampled_from(after)))
    with pytest.raises(PlanError, match=f"{task.name} of the step before is done with it"):
        check(problem_of(step), late)


@pytest.mark.parametrize("name", ["weight on the host", "master on the host"])
def test_no_weight_can_be_fetched_before_its_update(name: str) -> None:
    step, plan = PLANS[name]
    (task,) = (task for task in plan.tasks if task.after_previous)
    with pytest.raises(PlanError, match=r"update.\w+ of the step before is done with it"):
        check(problem_of(step), changed(plan, task.name, after_previous=()))


@given(CASES, st.data())
def test_no_weight_can_be_sent_before_it_is_back(
    case: tuple[Dataflow, Plan], data: st.DataObject
) -> None:
    step, plan = case
    backs = [task.buffer for task in plan.deferred if isinstance(task, Transfer)]
    name = f"offload.{data.draw(st.sampled_from(backs))}"
    early = changed(plan, name, issue_after=None)
    first = sorted(early.tasks, key=lambda task: task.name != name)
    with pytest.raises(PlanError, match=r"may read \w+ on the device before prefetch"):
        check(problem_of(step), replace(early, tasks=tuple(first)))


def carry(task: Task) -> Task:
    return replace(task, deferred=True, wait_before="forward_0")


def test_nothing_else_can_be_deferred() -> None:
    step, plan = PLANS["clipped"]
    sent = next(task for task in plan.tasks if task.name == "offload.g0")
    for broken in (
        replace(plan, tasks=tuple(carry(t) if t is sent else t for t in plan.tasks)),
        replace(plan, placement=replace(plan.placement, overlap_steps=False)),
    ):
        with pytest.raises(PlanError, match="goes on in the next step, where the placement"):
            check(problem_of(step), broken)


def test_only_what_is_deferred_can_be_named_in_the_next_step() -> None:
    step, plan = PLANS["clipped"]
    broken = changed(plan, "offload.g0", after_previous=("offload.g1",))
    with pytest.raises(PlanError, match=r"offload\.g1.*which no step carries over"):
        check(problem_of(step), broken)


@given(CASES, st.data())
def test_no_byte_of_the_host_can_be_missing(
    case: tuple[Dataflow, Plan], data: st.DataObject
) -> None:
    step, plan = case
    peak = replay(step, plan)[Tier.HOST].nbytes
    budgets = {**plan.budgets, Tier.HOST: peak - data.draw(st.integers(1, 100))}
    with pytest.raises(PlanError, match="bytes on the host"):
        check(problem_of(step), replace(plan, budgets=budgets))
