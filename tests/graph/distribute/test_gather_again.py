"""Sharded parameters are gathered once, or again for the backward: exactly, and less is kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from cotrain_compile.capture.aten import bucket_exchanges
from cotrain_compile.distribute.pretend import pretended
from cotrain_compile.entry.tracing import trace, trace_graph
from cotrain_compile.errors import PlanError
from cotrain_compile.extract.extract import extract
from cotrain_compile.machine import MEMORIES, Tier
from cotrain_compile.passes.recompute_values import recompute_values
from cotrain_compile.placement.check.check import check
from cotrain_compile.placement.decisions.find_decisions import decision_space
from cotrain_compile.placement.milp.bound import certified_bound_s
from cotrain_compile.placement.milp.model import MIB
from cotrain_compile.placement.milp.program import Program
from cotrain_compile.placement.milp.solvers import solve_program
from cotrain_compile.placement.placed import place_plan
from cotrain_compile.placement.policies import resident
from cotrain_compile.placement.problem import Problem, formulate
from cotrain_compile.placement.recompute.levels import gathered
from cotrain_compile.placement.recompute.rewrite import recomputed
from cotrain_compile.placement.schedule import schedule as scheduling
from cotrain_compile.placement.schedule.exchanges_ahead import UNDER_WAY
from cotrain_compile.placement.schedule.schedule import draft, schedule
from cotrain_compile.placement.search.attempts import Attempts
from cotrain_compile.placement.search.share_gathers import share_gathers
from cotrain_compile.placement.search.solve import SolveSettings, solve
from cotrain_compile.placement.search.variants import Levels
from cotrain_compile.placement.work import Allowance, Meter
from cotrain_compile.plan import Plan
from cotrain_compile.presets import find
from cotrain_compile.viz.text.summary import summary
from tests.support.closeness import relative_gap
from tests.support.gathering_ranks import (
    FEW_LAYERS,
    INTERPRETED,
    LAYERS,
    SEGMENTS,
    Trained,
    build,
    gather_once_and_again,
    gathering_again,
)
from tests.support.ranks import Ranks
from tests.support.work import LITTLE_WORK

# The weights of all layers but the first, whose input has no gradient.
AGAIN = LAYERS - 1
PLENTY = dict.fromkeys(MEMORIES, 1 << 40)


@pytest.fixture(autouse=True, scope="module")
def one_by_one() -> Iterator[None]:
    """No buckets, which would take parameters of several layers together."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bucket_exchanges, "SMALL_BYTES", 0)
        yield


@pytest.fixture(scope="module")
def problem() -> Problem:
    """With a network, and no link to speak of."""
    return formulate(trace(build, ranks=4), find("8xh100 link=1GB"), PLENTY)


def test_the_graph_becomes_what_the_dataflow_becomes() -> None:
    with pretended(2):
        step = trace_graph(build)
        dataflow = extract(step)
        names = tuple(gathered(dataflow))
        assert len(names) == AGAIN
        plan = gathering_again(formulate(dataflow, find("8xh100"), PLENTY))
        again = extract(recompute_values(step.copy(), plan).verify())
    expected = recomputed(dataflow, names)
    assert [op for op in again.ops if op.writes] == [op for op in expected.ops if op.writes]
    assert {b.name: b for b in again.buffers} == expected.buffer


def peak(plan: Plan) -> int:
    return plan.predicted.peak_bytes[Tier.DEVICE]


def test_what_is_gathered_again_is_not_kept_and_takes_the_network_twice(problem: Problem) -> None:
    once, again = schedule(problem, resident(problem.dataflow)), gathering_again(problem)
    check(problem, again)
    assert peak(again) < peak(once)
    begun = [span.name for span in again.predicted.spans if span.name.startswith("exchange.all_g")]
    assert len(begun) == 2 * LAYERS + AGAIN
    assert again.predicted.makespan_s > once.predicted.makespan_s
    assert f"{AGAIN} gathers of parameters among it" in summary(again, problem.dataflow)


def under_way(plan: Plan, problem: Problem, kind: str) -> list[int]:
    """How many exchanges of a kind are under way behind each op that computes."""
    found, begun = list[int](), set[str]()
    for op in place_plan(problem, plan).program.ops:
        if op.collective is not None and op.collective.kind.startswith(kind):
            begun.add(op.name)
        begun.discard(op.awaits)
        found += [len(begun)] if op.flops else []
    return found


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter"])
def test_the_device_works_beside_gathers_and_scatters(problem: Problem, kind: str) -> None:
    plan = schedule(problem, resident(problem.dataflow))
    check(problem, plan)
    beside = under_way(plan, problem, kind)
    assert max(beside) == UNDER_WAY
    assert sum(map(bool, beside)) >= LAYERS - 2
    assert plan.predicted.makespan_s < at_once(problem).predicted.makespan_s
    bound_s = certified_bound_s(
        problem, "highs", work=Allowance(Meter(), 30.0), seed=0, cyclic=False
    )
    assert 0 < bound_s <= plan.predicted.makespan_s * (1 + 1e-6)


def at_once(problem: Problem) -> Plan:
    """The plan that awaits every exchange where the step does."""
    with mock.patch.object(scheduling, "with_exchanges_ahead", lambda placed: placed):
        return schedule(problem, resident(problem.dataflow))


