"""Regions in parts as variants of the search: beside whole ops, never slower, told in words."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import chain as joined
from itertools import combinations
from typing import Any, NoReturn

import pytest

from cotrain_compile.dataflow import Dataflow
from cotrain_compile.dataflow.regions import whole_name
from cotrain_compile.errors import PlacementError
from cotrain_compile.machine import Tier
from cotrain_compile.placement.check.check import check
from cotrain_compile.placement.policies import resident
from cotrain_compile.placement.problem import Problem, formulate
from cotrain_compile.placement.recompute.recomputable import recomputable
from cotrain_compile.placement.schedule.schedule import draft
from cotrain_compile.placement.search import numbers_of_parts
from cotrain_compile.placement.search.from_whole import from_whole
from cotrain_compile.placement.search.infeasible import floor_bytes, refuse
from cotrain_compile.placement.search.solve import SolveSettings, solve
from cotrain_compile.presets import find
from tests.support.random_problems import PLENTY, resident_bytes
from tests.unit.placement.test_split import head

SETTINGS = SolveSettings(work_limit=5.0)


def wide() -> Dataflow:
    """A step whose loss has many classes: what it makes is far larger than all else."""
    step = head()
    sizes = {"h2": 32, "d2": 32}
    buffers = (replace(b, nbytes=b.nbytes * sizes.get(b.name, 1)) for b in step.buffers)
    return replace(step, buffers=tuple(buffers))


def problem_of(share: float, machine: str = "rtx4090") -> Problem:
    """A step with a loss of 8 rows, in `share` of what it takes with everything on the device."""
    free = formulate(wide(), find(machine), {Tier.DEVICE: PLENTY, Tier.HOST: PLENTY})
    return free.with_budget(Tier.DEVICE, int(share * resident_bytes(free)))


def step_s(problem: Problem, settings: SolveSettings) -> float:
    """Seconds of the plan, which passes the check; infinity where there is none."""
    try:
        plan = solve(problem, settings)
    except PlacementError:
        return float("inf")
    check(problem, plan)
    return plan.predicted.makespan_s


@pytest.mark.parametrize("machine", ["rtx4090", "h100"])
@pytest.mark.parametrize("share", [0.3, 0.45, 0.6, 0.8, 1.0])
def test_a_search_with_parts_is_never_slower(share: float, machine: str) -> None:
    problem = problem_of(share, machine)
    whole_s = step_s(problem, replace(SETTINGS, split=False))
    assert step_s(problem, SETTINGS) <= whole_s


def test_what_the_whole_plan_does_is_done_in_parts() -> None:
    problem = problem_of(0.97)
    whole = solve(problem, replace(SETTINGS, split=False))
    (region,) = problem.dataflow.regions
    splits = {region.name: 2}
    parts = problem.splitting(splits).as_its_own_step()
    plan = from_whole(parts, whole)
    assert plan is not None
    check(parts, plan)
    again = {whole_name(name) for name in plan.placement.recomputed}
    assert again == set(whole.placement.recomputed) & {
        whole_name(name) for name in recomputable(parts.dataflow)
    }
    assert plan.placement.updates == whole.placement.updates
    in_parts = replace(whole, placement=replace(whole.placement, splits=splits))
    assert from_whole(parts, in_parts) is None
    assert from_whole(parts.with_budget(Tier.DEVICE, 1), whole) is None


def test_where_all_fits_nothing_is_split() -> None:
    plan = solve(problem_of(1.0), SETTINGS)
    assert not plan.placement.splits
    assert not plan.tasks


def test_less_memory_than_whole_ops_need_is_enough_in_parts_and_the_plan_says_so() -> None:
    problem = problem_of(0.0)
    with pytest.raises(PlacementError, match="even with") as whole:
        solve(problem, replace(SETTINGS, split=False))
    with pytest.raises(PlacementError, match=r"parts.*with a whole loss it needs") as in_parts:
        solve(problem, SETTINGS)
    least = in_parts.value.shortfall_bytes
    assert least < whole.value.shortfall_bytes
    enough = problem.with_budget(Tier.DEVICE, least)
    plan = solve(enough, SETTINGS)
    check(enough, plan)
    assert plan.placement.splits
    assert any("loss in" in note and "less" in note for note in plan.notes)
    assert any(note.startswith("the bound is about") for note in plan.notes)
    assert plan.report is not None
    assert all("+parts:" in way for way in plan.report.simulated_s)


def test_what_is_too_large_has_its_least_looked_for_only_where_nothing_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    free = problem_of(0.0)
    with pytest.raises(PlacementError) as in_parts:
        solve(free, SETTINGS)
    refused = list[Dataflow]()

    def noted(problem: Problem, *others: Any, **more: Any) -> NoReturn:
        refused.append(problem.dataflow)
        refuse(problem, *others, **more)

    monkeypatch.setattr("cotrain_compile.placement.search.solve.refuse", noted)
    enough = free.with_budget(Tier.DEVICE, in_parts.value.shortfall_bytes)
    assert floor_bytes(enough.dataflow) > enough.budgets[Tier.DEVICE]
    assert solve(enough, SETTINGS).placement.splits
    budget = enough.budgets[Tier.DEVICE]
    assert all(floor_bytes(dataflow) <= budget for dataflow in refused)


def test_what_parts_need_is_looked_for_without_their_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds are found for the few numbers of parts that are planned."""
    rated = list[Dataflow]()
    problem = problem_of(0.45)
    monkeypatch.setattr("cotrain_compile.placement.problem.roofline", rated.append)
    assert [*numbers_of_parts.worth_a_try(problem)]
    assert not rated


