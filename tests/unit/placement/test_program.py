"""The integer program: its optimum is that of trying every decision, and it obeys its laws.

`best_of_all` fixes every whole decision in turn and solves what is left, a linear program, so that
nothing of the solver's branching or of `solvers` is trusted.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from unittest import mock

import highspy
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotrain_compile.dataflow import PERSISTENT_ROLES, Dataflow
from cotrain_compile.errors import PlacementError
from cotrain_compile.machine import MEMORIES, Machine, Tier
from cotrain_compile.placement.check.check import check
from cotrain_compile.placement.decisions.decisions import Decisions, DecisionSpace
from cotrain_compile.placement.decisions.find_decisions import decision_space
from cotrain_compile.placement.decisions.strategies import Strategy
from cotrain_compile.placement.milp import memory as program_memory
from cotrain_compile.placement.milp.bound import certified_bound_s
from cotrain_compile.placement.milp.model import MIB
from cotrain_compile.placement.milp.program import Program
from cotrain_compile.placement.milp.solvers import Solution, solve_program
from cotrain_compile.placement.policies import RULES, rule
from cotrain_compile.placement.problem import Problem, formulate
from cotrain_compile.placement.schedule.schedule import draft, schedule
from cotrain_compile.placement.work import Allowance, Meter
from cotrain_compile.plan import Placement, UpdateMode
from tests.support.examples import examples
from tests.support.nets import MIB as MIB_BYTES
from tests.support.nets import clipped_step
from tests.support.random_problems import PLENTY, problems, resident_bytes, with_budget
from tests.unit.placement.test_regimes import machine

# Milliseconds: what the solvers' tolerances leave open.
TOLERANCE = 2e-6
# Solvers keep to rows in MiB within a millionth or so.
EDGE_BYTES = 4


def program_of(space: DecisionSpace, more_bytes: float = 0.0, **settings: bool) -> Program:
    """The program with so many bytes more than the budgets on both tiers."""
    device, host = (space.problem.budgets[tier] + more_bytes for tier in (Tier.DEVICE, Tier.HOST))
    return Program(space, device / MIB, host / MIB, **settings)


def solved(program: Program, solver: str = "highs") -> Solution:
    return solve_program(program, solver, work=Allowance(Meter(), 60), gap=0, seed=0)


def optimum_ms(program: Program, solver: str = "highs") -> float:
    """The optimum of the program, infinity where it has none."""
    solution = solved(program, solver)
    assert "time" not in solution.status
    return 1e3 * solution.objective_s


def best_of_all(program: Program) -> float:
    """The same by going through all whole decisions."""
    lp = linear(program)
    assert program.linear.whole
    best = math.inf
    for values in assignments(program):
        for column, value in values.items():
            lp.changeColBounds(column, value, value)
        best = min(best, least_ms(lp))
    return best


def least_ms(lp: highspy.Highs) -> float:
    """The optimum of a linear program: from where the last one was, or else from the start."""
    status = highspy.HighsModelStatus
    lp.run()
    if lp.getModelStatus() not in (status.kOptimal, status.kInfeasible):
        lp.clearSolver()
        lp.run()
    assert lp.getModelStatus() in (status.kOptimal, status.kInfeasible)
    return lp.getObjectiveValue() if lp.getModelStatus() == status.kOptimal else math.inf


def assignments(program: Program) -> list[dict[int, float]]:
    """All ways to set the whole columns, by number: one strategy for each cluster."""
    params = [[column.number for column in columns] for columns in program.params]
    activations = [[*(column.number for column in c), -1] for c in program.activations]
    numbers = [number for cluster in (*params, *activations) for number in cluster if number >= 0]
    return [
        {number: float(number in chosen) for number in numbers}
        for chosen in product(*params, *activations)
    ]


def linear(program: Program) -> highspy.Highs:
    """The program without whole columns, for a solver that is asked again and again."""
    lp = highspy.Highs()  # type: ignore[no-untyped-call]
    lp.silent()
    costs = program.linear.objective.terms
    for column in program.linear.columns:
        lp.addCol(costs.get(column.number, 0.0), column.low, column.high, 0, [], [])
    for row in program.linear.rows:
        index = np.array([*row.terms], dtype=np.int32)
        shares = np.array([*row.terms.values()], dtype=np.float64)
        lp.addRow(row.low, row.high, len(index), index, shares)
    return lp


@st.composite
def small_spaces(draw: st.DrawFn, most: int = 200) -> DecisionSpace:
    """Few enough decisions to try them all: few clusters, and of each a few strategies."""
    problem = draw(problems())
    everything, states = resident_bytes(problem), problem.dataflow.total_bytes(*PERSISTENT_ROLES)
    host_bytes = draw(st.sampled_from([PLENTY, PLENTY, 2 * everything, states]))
    problem = with_budget(problem, draw(st.integers(6, 16)) * everything // 12, host_bytes)
    pieces = draw(st.integers(1, 3))
    space = decision_space(problem, draw(st.integers(2, 5)), pieces, at_peaks=draw(st.booleans()))
    activations = space.activations[: draw(st.integers(1, 4))]
    most, params = most // 2 ** len(activations), []
    for decision in space.params:
        options = draw(st.permutations(decision.options))[: max(1, most)]
        params.append(replace(decision, options=tuple(options)))
        most //= len(options)
    return replace(space, params=tuple(params), activations=activations)


@given(small_spaces())
@examples(25)
def test_the_optimum_is_the_best_of_all_decisions(space: DecisionSpace) -> None:
    """To a few bytes: what just does not fit may fit within the tolerance of a solver."""
    program = program_of(space)
    optimum = optimum_ms(program)
    if optimum != pytest.approx(best_of_all(program), rel=1e-6, abs=TOLERANCE):
        less, more = (best_of_all(program_of(space, edge)) for edge in (-EDGE_BYTES, EDGE_BYTES))
        assert more <= optimum * (1 + 1e-6) + TOLERANCE
        assert optimum <= less * (1 + 1e-6) + TOLERANCE


@given(small_spaces(most=20))
@examples(10)
def test_cbc_finds_the_same_optimum(space: DecisionSpace) -> None:
    """To a few bytes: what just does not fit, does within the tolerance of one of the solvers."""
    highs = optimum_ms(program_of(space))
    with_less, with_more = (
        optimum_ms(program_of(space, edge), "cbc") for edge in (-EDGE_BYTES, EDGE_BYTES)
    )
    assert with_more <= highs * (1 + 1e-5) + 1e-5
    assert highs <= with_less * (1 + 1e-5) + 1e-5


def better(machine: Machine, data: st.DataObject) -> Machine:
    """The same machine with one part better."""
    faster = data.draw(st.sampled_from([1.5, 4.0]))
    down, up, host = machine.d2h, machine.h2d, machine.host_update
    return data.draw(
        st.sampled_from(
            [
                machine.but(d2h=replace(down, bytes_per_s=faster * down.bytes_per_s)),
                machine.but(h2d=replace(up, bytes_per_s=faster * up.bytes_per_s)),
                machine.but(duplex=2.0),
                machine.but(host_update=replace(host, workers=host.workers + 1)),
                machine.but(host_update=replace(host, slowdown_while_copying=1.0)),
            ]
        )
    )


@given(small_spaces(), st.data())
@examples(20)
def test_more_of_anything_never_makes_the_optimum_worse(
    space: DecisionSpace, data: st.DataObject
) -> None:
    problem = space.problem
    device, host = problem.budgets[Tier.DEVICE], problem.budgets[Tier.HOST]
    richer = data.draw(
        st.sampled_from(
            [
                with_budget(problem, device + device // 8),
                with_budget(problem, device, host + host // 4),
                replace(problem, machine=better(problem.machine, data)),
            ]
        )
    )
    with_more = optimum_ms(program_of(replace(space, problem=richer)))
    assert with_more <= optimum_ms(program_of(space)) * (1 + 1e-6) + TOLERANCE


@given(problems(), st.sampled_from([3, 5, 8]))
@examples(10)
def test_relaxations_are_below_what_they_relax(problem: Problem, buckets: int) -> None:
    """But for the room for updates, which the relaxed program knows better.

    Where that room is what is short, the conservative one claims what cannot be scheduled.
    """
    conservative = decision_space(problem, buckets, 3)
    whole, split = solved(program_of(conservative)), solved(program_of(conservative, whole=False))
    assert split.objective_s <= whole.objective_s * (1 + 1e-6) + 1e-9
    at_peaks = decision_space(problem, buckets, 3, at_peaks=True)
    with mock.patch.object(program_memory, "_add_room_for_any_update"):
        relaxed = solved(program_of(at_peaks, relaxed=True))
    for program in (program_of(conservative), program_of(at_peaks)):
        assert relaxed.step_s <= solved(program).step_s * (1 + 1e-6) + 1e-9


@st.composite
def placed(draw: st.DrawFn) -> tuple[Problem, Placement]:
    """A problem, and a simple rule's placement or any decisions at all."""
    problem = draw(problems())
    space = decision_space(problem)
    policy = draw(st.sampled_from(["", "", "", *RULES, "fraction:0.5"]))
    if policy:
        return problem, rule(policy)(problem.dataflow)
    params = tuple(draw(st.sampled_from(decision.strategies)) for decision in space.params)
    activations = tuple(draw(st.sampled_from(d.strategies)) for d in space.activations)
    return problem, space.placement("drawn", Decisions(params, activations))


