"""Updates on guesses as plans: what they bring, what they hold, and which of them are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given

from cotrain_compile import files
from cotrain_compile.dataflow import Dataflow
from cotrain_compile.dataflow.guesses import guesses_of, second_bytes
from cotrain_compile.entry.choose_plan import saved_plan
from cotrain_compile.errors import PlacementError, PlanError
from cotrain_compile.machine import Tier
from cotrain_compile.options import Options
from cotrain_compile.placement.check.check import check
from cotrain_compile.placement.policies import rule
from cotrain_compile.placement.problem import Problem, formulate
from cotrain_compile.placement.schedule.schedule import schedule
from cotrain_compile.placement.search.solve import SolveSettings, solve
from cotrain_compile.placement.simulate.outcomes import outcomes
from cotrain_compile.plan import Plan
from cotrain_compile.presets import find
from tests.support.clipping import COEFFICIENT, clipped
from tests.support.dataflows import chain, mixed_precision_step
from tests.support.examples import examples
from tests.support.plans.broken_plans import with_task
from tests.support.random_problems import PLENTY, problems

ROUNDING = 1 + 1e-9
STEP = clipped(mixed_precision_step(3, params=1_000_000, batch_bytes=5_000_000))


def problem_of(dataflow: Dataflow, host_bytes: int = PLENTY) -> Problem:
    """On a device so slow that gradients are on the host long before the norm is known."""
    machine = find("rtx4090")
    slow = replace(machine.device, bytes_per_s=5e9)
    budgets = {Tier.DEVICE: PLENTY, Tier.HOST: host_bytes}
    return formulate(dataflow, machine.but(name="slow", device=slow), budgets)


def solved(
    problem: Problem, policy: str = "coarse", *, speculate: bool = True, hedged: bool = False
) -> Plan:
    settings = SolveSettings(policy, speculate=speculate, hedged=hedged, work_limit=5.0)
    plan = solve(problem, settings)
    check(problem, plan)
    return plan


def guessing(problem: Problem) -> Plan:
    """A plan of `coarse` with guesses wherever there is time for them."""
    placement = rule("coarse")(problem.dataflow)
    plan = schedule(problem, replace(placement, speculative=tuple(placement.updates)))
    check(problem, plan)
    assert plan.speculations
    return plan


# What there is to guess.


def test_a_clipping_factor_is_guessed_and_what_follows_from_no_gradient_is_not() -> None:
    assert guesses_of(chain(2)) == {}
    step = clipped(chain(2))
    assert guesses_of(step) == {group.param: (COEFFICIENT,) for group in step.updates}
    another = replace(step.ops[step.position["clip"]], target="aten.mul.Tensor")
    ops = tuple(another if op.name == "clip" else op for op in step.ops)
    assert guesses_of(replace(step, ops=ops)) == {}
    constant = replace(step.ops[step.position["clip"]], reads=())
    ops = tuple(constant if op.name == "clip" else op for op in step.ops)
    assert guesses_of(replace(step, ops=ops)) == {}


# What they bring.


def test_the_host_works_before_the_norm_is_known() -> None:
    problem = problem_of(STEP)
    waiting, plan = (solved(problem, speculate=speculate) for speculate in (False, True))
    assert not waiting.speculations
    known_s = next(s.end_s for s in plan.predicted.spans if s.name == "clip")
    begun = [s for s in plan.predicted.spans if s.name.startswith("speculate.")]
    assert begun
    assert all(span.start_s < known_s for span in begun)
    assert plan.predicted.makespan_s < waiting.predicted.makespan_s
    groups = [STEP.update[task.param] for task in plan.speculations]
    more = plan.predicted.peak_bytes[Tier.HOST] - waiting.predicted.peak_bytes[Tier.HOST]
    assert more == sum(second_bytes(STEP, group) for group in groups)


@given(problems(most=2))
@examples(3)
def test_to_guess_is_never_slower_and_never_beats_its_bound(problem: Problem) -> None:
    try:
        problem = replace(problem, dataflow=clipped(problem.dataflow))
    except AssertionError:
        return
    problem = formulate(problem.dataflow, problem.machine, problem.budgets)
    # A little more than the same step needs without clipping.
    problem = problem.with_budget(Tier.DEVICE, problem.budgets[Tier.DEVICE] + (1 << 20))
    try:
        waiting = solved(problem, "auto", speculate=False)
    except PlacementError:  # the norm needs still more
        return
    plan = solved(problem, "auto")
    assert waiting.report is not None
    assert plan.report is not None
    fastest = min(waiting.report.simulated_s[name] for name in waiting.report.simulated_s)
    rules = [n for n in plan.report.simulated_s if n in ("coarse", "zero-offload", "streamed")]
    for name in rules:
        assert plan.report.simulated_s[name] <= waiting.report.simulated_s[name] * ROUNDING
    bound_s = plan.report.lower_bound_s
    assert bound_s <= min(fastest, *plan.report.simulated_s.values()) * ROUNDING
    assert bound_s <= waiting.report.lower_bound_s * (1 + 2e-3)  # the solver's gap
    hedged = solved(problem, "auto", hedged=True)
    assert hedged.report is not None
    # Without guesses it is the fastest plan that was found without them.
    waits_s = min(hedged.report.simulated_s.values()) * ROUNDING
    assert outcomes(problem, hedged).held_back_s <= waits_s
    assert (
        hedged.report.lower_bound_s <= hedged.predicted.makespan_s * ROUNDING <= waits_s * ROUNDING
    )


def test_a_hedged_plan_takes_no_longer_held_back_than_the_plan_that_waits() -> None:
    problem = problem_of(STEP)
    waiting, plan = solved(problem, speculate=False), solved(problem, hedged=True)
    assert plan.speculations
    found = outcomes(problem, plan)
    assert found.held_back_s == pytest.approx(waiting.predicted.makespan_s, rel=1e-9)
    assert plan.predicted.makespan_s == pytest.approx(found.right_s, rel=1e-9)
    assert found.right_s < found.held_back_s
    assert replace(plan.placement, speculative=()) == waiting.placement


def test_a_hedged_search_takes_of_a_known_plan_what_does_not_count_on_guesses() -> None:
    plenty = problem_of(STEP)
    problem = plenty.with_budget(Tier.DEVICE, solved(plenty).predicted.peak_bytes[Tier.DEVICE])
    known = solved(problem)
    assert known.speculations
    settings = SolveSettings("auto", speculate=True, hedged=True, work_limit=2.0)
    plan = solve(problem, settings, incumbents=(known,))
    check(problem, plan)
    assert outcomes(problem, plan).held_back_s <= outcomes(problem, known).held_back_s * ROUNDING


def test_coarse_says_where_a_norm_lets_no_update_begin_early() -> None:
    told = "coarse does what zero-offload does"
    settings = SolveSettings("coarse", work_limit=5.0)
    waits = solve(problem_of(STEP), settings)
    assert any(told in note for note in waits.notes)
    free = solve(problem_of(mixed_precision_step(3)), settings)
    assert not any(told in note for note in (*free.notes, *solved(problem_of(STEP)).notes))


def test_without_room_for_what_it_saves_an_update_waits() -> None:
    plenty = problem_of(STEP)
    host = solved(plenty, speculate=False).predicted.peak_bytes[Tier.HOST]
    assert not solved(problem_of(STEP, host)).speculations
    assert solved(problem_of(STEP, 2 * host)).speculations


def test_outcomes_are_in_order_and_say_when_guessing_pays() -> None:
    found = outcomes(problem_of(STEP), guessing(problem_of(STEP)))
    assert found.right_s < found.held_back_s <= found.wrong_s
    share = found.pays_below
    assert 0 < share <= 1
    mean_s = share * found.wrong_s + (1 - share) * found.right_s
    assert mean_s == pytest.approx(found.held_back_s)
    (note,) = (text for text in solved(problem_of(STEP)).notes if "norm" in text)
    assert "pays while fewer than" in note


# What is refused.


def confirming(plan: Plan) -> tuple[str, str]:
    task = next(region for region in plan.host_updates if region.confirms)
    return task.name, task.confirms


def test_a_guess_that_nothing_confirms_is_refused() -> None:
    plan = guessing(problem_of(STEP))
    update, _ = confirming(plan)
    with pytest.raises(PlanError, match="do not match"):
        check(problem_of(STEP), with_task(plan, update, confirms=""))


def test_an_update_that_does_not_wait_for_its_guess_is_refused() -> None:
    plan = guessing(problem_of(STEP))
    update, guess = confirming(plan)
    (task,) = (t for t in plan.tasks if t.name == update)
    after = tuple(name for name in task.after if name != guess)
    with pytest.raises(PlanError, match="does not come after"):
        check(problem_of(STEP), with_task(plan, update, after=after))


def test_what_was_done_on_guesses_is_used_by_nothing_but_its_update() -> None:
    """A new weight that goes back before the norm is known."""
    plan = guessing(problem_of(STEP))
    update, guess = confirming(plan)
    (back,) = (t for t in plan.transfers if t.after == (update,))
    early = with_task(plan, back.name, after=(guess,))
    (task,) = (t for t in plan.tasks if t.name == update)
    early = with_task(early, update, after=(*task.after, back.name))
    at_the_end = sorted(early.tasks, key=lambda task: task.name == update)
    with pytest.raises(PlanError, match="before it is confirmed left it"):
        check(problem_of(STEP), replace(early, tasks=tuple(at_the_end)))


def test_a_guess_of_what_may_be_anything_is_refused() -> None:
    plan = guessing(problem_of(STEP))
    _, guess = confirming(plan)
    gradient = STEP.updates[0].gradient
    with pytest.raises(PlanError, match="which no step has neutral as a rule"):
        check(problem_of(STEP), with_task(plan, guess, guesses=(COEFFICIENT, gradient)))


def test_a_saved_plan_guesses_only_where_the_option_allows_it(tmp_path: Path) -> None:
    problem = problem_of(STEP)
    plan = solved(problem)
    files.save(plan, tmp_path / "plan.json")
    path = str(tmp_path / "plan.json")
    assert saved_plan(path, problem, Options(speculate="auto")) == plan
    with pytest.raises(PlanError, match="which only the option speculate allows"):
        saved_plan(path, problem, Options())
