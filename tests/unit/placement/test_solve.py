"""The ladder: its plans are sound, no slower than any simple rule's, and no faster than the bound.

The laws hold on random steps, machines and budgets. Times are the simulator's, which shares no code
with the program that chose.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cotrain_compile.dataflow import PERSISTENT_ROLES, Dataflow
from cotrain_compile.errors import PlacementError
from cotrain_compile.machine import HostUpdate, Link, Tier, TierSpec, two_tier
from cotrain_compile.placement.autotm.autotm import autotm
from cotrain_compile.placement.check.check import check
from cotrain_compile.placement.policies import RULES, rule
from cotrain_compile.placement.problem import Problem, formulate
from cotrain_compile.placement.schedule.exchanges_ahead import chain_of, is_shifted
from cotrain_compile.placement.schedule.schedule import draft
from cotrain_compile.placement.search.solve import FRACTIONS, SolveSettings, solve
from cotrain_compile.plan import Plan, SolveReport, UpdateMode
from cotrain_compile.presets import find
from tests.support import nets
from tests.support.dataflows import chain, mixed_precision_step
from tests.support.examples import examples
from tests.support.nets import KIB, every_small_step
from tests.support.random_problems import (
    PLENTY,
    fits,
    least_bytes,
    problems,
    resident_bytes,
    with_budget,
)

SIMPLE = (*RULES, *(f"fraction:{share:g}" for share in FRACTIONS))
# What differs in the last bits between two ways to add up the same times.
ROUNDING = 1 + 1e-9

SMALL = chain(2, width=512, batch=512)
STEPS = {"chain": chain(4, width=512, batch=512), "mixed": mixed_precision_step(3, params=500_000)}
STEPS.update(every_small_step())


def problem_of(dataflow: Dataflow, share: float = 0.5, host_bytes: int = PLENTY) -> Problem:
    """`dataflow` at `share` of the way from the least budget to where nothing has to move."""
    budgets = {Tier.DEVICE: PLENTY, Tier.HOST: host_bytes}
    # Python takes no time: what it takes would be one more note of each plan.
    problem = formulate(dataflow, find("rtx4090").but(issue_s=0.0), budgets)
    least = least_bytes(problem)
    return with_budget(problem, least + int(share * (resident_bytes(problem) - least)))


def report_of(plan: Plan) -> SolveReport:
    assert plan.report is not None
    return plan.report


def steps_s(problem: Problem) -> dict[str, float]:
    """The step of each simple rule that fits."""
    found = {}
    for name in SIMPLE:
        try:
            found[name] = draft(problem, rule(name)(problem.dataflow)).step_s
        except PlacementError:
            continue
    return found


# Laws.


@given(problems(most=2))
@examples(6)
def test_what_has_to_move_moves_no_slower_than_by_any_rule(problem: Problem) -> None:
    assume(not fits(problem, problem.budgets[Tier.DEVICE]))
    solve_and_compare(problem)


@pytest.mark.long
@given(problems(most=4))
@settings(max_examples=500)
def test_larger_steps_too_move_no_slower_than_by_any_rule(problem: Problem) -> None:
    assume(not fits(problem, problem.budgets[Tier.DEVICE]))
    solve_and_compare(problem)


def solve_and_compare(problem: Problem) -> None:
    """The plan is sound, no slower than any rule's, and nothing is faster than the bound."""
    plan = solve(problem)
    check(problem, plan)
    report = report_of(plan)
    assert plan.predicted.makespan_s <= min(steps_s(problem).values(), default=math.inf) * ROUNDING
    assert 0 < report.lower_bound_s <= plan.predicted.makespan_s * ROUNDING
    assert all(report.lower_bound_s <= s * ROUNDING for s in report.simulated_s.values())


@given(problems(most=2), st.lists(st.floats(0, 1), min_size=2, max_size=3))
@examples(4)
def test_more_memory_is_never_slower_when_solved_again(
    problem: Problem, shares: list[float]
) -> None:
    """Each budget is given the plans of the smaller ones. Up to where everything fits: from there
    on nothing moves, even where an update on the host were faster.
    """
    least, everything = least_bytes(problem), resident_bytes(problem)
    plans: list[Plan] = []
    for share in sorted(shares):
        device_bytes = least + int(share * (everything - 1 - least))
        if fits(problem, device_bytes):
            break
        again = with_budget(problem, device_bytes)
        plan = solve(again, SolveSettings(work_limit=4), incumbents=plans)
        check(again, plan)
        if plans:
            assert plan.predicted.makespan_s <= plans[-1].predicted.makespan_s * ROUNDING
        plans.append(plan)


