"""Folded steps: fewer ops, the same work, the same memory, and plans of the step as written."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotrain_compile.dataflow import Dataflow, Op, Phase
from cotrain_compile.errors import PlacementError
from cotrain_compile.machine import MEMORIES, Machine, Tier
from cotrain_compile.placement.check.check import check
from cotrain_compile.placement.fold.fold import folded as folded_problem
from cotrain_compile.placement.fold.updates import EXCESS, folded_updates
from cotrain_compile.placement.fold.views import without_views
from cotrain_compile.placement.policies import RULES, rule
from cotrain_compile.placement.problem import Problem, formulate
from cotrain_compile.placement.schedule.find_moves import moves_of
from cotrain_compile.placement.schedule.schedule import Draft
from cotrain_compile.placement.search import solve as searching
from cotrain_compile.placement.search.finish import Finish
from cotrain_compile.placement.search.found import Found
from cotrain_compile.placement.search.infeasible import floor_bytes
from cotrain_compile.placement.search.solve import SolveSettings, solve
from cotrain_compile.plan import Plan
from cotrain_compile.presets import find
from tests.support.dataflows import chain, mixed_precision_step
from tests.support.nets import KIB, STEPS
from tests.support.random_problems import machines, training_steps, views
from tests.support.with_views import with_views
from tests.support.written_out import written_out

PLENTY = 1 << 40
SMALL = written_out(mixed_precision_step(3, params=200_000))


def problem_of(dataflow: Dataflow, device_bytes: int = PLENTY) -> Problem:
    return formulate(
        dataflow, find("rtx4090"), dict.fromkeys(MEMORIES, PLENTY) | {Tier.DEVICE: device_bytes}
    )


@given(
    machine=machines(),
    step=training_steps(),
    pieces=st.booleans(),
    views=views(),
    name=st.sampled_from([*RULES]),
)
def test_under_any_rule_a_folded_step_does_the_same_work_in_the_same_memory(
    machine: Machine,
    step: Dataflow,
    pieces: bool,
    views: list[tuple[int, tuple[int, ...]]],
    name: str,
) -> None:
    dataflow = with_views(written_out(step, in_pieces=pieces), views)
    written = replace(problem_of(dataflow), machine=machine)
    folded = folded_problem(written)
    fewer = len(folded.dataflow.ops) < len(written.dataflow.ops)
    assert fewer is bool(step.updates)
    assert math.isclose(*(math.fsum(p.costs.device_s.values()) for p in (folded, written)))
    for of in ("flops", "bytes_moved"):
        assert len({sum(getattr(op, of) for op in p.dataflow.ops) for p in (folded, written)}) == 1
    needs = [
        max(moves_of(problem, rule(name)(problem.dataflow)).slot_bytes)
        for problem in (folded, written)
    ]
    assert 0 <= needs[0] - needs[1] <= EXCESS


def slot_bytes(dataflow: Dataflow, name: str) -> dict[str, int]:
    """The bytes at each op where the rule `name` places a step."""
    moves = moves_of(problem_of(dataflow), rule(name)(dataflow))
    ops = [op.name for op in moves.program.ops]
    return dict(zip(ops, moves.slot_bytes, strict=False))


@given(step=training_steps(), views=views(), name=st.sampled_from([*RULES]))
def test_a_step_needs_as_much_without_the_views_that_go(
    step: Dataflow, views: list[tuple[int, tuple[int, ...]]], name: str
) -> None:
    """At the op that stands for them as much as at any of them and at itself."""
    whole = with_views(step, views)
    fewer = without_views(whole)
    before, after = slot_bytes(whole, name), slot_bytes(fewer.dataflow, name)
    assert max(before.values()) == max(after.values())
    assert {part for of in fewer.parts.values() for part in of} == {op.name for op in whole.ops}
    for op, nbytes in after.items():
        assert nbytes <= max(before[part] for part in fewer.parts[op])


def reads(*rows: tuple[str, ...]) -> Dataflow:
    """A row of views between two ops of the forward, each of what it reads."""
    step = chain(2)
    behind = step.position["forward_1"]
    ops = [
        Op(f"view_{n}", "aten.view.default", Phase.FORWARD, row, ()) for n, row in enumerate(rows)
    ]
    return replace(step, ops=(*step.ops[:behind], *ops, *step.ops[behind:]))


@pytest.mark.parametrize(
    ("rows", "left"),
    [
        ([("w0",)], []),  # of what the op before has read
        ([("w1",)], []),  # of what the op behind it reads
        ([("m0",)], ["view_0"]),  # of what neither knows
        ([("w0", "w1")], ["view_0"]),  # of what either has, and no one has both
        ([("w0",), ("w1",)], []),
        ([("w1",), ("w0",)], ["view_0", "view_1"]),  # both are there between the two
        ([("w0",), ("w0", "w1"), ("w0",), ("w1",)], ["view_1", "view_2"]),
    ],
)
def test_views_go_whose_buffers_a_neighbour_needs(
    rows: list[tuple[str, ...]], left: list[str]
) -> None:
    step = reads(*rows)
    fewer = without_views(step).dataflow
    kept = [op.name for op in fewer.ops if op.name.startswith("view")]
    assert kept == left


def test_an_update_is_an_op_on_numbers_and_one_on_all_elements() -> None:
    step = written_out(STEPS["perceptron"](2, 64 * KIB, 64 * KIB))
    folded = folded_updates(step).dataflow
    kinds = Counter(op.phase for op in folded.ops)
    assert kinds[Phase.OPTIMIZER] == 2 * len(step.updates)
    assert kinds[Phase.FORWARD] == Counter(op.phase for op in step.ops)[Phase.FORWARD]
    for group in folded.updates:
        numbers, elements = (folded.ops[folded.position[name]] for name in group.ops)
        assert group.param in elements.writes
        assert f"t_{group.param}" in numbers.writes
        assert elements.name == step.update[group.param].ops[-1]


def test_an_update_of_which_no_elements_are_told_is_one_op() -> None:
    folded = folded_updates(written_out(chain(2), in_pieces=False)).dataflow
    assert [group.ops for group in folded.updates] == [("update_0",), ("update_1",)]


def changed(dataflow: Dataflow, op: str, **values: object) -> Dataflow:
    """`dataflow` with other reads or writes of one op."""
    return replace(
        dataflow,
        ops=tuple(replace(each, **values) if each.name == op else each for each in dataflow.ops),  # type: ignore[arg-type]
    )


def test_a_number_that_comes_of_elements_keeps_its_place() -> None:
    step = written_out(STEPS["perceptron"](1, 64 * KIB, 64 * KIB))
    (group,) = step.updates
    count = next(op for op in step.ops if op.name.startswith(f"{group.ops[-1]}_count"))
    made = f"{group.ops[-1]}.scale"
    # Of all elements it is one number, as a norm of the update is.
    norm = Op("norm", "aten.sum", Phase.OPTIMIZER, (made,), ("n",))
    position = step.position[count.name]
    buffers = (*step.buffers, replace(step.buffer[made], name="n", nbytes=4))
    ops = (*step.ops[:position], norm, *step.ops[position:])
    names = [op.name for op in ops if op.name in {*group.ops, "norm"}]
    step = replace(step, ops=ops, buffers=buffers, updates=(replace(group, ops=tuple(names)),))
    step = changed(step, count.name, reads=(*count.reads, "n"))
    assert folded_updates(step).dataflow.ops == step.ops


def test_what_would_need_more_memory_stays_as_it_is() -> None:
    """The gradient dies before the parameter gets a copy that stays: never are both there."""
    step = written_out(chain(1, width=256))
    (group,) = step.updates
    last = step.ops[step.position[group.ops[-1]]]
    nbytes = step.buffer["w0"].nbytes
    own = [name for name in last.reads if name not in ("g0", "w0", "m0")]
    late = [
        replace(step.buffer["g0"], name=f"late_{i}", nbytes=nbytes, is_output=True)
        for i in range(3)
    ]
    makes = Op("make_late", "aten.clone", Phase.OPTIMIZER, ("w0",), tuple(b.name for b in late))
    step = changed(step, last.name, reads=("w0", *own))
    update = replace(group, ops=(*group.ops, makes.name))
    step = replace(step, ops=(*step.ops, makes), buffers=(*step.buffers, *late), updates=(update,))
    assert folded_updates(step).dataflow.ops == step.ops


@pytest.mark.parametrize("share", [0.35, 0.7])
def test_a_plan_that_is_found_folded_is_one_of_the_step_as_written(share: float) -> None:
    roomy = problem_of(SMALL)
    whole = max(moves_of(roomy, rule("resident")(SMALL)).slot_bytes)
    problem = problem_of(SMALL, int(share * whole))
    assert folded_problem(problem) is not problem
    plan = solve(problem)
    check(problem, plan)
    assert plan.tasks
    assert plan.report is not None
    assert plan.report.lower_bound_s <= plan.predicted.makespan_s


def test_where_nothing_fits_as_written_the_step_itself_is_searched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every plan is dropped, one after the other, that is scheduled again for the step as it is."""
    problem = problem_of(SMALL, 3_000_000)
    searched: list[bool] = []

    def refused(self: Finish, found: Draft) -> Plan:
        searched.append(self.is_folded)
        if self.is_folded:
            raise PlacementError("not as written", shortfall_bytes=1)
        return plan_of(self, found)

    plan_of = Finish._plan_of
    monkeypatch.setattr(Finish, "_plan_of", refused)
    check(problem, solve(problem))
    assert searched.count(True) > 1
    assert not searched[-1]