def test_only_what_fits_is_under_way_early(problem: Problem) -> None:
    """What awaits all at once in so much memory still fits, and so does each byte more."""
    least, most = peak(at_once(problem)), peak(schedule(problem, resident(problem.dataflow)))
    assert least < most
    begun = [op.name for op in problem.dataflow.ops if op.collective]
    moved = []
    for part in range(9):
        tight = problem.with_budget(Tier.DEVICE, least + (most - least) * part // 8)
        plan = schedule(tight, resident(tight.dataflow))
        check(tight, plan)
        order = place_plan(tight, plan).program.ops
        assert [op.name for op in order if op.collective] == begun
        moved.append(len(plan.moved))
    assert moved[0] < moved[-1]
    assert moved == sorted(moved)


def test_the_planner_gathers_again_where_memory_is_short(problem: Problem) -> None:
    budget = int(1.05 * peak(gathering_again(problem)))
    asked = problem.with_budget(Tier.DEVICE, budget)
    plan = solve(asked, SolveSettings(work_limit=LITTLE_WORK))
    assert set(plan.placement.recomputed) & set(gathered(problem.dataflow))
    bound_s = certified_bound_s(
        asked, "highs", work=Allowance(Meter(), 30.0), seed=0, cyclic=False, recompute=True
    )
    assert 0 < bound_s <= plan.predicted.makespan_s * (1 + 1e-6)


def test_no_level_that_gathers_again_in_all_layers_is_faster(problem: Problem) -> None:
    """Where something has to move as well: levels of regions alone, which gather once, are slow."""
    asked = problem.with_budget(Tier.DEVICE, int(0.8 * peak(gathering_again(problem))))
    settings, levels = SolveSettings(work_limit=LITTLE_WORK), Levels(asked)
    tried = Attempts(asked, settings, lambda stage: None)
    for number in range(1, levels.count + 1):
        tried.try_level(levels.variant(number))
    assert tried.found.fastest is not None
    plan = solve(asked, settings)
    assert plan.predicted.makespan_s <= tried.found.fastest.step_s * (1 + 1e-9)


def test_over_a_slow_network_what_is_gathered_leaves_for_the_host(problem: Problem) -> None:
    """Beside a fast link: to gather it again takes longer."""
    slow = formulate(problem.dataflow, find("8xh100 network=2GB"), PLENTY)
    again = gathering_again(slow)
    asked = slow.with_budget(Tier.DEVICE, int(1.1 * peak(again)))
    tried = Attempts(asked, SolveSettings(), lambda stage: None)
    tried.found.keep("again", draft(asked, again.placement))
    share_gathers(tried)
    fastest = tried.found.fastest
    assert fastest is not None
    assert set(fastest.placement.offloaded) <= set(gathered(slow.dataflow))
    assert fastest.placement.offloaded
    assert fastest.step_s < 0.95 * again.predicted.makespan_s
    check(asked, schedule(asked, fastest.placement))
    plan = solve(asked, SolveSettings(work_limit=LITTLE_WORK))
    assert plan.predicted.makespan_s <= fastest.step_s * (1 + 1e-9)


def test_the_bound_has_the_network_of_what_must_be_gathered_again(problem: Problem) -> None:
    """With no host to send anything to, a weight at least is gathered twice over a slow network."""
    slow = formulate(problem.dataflow, find("8xh100 link=1GB network=5GB"), PLENTY)
    again, network_s = gathered(slow.dataflow), slow.costs.network_s
    budget = int(1.02 * peak(gathering_again(slow)))
    assert peak(at_once(slow)) - budget > slow.dataflow.buffer[next(iter(again))].nbytes
    tight = replace(slow, budgets={Tier.DEVICE: budget, Tier.HOST: 0})
    space = decision_space(tight, at_peaks=True, everything=True, recompute=True)
    program = Program(space, budget / MIB, 0.0, relaxed=True)
    solution = solve_program(program, "highs", work=Allowance(Meter(), 30.0), gap=1e-3, seed=0)
    twice_s = min(network_s[op.name] for op in again.values())
    assert solution.bound_s >= sum(network_s.values()) + twice_s


def test_without_one_plan_for_all_ranks_nothing_is_gathered_again(problem: Problem) -> None:
    dataflow = problem.dataflow.with_own_plans()
    assert not gathered(dataflow)
    names = tuple(gathered(problem.dataflow))[:1]
    placement = replace(resident(dataflow), recomputed=names)
    plan = replace(gathering_again(problem), placement=placement)
    with pytest.raises(PlanError, match="which is written twice"):
        check(replace(problem, dataflow=dataflow), plan)


@pytest.mark.parametrize(
    ("segments", "rounding"),
    [
        pytest.param(INTERPRETED, 0.0, id="interpreted"),
        pytest.param(SEGMENTS, 1e-6, id="compiled", marks=pytest.mark.long),  # by a C++ compiler
    ],
)
def test_two_ranks_gather_again_to_the_same_bits(
    two_ranks: Ranks, segments: Mapping[str, Any], rounding: float
) -> None:
    """Also in segments of Inductor, in which exchanges are where the plan has moved them."""
    found = two_ranks.run(gather_once_and_again, segments)
    assert found[0][1].begun == found[1][1].begun
    for once, again, lowered, sent in found:
        gathers = [len([n for n in t.begun if n.startswith("all_gather")]) for t in (once, again)]
        assert gathers[1] > gathers[0]
        assert again.measured_peak <= again.predicted_peak
        assert lowered.begun == again.begun
        # Gathers begin early, scatters end late.
        assert min(once.moved, again.moved, lowered.moved) > FEW_LAYERS
        assert furthest(again, once) == 0.0
        assert furthest(lowered, again) <= rounding
        assert sent.begun == once.begun
        assert (once.offloads, sent.offloads) == (0, gathers[1] - gathers[0])
        assert sent.measured_peak <= sent.predicted_peak
        assert furthest(sent, once) == 0.0


def furthest(found: Trained, expected: Trained) -> float:
    """The largest difference of a tensor, relative to its largest element."""
    return relative_gap(found.tensors, expected.tensors)
