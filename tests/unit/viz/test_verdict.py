"""What a plan means in ten seconds: does it fit, how fast is it, why, and what would help."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cotrain_compile.dataflow import Buffer, Job, Role
from cotrain_compile.machine import MEMORIES, Processor, Space, Tier
from cotrain_compile.placement.explain.explain import limits_words
from cotrain_compile.placement.explain.helps import TIMES, helps
from cotrain_compile.placement.explain.sensitivity import Limits, limits
from cotrain_compile.placement.explain.sweep import Case, Point, try_case
from cotrain_compile.placement.problem import Problem, formulate
from cotrain_compile.placement.search.solve import SolveSettings, solve
from cotrain_compile.plan import Lane
from cotrain_compile.presets import find
from cotrain_compile.support.plan_words import plan_words
from cotrain_compile.support.units import format_seconds
from cotrain_compile.viz.text.verdict import fits, pace, verdict, verdict_lines, work_of
from tests.support.dataflows import chain
from tests.unit.viz.test_report import KIB, MEASURED, PLAN, PROBLEM, STEP


def test_it_says_whether_the_step_fits_as_planned_as_measured_and_as_reserved() -> None:
    assert fits(PROBLEM, PLAN) == ("Fits", "device and host memory within budget")
    assert fits(PROBLEM, PLAN, [MEASURED])[1].endswith("as measured")
    above = replace(MEASURED, peak_bytes={**MEASURED.peak_bytes, Tier.DEVICE: 2000 * KIB})
    found = verdict(PROBLEM, PLAN, [above])
    assert (found.fits, found.remark) == (
        "Does not fit",
        "device memory was measured above its budget",
    )
    assert found.memories[0].is_above


def test_what_torch_reserves_above_the_card_is_a_setting_away() -> None:
    step = chain(4, width=8192)
    plan = solve(formulate(step, find("rtx4090"), dict.fromkeys(MEMORIES, 1 << 40)))
    tight = {**plan.budgets, Tier.DEVICE: plan.predicted.peak_bytes[Tier.DEVICE]}
    problem, plan = formulate(step, find("rtx4090"), tight), replace(plan, budgets=tight)
    found = verdict(problem, plan)
    (reserved,) = (one for one in found.memories if one.name == "reserved")
    assert reserved.is_above
    assert found.fits == "Fits"
    assert "expandable_segments" in found.remark
    spaces = {**problem.machine.spaces, "device": Space(tight[Tier.DEVICE])}
    small = replace(problem, machine=replace(problem.machine, spaces=spaces))
    assert fits(small, plan)[0] == "Fits with one setting"


def test_what_copies_and_updates_gain_only_together_sets_the_pace() -> None:
    """Each waits for the others, so that none of them alone makes the step much faster."""
    shares: dict[str, float] = {Lane.DEVICE: 0.4, Lane.HOST: 0.01, Lane.D2H: 0.15, Lane.H2D: 0.01}
    tied, alone = (Limits(1.0, shares, beside, ()) for beside in (0.6, 0.2))
    assert pace(PLAN, tied) == "copies and updates on the host together set the pace"
    assert pace(PLAN, alone) == "device compute sets the pace"
    assert limits_words(tied).endswith(", all but the device together 60%")
    assert "together" not in limits_words(alone)


def test_a_device_twice_as_fast_takes_what_a_machine_with_one_does() -> None:
    """Where Python takes no time to start tasks: that is the device's time, too."""
    slow = _problem(PROBLEM.machine.processors["device"], times=1.0)
    fast = _problem(PROBLEM.machine.processors["device"], times=TIMES)
    (told,) = (one for one in helps(slow, PLAN) if one.change == "a device twice as fast")
    assert told.step_s == pytest.approx(limits(fast, PLAN).step_s)


def _problem(device: Processor, times: float) -> Problem:
    faster = replace(
        device,
        flops_per_s={dtype: times * rate for dtype, rate in device.flops_per_s.items()},
        bytes_per_s=times * device.bytes_per_s,
        launch_s=device.launch_s / times,
        issue_s=0.0,
    )
    processors = {**PROBLEM.machine.processors, "device": faster}
    return formulate(STEP, replace(PROBLEM.machine, processors=processors), PLAN.budgets)


