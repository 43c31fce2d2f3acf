"""Half the work costs little: no plan falls because one program of a search was not solved."""

from __future__ import annotations

from pathlib import Path

import pytest

from cotrain_compile.dataflow import Dataflow
from cotrain_compile.files import load
from cotrain_compile.machine import MEMORIES
from cotrain_compile.placement.problem import Problem, formulate
from cotrain_compile.placement.search import climb_levels
from cotrain_compile.placement.search.attempts import Attempts
from cotrain_compile.placement.search.solve import SolveSettings, solve
from cotrain_compile.placement.search.variants import Variant
from cotrain_compile.presets import find
from tests.support.random_problems import PLENTY, least_bytes, resident_bytes, with_budget

LITTLE = 1.03


MOST_S = {0.1: 0.0388, 0.3: 0.0300}
HALF = SolveSettings(work_limit=SolveSettings().work_limit / 2)


def in_little_memory(share: float) -> Problem:
    """A small GPT, and of the memory between the least and the most a share."""
    step = load(Path("tests/problems/gpt.json"), Dataflow)
    free = formulate(step, find("rtx4090"), dict.fromkeys(MEMORIES, PLENTY))
    least, most = least_bytes(free), resident_bytes(free)
    return with_budget(free, int(least + share * (most - least)))


def test_a_plan_of_a_small_gpt_is_found_with_half_the_work() -> None:
    """As fast as what the whole has to find, below."""
    assert solve(in_little_memory(0.3), HALF).predicted.makespan_s <= MOST_S[0.3]


@pytest.mark.long
@pytest.mark.parametrize("share", MOST_S)
def test_plans_of_a_small_gpt_are_found_with_half_the_work(share: float) -> None:
    """With the whole they are at most 3 % slower than was found once."""
    problem = in_little_memory(share)
    whole = solve(problem).predicted.makespan_s
    half = solve(problem, HALF)
    assert whole <= MOST_S[share]
    assert half.predicted.makespan_s <= LITTLE * whole


def test_where_relaxations_say_that_nothing_is_faster_no_program_is_solved_whole() -> None:
    """That of the step as it is, too, where the first of proposed levels is no faster."""
    step = load(Path("tests/problems/gpt.json"), Dataflow)
    free = formulate(step, find("rtx4090"), dict.fromkeys(MEMORIES, PLENTY))
    report = solve(with_budget(free, resident_bytes(free) // 2)).report
    assert report is not None
    assert not any(way.startswith("ilp") for way in report.simulated_s)
    assert report.work < SolveSettings().work_limit / 2


@pytest.mark.parametrize("rounding", [1.0, 1e3])
def test_levels_are_proposed_where_rounding_leaves_them_a_chance(
    monkeypatch: pytest.MonkeyPatch, rounding: float
) -> None:
    """What rounding has cost at the fastest level it costs at others, and there is the bound."""
    asked = list[object]()
    monkeypatch.setattr(climb_levels, "_rounding", lambda _: rounding)
    monkeypatch.setattr(Attempts, "propose_levels", lambda _, regions: asked.append(regions))
    step = load(Path("tests/problems/gpt.json"), Dataflow)
    free = formulate(step, find("rtx4090"), dict.fromkeys(MEMORIES, PLENTY))
    solve(with_budget(free, resident_bytes(free) // 2), SolveSettings(split=False))
    assert bool(asked) == (rounding == 1.0)


def test_the_step_as_it_is_has_no_program_where_the_link_alone_takes_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    relaxed, relax = list[Variant](), Attempts.relax
    hopeless = list[bool]()

    def noted(attempts: Attempts, variant: Variant) -> bool:
        relaxed.append(variant)
        hopeless.append(variant is attempts.step and attempts.is_hopeless(variant))
        return relax(attempts, variant)

    monkeypatch.setattr(Attempts, "relax", noted)
    step = load(Path("tests/problems/gpt.json"), Dataflow)
    free = formulate(step, find("rtx4090"), dict.fromkeys(MEMORIES, PLENTY))
    solve(with_budget(free, resident_bytes(free) // 2), SolveSettings(split=False))
    assert relaxed
    assert not any(hopeless)
