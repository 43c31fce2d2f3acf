"""Plans on disk: used for the same question alone, checked when read, bounded in size."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from cotrain_compile.dataflow import Job
from cotrain_compile.entry import plan_cache
from cotrain_compile.entry.plan_cache import cached, digest_of
from cotrain_compile.machine import MEMORIES, Tier
from cotrain_compile.placement.check.check import check
from cotrain_compile.placement.problem import Problem, formulate
from cotrain_compile.placement.schedule.schedule import schedule
from cotrain_compile.placement.search.infeasible import least_of
from cotrain_compile.placement.search.solve import SolveSettings, solve
from cotrain_compile.plan import Plan
from cotrain_compile.presets import find
from tests.support.blocks import blocks

SETTINGS = SolveSettings("greedy")
GIB = 1 << 30


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COTRAIN_CACHE_DIR", str(tmp_path))
    return tmp_path / "plans"


@pytest.fixture(scope="module")
def problem() -> Problem:
    step = formulate(blocks(4), find("rtx4090"), dict.fromkeys(MEMORIES, GIB))
    return step.with_budget(Tier.DEVICE, 48 << 20)


def solved(problem: Problem) -> Callable[[Sequence[Plan]], Plan]:
    return lambda before: solve(problem, SETTINGS)


def never(before: Sequence[Plan]) -> Plan:
    raise AssertionError("a plan was looked for")


def test_the_next_process_reads_the_plan_and_says_so(problem: Problem, folder: Path) -> None:
    first = cached(problem, SETTINGS, solved(problem))
    second = cached(problem, SETTINGS, never)
    assert first.tasks
    assert replace(second, notes=()) == replace(first, notes=())
    assert "this plan was found before" in second.notes[-1]


@pytest.mark.parametrize("tier", MEMORIES)
def test_a_plan_serves_in_budgets_that_hold_it_and_are_hardly_larger(
    problem: Problem, folder: Path, tier: Tier
) -> None:
    first = cached(problem, SETTINGS, solved(problem))
    budget, peak = problem.budgets[tier], first.predicted.peak_bytes[tier]
    least, most = problem.with_budget(tier, peak), problem.with_budget(tier, budget * 101 // 100)
    assert cached(least, SETTINGS, never).budgets[tier] == peak
    assert "so is its bound" in cached(most, SETTINGS, never).notes[-1]
    for other in (peak - 1, budget * 11 // 10):
        with pytest.raises(AssertionError, match="looked for"):
            cached(problem.with_budget(tier, other), SETTINGS, never)


def test_all_that_a_plan_is_found_from_is_told_apart(problem: Problem) -> None:
    op = problem.dataflow.ops[0].name
    costs, machine = problem.costs, problem.machine
    others = [
        replace(problem, captured=True),
        replace(problem, dataflow=problem.dataflow.with_workspace({op: 1})),
        replace(problem, costs=replace(costs, device_s={**costs.device_s, op: 1.0})),
        replace(problem, machine=replace(machine, name="another")),
    ]
    changed: dict[str, Any] = {
        "policy": "ilp",
        "solver": "cbc",
        "work_limit": 1.0,
        "time_limit_s": 1.0,
        "gap": 0.1,
        "seed": 1,
        "overlap_steps": True,
        "speculate": True,
        "hedged": True,
        "micro_batch_order": "by-layer",
        "compiled": True,
        "recompute": False,
        "split": False,
        "known_s": 1.0,
        "bound_limit": 1.0,
    }
    assert changed.keys() == {field.name for field in fields(SolveSettings)}
    digests = [digest_of(other, SETTINGS) for other in (problem, *others)]
    digests += [digest_of(problem, replace(SETTINGS, **{n: v})) for n, v in changed.items()]
    assert len(set(digests)) == len(digests)


def test_a_line_added_above_the_model_changes_no_plan(problem: Problem) -> None:
    ops = tuple(replace(op, line="model.py:58") for op in problem.dataflow.ops)
    moved = replace(problem.dataflow, ops=ops, job=Job("Renamed"))
    other = replace(problem, dataflow=moved)
    assert digest_of(other, SETTINGS) == digest_of(problem, SETTINGS)


@pytest.mark.parametrize("damage", ["cut", "another step's"])
def test_what_is_no_sound_plan_is_found_anew(problem: Problem, folder: Path, damage: str) -> None:
    plan = cached(problem, SETTINGS, solved(problem))
    (path,) = folder.iterdir()
    whole = path.read_text()
    path.write_text(whole[:-9] if damage == "cut" else whole.replace("f_in1", "f_in9"))
    assert cached(problem, SETTINGS, lambda before: plan) is plan
    assert path.read_text() == whole


def test_the_plans_used_last_stay(
    problem: Problem, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = (replace(SETTINGS, seed=seed) for seed in (1, 2, 3))
    for used_at, settings in enumerate((first, second)):
        cached(problem, settings, solved(problem))
        (kept,) = folder.glob(f"{digest_of(problem, settings)}-*")
        os.utime(kept, (used_at, used_at))
    cached(problem, first, never)
    monkeypatch.setattr(plan_cache, "MOST_BYTES", int(2.5 * kept.stat().st_size))
    cached(problem, third, solved(problem))
    cached(problem, first, never)
    with pytest.raises(AssertionError, match="looked for"):
        cached(problem, second, never)


@pytest.mark.parametrize("first", ["less", "more"])
def test_more_memory_never_has_a_slower_plan(problem: Problem, folder: Path, first: str) -> None:
    """Whichever budget is asked for first: what was found for less is what a search has to beat."""
    larger = problem.with_budget(Tier.DEVICE, 56 << 20)
    slow = schedule(larger, least_of(larger).placement)
    fast = solve(problem, SETTINGS)
    assert slow.predicted.makespan_s > fast.predicted.makespan_s
    searched: list[int] = []

    def fastest(before: Sequence[Plan]) -> Plan:
        searched.append(len(before))
        plan = min((slow, *before), key=lambda plan: plan.predicted.makespan_s)
        check(larger, plan)
        return plan

    if first == "more":
        assert cached(larger, SETTINGS, fastest) is slow
    cached(problem, SETTINGS, lambda before: fast)
    for _ in range(2):
        assert cached(larger, SETTINGS, fastest).predicted.makespan_s == fast.predicted.makespan_s
    assert searched == ([0, 2] if first == "more" else [1])


@pytest.mark.parametrize("where", ["", "a file"])
def test_where_nothing_can_be_kept_plans_are_found(
    problem: Problem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    (tmp_path / "a file").write_text("")
    monkeypatch.setenv("COTRAIN_CACHE_DIR", where and str(tmp_path / where))
    plan = solve(problem, SETTINGS)
    assert cached(problem, SETTINGS, lambda before: plan) is plan
    assert os.listdir(tmp_path) == ["a file"]
