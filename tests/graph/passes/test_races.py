"""A placed step is in no race, and one that lacks an edge is refused unless others stand for it.

What the checker accepts runs under delays anywhere and leaves the same bits.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from cotrain_compile.backends.lifecycle.compiled_step import CompiledStep
from cotrain_compile.backends.lifecycle.deferred import wait_for_deferred
from cotrain_compile.backends.verify import refuse_race
from cotrain_compile.errors import VerifyError
from cotrain_compile.graph import StepGraph
from cotrain_compile.passes import run_passes
from cotrain_compile.passes.find_accesses import find_accesses, find_race_in
from cotrain_compile.passes.views import viewed
from cotrain_compile.plan import Plan
from cotrain_compile.runtime.task_nodes import view_of
from tests.support.captured_steps import (
    TRAININGS,
    captured,
    differences,
    place,
    reference,
)
from tests.support.delays import late, random_delays
from tests.support.edges import Edge, edges, ordered_pairwise
from tests.support.plans.overlapping_plans import overlapping
from tests.support.plans.random_plans import random_plan

LONG_ONLY = ("llama", "muon", "t5", "gpt2")
# The longest delay of a schedule: from about an op of these steps to much more than a step.
LONGEST_DELAYS_S = (5e-5, 2e-4, 2e-3)


def seeds(count: int) -> list[Any]:
    """Seeds by training: some in every run, many more in a long one."""
    return [
        pytest.param(
            name, seed, marks=pytest.mark.long if name in LONG_ONLY or seed >= count else ()
        )
        for name in TRAININGS
        for seed in range(20 * count)
    ]


def plan_at_random(name: str, seed: int, *, overlap: bool) -> Plan:
    problem, rng = captured(name).problem(), random.Random(f"{name} {seed}")
    plan = random_plan(problem, rng)
    return overlapping(problem, plan, rng) if overlap else plan


def placed_at_random(name: str, seed: int, *, overlap: bool) -> StepGraph:
    return run_passes(captured(name).step, plan_at_random(name, seed, overlap=overlap))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("name", "seed"), seeds(4))
def test_a_random_plan_is_in_no_race(name: str, seed: int, overlap: bool) -> None:
    assert find_race_in(placed_at_random(name, seed, overlap=overlap)) is None


@pytest.mark.parametrize("overlap", [pytest.param(False, marks=pytest.mark.long), True])
@pytest.mark.parametrize(
    ("name", "seed"),
    [
        ("unclipped", 0),
        *(pytest.param("autocast-unclipped", seed, marks=pytest.mark.long) for seed in range(10)),
        *(pytest.param("unclipped", seed, marks=pytest.mark.long) for seed in range(1, 10)),
    ],
)
def test_an_edge_may_be_left_out_exactly_where_others_stand_for_it(
    name: str, seed: int, overlap: bool
) -> None:
    placed = placed_at_random(name, seed, overlap=overlap)
    persistent = {item.name for item in placed.inputs}
    verdicts = set()
    for edge in edges(placed):
        with edge.left_out():
            race, events = find_race_in(placed), list(find_accesses(placed))
        assert (race is None) is ordered_pairwise(events, persistent), f"{edge}: {race}"
        verdicts.add(race is None)
    assert verdicts == {True, False}


def test_an_op_writes_what_it_makes() -> None:
    placed = placed_at_random("unclipped", 0, overlap=False)
    writes = {event.name: event.writes for event in find_accesses(placed)}
    computing = [n for n in placed.nodes if n.name in writes and view_of(n) is None]
    made = [n for n in computing if n.op == "call_function" and viewed(n) is None]
    assert made
    assert all(node.name in writes[node.name] for node in made)


def test_verify_refuses_a_race_in_words_before_the_step_runs() -> None:
    placed = placed_at_random("unclipped", 0, overlap=False)
    refuse_race(placed)
    for edge in edges(placed):
        with edge.left_out():
            race = find_race_in(placed)
            if race is not None:
                with pytest.raises(VerifyError, match=r"nothing orders .* The step has not run"):
                    refuse_race(placed)


# Under delays.


@pytest.mark.usefixtures("watchdog", "one_thread")
def test_a_view_of_what_is_offloaded_keeps_nothing_alive() -> None:
    """This plan takes a view of a gradient between its way out and its way back."""
    compiled = place("autocast-unclipped", plan_at_random("autocast-unclipped", 477, overlap=False))
    assert not differences(
        train_to_the_end("autocast-unclipped", compiled), reference("autocast-unclipped")
    )


def train_to_the_end(name: str, run: Any) -> list[Any]:
    left = captured(name).train(run)
    wait_for_deferred()
    return left


def schedules(count: int) -> list[Any]:
    """Seeds by training and overlap: few in every run, thousands in a long one."""
    return [
        pytest.param(name, seed, marks=pytest.mark.long if seed >= count else ())
        for name in ("unclipped", "autocast", "autocast-unclipped", "tied")
        for seed in range(500 * count)
    ]


@pytest.mark.usefixtures("watchdog", "one_thread")
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("name", "seed"), schedules(1))
def test_delays_anywhere_change_no_bit(name: str, seed: int, overlap: bool) -> None:
    compiled = place(name, plan_at_random(name, seed, overlap=overlap))
    rng = random.Random(seed)
    with random_delays(compiled, rng, rng.choice(LONGEST_DELAYS_S)):
        assert not differences(train_to_the_end(name, compiled), reference(name))


def accepted(placed: StepGraph) -> Iterator[Edge]:
    """Edges without which there is still no race."""
    for edge in edges(placed):
        with edge.left_out():
            if find_race_in(placed) is None:
                yield edge


def check_late(compiled: CompiledStep, name: str, edge: Edge) -> None:
    """The step leaves the right bits also where the task of an edge begins long after all else."""
    with late(compiled, edge.task, 0.02):
        assert not differences(train_to_the_end(name, compiled), reference(name)), str(edge)


@pytest.mark.usefixtures("watchdog", "one_thread")
@pytest.mark.parametrize("overlap", [False, True])
def test_what_others_stand_for_may_come_late(overlap: bool) -> None:
    name = "unclipped"
    compiled = place(name, plan_at_random(name, 0, overlap=overlap))
    found = list(accepted(compiled.graph))
    assert found
    for edge in found:
        with edge.left_out():
            check_late(compiled, name, edge)