def test_a_refusal_speaks_of_the_step_as_written(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of(SMALL, floor_bytes(SMALL) - 1)
    with pytest.raises(PlacementError) as folded:
        solve(problem)
    monkeypatch.setattr(searching, "folded", lambda problem: problem)
    with pytest.raises(PlacementError) as written:
        solve(problem)
    assert str(folded.value) == str(written.value)
    assert folded.value.shortfall_bytes == written.value.shortfall_bytes


def test_a_plan_for_less_memory_is_returned_where_nothing_faster_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tight = problem_of(SMALL, 3_000_000)
    before = solve(tight)
    problem = problem_of(SMALL, 3_100_000)
    monkeypatch.setattr(Found, "keep", lambda self, name, found: None)
    again = solve(problem, SolveSettings(), incumbents=[before])
    assert again.placement == before.placement
    check(problem, again)


def test_a_plan_that_another_beats_is_not_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told how fast it would be, which is slower than the other in any case."""
    problem = problem_of(SMALL, 3_000_000)
    known_s = solve(problem).predicted.makespan_s / 2
    monkeypatch.setattr(Finish, "fastest_of", lambda self, found: pytest.fail("it is finished"))
    beaten = solve(problem, SolveSettings(known_s=known_s))
    assert beaten.predicted.makespan_s > known_s
    assert beaten.report is not None
    assert beaten.report.lower_bound_s > 0
