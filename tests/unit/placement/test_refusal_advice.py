"""Refusals name the way on that helps most, by what is alive at the peak."""

from __future__ import annotations

import pytest

from cotrain_compile.dataflow import Dataflow
from cotrain_compile.errors import PlacementError
from cotrain_compile.machine import Tier
from cotrain_compile.placement.policies import resident
from cotrain_compile.placement.problem import Problem, formulate
from cotrain_compile.placement.schedule.find_moves import moves_of
from cotrain_compile.placement.schedule.refuse import ACTIVATIONS, peak_of
from cotrain_compile.placement.search.solve import SolveSettings, solve
from cotrain_compile.presets import find
from tests.support.dataflows import chain
from tests.support.random_problems import PLENTY, least_bytes, with_budget

MADE_OF_WEIGHTS = chain(6, width=512, batch=8)
MADE_OF_ACTIVATIONS = chain(6, width=64, batch=4096)


def problem_of(step: Dataflow) -> Problem:
    return formulate(step, find("rtx4090"), {Tier.DEVICE: PLENTY, Tier.HOST: PLENTY})


def refusal_of(problem: Problem, policy: str) -> str:
    with pytest.raises(PlacementError) as refusal:
        solve(problem, SolveSettings(policy))
    return str(refusal.value)


@pytest.mark.parametrize("step", [MADE_OF_WEIGHTS, MADE_OF_ACTIVATIONS])
def test_the_kinds_at_the_peak_are_all_that_is_alive_largest_first(step: Dataflow) -> None:
    problem = problem_of(step)
    moves = moves_of(problem, resident(step))
    peak = peak_of(moves)
    assert peak.nbytes == max(moves.slot_bytes)
    assert list(peak.kinds.values()) == sorted(peak.kinds.values(), reverse=True)
    assert (next(iter(peak.kinds)) == ACTIVATIONS) == (step is MADE_OF_ACTIVATIONS)


@pytest.mark.parametrize(("step", "helps"), [(MADE_OF_WEIGHTS, False), (MADE_OF_ACTIVATIONS, True)])
def test_a_smaller_batch_is_advised_where_the_peak_is_made_of_activations(
    step: Dataflow, helps: bool
) -> None:
    said = refusal_of(with_budget(problem_of(step), 1 << 20), "zero-offload")
    assert ("make the batch or the sequence smaller" in said) == helps


@pytest.mark.parametrize(
    ("step", "first", "second"),
    [
        (MADE_OF_WEIGHTS, "raise memory_budget so that", "keep fewer activations"),
        (MADE_OF_ACTIVATIONS, "keep fewer activations", "raise memory_budget so that"),
    ],
)
def test_short_of_host_memory_what_most_of_it_is_for_comes_first(
    step: Dataflow, first: str, second: str
) -> None:
    problem = problem_of(step)
    said = refusal_of(with_budget(problem, least_bytes(problem), 4096), "greedy")
    assert "raise host_memory_budget by up to" in said
    assert 0 < said.index(first) < said.index(second)


def test_a_budget_above_what_the_device_has_is_noted() -> None:
    problem = problem_of(MADE_OF_WEIGHTS)
    has = problem.machine.device.capacity_bytes
    assert solve(with_budget(problem, has), SolveSettings("resident")).notes == ()
    (note,) = solve(with_budget(problem, 2 * has), SolveSettings("resident")).notes
    assert note == ("memory_budget is 47.0 GiB, above the 23.5 GiB that the device of rtx4090 has")
