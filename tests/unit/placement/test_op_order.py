"""What is found once about an order of ops is what a plain look at it finds, each time."""

from __future__ import annotations

import gc
import random
import weakref
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotrain_compile.dataflow import Dataflow, UpdateGroup
from cotrain_compile.errors import PlacementError
from cotrain_compile.files import load
from cotrain_compile.placement.host_memory import made_by, updates_alone
from cotrain_compile.placement.op_order import OpOrder, order_without
from cotrain_compile.placement.problem import Problem
from cotrain_compile.placement.recompute.recomputable import recomputable
from cotrain_compile.placement.recompute.rewrite import recomputed
from cotrain_compile.placement.remembered import Same, once, once_alike, remembered_last
from cotrain_compile.placement.residency import IntervalSum, summed
from cotrain_compile.placement.schedule.find_moves import moves_of
from cotrain_compile.placement.schedule.hoisted_updates import update_needs
from cotrain_compile.placement.schedule.moves import Moves
from cotrain_compile.placement.schedule.schedule import Draft, draft
from cotrain_compile.plan import Placement
from tests.support.dataflows import chain
from tests.support.examples import examples
from tests.support.plans.random_plans import random_plan
from tests.support.random_problems import problems, training_steps


def plain_touches(order: OpOrder) -> dict[str, list[int]]:
    found: dict[str, set[int]] = {}
    for slot, op in enumerate(order.ops):
        begun = next((i for i, other in enumerate(order.ops) if other.name == op.awaits), slot)
        for name in {*op.reads, *op.writes}:
            found.setdefault(name, set()).update(range(begun, slot + 1))
    return {name: sorted(slots) for name, slots in found.items()}


def plain_gaps(order: OpOrder, name: str) -> list[tuple[int, int]]:
    """The longest gap of a buffer, then the longest behind it, if nothing is written there."""

    def work(gap: tuple[int, int]) -> float:
        return order.work[gap[1]] - order.work[gap[0] + 1]

    gaps = [(a, b) for a, b in pairwise(plain_touches(order).get(name, [])) if b > a + 1]
    if not gaps:
        return []
    first = max(gaps, key=work)
    if any(name in op.writes for op in order.ops[first[0] + 1 :]):
        return [first]
    behind = [gap for gap in gaps if gap[0] >= first[1]]
    return [first, max(behind, key=work)] if behind else [first]


def plain_made_bytes(step: Dataflow, group: UpdateGroup) -> int:
    ops = [step.ops[step.position[name]] for name in group.ops]
    made = {n for op in ops for n in op.writes if not step.buffer[n].is_input}
    there = dict[str, list[int]]()
    for index, op in enumerate(ops):
        for name in made.intersection(op.touched):
            there.setdefault(name, []).append(index)
    at_once = (
        sum(step.buffer[n].nbytes for n, at in there.items() if at[0] <= index <= at[-1])
        for index in range(len(ops))
    )
    return max(at_once, default=0)


@given(training_steps(), st.randoms(use_true_random=False))
@examples(40)
def test_what_is_inside_updates_is_that_of_their_own_ops(
    step: Dataflow, rng: random.Random
) -> None:
    """Steps that share groups, but not what these write, are told apart."""
    taken = {
        n: rng.randrange(1, 1 << 20) for g in step.updates for n in g.ops if rng.random() < 0.5
    }
    for each in (step, step.with_workspace(taken), step):
        for group in each.updates:
            assert made_by(each, group) == plain_made_bytes(each, group)


@given(training_steps(), st.randoms(use_true_random=False))
@examples(40)
def test_touches_gaps_and_stays_of_any_order(step: Dataflow, rng: random.Random) -> None:
    order = order_without(step, frozenset(op.name for op in step.ops if rng.random() < 0.2))
    touches = plain_touches(order)
    assert order.touches == touches
    for buffer, held, unmoved in zip(step.buffers, order.at_uses, order.unmoved, strict=True):
        assert list(order.offloaded_gaps(buffer.name)) == plain_gaps(order, buffer.name)
        assert order.offloaded_gaps(buffer.name) == order.offloaded_gaps(buffer.name)
        slots = touches.get(buffer.name, [])
        if not (slots or buffer.is_input):
            assert held == unmoved == ()
            continue
        (there,), (stays,) = held, unmoved
        assert there.first == stays.first == (0 if buffer.is_input else slots[0])
        to_the_end = buffer.is_input or buffer.is_output
        assert there.last == (order.end if to_the_end else slots[-1]) + 1
        assert stays.last in (there.last, order.end + 1)