@given(problems())
@examples(8)
def test_nothing_moves_that_need_not(problem: Problem) -> None:
    plan = solve(with_budget(problem, resident_bytes(problem)))
    assert set(plan.placement.updates.values()) <= {UpdateMode.RESIDENT}
    assert set(plan.placement.homes.values()) <= {Tier.DEVICE}
    assert not plan.placement.offloaded
    assert not plan.tasks
    alone = chain_of(problem.dataflow.ops, problem.costs.device_s, problem.costs.network_s)
    if any(map(is_shifted, problem.dataflow.ops)):  # but waits for scatters, for less time
        assert plan.predicted.makespan_s <= alone.end_s * ROUNDING
    else:
        assert not plan.moved
        assert plan.predicted.makespan_s == pytest.approx(alone.end_s)
    assert report_of(plan).status == "not needed"


@given(problems(most=2))
@examples(5)
def test_the_least_budget_is_exact(problem: Problem) -> None:
    least = least_bytes(problem)
    enough = with_budget(problem, least)
    plan = solve(enough, SolveSettings("greedy"))
    check(enough, plan)
    assert plan.predicted.peak_bytes[Tier.DEVICE] == least
    with pytest.raises(PlacementError, match=": 1 byte short; raise memory_budget") as refusal:
        solve(with_budget(problem, least - 1))
    assert refusal.value.shortfall_bytes == 1


@given(problems(most=2), st.sampled_from(["ilp", "lp-round"]), st.sampled_from(["highs", "cbc"]))
@examples(4)
def test_what_a_program_decides_is_a_plan_wherever_there_is_one(
    problem: Problem, policy: str, solver: str
) -> None:
    """Where nothing it decides fits in the least budget, the plan is another's, and says so."""
    least = with_budget(problem, least_bytes(problem))
    plan = solve(least, SolveSettings(policy, solver=solver, work_limit=30))
    check(least, plan)
    told = f"nothing that {policy} decided fits in the budget; the plan is: greedy choice"
    assert plan.placement.policy == ("greedy" if told in plan.notes else policy)


@given(problems(most=2), st.sampled_from(["ilp", "lp-round", "greedy"]), st.floats(0, 1))
@examples(5)
def test_a_host_that_is_too_small_leaves_more_on_the_device(
    problem: Problem, policy: str, share: float
) -> None:
    """There is room for all of it: what moves does to be faster, where the host has room."""
    everything = with_budget(problem, resident_bytes(problem))
    host_bytes = int(share * problem.dataflow.total_bytes(*PERSISTENT_ROLES))
    small = everything.with_budget(Tier.HOST, host_bytes)
    check(small, solve(small, SolveSettings(policy, work_limit=30)))


def test_the_least_budget_is_that_of_every_cut_of_the_step() -> None:
    """The weight of this step can be offloaded over its loss, wherever buckets happen to end."""
    machine = two_tier(
        name="slow link",
        device=TierSpec(PLENTY, 160e9, {"float32": 1e11}, 1e-6),
        host=TierSpec(PLENTY, 2e9, {"float32": 1e11}, 1e-6),
        h2d=Link(1e9),
        d2h=Link(1e9),
        host_update=HostUpdate(2e9),
    )
    budgets = {Tier.DEVICE: PLENTY, Tier.HOST: PLENTY}
    problem = formulate(chain(1, width=128, batch=192), machine, budgets)
    with pytest.raises(PlacementError):
        solve(with_budget(problem, least_bytes(problem) - 1))


@given(problems(most=2))
@examples(2)
def test_autotms_variants_are_nested(problem: Problem) -> None:
    """A static answer is a synchronous one, and that one that does not use its overlap."""
    seconds = []
    for variant in ("static", "synchronous", "asynchronous"):
        try:
            answer = autotm(problem, variant)
        except PlacementError:
            seconds.append(math.inf)
        else:
            assume(answer.status == "optimal")
            seconds.append(answer.objective_s)
    static, synchronous, asynchronous = seconds
    # HiGHS stops at a gap of 1e-4.
    assert static * 1.001 >= synchronous
    assert synchronous * 1.001 >= asynchronous


# What a user sees.


@pytest.mark.parametrize("name", STEPS)
def test_every_kind_of_step_is_solved_and_reported_in_the_least_memory(name: str) -> None:
    """Where the conservative program is loose."""
    solve_and_look(name, 0.0)


@pytest.mark.parametrize(
    "name",
    [name if name == "mixed" else pytest.param(name, marks=pytest.mark.long) for name in STEPS],
)
def test_every_kind_of_step_is_solved_and_reported(name: str) -> None:
    solve_and_look(name, 0.6)


def solve_and_look(name: str, share: float) -> None:
    problem = problem_of(STEPS[name], share)
    plan = solve(problem, SolveSettings(work_limit=1))
    check(problem, plan)
    report = report_of(plan)
    step_s = plan.predicted.makespan_s
    assert report.solver == "highs"
    assert report.status in ("optimal", "rounded", "work limit reached")
    assert report.seconds > 0
    assert (report.rounds >= 1) == (report.status != "rounded")
    assert report.simulated_s[plan.placement.policy] == pytest.approx(step_s)
    assert step_s <= min(report.simulated_s.values()) * ROUNDING
    assert report.gap == pytest.approx(step_s / report.lower_bound_s - 1, abs=1e-6)
    assert (report.objective_s is None) == (report.bound_s is None)
    assert all(math.isfinite(s) for s in (report.lower_bound_s, report.gap))