def test_parts_that_stay_behind_the_whole_step_have_no_whole_program() -> None:
    """A plan is known that is faster than what the first relaxation leads to."""
    problem = problem_of(0.97)
    alone, behind = (
        solve(problem, replace(SETTINGS, split=False, known_s=known_s)).report
        for known_s in (math.inf, 1e-9)
    )
    assert alone is not None
    assert behind is not None
    assert any(way.startswith("ilp") for way in alone.simulated_s)
    assert not any(way.startswith("ilp") for way in behind.simulated_s)
    assert behind.work < alone.work


@pytest.mark.parametrize("share", [0.05, 0.1, 0.15, 0.3])
def test_no_op_in_parts_is_to_take_much_of_a_small_budget(share: float) -> None:
    """Beside it a replay has to fit, or all but a few values leave."""
    problem = problem_of(share)
    (region,) = problem.dataflow.regions
    whole = max(
        sum(problem.dataflow.buffer[name].nbytes for name in {*op.reads, *op.writes})
        for op in problem.dataflow.ops
    )
    *_, splits = numbers_of_parts.worth_a_try(problem)
    parts = splits[region.name]
    assert parts == region.length or whole <= parts * problem.budgets[Tier.DEVICE] / 3


def test_another_policy_splits_nothing() -> None:
    with pytest.raises(PlacementError):
        solve(problem_of(0.3), replace(SETTINGS, policy="resident"))


def subsets(names: list[str]) -> list[tuple[str, ...]]:
    """All, of at most so many names as a small step has."""
    return list(joined.from_iterable(combinations(names, n) for n in range(len(names) + 1)))


def test_the_fastest_of_all_small_plans_lies_between_bound_and_plan() -> None:
    problem = problem_of(0.6)
    plan = solve(problem, SETTINGS)
    assert plan.report is not None
    tried = {tuple(plan.placement.splits.items()), ()}
    best_s = float("inf")
    for splits in tried:
        parts = problem.splitting(dict(splits)).as_its_own_step()
        dataflow = parts.dataflow
        offloaded = [
            b.name
            for b in dataflow.buffers
            if b.is_passing and sum(b.name in (*op.reads, *op.writes) for op in dataflow.ops) > 1
        ][:4]
        for recomputed in subsets(sorted(recomputable(dataflow))[:3]):
            for gone in subsets([name for name in offloaded if name not in recomputed]):
                placement = replace(resident(dataflow), offloaded=gone, recomputed=recomputed)
                try:
                    found = draft(parts, placement)
                except PlacementError:
                    continue
                best_s = min(best_s, found.step_s)
    best_s = min(best_s, plan.predicted.makespan_s)
    assert plan.report.lower_bound_s <= best_s * (1 + 1e-9)
    assert plan.predicted.makespan_s <= best_s * (1 + SETTINGS.gap)


def test_where_few_parts_have_no_plan_those_that_need_least_are_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(numbers_of_parts, "SAVES", 1.0)  # never worth a try
    free = problem_of(1.0)
    (region,) = free.dataflow.regions
    needs = {
        parts: floor_bytes(free.splitting({region.name: parts}).dataflow)
        for parts in numbers_of_parts.PARTS
        if parts <= region.length
    }
    smallest = min(needs, key=needs.__getitem__)
    assert needs[smallest] < needs[2]
    with pytest.raises(PlacementError) as nothing:
        solve(problem_of(0.0), SETTINGS)
    tight = free.with_budget(Tier.DEVICE, nothing.value.shortfall_bytes)
    plan = solve(tight, SETTINGS)
    check(tight, plan)
    assert plan.placement.splits == {region.name: smallest}
