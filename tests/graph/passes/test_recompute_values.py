"""Values made again: graph and data say the same, and the step's numbers stay as they are."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from cotrain_compile.dataflow import Dataflow, Op
from cotrain_compile.extract.extract import extract
from cotrain_compile.passes.recompute_values import recompute_values
from cotrain_compile.placement.check.check import check
from cotrain_compile.placement.policies import resident
from cotrain_compile.placement.recompute.recomputable import recomputable
from cotrain_compile.placement.recompute.rewrite import recomputed, recomputed_ops
from cotrain_compile.placement.schedule.schedule import schedule
from tests.support.captured_steps import TRAININGS, captured, differences, place, reference
from tests.support.plans.random_plans import random_plan

# Dropout, two micro-batches, the user's own checkpoints, a convolution, attention, shared weights.
SHORT = ("accumulating", "checkpointed", "autocast", "conv", "tied")
SOME_TRAININGS = pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n in SHORT else [pytest.mark.long]) for n in TRAININGS],
)


def chosen_from(dataflow: Dataflow, rng: random.Random) -> tuple[str, ...]:
    """Some of what can be made again, from next to nothing to all of it."""
    share = rng.choice((0.1, 0.5, 1.0))
    return tuple(n for n in sorted(recomputable(dataflow)) if rng.random() < share)


def apart_from(names: tuple[str, ...], rng: random.Random) -> tuple[str, ...]:
    """Some of `names` to be made on copies of their own: none, a few, or all."""
    share = rng.choice((0.0, 0.3, 1.0))
    return tuple(n for n in names if rng.random() < share)


def without_views(dataflow: Dataflow) -> list[Op]:
    """Its ops; a view of what is made again is one more view."""
    return [op for op in dataflow.ops if op.writes]


@SOME_TRAININGS
def test_the_graph_becomes_what_the_dataflow_becomes(name: str) -> None:
    step, rng = captured(name), random.Random(name)
    base = step.problem()
    for _ in range(4):
        names = chosen_from(step.dataflow, rng)
        apart = apart_from(names, rng)
        placement = replace(resident(step.dataflow), recomputed=names, recomputed_apart=apart)
        plan = schedule(base, placement)
        check(base, plan)
        graph = recompute_values(step.step.copy(), plan).verify()
        again = extract(graph)
        expected = recomputed(step.dataflow, names, apart)
        # The gaps of the plan, which lie between ops, are those of the graph.
        assert [n.name for n in graph.nodes if n.name in graph.phases] == [
            op.name for op in expected.ops
        ]
        assert without_views(again) == without_views(expected)
        assert {b.name: b for b in again.buffers} == expected.buffer
        assert again.updates == expected.updates


@SOME_TRAININGS
def test_random_plans_that_make_values_again_give_the_same_numbers(name: str) -> None:
    step, rng = captured(name), random.Random(name)
    names = chosen_from(step.dataflow, rng)
    apart = apart_from(names, rng)
    plan = random_plan(step.problem().recomputing(names, apart), rng)
    check(step.problem(), plan)
    compiled = place(name, plan)
    again = recomputed_ops(step.dataflow, names, apart)
    assert {n.name for n in compiled.graph.nodes if n.name in again} == set(again)
    assert not differences(step.train(compiled), reference(name))
