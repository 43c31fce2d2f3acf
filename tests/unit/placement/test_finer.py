"""Layers in more parts than fits asks for: where a glimpse says so, and with what work."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from cotrain_compile.machine import Tier
from cotrain_compile.placement.check.check import check
from cotrain_compile.placement.problem import Problem, formulate
from cotrain_compile.placement.search import finer as module
from cotrain_compile.placement.search import split_variants
from cotrain_compile.placement.search.attempts import Attempts
from cotrain_compile.placement.search.finer import finer, glimpse_s
from cotrain_compile.placement.search.numbers_of_parts import in_parts
from cotrain_compile.placement.search.settings import SolveSettings
from cotrain_compile.placement.search.solve import solve
from cotrain_compile.placement.search.variants import Variant
from cotrain_compile.placement.work import Allowance, Meter
from cotrain_compile.plan import Plan
from cotrain_compile.presets import find
from tests.support.nets import MIB
from tests.support.random_problems import PLENTY
from tests.unit.placement.test_recompute_chain import unit_chain
from tests.unit.placement.test_split import two_regions

SETTINGS = SolveSettings(work_limit=4.0)
SLOW = 1e3  # of a step that waits, in seconds


def problem_of(mib: float = 1.0, layer_mib: float = 4.0) -> Problem:
    """A step with a layer and a loss that may run in parts; the layer makes so much."""
    step = two_regions()
    sizes = {"h1": int(layer_mib * MIB)}
    buffers = tuple(replace(b, nbytes=sizes.get(b.name, b.nbytes)) for b in step.buffers)
    free = formulate(replace(step, buffers=buffers), find("rtx4090"), dict.fromkeys(Tier, PLENTY))
    return free.with_budget(Tier.DEVICE, int(mib * MIB))


def seen(monkeypatch: pytest.MonkeyPatch, *seconds: float) -> list[int]:
    """Let glimpses say `seconds` one after the other; what of the layer each was of, in parts."""
    found, left = list[int](), list(seconds)

    def glimpsed(problem: Problem, *_: Any) -> float:
        parts = [op for op in problem.dataflow.ops if op.name.startswith("forward_1_part")]
        found.append(max(1, sum("collected" not in op.name for op in parts)))
        return left.pop(0)

    monkeypatch.setattr(module, "glimpse_s", glimpsed)
    return found


def test_parts_grow_as_long_as_that_looks_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at = seen(monkeypatch, SLOW, 0.7 * SLOW, 0.6 * SLOW, 0.65 * SLOW)
    assert finer(problem_of(), {"loss": 4}, SETTINGS) == {"loss": 4, "layer": 16}
    assert looked_at == [1, 8, 16, 32]


def test_a_little_faster_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at = seen(monkeypatch, SLOW, 0.9 * SLOW)
    assert finer(problem_of(), {"loss": 4}, SETTINGS) is None
    assert looked_at == [1, 8]


def test_what_does_not_fit_in_few_parts_may_in_more(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at = seen(monkeypatch, math.inf, SLOW, SLOW)
    assert finer(problem_of(), {"layer": 4}, SETTINGS) == {"layer": 8}
    assert looked_at == [4, 8, 16]


def test_nothing_is_looked_at_where_layers_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at = seen(monkeypatch)
    assert finer(problem_of(layer_mib=1 / 16), {"loss": 4}, SETTINGS) is None
    assert not looked_at


def test_nothing_is_looked_at_when_the_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at = seen(monkeypatch)
    assert finer(problem_of(), {"loss": 4}, replace(SETTINGS, time_limit_s=0.0)) is None
    assert not looked_at


def test_where_the_device_computes_parts_gain_little(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of()
    device_s = sum(in_parts(problem, {"loss": 4}).costs.device_s.values())
    looked_at = seen(monkeypatch, 1.5 * device_s)
    assert finer(problem, {"loss": 4}, SETTINGS) is None
    assert looked_at == [1]


def test_a_step_of_too_many_ops_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at = seen(monkeypatch, SLOW, 0.5 * SLOW)
    monkeypatch.setattr(module, "MOST_OPS", 30)
    assert finer(problem_of(), {"loss": 2}, SETTINGS) == {"loss": 2, "layer": 8}
    assert looked_at == [1, 8]


def test_a_glimpse_is_what_a_plan_takes_and_is_charged() -> None:
    problem, work = problem_of(8.0), Allowance(Meter(), 4.0)
    seconds = glimpse_s(in_parts(problem, {"layer": 8}), SETTINGS, work)
    assert solve(problem, replace(SETTINGS, split=False)).predicted.makespan_s <= 2 * seconds
    assert 0 < work.meter.spent < SETTINGS.work_limit
    assert glimpse_s(problem_of(1 / 64), SETTINGS, work) == math.inf


def test_more_parts_have_all_work_and_the_others_a_quarter(monkeypatch: pytest.MonkeyPatch) -> None:
    more = {"layer": 8, "loss": 2}
    monkeypatch.setattr(split_variants, "finer", lambda *_: more)
    monkeypatch.setattr(split_variants, "worth_a_try", lambda _: iter([{"loss": 2}]))
    monkeypatch.setattr(split_variants, "can_gain", lambda *_: True)
    problem, within = problem_of(4.1), list[SolveSettings]()

    def climb(of: Problem, settings: SolveSettings, plans: Sequence[Plan]) -> Plan:
        within.append(settings)
        return solve(of, replace(settings, split=False), incumbents=plans)

    plan = split_variants.best_split(problem, SETTINGS, (), climb)
    check(problem, plan)
    *_, first, last = within
    assert (first.work_limit, last.work_limit) == (4.0, 1.0)
    assert last.known_s <= first.known_s
    assert first.bound_units == last.bound_units == SETTINGS.bound_units


def test_a_glimpse_makes_nothing_again_that_may_not(monkeypatch: pytest.MonkeyPatch) -> None:
    step = unit_chain(4)
    problem = formulate(step, find("rtx4090"), dict.fromkeys(Tier, PLENTY))
    seen_again: list[tuple[str, ...]] = []

    def try_cover(self: Attempts, variant: Variant) -> float:
        seen_again.append(variant.recomputed)
        return 1.0

    monkeypatch.setattr(Attempts, "try_cover", try_cover)
    for recompute in (True, False):
        settings = replace(SETTINGS, recompute=recompute)
        glimpse_s(problem, settings, Allowance(Meter(), 4.0))
    assert seen_again[0]
    assert seen_again[1:] == [()]