@given(placed(), st.sampled_from([0.0, 0.0, 0.1, 1.0]), st.sampled_from([96, 96, 20, 5]))
@examples(20)
def test_no_plan_beats_the_certified_bound_at_its_own_peaks(
    case: tuple[Problem, Placement], slack: float, buckets: int
) -> None:
    """Every plan, at budgets of exactly what it takes: the tightest that the bound can be asked."""
    problem, placement = case
    device_bytes = int((1 + slack) * needed_bytes(problem, placement))
    plan = schedule(with_budget(problem, device_bytes), placement)
    peaks = plan.predicted.peak_bytes
    own = with_budget(problem, peaks[Tier.DEVICE], peaks[Tier.HOST])
    check(own, replace(plan, budgets=own.budgets))
    relaxed = program_of(decision_space(own, buckets, at_peaks=True), relaxed=True)
    bound = solved(relaxed)
    assert bound.decisions is not None
    assert bound.bound_s <= plan.predicted.makespan_s * (1 + 1e-6)


def prompt_norms() -> Dataflow:
    """A step that clips, and takes the norm of each gradient as soon as there is one."""
    step = clipped_step(12, MIB_BYTES // 4, 4 * MIB_BYTES)
    norms = {op.reads[0]: op for op in step.ops if op.name.startswith("square_")}
    others = [op for op in step.ops if op.name not in {norm.name for norm in norms.values()}]
    ops = []
    for op in others:
        early = [replace(norms[name], phase=op.phase) for name in op.writes if name in norms]
        ops += [op, *early]
    return replace(step, ops=tuple(ops))


def test_gradients_that_come_back_for_their_updates_are_not_all_there_at_the_end() -> None:
    """They come one by one, and leave with the update: else this plan would be impossible."""
    slow_host = machine(1e12, 1000e9, 10e9, 0.01e9)
    free = formulate(prompt_norms(), slow_host, dict.fromkeys(MEMORIES, PLENTY))
    space = decision_space(free)
    wanted = Strategy(UpdateMode.STREAMED, 0, gradient_offloaded=True)
    params = tuple(
        wanted if wanted in each.strategies else Strategy(UpdateMode.STREAMED, 0)
        for each in space.params
    )
    assert params.count(wanted) > 3
    activations = tuple(each.strategies[-1] for each in space.activations)
    placement = space.placement("drawn", Decisions(params, activations))
    plan = schedule(with_budget(free, needed_bytes(free, placement)), placement)
    own = with_budget(free, plan.predicted.peak_bytes[Tier.DEVICE])
    bound_s = certified_bound_s(own, "highs", work=Allowance(Meter(), 60), seed=0, cyclic=False)
    assert bound_s <= plan.predicted.makespan_s


def needed_bytes(problem: Problem, placement: Placement) -> int:
    """The least device bytes of a placement, by what a refusal says is missing."""
    try:
        draft(with_budget(problem, 0), placement)
    except PlacementError as refusal:
        return refusal.shortfall_bytes
    return 0
