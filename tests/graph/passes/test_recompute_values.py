"""Values made again: graph and data say the same, and the step's numbers stay as they are."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from cotrain_compile.dataflow import Dataflow, Op
from cotrain_compile.extract.extract import extract
from cotrain_compile.passes.recompute_values import recompute_values
from cotrain_compile.placement.check.check import check
from cotrain_compile.placement.policies import resident
from cotrain_compile.placement.problem import Problem
from cotrain_compile.placement.recompute.rewrite import (
    recomputable,
    recomputed,
    recomputed_ops,
)
from cotrain_compile.placement.schedule.schedule import schedule
from cotrain_compile.plan import Plan
from tests.support.captured_steps import TRAININGS, captured, differences, place, reference
from tests.support.plans.random_plans import random_plan


def chosen_from(dataflow: Dataflow, rng: random.Random) -> tuple[str, ...]:
    """Some of what can be made again, from next to nothing to all of it."""
    share = rng.choice((0.1, 0.5, 1.0))
    return tuple(n for n in sorted(recomputable(dataflow)) if rng.random() < share)


def plan_of(problem: Problem, names: Sequence[str], rng: random.Random) -> Plan:
    """A random plan of the step in which `names` are made again."""
    plan = random_plan(problem.recomputing(names), rng)
    return replace(plan, placement=replace(plan.placement, recomputed=tuple(names)))


def without_views(dataflow: Dataflow) -> list[Op]:
    return [op for op in dataflow.ops if op.writes]


@pytest.mark.parametrize("name", [*TRAININGS])
def test_the_graph_becomes_what_the_dataflow_becomes(name: str) -> None:
    step, rng = captured(name), random.Random(name)
    base = step.problem()
    for _ in range(3):
        names = chosen_from(step.dataflow, rng)
        placement = replace(resident(step.dataflow), recomputed=names)
        plan = schedule(base, placement)
        again = extract(recompute_values(step.step.copy(), plan).verify())
        expected = recomputed(step.dataflow, names)
        assert without_views(again) == without_views(expected)
        assert {b.name: b for b in again.buffers} == expected.buffer
        assert again.updates == expected.updates


@pytest.mark.parametrize("name", [*TRAININGS])
def test_random_plans_that_make_values_again_give_the_same_numbers(name: str) -> None:
    step, rng = captured(name), random.Random(name)
    names = chosen_from(step.dataflow, rng)
    plan = plan_of(step.problem(), names, rng)
    check(step.problem(), plan)
    compiled = place(name, plan)
    made = [n for n in compiled.graph.nodes if n.name in recomputed_ops(step.dataflow, names)]
    assert bool(made) == bool(names)
    assert not differences(step.train(compiled), reference(name))
