"""`auto` is never slower than what users write themselves, nor than with less to work with.

On steps, machines and budgets drawn at random, whatever work a search has. What users write are
checkpoints of every layer, or every other, with states where a simple rule has them.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotrain_compile.errors import PlacementError
from cotrain_compile.machine import MEMORIES, Tier
from cotrain_compile.placement.check.check import check
from cotrain_compile.placement.policies import RULES, rule
from cotrain_compile.placement.problem import Problem, formulate
from cotrain_compile.placement.recompute.recomputable import recomputable
from cotrain_compile.placement.recompute.regions import every_layer, every_other_layer
from cotrain_compile.placement.schedule.schedule import draft
from cotrain_compile.placement.search.solve import SolveSettings, solve
from cotrain_compile.plan import Plan
from cotrain_compile.presets import find
from tests.support.examples import examples
from tests.support.nets import Training
from tests.support.random_problems import PLENTY, machines, resident_bytes, with_budget
from tests.unit.placement.test_recompute_search import blocks_of_torch

ROUNDING = 1 + 1e-9
WORK = st.sampled_from([1e-6, 0.05, 12.0])


@st.composite
def cells(draw: st.DrawFn) -> Problem:
    """Blocks with wide values inside, in a part of the memory that they take."""
    training = draw(st.sampled_from([None, Training(clipped=True), Training(micro_batches=2)]))
    step, machine = blocks_of_torch(draw(st.integers(2, 5)), training), draw(machines())
    free = formulate(step, machine, {Tier.DEVICE: PLENTY, Tier.HOST: PLENTY})
    share = draw(st.floats(0.3, 1.0))
    return with_budget(free, int(share * resident_bytes(free)))


def usual_s(problem: Problem) -> float | None:
    """The step time of the fastest of users' own ways that fits, None where none does."""
    step = problem.dataflow
    may, found = recomputable(step), list[float]()
    for choose in (every_layer, every_other_layer):
        again = choose(step, may)
        names = tuple(b.name for b in step.buffers if b.name in again)
        for name in RULES:
            try:
                placement = replace(rule(name)(step), recomputed=names)
                found.append(draft(problem, placement).step_s)
            except PlacementError:
                continue
    return min(found, default=None)


def planned(problem: Problem, work: float, plans: tuple[Plan, ...] = ()) -> Plan | None:
    """The plan of `auto`, None where nothing fits; it passes the check."""
    settings = SolveSettings(work_limit=work, micro_batch_order="as-written")
    try:
        plan = solve(problem, settings, incumbents=plans)
    except PlacementError:
        return None
    check(problem, plan)
    return plan


@given(cells(), WORK)
@examples(6)
def test_no_checkpoints_of_a_users_are_faster(problem: Problem, work: float) -> None:
    known_s = usual_s(problem)
    plan = planned(problem, work)
    if known_s is not None:
        assert plan is not None
        assert plan.predicted.makespan_s <= known_s * ROUNDING


@given(cells(), WORK, st.floats(1.0, 1.5))
@examples(4)
def test_more_memory_is_never_slower_where_the_plan_for_less_is_known(
    problem: Problem, work: float, more: float
) -> None:
    plan = planned(problem, work)
    if plan is None:
        return
    roomier = with_budget(problem, int(more * problem.budgets[Tier.DEVICE]))
    found = planned(roomier, work, (plan,))
    assert found is not None
    assert found.predicted.makespan_s <= plan.predicted.makespan_s * ROUNDING


@pytest.mark.parametrize("work", [1e-6, 12.0])
def test_checkpoints_are_tried_where_nothing_else_was_found(work: float) -> None:
    """With hardly any work the plan is as fast as with every other layer made again."""
    free = formulate(blocks_of_torch(4), find("rtx4090"), dict.fromkeys(MEMORIES, PLENTY))
    tight = with_budget(free, int(0.8 * resident_bytes(free)))
    known_s, plan = usual_s(tight), planned(tight, work)
    assert known_s is not None
    assert plan is not None
    assert plan.predicted.makespan_s <= known_s * ROUNDING
