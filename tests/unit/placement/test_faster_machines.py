"""More memory or a faster machine never has a slower plan: a sweep carries the plans it has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotrain_compile.cluster.model.machines import side_by_side
from cotrain_compile.machine import Machine, Network, Tier
from cotrain_compile.placement.explain.sweep import (
    FITS,
    Case,
    Tried,
    carry_over,
    is_nowhere_slower,
    problem_of,
    try_case,
    with_plans_of_slower_machines,
)
from cotrain_compile.placement.placed import place_plan
from cotrain_compile.placement.problem import Problem
from cotrain_compile.placement.search.solve import SolveSettings
from cotrain_compile.placement.simulate.predict import predict
from cotrain_compile.presets import find
from tests.support.dataflows import chain
from tests.support.examples import examples
from tests.support.random_problems import PLENTY, least_bytes, problems, resident_bytes

GREEDY = SolveSettings("greedy")
ROUNDING = 1 + 1e-9
STEP = chain(3, width=256)
H100 = find("h100")


@st.composite
def faster(draw: st.DrawFn, machine: Machine) -> Machine:
    """The same machine with some of its rates higher."""

    def by() -> float:
        return draw(st.sampled_from([1.0, 1.0, 1.1, 1.5, 2.0, 4.0]))

    device, update = machine.device, machine.host_update
    compute = by()
    return machine.but(
        name="faster",
        device=replace(
            device,
            bytes_per_s=device.bytes_per_s * by(),
            flops_per_s={dtype: compute * rate for dtype, rate in device.flops_per_s.items()},
        ),
        h2d=replace(machine.h2d, bytes_per_s=machine.h2d.bytes_per_s * by()),
        d2h=replace(machine.d2h, bytes_per_s=machine.d2h.bytes_per_s * by()),
        host_update=replace(update, bytes_per_s=update.bytes_per_s * by()),
    )


@given(problems(), st.data())
@examples(4)
def test_no_more_memory_and_no_faster_machine_has_a_slower_plan(
    problem: Problem, data: st.DataObject
) -> None:
    step, slow = problem.dataflow, problem.machine
    fast = data.draw(faster(slow))
    least = least_bytes(problem)
    most = data.draw(st.integers(least, max(least, resident_bytes(problem) - 1)))
    cases = [
        Case(machine, {**problem.budgets, Tier.DEVICE: nbytes})
        for machine in (slow, fast)
        for nbytes in (least, most)
    ]
    tried = [Tried(case, *try_case(step, case, GREEDY)) for case in cases]
    points = carry_over(with_plans_of_slower_machines(step, tried))
    slow_least, slow_most, fast_least, fast_most = (p.step_s or 0.0 for p in points)
    assert slow_most <= slow_least
    assert fast_least <= slow_least * ROUNDING
    assert fast_most <= min(slow_most, fast_least) * ROUNDING


def both(asked_of_fast: str, **more: int) -> list[Tried]:
    """A step on a machine that is planned well, and on one a little faster that is not."""
    link = replace(H100.h2d, bytes_per_s=1.05 * H100.h2d.bytes_per_s)
    budgets = {Tier.DEVICE: 1200 << 10, Tier.HOST: PLENTY}
    slow, fast = Case(H100, budgets), Case(H100.but(name="fast", h2d=link, d2h=link), budgets)
    fast = replace(fast, budgets={**budgets, Tier.DEVICE: more.get("fast", 1200 << 10)})
    return [
        Tried(slow, *try_case(STEP, slow, SolveSettings("zero-offload"))),
        Tried(fast, *try_case(STEP, fast, SolveSettings(asked_of_fast))),
    ]


def test_the_plan_of_a_slower_machine_is_simulated_and_taken() -> None:
    slow, fast = both("greedy")
    assert slow.plan is not None
    assert slow.point.step_s is not None
    assert fast.point.step_s is not None
    assert fast.point.step_s > slow.point.step_s
    (_, carried_over) = with_plans_of_slower_machines(STEP, [slow, fast])
    problem = problem_of(STEP, fast.case)
    again = predict(place_plan(problem, slow.plan))
    assert carried_over.step_s == again.makespan_s < slow.point.step_s
    assert (carried_over.machine, carried_over.policy) == ("fast", "zero-offload")


def test_a_plan_serves_no_machine_that_has_less_memory_or_is_slower_anywhere() -> None:
    slow, fast = both("greedy", fast=1150 << 10)
    assert list(with_plans_of_slower_machines(STEP, [slow, fast])) == [slow.point, fast.point]
    slow, fast = both("greedy")
    apart = fast.case.machine.but(issue_s=1.01 * H100.issue_s)
    fast = replace(fast, case=replace(fast.case, machine=apart))
    assert list(with_plans_of_slower_machines(STEP, [slow, fast])) == [slow.point, fast.point]


def test_where_all_fits_on_the_faster_machine_nothing_moves() -> None:
    slow, fast = both("resident", fast=PLENTY)
    assert fast.point.regime == FITS
    fast = replace(fast, point=replace(fast.point, step_s=1.0))
    assert list(with_plans_of_slower_machines(STEP, [slow, fast])) == [slow.point, fast.point]


@pytest.mark.parametrize(
    "worse",
    [
        lambda m: m.but(device=replace(m.device, bytes_per_s=1.0)),
        lambda m: m.but(host=replace(m.host, flops_per_s={"float32": 1.0})),
        lambda m: m.but(device=replace(m.device, flops_per_s={"bfloat16": 1.0})),
        lambda m: m.but(device=replace(m.device, launch_s=1.0)),
        lambda m: m.but(h2d=replace(m.h2d, latency_s=1.0)),
        lambda m: m.but(d2h=replace(m.d2h, bytes_per_s=1.0)),
        lambda m: m.but(duplex=1.0),
        lambda m: m.but(issue_s=1.0),
        lambda m: m.but(host_update=replace(m.host_update, slowdown_while_copying=9.0)),
        lambda m: m.but(host_update=replace(m.host_update, workers=2)),
        lambda m: m.but(host_update=replace(m.host_update, elements_per_s=1.0)),
        lambda m: m.but(network=Network(1e9)),
        lambda m: side_by_side(m, 2),
    ],
)
def test_one_rate_that_is_lower_makes_a_machine_slower(
    worse: Callable[[Machine], Machine],
) -> None:
    assert is_nowhere_slower(H100, H100)
    assert not is_nowhere_slower(worse(H100), H100)
