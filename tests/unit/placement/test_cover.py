"""Covers: values offloaded by the exact profile fit, none for nothing, some twice."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotrain_compile.dataflow import Buffer, Dataflow, Op, Phase, Role
from cotrain_compile.errors import PlacementError, PlanError
from cotrain_compile.machine import MEMORIES, Tier
from cotrain_compile.placement.check.check import check
from cotrain_compile.placement.milp.bound import certified_bound_s
from cotrain_compile.placement.policies import resident
from cotrain_compile.placement.problem import Problem, formulate
from cotrain_compile.placement.schedule.find_moves import moves_of
from cotrain_compile.placement.schedule.schedule import schedule
from cotrain_compile.placement.search.cover import covered, with_all_offloaded
from cotrain_compile.placement.search.infeasible import least_of
from cotrain_compile.placement.search.solve import solve
from cotrain_compile.placement.work import Allowance, Meter
from cotrain_compile.plan import Placement, Plan
from tests.support.examples import examples
from tests.support.nets import MIB
from tests.support.random_problems import PLENTY, problems
from tests.unit.placement.test_recompute_brute_force import with_link


def op(name: str, reads: str, writes: str, phase: Phase) -> Op:
    read, made = tuple(reads.split()), tuple(writes.split())
    return Op(name, f"made_up.{name}", phase, read, made, flops=1 << 24, bytes_moved=MIB)


# The backward reads `v` twice, with something as large as all that it has room for in between.
TWICE = Dataflow(
    "twice",
    (
        op("make", "x", "v", Phase.FORWARD),
        op("wide", "x", "w", Phase.FORWARD),
        op("loss", "w", "out", Phase.FORWARD),
        op("first", "v out", "g", Phase.BACKWARD),
        op("spread", "g", "s", Phase.BACKWARD),
        op("gather", "s", "h", Phase.BACKWARD),
        op("second", "v h", "end", Phase.BACKWARD),
    ),
    (
        Buffer("x", 1024, Role.BATCH, is_input=True),
        *(Buffer(n, 1024, Role.TEMPORARY) for n in ("out", "g", "h", "end")),
        Buffer("v", 4 * MIB, Role.TEMPORARY),
        *(Buffer(n, 8 * MIB, Role.TEMPORARY) for n in ("w", "s")),
    ),
)


def within(nbytes: int, bytes_per_s: float = 1e10) -> Problem:
    free = formulate(TWICE, with_link(bytes_per_s), dict.fromkeys(MEMORIES, PLENTY))
    return free.with_budget(Tier.DEVICE, nbytes)


def bound_s(problem: Problem, *, recompute: bool) -> float:
    work = Allowance(Meter(), 60)
    return certified_bound_s(problem, "highs", work=work, seed=0, cyclic=False, recompute=recompute)


def twice_offloaded() -> Placement:
    return replace(resident(TWICE), offloaded=("v",), refetched=("v",))


def test_what_is_read_twice_is_fetched_twice_from_one_copy() -> None:
    problem = within(9 * MIB)
    assert max(moves_of(problem, replace(resident(TWICE), offloaded=("v",))).slot_bytes) > 12 * MIB
    plan = solve(problem)
    check(problem, plan)
    assert plan.placement.refetched == ("v",)
    assert [t.name for t in plan.transfers] == ["offload.v", "fetch.v", "refetch.v"]
    assert plan.predicted.peak_bytes[Tier.DEVICE] <= 9 * MIB
    assert least_of(problem).nbytes < 9 * MIB


def test_the_bound_knows_that_what_is_fetched_twice_crosses_the_link_twice() -> None:
    # No other plan fits: without the second fetch the program would have no solution.
    assert bound_s(within(9 * MIB, 1e9), recompute=False) >= 2 * 4 * MIB / 1e9


@pytest.mark.parametrize("bytes_per_s", [1e9, 1e11, 1e13])
def test_no_bound_is_above_what_is_fetched_twice(bytes_per_s: float) -> None:
    problem = within(9 * MIB, bytes_per_s)
    seconds = schedule(problem, twice_offloaded()).predicted.makespan_s
    for recompute in (False, True):
        assert bound_s(problem, recompute=recompute) <= seconds * (1 + 1e-6)


def test_the_bound_has_no_plan_where_even_twice_is_not_enough() -> None:
    with pytest.raises(PlacementError):
        solve(within(8 * MIB - 1))


def test_what_is_written_behind_its_copy_is_not_fetched_again() -> None:
    """The copy on the host has the value before."""
    step = replace(
        TWICE, ops=(*TWICE.ops[:4], op("add", "v g", "v", Phase.BACKWARD), *TWICE.ops[4:])
    )
    problem = formulate(step, with_link(1e10), dict.fromkeys(MEMORIES, PLENTY))
    program = moves_of(problem, resident(step)).program
    assert len(program.order.offloaded_gaps("v")) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        replace(twice_offloaded(), offloaded=()),
        replace(twice_offloaded(), refetched=("v", "x")),
        replace(twice_offloaded(), refetched=()),
    ],
)
def test_a_plan_that_fetches_otherwise_than_it_says_is_refused(wrong: Placement) -> None:
    problem = within(PLENTY)
    plan: Plan = schedule(problem, twice_offloaded())
    with pytest.raises(PlanError, match=r"refetched names|is fetched 2 times"):
        check(problem, replace(plan, placement=wrong))


@given(problems(), st.floats(0, 1))
@examples(20)
def test_a_cover_fits_and_closes_what_it_can(problem: Problem, share: float) -> None:
    least, free = least_of(problem), resident(problem.dataflow)
    kept = replace(least.placement, offloaded=(), refetched=())
    most = max(moves_of(problem, kept).slot_bytes)
    target = least.nbytes + int(share * max(0, most - least.nbytes))
    placement, moves = covered(problem, least.placement, target)
    if max(moves.slot_bytes) > target:
        return  # an update takes more, or tiny values stay
    own = problem.with_budget(Tier.DEVICE, max(target, least.nbytes))
    check(own, schedule(own, placement))
    values = [name for name in placement.offloaded if name not in free.homes]
    for name in values:
        fewer = tuple(each for each in placement.refetched if each != name)
        offloaded = placement.offloaded
        if name not in placement.refetched:
            offloaded = tuple(each for each in offloaded if each != name)
        closed = replace(placement, offloaded=offloaded, refetched=fewer)
        is_value = problem.dataflow.buffer[name].role is Role.TEMPORARY
        if is_value and name not in least.placement.homes and name in covered_names(problem):
            assert max(moves_of(problem, closed).slot_bytes) > target


def covered_names(problem: Problem) -> set[str]:
    """What a cover decides on: all that it has offloaded where nothing fits."""
    bare = replace(least_of(problem).placement, offloaded=(), refetched=())
    return set(covered(problem, bare, 0)[0].offloaded)


def test_what_is_made_again_is_not_offloaded_too() -> None:
    """It stays to its last use in the forward, as where parts of a split op read it in turn."""
    step = Dataflow(
        "parts",
        (
            op("make", "x", "v", Phase.FORWARD),
            op("part0", "v", "w", Phase.FORWARD),
            op("between", "w", "y", Phase.FORWARD),
            op("part1", "v y", "out", Phase.FORWARD),
            op("back", "v out", "end", Phase.BACKWARD),
        ),
        (
            Buffer("x", 1024, Role.BATCH, is_input=True),
            *(Buffer(name, 1024, Role.TEMPORARY) for name in ("v", "w", "y", "out", "end")),
        ),
        (),
    )
    problem = formulate(step, with_link(1e10), dict.fromkeys(MEMORIES, PLENTY))
    again = replace(resident(step), recomputed=("v",))
    assert "v" in with_all_offloaded(problem, resident(step)).offloaded
    assert "v" not in with_all_offloaded(problem, again).offloaded
