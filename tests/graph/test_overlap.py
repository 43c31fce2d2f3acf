"""Overlapping steps are exact: what one leaves to the next is waited for by all who look at it."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from cotrain_compile.backends.tails import wait_for_tails
from cotrain_compile.machine import Link, Machine, Tier
from cotrain_compile.placement.check import check
from cotrain_compile.placement.replay import replay
from cotrain_compile.placement.residency import device_bytes, device_program
from cotrain_compile.presets import find
from tests.graph.captured_steps import TRAININGS, captured, differences, place, reference
from tests.graph.overlapping_plans import overlapping
from tests.graph.random_plans import random_plan
from tests.graph.test_modes import LONG_ONLY


def slow_machine() -> Machine:
    """Links that are slow enough for a step to return long before its copies are done."""
    slow = Link(bytes_per_s=1e9, latency_s=0.002)
    return replace(find("this-machine"), h2d=slow, d2h=slow)


def seeds(count: int) -> list[Any]:
    """Seeds by training: some in every run, many more in a long one."""
    return [
        pytest.param(
            name, seed, marks=pytest.mark.long if name in LONG_ONLY or seed >= count else ()
        )
        for name in TRAININGS
        for seed in range(10 * count)
    ]


@pytest.mark.parametrize("throttle", [False, True])
@pytest.mark.parametrize(("name", "seed"), seeds(2))
def test_random_overlapping_steps_are_exact_in_exactly_their_memory(
    name: str, seed: int, throttle: bool
) -> None:
    problem = captured(name).problem()
    rng = random.Random(f"{name} {seed}")
    plan = overlapping(problem, random_plan(problem, rng), rng)
    check(problem, plan)
    compiled = place(name, plan, slow_machine(), throttle=throttle)
    peaks = []

    def run(inputs: list[Any]) -> Any:
        outputs = compiled(inputs)
        assert compiled.measured is not None
        peaks.append(compiled.measured.peak_bytes)
        return outputs

    left = captured(name).train(run)
    wait_for_tails()
    assert not differences(left, reference(name))
    program = device_program(problem.dataflow, plan.placement, plan.moved)
    modelled = max(device_bytes(program, plan.placement, plan.tasks))
    assert {peak[Tier.DEVICE] for peak in peaks} == {modelled}
    most = replay(problem.dataflow, plan)[Tier.HOST].nbytes
    assert all(peak[Tier.HOST] <= most for peak in peaks)
