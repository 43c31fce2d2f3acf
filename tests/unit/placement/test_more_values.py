"""More values made again: what leaves the device is made again instead where that is faster."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cotrain_compile.dataflow import Buffer, Dataflow, Op, Phase, Role
from cotrain_compile.errors import PlacementError
from cotrain_compile.files import load
from cotrain_compile.machine import MEMORIES, Tier
from cotrain_compile.placement.check.check import check
from cotrain_compile.placement.problem import Problem, formulate
from cotrain_compile.placement.recompute.alike import kinds_of
from cotrain_compile.placement.recompute.rewrite import recomputed_ops
from cotrain_compile.placement.schedule.schedule import Draft, finished
from cotrain_compile.placement.search import more_values
from cotrain_compile.placement.search.attempts import Attempts
from cotrain_compile.placement.search.cover import covered
from cotrain_compile.placement.search.more_values import make_more_again
from cotrain_compile.placement.search.settings import SolveSettings
from cotrain_compile.plan import Placement
from cotrain_compile.presets import find
from cotrain_compile.viz.kinds import kinds_of as kinds
from tests.support.nets import MIB
from tests.support.random_problems import PLENTY
from tests.unit.placement.test_recompute_brute_force import with_link

SLOW, FAST = 1e9, 1e13


def op(name: str, reads: str, writes: str, phase: Phase) -> Op:
    read, made = tuple(reads.split()), tuple(writes.split())
    return Op(name, f"aten.{name}.default", phase, read, made, flops=1 << 24, bytes_moved=MIB)


def step(first: Op, *others: Op, source_mib: int) -> Dataflow:
    """The backward reads `v`, made of `u`, behind something that leaves no room for it."""
    return Dataflow(
        "more",
        (
            first,
            *others,
            op("mul", "u", "v", Phase.FORWARD),
            op("exp", "x", "w", Phase.FORWARD),
            op("sum", "w", "out", Phase.FORWARD),
            op("expand", "out", "s", Phase.BACKWARD),
            op("mean", "s", "h", Phase.BACKWARD),
            op("dot", "v h", "end", Phase.BACKWARD),
        ),
        (
            Buffer("x", 1024, Role.BATCH, is_input=True),
            *(Buffer(n, 1024, Role.TEMPORARY) for n in ("out", "h", "end")),
            Buffer("u", source_mib * MIB, Role.TEMPORARY),
            Buffer("v", 4 * MIB, Role.TEMPORARY),
            *(Buffer(n, 8 * MIB, Role.TEMPORARY) for n in ("w", "s")),
        ),
    )


def covered_attempts(dataflow: Dataflow, bytes_per_s: float) -> Attempts:
    """A search that has found a cover of the step as it is, in 9 MiB."""
    problem = formulate(dataflow, with_link(bytes_per_s), dict.fromkeys(MEMORIES, PLENTY))
    problem = problem.with_budget(Tier.DEVICE, 9 * MIB)
    attempts = Attempts(problem, SolveSettings(), lambda stage: None)
    attempts.try_cover(attempts.step)
    attempts.covers = True
    assert attempts.found.fastest is not None
    assert attempts.found.fastest.placement.offloaded == ("v",)
    return attempts


@pytest.mark.parametrize(
    ("first", "source_mib", "again", "offloaded"),
    [
        # What nobody else needs is made again with it; what may not run again leaves in its place.
        (op("add", "x", "u", Phase.FORWARD), 4, ("u", "v"), ()),
        (op("sort", "x", "u", Phase.FORWARD), 2, ("v",), ("u",)),
    ],
)
def test_a_value_is_made_again_where_its_way_takes_longer(
    first: Op, source_mib: int, again: tuple[str, ...], offloaded: tuple[str, ...]
) -> None:
    attempts = covered_attempts(step(first, source_mib=source_mib), SLOW)
    before = attempts.found.fastest
    make_more_again(attempts)
    fastest = attempts.found.fastest
    assert before is not None
    assert fastest is not None
    assert fastest.step_s < before.step_s
    assert fastest.placement.recomputed == again
    assert fastest.placement.offloaded == offloaded
    assert fastest.placement.policy == "cover+values"
    check(attempts.problem, finished(attempts.problem, fastest))


@pytest.mark.parametrize(("leaves", "is_scheduled"), [("u", True), ("w", False)])
def test_what_makes_more_leave_is_not_scheduled(
    monkeypatch: pytest.MonkeyPatch, leaves: str, is_scheduled: bool
) -> None:
    """With `v` made again 2 MiB leave instead of 4, or 8."""
    attempts = covered_attempts(step(op("sort", "x", "u", Phase.FORWARD), source_mib=2), SLOW)
    scheduled = list[Placement]()

    def left(*arguments: Any) -> Any:
        placement, moves = covered(*arguments)
        return replace(placement, offloaded=(leaves,)), moves

    def noted(_: Attempts, problem: Problem, placement: Placement, *others: Any) -> Any:
        scheduled.append(placement)
        raise PlacementError("", shortfall_bytes=0)

    monkeypatch.setattr(more_values, "covered", left)
    monkeypatch.setattr(Attempts, "drafted", noted)
    make_more_again(attempts)
    assert bool(scheduled) == is_scheduled


def needed_later() -> Dataflow:
    """The backward reads `v`, made of `u`, then has no room for `u`, and then reads that."""
    backward = (
        op("dot", "v out", "d", Phase.BACKWARD),
        op("expand", "d", "s", Phase.BACKWARD),
        op("mean", "s", "h", Phase.BACKWARD),
        op("addcmul", "u h", "end", Phase.BACKWARD),
    )
    return Dataflow(
        "later",
        (
            op("add", "x", "u", Phase.FORWARD),
            op("mul", "u", "v", Phase.FORWARD),
            op("exp", "x", "w", Phase.FORWARD),
            op("sum", "w", "out", Phase.FORWARD),
            *backward,
        ),
        (
            Buffer("x", 1024, Role.BATCH, is_input=True),
            *(Buffer(n, 1024, Role.TEMPORARY) for n in ("out", "d", "h", "end")),
            *(Buffer(n, 4 * MIB, Role.TEMPORARY) for n in "uv"),
            *(Buffer(n, 8 * MIB, Role.TEMPORARY) for n in "ws"),
        ),
    )


def test_what_a_value_is_made_of_is_made_twice_where_it_is_in_the_way_between() -> None:
    problem = formulate(needed_later(), with_link(SLOW), dict.fromkeys(MEMORIES, PLENTY))
    attempts = Attempts(
        problem.with_budget(Tier.DEVICE, 9 * MIB), SolveSettings(), lambda stage: None
    )
    attempts.try_cover(attempts.step)
    attempts.covers = True
    make_more_again(attempts)
    fastest = attempts.found.fastest
    assert fastest is not None
    assert fastest.placement.recomputed == ("u", "v")
    assert fastest.placement.recomputed_apart == ("v",)
    assert fastest.placement.offloaded == ()
    plan = finished(attempts.problem, fastest)
    check(attempts.problem, plan)
    again = recomputed_ops(attempts.problem.dataflow, ("u", "v"), ("v",))
    assert again == {
        "add_recomputed_for_mul": "add",
        "mul_recomputed": "mul",
        "add_recomputed": "add",
    }
    assert {
        name for name in again if name in kinds(plan, {"add": Phase.FORWARD, "mul": Phase.FORWARD})
    } == {*again}


def test_steps_that_differ_in_names_alone_are_scheduled_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # What `v` is made of is there already where `v` is made again, also apart.
    whole = needed_later()
    dot, *between, last = whole.ops[4:]
    first = replace(dot, reads=("u", "out"))
    ops = (*whole.ops[:4], first, *between, replace(last, reads=("v", "h")))
    problem = formulate(replace(whole, ops=ops), with_link(SLOW), dict.fromkeys(MEMORIES, PLENTY))
    problem = problem.with_budget(Tier.DEVICE, 9 * MIB)
    attempts = Attempts(problem, SolveSettings(), lambda stage: None)
    attempts.try_cover(attempts.step)
    attempts.covers = True
    drafted, scheduled = attempts.drafted, list[Placement]()

    def noted(problem: Problem, placement: Placement, *others: Any) -> Draft:
        scheduled.append(placement)
        return drafted(problem, placement, *others)

    monkeypatch.setattr(attempts, "drafted", noted)
    make_more_again(attempts)
    assert [each for each in scheduled if each.recomputed == ("u", "v")]
    assert not [each for each in scheduled if each.recomputed_apart]


def test_nothing_is_made_again_where_its_way_is_short_or_covers_do_not_lead() -> None:
    dataflow = step(op("add", "x", "u", Phase.FORWARD), source_mib=4)
    fast, slow = covered_attempts(dataflow, FAST), covered_attempts(dataflow, SLOW)
    slow.covers = False
    for attempts in (fast, slow):
        before = attempts.found.fastest
        make_more_again(attempts)
        assert attempts.found.fastest is before


def test_values_of_one_place_in_their_layers_are_of_one_kind() -> None:
    layers, ops = 7, list[Op]()
    for layer in range(layers):
        ops.append(op("mul", f"a{layer}", f"m{layer}", Phase.FORWARD))
        ops.append(op("exp", f"m{layer}", f"e{layer}", Phase.FORWARD))
        ops.append(op("add", f"a{layer} e{layer}", f"a{layer + 1}", Phase.FORWARD))
    names = sorted({name for each in ops for name in (*each.reads, *each.writes)})
    buffers = tuple(Buffer(n, MIB, Role.TEMPORARY, is_input=n == "a0") for n in names)
    unique = [Op(f"{each.name}_{number}", *_rest(each)) for number, each in enumerate(ops)]
    kinds = kinds_of(Dataflow("layers", tuple(unique), buffers))
    inner = range(2, layers - 2)
    found = [{kinds[f"{place}{layer}"] for layer in inner} for place in "ame"]
    assert [len(each) for each in found] == [1, 1, 1]
    assert len(set().union(*found)) == 3
    assert kinds["a0"] not in found[0]


def _rest(each: Op) -> tuple[str, Phase, tuple[str, ...], tuple[str, ...]]:
    return each.target, each.phase, each.reads, each.writes


def test_a_kind_of_value_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However much faster others are beside it."""
    step = load(Path("tests/problems/gpt.json"), Dataflow)
    budgets = {Tier.DEVICE: 245 * MIB, Tier.HOST: PLENTY}
    problem = formulate(step, find("h100"), budgets)
    attempts = Attempts(problem, SolveSettings(), lambda stage: None)
    attempts.try_cover(attempts.step)
    attempts.covers = True
    added: list[tuple[frozenset[str], frozenset[str]]] = []
    try_one = more_values._try

    def noted(attempts: Attempts, fastest: Draft, problem: Problem) -> Draft | None:
        again = frozenset(problem.recomputed) - frozenset(fastest.placement.recomputed)
        apart = frozenset(problem.apart) - frozenset(fastest.placement.recomputed_apart)
        added.append((again, apart))
        return try_one(attempts, fastest, problem)

    monkeypatch.setattr(more_values, "_try", noted)
    make_more_again(attempts)
    assert len(added) > 5
    assert len(set(added)) == len(added)
