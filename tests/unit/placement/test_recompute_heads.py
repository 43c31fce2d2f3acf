"""Heads: large values that are in no layer are made again where that is faster."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cotrain_compile.dataflow import Dataflow
from cotrain_compile.machine import Link, Tier
from cotrain_compile.placement.check.check import check
from cotrain_compile.placement.problem import Problem, formulate
from cotrain_compile.placement.search.solve import SolveSettings, solve
from cotrain_compile.placement.search.variants import Levels, Variant
from cotrain_compile.plan import Plan
from cotrain_compile.presets import find
from tests.support.blocks import in_modules
from tests.support.nets import MIB, Layer, Training, step_of
from tests.support.random_problems import PLENTY
from tests.unit.placement.test_recompute_brute_force import of_torch

BLOCKS = 8


def with_a_head() -> Dataflow:
    """Numbered blocks, then a wide loss: three values made of one another, in no layer."""
    net, modules = list[Layer](), dict[str, str]()
    for i in range(BLOCKS):
        before = f"out{i - 1}" if i else "x"
        net.append(Layer(f"in{i}", (before,), "", 0, 4 * MIB, 1 << 28))
        net.append(Layer(f"out{i}", (f"in{i}",), "", 0, MIB, 1 << 28))
        modules |= {f"f_{part}{i}": f"model.blocks.{i}.{part}.0" for part in ("in", "out")}
    net.append(Layer("logits", (f"out{BLOCKS - 1}",), "", 0, 8 * MIB, 1 << 20))
    net.append(Layer("chances", ("logits",), "", 0, 8 * MIB))
    net.append(Layer("wide", ("chances",), "", 0, 16 * MIB))
    net.append(Layer("loss", ("wide",), "w", MIB // 4, 1024))
    modules |= {f"f_{name}": "model.head" for name in ("logits", "chances", "wide", "loss")}
    return of_torch(in_modules(step_of("head", net, Training(frozenset("w"))), modules))


@pytest.fixture
def problem() -> Problem:
    """On a slow link, with just enough memory for the wide value and its gradient."""
    link = Link(4e9, 0.0)
    machine = find("rtx4090").but(h2d=link, d2h=link)
    return formulate(with_a_head(), machine, {Tier.DEVICE: 46 * MIB, Tier.HOST: PLENTY})


def step_s(plan: Plan) -> float:
    return plan.predicted.makespan_s


def test_heads_are_large_with_what_they_are_made_of_what_is_needed_last_first(
    problem: Problem,
) -> None:
    logits, chances, wide = Levels(problem).heads()
    assert logits == {"h_logits"}
    assert chances == {"h_logits", "h_chances"}
    assert wide == {"h_logits", "h_chances", "h_wide"}
    roomy = problem.with_budget(Tier.DEVICE, PLENTY)
    assert not [*Levels(roomy).heads()]


def test_a_head_is_in_all_levels_but_for_what_users_write(problem: Problem) -> None:
    levels = Levels(problem)
    users = [level.recomputed for level in levels.usual(PLENTY)]
    levels.head = next(levels.heads())
    assert levels.head < {*levels.variant(1).recomputed}
    assert [level.recomputed for level in levels.usual(PLENTY)] == users


def test_logits_are_made_again_where_they_take_the_room_of_all_else(
    problem: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = solve(problem)
    check(problem, found)
    assert "h_logits" in found.placement.recomputed

    def none(self: Levels) -> Iterator[frozenset[str]]:
        yield from ()

    monkeypatch.setattr(Levels, "heads", none)
    monkeypatch.setattr(
        f"{solve.__module__}.make_more_again", lambda attempts: None
    )  # it finds them, too
    assert step_s(found) < 0.98 * step_s(solve(problem))


def test_what_the_link_takes_at_the_least_no_plan_beats(problem: Problem) -> None:
    """For the step as it is: all that is there at most beyond the budget goes down and comes up."""
    step = Variant(problem)
    plan = solve(problem, SolveSettings(recompute=False))
    assert 0.5 * step_s(plan) < step.least_s <= step_s(plan)
    assert not Variant(problem.with_budget(Tier.DEVICE, PLENTY)).least_s
