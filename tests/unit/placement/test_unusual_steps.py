"""Steps of unusual optimizers: whatever way they are planned in, the plan is sound.

Not only the one that `solve` chooses: every draft that any rung of the ladder keeps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cotrain_compile.errors import PlacementError, PlanError
from cotrain_compile.machine import Tier
from cotrain_compile.placement.check.check import check
from cotrain_compile.placement.policies import RULES
from cotrain_compile.placement.problem import Problem, formulate
from cotrain_compile.placement.recompute.recomputable import recomputable
from cotrain_compile.placement.schedule.schedule import Draft, finished, schedule
from cotrain_compile.placement.search.found import UNSOUND, Found
from cotrain_compile.placement.search.infeasible import least_of
from cotrain_compile.placement.search.solve import SolveSettings, solve
from cotrain_compile.plan import Task, Transfer
from cotrain_compile.presets import find
from tests.support.dataflows import chain
from tests.support.examples import examples
from tests.support.factories import KINDS, per_sample_step, with_factories
from tests.support.nets import KIB
from tests.support.random_problems import PLENTY, unusual_problems

POLICIES = (*tuple(RULES), "fraction:0.5", "greedy", "lp-round", "auto")
FREE = {Tier.DEVICE: PLENTY, Tier.HOST: PLENTY}


@pytest.mark.parametrize("is_output", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", ["streamed", "coarse"])
def test_updates_find_what_factory_ops_make(rule: str, kind: str, is_output: bool) -> None:
    step = chain(3)
    step = with_factories(step, {g.param: kind for g in step.updates}, is_output=is_output)
    problem = formulate(step, find("rtx4090"), FREE)
    check(problem, schedule(problem, RULES[rule](step)))


def test_an_update_that_shares_nothing_with_the_rest_still_runs_early() -> None:
    """What only it reads, and views of that, come with it to where its gradient is there."""
    step = chain(3)
    step = with_factories(step, {g.param: "view" for g in step.updates}, is_output=True)
    problem = formulate(step, find("rtx4090"), FREE)
    plan = schedule(problem, RULES["streamed"](step))
    first = plan.moved[0]
    assert first.ops == ("make.eye.w2", "permute.eye.w2", "update_2")
    assert first.after == "backward_2"


def test_what_is_made_again_is_not_offloaded_too() -> None:
    """The gradients of samples rest in the forward, where they could be offloaded in between."""
    step = per_sample_step(3, 64 * KIB, 8)
    names = tuple(sorted(recomputable(step)))
    assert "s0" in names
    problem = formulate(step, find("rtx4090"), FREE)
    assert "s0" in least_of(problem).placement.offloaded
    least = least_of(problem.recomputing(names))
    assert not set(least.placement.offloaded) & set(names)
    check(problem, schedule(problem, least.placement))


@given(unusual_problems(most=2), st.sampled_from(POLICIES))
@examples(12)
def test_whatever_is_kept_on_the_way_is_sound(problem: Problem, policy: str) -> None:
    check_all(problem, policy)


@pytest.mark.long
@given(unusual_problems(most=3), st.sampled_from(POLICIES))
@settings(max_examples=500)
def test_whatever_is_kept_on_the_way_of_larger_steps_is_sound(
    problem: Problem, policy: str
) -> None:
    check_all(problem, policy)


def check_all(problem: Problem, policy: str) -> None:
    """Solve by a policy, and check each draft that is kept on the way."""
    with pytest.MonkeyPatch.context() as patch:
        kept: list[tuple[Problem, Draft]] = []
        keep = Found._keep

        def noting(self: Found, name: str, found: Draft) -> None:
            kept.append((self.problem, found))
            keep(self, name, found)

        patch.setattr(Found, "_keep", noting)
        try:
            check(problem, solve(problem, SolveSettings(policy, work_limit=2)))
        except PlacementError:
            pass
        except PlanError as error:  # of the program alone, on a computer that is busy
            if "found no plan within its limit" not in str(error):
                raise
    for of, found in kept:
        check(of, finished(of, found))


# What the check refuses is not the answer.


def with_late_waits(found: Draft, step_s: float) -> Draft:
    """A draft that claims to be fast and waits for what it fetches when the step is over."""
    late = (replace(t, wait_before=None) if is_fetch(t) else t for t in found.tasks)
    return replace(found, tasks=tuple(late), step_s=step_s)


def with_all_twice(found: Draft, step_s: float) -> Draft:
    """A draft that claims to be fast, of which no timeline can be made."""
    return replace(found, tasks=found.tasks * 2, step_s=step_s)


def is_fetch(task: Task) -> bool:
    return isinstance(task, Transfer) and task.is_fetch


def small_problem() -> Problem:
    """One with something to move, by any policy."""
    return formulate(chain(3), find("rtx4090"), {Tier.DEVICE: 88 * KIB, Tier.HOST: PLENTY})


@pytest.mark.parametrize(
    ("policy", "broken"),
    [("auto", with_late_waits), ("streamed", with_late_waits), ("streamed", with_all_twice)],
)
def test_an_unsound_plan_is_dropped_and_told_and_the_next_best_wins(
    policy: str,
    broken: Callable[[Draft, float], Draft],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    keep = Found.keep

    def keep_broken_too(self: Found, name: str, found: Draft) -> None:
        keep(self, name, found)
        if any(is_fetch(task) for task in found.tasks):
            self.prefer(name, broken(found, 0.0))

    monkeypatch.setattr(Found, "keep", keep_broken_too)
    problem = small_problem()
    with caplog.at_level("DEBUG", logger="cotrain_compile"):
        plan = solve(problem, SolveSettings(policy))
    assert UNSOUND
    assert f"dropped the plan of {UNSOUND[0]}" in caplog.text
    UNSOUND.clear()
    check(problem, plan)


@pytest.mark.parametrize(
    ("broken", "complaint"),
    [(with_late_waits, "unsound plan"), (with_all_twice, "two works are named")],
)
def test_where_every_plan_is_unsound_the_check_says_why(
    broken: Callable[[Draft, float], Draft], complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep = Found._keep

    def keep_broken(self: Found, name: str, found: Draft) -> None:
        keep(self, name, broken(found, found.step_s))

    monkeypatch.setattr(Found, "_keep", keep_broken)
    with pytest.raises(PlanError, match=complaint):
        solve(small_problem(), SolveSettings("streamed"))
    assert UNSOUND
    UNSOUND.clear()