def test_the_same_question_has_the_same_order() -> None:
    step = chain(2)
    names = [op.name for op in step.ops]
    first = order_without(step, frozenset(names[:2]))
    assert order_without(step, frozenset(names[:2])) is first
    assert [op.name for op in order_without(step, frozenset(names[2:])).ops] == names[:2]
    assert [op.name for op in first.ops] == names[2:]


def without_memory(problem: Problem) -> Problem:
    """The same step as a value about which nothing has been found yet."""
    return replace(problem, dataflow=replace(problem.dataflow))


def in_words(moves: Moves) -> list[object]:
    groups = [replace(update, group=None) for update in moves.host_updates]  # type: ignore[arg-type]
    return [
        *([op.name for op in moves.program.ops], moves.sends, moves.fetches, moves.casts, groups),
        *(moves.device_updates, moves.instances, moves.slot_bytes, moves.gap_bytes),
    ]


def drafted(problem: Problem, placement: Placement) -> Draft | str:
    try:
        return draft(problem, placement)
    except PlacementError as error:
        return str(error)


@given(problems(), st.randoms(use_true_random=False))
@examples(25)
def test_what_was_asked_before_changes_no_schedule(problem: Problem, rng: random.Random) -> None:
    placements = [random_plan(problem, rng).placement for _ in range(3)]
    for placement in [*placements, *placements]:
        fresh = without_memory(problem)
        assert in_words(moves_of(problem, placement)) == in_words(moves_of(fresh, placement))
        assert drafted(problem, placement) == drafted(fresh, placement)


@given(st.lists(st.tuples(st.integers(0, 1 << 50), st.integers(0, 9), st.integers(0, 12))))
def test_intervals_summed_as_arrays_are_those_summed_one_by_one(
    intervals: list[tuple[int, int, int]],
) -> None:
    curve = IntervalSum(10)
    for nbytes, first, length in intervals:
        curve.add(nbytes, first, first + length)
    lasts = [first + length for _, first, length in intervals]
    found = summed(10, [each[0] for each in intervals], [each[1] for each in intervals], lasts)
    assert found == curve.values()


class Value:
    """Something that is remembered about."""


def test_what_is_made_of_a_value_is_made_once_while_it_lives() -> None:
    made: list[Value] = []

    @once
    def number(value: Value) -> int:
        made.append(value)
        return len(made)

    value, other = Value(), Value()
    assert [number(value), number(other), number(value)] == [1, 2, 1]
    gone = weakref.ref(other)
    del other
    made.clear()
    gc.collect()
    assert gone() is None


def test_of_many_results_the_last_are_kept() -> None:
    asked: list[int] = []

    @remembered_last(2)
    def double(value: Value, key: int) -> int:
        asked.append(key)
        if key < 0:
            raise ValueError("no")
        return 2 * key

    value = Value()
    assert [double(value, key) for key in (1, 2, 1, 3, 2, 1)] == [2, 4, 2, 6, 4, 2]
    assert asked == [1, 2, 3, 1]
    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            double(value, -1)
    assert asked[-2:] == [-1, -1]


def test_what_is_made_of_all_that_are_alike_is_forgotten_with_what_they_share() -> None:
    made: list[int] = []

    def inputs(pair: tuple[Value, ...]) -> tuple[Value, Same[Value]]:
        return pair[0], Same(pair[1:])

    @once_alike(inputs)
    def number(pair: tuple[Value, ...]) -> int:
        made.append(len(made))
        return len(made)

    shared, one, other = Value(), Value(), Value()
    assert [number((shared, each)) for each in (one, other, one)] == [1, 2, 1]
    gone = weakref.ref(shared), weakref.ref(other)
    del shared, other
    gc.collect()
    assert [each() for each in gone] == [None, None]


def test_what_updates_need_is_known_of_a_step_that_makes_more_again() -> None:
    step = load(Path("tests/problems/gpt.json"), Dataflow)
    again = recomputed(step, recomputable(step))
    assert again.ops != step.ops
    assert update_needs(again) is update_needs(step)
    # As if nothing were known: the same ops as other objects.
    apart = replace(again, updates=tuple(replace(group) for group in again.updates))
    assert updates_alone(apart) != updates_alone(again)
    assert update_needs(apart) == update_needs(again)