@pytest.mark.parametrize(
    "policy", [*RULES, "fraction:0.5", "fraction:auto", "greedy", "ilp", "lp-round", "auto"]
)
@pytest.mark.parametrize("name", ["mixed", pytest.param("finetune", marks=pytest.mark.long)])
def test_a_named_policy_gives_its_own_plan_or_says_why_not(name: str, policy: str) -> None:
    problem = problem_of(STEPS[name], 0.7)
    if not can_be_followed(problem, policy):
        with pytest.raises(PlacementError) as refusal:
            solve(problem, SolveSettings(policy))
        assert refusal.value.shortfall_bytes > 0
        return
    plan = solve(problem, SolveSettings(policy, work_limit=1))
    check(problem, plan)
    assert policy in ("auto", plan.placement.policy)
    simulated_s = report_of(plan).simulated_s[plan.placement.policy]
    assert simulated_s == pytest.approx(plan.predicted.makespan_s)


def can_be_followed(problem: Problem, policy: str) -> bool:
    """Whether a simple rule fits; the others look until something does."""
    followed = steps_s(problem)
    if policy == "fraction:auto":
        return any(name.startswith("fraction") for name in followed)
    return policy in followed or policy not in SIMPLE


@pytest.mark.parametrize("variant", ["static", "synchronous", "asynchronous"])
def test_what_autotm_chooses_can_be_scheduled(variant: str) -> None:
    """Its model ignores what copies take while they are under way: a little more than its least."""
    problem = problem_of(SMALL, 0.7)
    plan = solve(problem, SolveSettings(f"autotm-{variant}"))
    check(problem, plan)
    assert plan.placement.policy == f"autotm-{variant}"


@pytest.mark.parametrize("step", [SMALL, mixed_precision_step(2, params=500_000)])
def test_a_plan_can_be_repeated(step: Dataflow) -> None:
    """To the last byte with the same seed; soundly and as fast with another."""
    problem = problem_of(step, 0.6)
    first, second = (solve(problem, SolveSettings("ilp", gap=1e-3, seed=7)) for _ in range(2))
    report = report_of(first)
    assert "time" not in report.status
    assert replace(report_of(second), seconds=report.seconds) == report
    assert replace(second, report=report) == first
    other = solve(problem, SolveSettings("ilp", gap=1e-3, seed=8))
    check(problem, other)
    assert report_of(other).seed == 8
    if report_of(other).rounds == report.rounds == 1:
        assert report_of(other).objective_s == pytest.approx(report.objective_s, rel=4e-3)


def test_what_the_program_does_not_count_keeps_it_from_no_plan() -> None:
    """The same bytes are missing round after round, until the program is given much less."""
    problem = problem_of(nets.STEPS["clipped"](2, 1000 * KIB, 2000 * KIB), 0.45)
    report = report_of(solve(problem))
    assert report.rounds > 2
    assert report.simulated_s["ilp"] < min(steps_s(problem).values())


@pytest.mark.parametrize("gap", [0.0, 0.3])
def test_the_claim_is_within_the_gap_of_its_bound(gap: float) -> None:
    """As HiGHS counts it: as a fraction of the claim, which has the price of what moves in it."""
    report = report_of(solve(problem_of(STEPS["mixed"], 0.5), SolveSettings("ilp", gap=gap)))
    assert report.status == "optimal"
    assert report.objective_s is not None
    assert report.bound_s is not None
    assert report.bound_s >= report.objective_s * (1 - gap) * (1 - 1e-6)


@pytest.mark.parametrize("name", ["finetune", pytest.param("recurrent", marks=pytest.mark.long)])
def test_cbc_certifies_the_same_bound(name: str) -> None:
    problem = problem_of(STEPS[name], 0.6)
    highs, cbc = (solve(problem, SolveSettings(solver=solver)) for solver in ("highs", "cbc"))
    check(problem, cbc)
    assert report_of(cbc).solver == "cbc"
    assert report_of(cbc).lower_bound_s == pytest.approx(report_of(highs).lower_bound_s, rel=3e-3)


def test_only_plans_for_smaller_budgets_are_taken_over() -> None:
    smaller, problem, larger = (problem_of(SMALL, share) for share in (0.2, 0.5, 0.9))
    fast = solve(larger)
    plan = solve(problem, incumbents=[fast, solve(smaller)])
    check(problem, plan)
    assert plan.predicted.makespan_s >= fast.predicted.makespan_s * (1 - 1e-9)


def test_progress_is_told() -> None:
    problem = problem_of(SMALL, 0.6)
    stages: list[str] = []
    solve(problem, progress=stages.append)
    assert "looking for what can be decided" in stages
    assert stages[0] == "trying everything on the device"
    assert stages[-1] == "certifying the bound"
