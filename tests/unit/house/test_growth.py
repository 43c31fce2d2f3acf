"""A step of four times the layers takes four times the work: no function is called more often."""

from __future__ import annotations

from functools import partial

import pytest

from cotrain_compile.analysis.liveness import liveness
from cotrain_compile.analysis.reuse import critical_path_s
from cotrain_compile.machine import Tier
from cotrain_compile.placement.check.check import check
from cotrain_compile.placement.policies import rule
from cotrain_compile.placement.problem import Problem, formulate
from cotrain_compile.placement.schedule.schedule import schedule
from cotrain_compile.plan import Plan
from cotrain_compile.presets import find
from tests.support.call_counts import calls_in, growing_faster
from tests.support.dataflows import chain, mixed_precision_step

SMALL, LARGE = 30, 120
# Sorting and heaps take n log n; what is quadratic grows by 16.
MOST_TIMES = 1.6 * LARGE / SMALL
POLICIES = ("zero-offload", "coarse", "streamed")


def problem_of(layers: int, *, mixed: bool = False) -> Problem:
    dataflow = mixed_precision_step(layers, params=10**7) if mixed else chain(layers, width=4096)
    budgets = {Tier.DEVICE: liveness(dataflow).peak_bytes, Tier.HOST: 1 << 50}
    return formulate(dataflow, find("rtx4090"), budgets)


def planned(problem: Problem, policy: str) -> Plan:
    return schedule(problem, rule(policy)(problem.dataflow))


@pytest.mark.parametrize("mixed", [False, True], ids=["plain", "mixed"])
def test_scheduling_host_updates_is_about_linear_in_the_layers(mixed: bool) -> None:
    small, large = (problem_of(layers, mixed=mixed) for layers in (SMALL, LARGE))
    few, many = (calls_in(partial(planned, problem, "zero-offload")) for problem in (small, large))
    assert growing_faster(few, many, MOST_TIMES, least=len(large.dataflow.ops)) == {}


@pytest.mark.parametrize("policy", POLICIES)
def test_checking_is_about_linear_in_the_layers(policy: str) -> None:
    small, large = (problem_of(layers) for layers in (SMALL, LARGE))
    few, many = (calls_in(partial(check, p, planned(p, policy))) for p in (small, large))
    assert growing_faster(few, many, MOST_TIMES, least=len(large.dataflow.ops)) == {}


def test_the_critical_path_is_about_linear_in_the_layers() -> None:
    small, large = (problem_of(layers) for layers in (SMALL, LARGE))
    few, many = (
        calls_in(partial(critical_path_s, p.dataflow, p.costs.device_s)) for p in (small, large)
    )
    assert growing_faster(few, many, MOST_TIMES, least=len(large.dataflow.ops)) == {}