def test_everything_on_the_device_takes_what_a_plan_there_does() -> None:
    roomy = formulate(STEP, PROBLEM.machine, dict.fromkeys(MEMORIES, 1 << 40))
    resident = solve(roomy)
    assert not resident.tasks
    (told,) = (one for one in helps(PROBLEM, PLAN) if one.change.startswith("everything"))
    assert told.step_s == pytest.approx(resident.predicted.makespan_s)
    assert helps(roomy, resident)[0].change == "a device twice as fast"


def test_a_sweep_says_what_each_gib_buys() -> None:
    budget = 2500 * KIB
    point, _ = try_case(STEP, _case(budget), SolveSettings())
    assert point.step_s is not None
    other = replace(point, machine="h100", step_s=0.0)
    now_s, more = PLAN.predicted.makespan_s, (budget - 1500 * KIB) / 2**30
    (told,) = (one for one in helps(PROBLEM, PLAN, [point, other]) if "more device" in one.change)
    assert told.step_s == point.step_s < now_s
    each = format_seconds((now_s - point.step_s) / more)
    assert told.remark == f"{each} less for each GiB"
    assert "sweep" in helps(PROBLEM, PLAN)[-1].remark


def test_points_that_gain_nothing_are_left_out() -> None:
    same = Point("rtx4090", 2000 * KIB, 1 << 30, {}, PLAN.predicted.makespan_s)
    assert not [one for one in helps(PROBLEM, PLAN, [same]) if "more device" in one.change]


def _case(nbytes: int) -> Case:
    return Case(PROBLEM.machine, {Tier.DEVICE: nbytes, Tier.HOST: 1 << 30})


def test_a_search_that_ended_early_may_find_a_faster_plan() -> None:
    assert PLAN.report is not None
    report = replace(PLAN.report, status="work limit reached", gap=0.4, lower_bound_s=1e-4)
    told = [one.change for one in helps(PROBLEM, replace(PLAN, report=report))]
    assert "a search 4 times as long (work_limit)" in told
    by_clock = replace(report, status="optimal", ended="its time_limit (300 s) was spent")
    told = [one.change for one in helps(PROBLEM, replace(PLAN, report=by_clock))]
    assert "a search 4 times as long (time_limit)" in told
    at_its_end = replace(PLAN, report=replace(report, status="optimal", ended=""))
    assert not [c for c in (one.change for one in helps(PROBLEM, at_its_end)) if "search" in c]


def test_work_is_counted_in_tokens_where_the_batch_is_rows_of_them() -> None:
    named = replace(STEP, job=Job("GPT", {"x": (8, 128)}))
    assert next(b for b in STEP.buffers if b.name == "x").nbytes == 8 * 128 * 8
    assert work_of(named) == (8 * 128, "tokens")
    pixels = replace(
        STEP,
        job=Job("Net", {"x": (8, 3, 32, 32)}),
        buffers=(Buffer("x", 8 * 3 * 32 * 32 * 4, Role.BATCH, is_input=True), *STEP.buffers[1:]),
    )
    assert work_of(pixels) == (8, "samples")
    assert work_of(STEP) == (0, "samples")
    rates = verdict(replace(PROBLEM, dataflow=named), PLAN).rates
    assert f"{8 * 128 / PLAN.predicted.makespan_s:,.0f} tokens/s" in rates


def test_the_lines_of_a_terminal_say_the_same() -> None:
    found = verdict(PROBLEM, PLAN)
    said = "\n".join(verdict_lines(found))
    heads = [line[:11].strip() for line in said.splitlines() if line[:1] != " "]
    assert heads == ["fits?", "how fast?", "why?", "what helps?"]
    assert format_seconds(found.step_s) in said
    for one in found.helps:
        assert one.change in said
    busy = PLAN.predicted.busy_s(Lane.DEVICE) / PLAN.predicted.makespan_s
    assert f"device {busy:.0%}" in said


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ("resident", "everything on the device"),
        ("fraction:0.5", "a share of 0.5 updated on the host"),
        ("lp-round+recompute:by-region", "rounded program, recomputing by layer"),
        ("greedy+recompute:4+head", "greedy choice, recomputing, level 4, logits too"),
        ("ilp+packs:1+parts:8", "integer program, micro-batches breadth first, in 8 parts"),
        ("greedy+recompute:cut-2-0", "greedy choice, recomputing (cut-2-0)"),
        ("of-a-later-day+x", "of-a-later-day, x"),
    ],
)
def test_plans_are_named_in_words(policy: str, words: str) -> None:
    assert plan_words(policy) == words
