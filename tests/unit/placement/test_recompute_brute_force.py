"""Values made again, against every plan of small steps: the bound, what is found, and the links."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import replace
from itertools import combinations, pairwise, product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotrain_compile.dataflow import Dataflow, Phase
from cotrain_compile.errors import PlacementError
from cotrain_compile.machine import MEMORIES, HostUpdate, Link, Machine, Tier, TierSpec, two_tier
from cotrain_compile.placement.check.check import check
from cotrain_compile.placement.decisions.bucketed_step import bucketed
from cotrain_compile.placement.decisions.decisions import Decisions, DecisionSpace
from cotrain_compile.placement.decisions.find_decisions import decision_space
from cotrain_compile.placement.decisions.level_decisions import least_again
from cotrain_compile.placement.milp.bound import certified_bound_s
from cotrain_compile.placement.milp.model import MIB as BYTES_PER_MIB
from cotrain_compile.placement.milp.program import Program
from cotrain_compile.placement.milp.solvers import solve_program
from cotrain_compile.placement.problem import Problem, formulate
from cotrain_compile.placement.recompute.recomputable import recomputable
from cotrain_compile.placement.schedule.schedule import Draft, draft, schedule
from cotrain_compile.placement.search.cover import covered
from cotrain_compile.placement.search.solve import SolveSettings, solve
from cotrain_compile.placement.work import Allowance, Meter
from cotrain_compile.plan import Placement, Plan
from tests.support.blocks import in_modules
from tests.support.examples import examples
from tests.support.nets import MIB, Layer, Training, step_of
from tests.support.random_problems import (
    GB_PER_S,
    PLENTY,
    least_bytes,
    machines,
    resident_bytes,
    training_steps,
    with_budget,
)


def of_torch(dataflow: Dataflow) -> Dataflow:
    """The step with layers that are ops of torch, which may run again."""
    ops = (
        replace(op, target="aten.mul.Tensor") if op.phase is Phase.FORWARD else op
        for op in dataflow.ops
    )
    return replace(dataflow, ops=tuple(ops))


def between(dataflow: Dataflow, machine: Machine, share: float) -> Problem:
    """With that share of the bytes between the least feasible budget and all that is used."""
    free = formulate(dataflow, machine, dict.fromkeys(MEMORIES, PLENTY))
    least, everything = least_bytes(free), resident_bytes(free)
    return with_budget(free, least + int(share * max(0, everything - least)))


def best_of(problem: Problem, placements: Iterable[Placement]) -> Plan | None:
    """The fastest plan of those placements that fit."""
    found: list[Draft] = []
    for placement in placements:
        with suppress(PlacementError):
            found.append(draft(problem, placement))
    if not found:
        return None
    return schedule(problem, min(found, key=lambda each: each.step_s).placement)


def bound_s(problem: Problem, *, recompute: bool = True) -> float:
    return certified_bound_s(
        problem, "highs", work=Allowance(Meter(), 60), seed=0, cyclic=False, recompute=recompute
    )


def step_s(plan: Plan) -> float:
    return plan.predicted.makespan_s


# Random steps: any values made again, any offloaded, parameters in a few ways each.


@st.composite
def small_problems(draw: st.DrawFn) -> tuple[Problem, list[Placement]]:
    """A problem with all placements of what is drawn of its decisions, some hundred at most."""
    dataflow = of_torch(draw(training_steps(most=2)))
    made = sorted(recomputable(dataflow))
    dataflow = unread(dataflow, draw(st.sets(st.sampled_from(made))) if made else set())
    machine = draw(machines())
    slower = draw(st.sampled_from([1, 40]))
    up, down = (Link(link.bytes_per_s / slower, 0.0) for link in (machine.h2d, machine.d2h))
    problem = between(dataflow, machine.but(h2d=up, d2h=down), draw(st.floats(0, 0.9)))
    values = draw(st.permutations(sorted(recomputable(dataflow))))[:3]
    subsets = [names for count in range(len(values) + 1) for names in combinations(values, count)]
    placements = []
    for names in subsets:
        space = decision_space(problem.recomputing(names), 8)
        decided: list[Any] = [*space.params, *space.activations]
        ways = [draw(some_of(each.strategies)) for each in decided]
        found = list(all_of(space, ways))
        # Values offloaded by the exact profile, and all that can be, some of it twice.
        target = problem.budgets[Tier.DEVICE]
        covers = [covered(problem, each, nbytes)[0] for each in found[:6] for nbytes in (target, 0)]
        placements += [*found, *covers]
        # What is made of others that are made again, too, on copies of its own.
        if len(names) > 1:
            own = (replace(each, recomputed_apart=names) for each in found[:6])
            placements += [covered(problem, each, target)[0] for each in own]
    return problem, placements


def unread(dataflow: Dataflow, names: AbstractSet[str]) -> Dataflow:
    """The step whose backward does not read `names`, which the forward makes: as of a sum."""
    ops = (
        op
        if op.phase is Phase.FORWARD
        else replace(op, reads=tuple(name for name in op.reads if name not in names))
        for op in dataflow.ops
    )
    return replace(dataflow, ops=tuple(ops))


def some_of(strategies: Sequence[object]) -> st.SearchStrategy[list[object]]:
    """Mostly one of them, sometimes two."""
    return st.lists(st.sampled_from(strategies), min_size=1, max_size=2, unique=True)


def all_of(space: DecisionSpace, ways: Sequence[Sequence[object]]) -> Iterator[Placement]:
    """The placements of every choice, at most sixty."""
    count = len(space.params)
    for _, chosen in zip(range(60), product(*ways), strict=False):
        decisions = Decisions(chosen[:count], chosen[count:])  # type: ignore[arg-type]
        yield space.placement("drawn", decisions)


@given(small_problems())
@examples(12)
def test_no_plan_with_any_values_made_again_beats_the_bound(
    case: tuple[Problem, list[Placement]],
) -> None:
    """Neither at the budget of the problem nor at exactly the bytes that the best plan takes."""
    problem, placements = case
    best = best_of(problem, placements)
    least_s = bound_s(problem)
    assert least_s <= bound_s(problem, recompute=False) * (1 + 1e-6)
    if best is None:
        return
    check(problem, best)
    assert least_s <= step_s(best) * (1 + 1e-6)
    peaks = best.predicted.peak_bytes
    own = with_budget(problem, peaks[Tier.DEVICE], peaks[Tier.HOST])
    assert bound_s(own) <= step_s(best) * (1 + 1e-6)


# Two blocks whose weights stay: each value is kept, offloaded or recomputed.


def two_blocks() -> Dataflow:
    """A dear wide value, a cheap wide one made of it, and a narrow one that leaves the block."""
    net, modules = list[Layer](), dict[str, str]()
    for i in range(2):
        before = f"out{i - 1}" if i else "x"
        net.append(Layer(f"in{i}", (before,), "", 0, 4 * MIB, 1 << 28))
        net.append(Layer(f"act{i}", (f"in{i}",), "", 0, 4 * MIB))
        net.append(Layer(f"out{i}", (f"act{i}",), "", 0, MIB, 1 << 28))
        modules |= {f"f_{part}{i}": f"model.blocks.{i}.{part}.0" for part in ("in", "act", "out")}
    net.append(Layer("head", ("out1",), "w", MIB // 4, MIB))
    return of_torch(in_modules(step_of("two blocks", net, Training(frozenset("w"))), modules))


def test_a_value_is_charged_what_is_there_for_it_alone() -> None:
    """Unless the backward reads that itself, or it takes less memory than what is made of it."""

    def charged_s(dataflow: Dataflow) -> float:
        problem = formulate(dataflow, with_link(1e9), dict.fromkeys(MEMORIES, PLENTY))
        again = least_again(bucketed(problem, 64, at_peaks=True))["h_act0"]
        return again.seconds - problem.costs.device_s["f_act0"]

    step = two_blocks()
    alone = unread(step, {"h_in0"})
    less = replace(alone.buffer["h_in0"], nbytes=MIB)
    small = replace(alone, buffers=tuple(less if b.name == "h_in0" else b for b in alone.buffers))
    dear = formulate(alone, with_link(1e9), dict.fromkeys(MEMORIES, PLENTY))
    assert [charged_s(each) for each in (step, small)] == [0.0, 0.0]
    assert charged_s(alone) == pytest.approx(dear.costs.device_s["f_in0"])


def with_link(bytes_per_s: float, flops_per_s: float = 1e12) -> Machine:
    return two_tier(
        name="drawn",
        device=TierSpec(PLENTY, 200 * GB_PER_S, {"float32": flops_per_s}, 1e-6),
        host=TierSpec(PLENTY, 20 * GB_PER_S, {"float32": 1e11}, 1e-6),
        h2d=Link(bytes_per_s, 0.0),
        d2h=Link(bytes_per_s, 0.0),
        host_update=HostUpdate(10 * GB_PER_S, workers=1, slowdown_while_copying=1.0),
        duplex=2.0,
    )


def every_placement(problem: Problem) -> Iterator[Placement]:
    names = sorted(recomputable(problem.dataflow))
    for count in range(len(names) + 1):
        for chosen in combinations(names, count):
            space = decision_space(problem.recomputing(chosen))
            stays = tuple(decision.strategies[0] for decision in space.params)
            for offloaded in product(*(decision.strategies for decision in space.activations)):
                yield space.placement("all", Decisions(stays, offloaded))


@pytest.mark.parametrize("link", [1, pytest.param(8, marks=pytest.mark.long)])
def test_what_is_found_is_the_best_of_all_plans(link: float) -> None:
    problem = between(two_blocks(), with_link(link * GB_PER_S), 0.3)
    best = best_of(problem, every_placement(problem))
    assert best is not None
    found = solve(problem, SolveSettings(work_limit=10))
    assert bound_s(problem) <= step_s(best) * (1 + 1e-6)
    assert best.placement.recomputed
    assert bound_s(problem, recompute=False) > step_s(best) or link > 1
    assert step_s(found) <= step_s(best) * (1 + 1e-6)


# What links and processors are worth.


def made_again_bytes(problem: Problem) -> int:
    """By the optimum of the program behind the bound."""
    space = decision_space(problem, at_peaks=True, everything=True, recompute=True)
    budgets_mib = [problem.budgets[tier] / BYTES_PER_MIB for tier in (Tier.DEVICE, Tier.HOST)]
    program = Program(space, *budgets_mib, relaxed=True)
    solution = solve_program(program, "highs", work=Allowance(Meter(), 60), gap=0, seed=0)
    assert solution.decisions is not None
    names = space.placement("bound", solution.decisions).recomputed
    return sum(problem.dataflow.buffer[name].nbytes for name in names)


def test_the_slower_the_link_and_the_faster_the_device_the_more_is_made_again() -> None:
    dataflow = two_blocks()
    nbytes = between(dataflow, with_link(GB_PER_S), 0.3).budgets[Tier.DEVICE]

    def again_on(link: float, flops_per_s: float = 1e12) -> int:
        machine = with_link(link * GB_PER_S, flops_per_s)
        free = formulate(dataflow, machine, dict.fromkeys(MEMORIES, PLENTY))
        return made_again_bytes(with_budget(free, nbytes))

    by_link = [again_on(link) for link in (0.1, 1, 4, 16, 64, 256, 1e6)]
    by_device = [again_on(8, flops_per_s) for flops_per_s in (1e14, 1e13, 1e12, 1e11, 1e10)]
    for more, less in (*pairwise(by_link), *pairwise(by_device)):
        assert more >= less
    assert by_link[0] > by_link[-1] == 0
    assert by_device[0] > by_device[-1]
