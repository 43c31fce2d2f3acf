"""Casts once: the first copy of a parameter is all of them, and the check refuses any other."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotrain_compile.dataflow import Buffer, Checkpoints, Dataflow, Op, Phase, Role
from cotrain_compile.errors import PlanError
from cotrain_compile.machine import Tier
from cotrain_compile.placement.casts import casts_once, has_recasts
from cotrain_compile.placement.check.check import check, check_cast_once
from cotrain_compile.placement.placed import place_plan
from cotrain_compile.placement.policies import streamed
from cotrain_compile.placement.problem import formulate
from cotrain_compile.placement.residency import low_precision_copies
from cotrain_compile.placement.schedule.schedule import schedule
from cotrain_compile.placement.search.settings import SolveSettings
from cotrain_compile.placement.search.solve import solve
from cotrain_compile.plan import Plan
from cotrain_compile.presets import find
from tests.support.dataflows import mixed_precision_step

MIB = 1 << 20
PLENTY = {Tier.DEVICE: 1 << 50, Tier.HOST: 1 << 50}


def recasting(step: Dataflow, params: tuple[str, ...]) -> Dataflow:
    """`step` in which the backward casts `params` again, as a respected checkpoint does."""
    ops, buffers, copies = list[Op](), list(step.buffers), dict[str, str]()
    of_param = {f"p16_{p.removeprefix('p32_')}": p for p in params}
    for op in step.ops:
        for name in op.reads if op.phase is Phase.BACKWARD else ():
            if name in of_param and name not in copies:
                copies[name] = f"again_{name}"
                size = step.buffer[name].nbytes
                buffers.append(Buffer(copies[name], size, Role.TEMPORARY))
                cast = (of_param[name],), (copies[name],), 0, 3 * size
                ops.append(Op(f"cast_{copies[name]}", _target(step, name), Phase.BACKWARD, *cast))
        reads = op.reads
        if op.phase is Phase.BACKWARD:
            reads = tuple(copies.get(name, name) for name in reads)
        ops.append(replace(op, reads=reads))
    updates = tuple(
        replace(g, recasts=(copies[g.low_precision],)) if g.low_precision in copies else g
        for g in step.updates
    )
    marked = Checkpoints(tuple(copies.values()))
    return replace(
        step, ops=tuple(ops), buffers=tuple(buffers), updates=updates, checkpoints=marked
    )


def _target(step: Dataflow, name: str) -> str:
    return next(op.target for op in step.ops if name in op.writes)


def planned(step: Dataflow, policy: str) -> Plan:
    problem = formulate(step, find("h100"), PLENTY)
    plan = solve(problem, SolveSettings(policy))
    check(problem, plan)
    return plan


@given(layers=st.integers(1, 5), data=st.data())
def test_what_is_cast_once_is_the_step_without_its_other_casts(
    layers: int, data: st.DataObject
) -> None:
    step = mixed_precision_step(layers, params=1000)
    params = [group.param for group in step.updates]
    chosen = tuple(name for name in params if data.draw(st.booleans()))
    whole = recasting(step, chosen)
    assert has_recasts(whole) is bool(chosen)
    once = casts_once(whole)
    assert once.ops == step.ops
    assert once.buffers == step.buffers
    assert once.updates == step.updates
    assert not once.checkpoints.values
    if chosen:
        check_cast_once(whole, once)
        assert low_precision_copies(once).keys() - low_precision_copies(whole) == set(chosen)


@pytest.mark.parametrize("policy", ["zero-offload", "streamed", "coarse"])
def test_a_plan_of_a_checkpointed_step_is_that_without_the_checkpoint(policy: str) -> None:
    """As far as weights go, which move as often as where each is cast once."""
    step = mixed_precision_step(4, params=MIB)
    found = planned(recasting(step, tuple(g.param for g in step.updates)), policy)
    plain = planned(step, policy)
    assert found.bytes_moved("prefetch") == plain.bytes_moved("prefetch")
    assert found.predicted.makespan_s <= plain.predicted.makespan_s + 4 * 5e-6


def test_it_is_told_which_weights_are_cast_once() -> None:
    whole = recasting(mixed_precision_step(1, params=MIB), ("p32_0",))
    plan = planned(whole, "zero-offload")
    assert plan.placement.casts_once
    assert plan.placement.policy == "zero-offload"
    assert "1 weights are cast once, where the step has 2 casts of them" in plan.notes
    problem = formulate(whole, find("h100"), PLENTY)
    assert place_plan(problem, plan).dataflow.ops == casts_once(whole).ops


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (
            lambda op: op if op.name != "cast_again_p16_0" else replace(op, target="other"),
            "no copy",
        ),
        (
            lambda op: (
                op if op.name != "cast_again_p16_0" else replace(op, reads=("p32_0", "p16_0"))
            ),
            "leaves out cast_again",
        ),
    ],
)
def test_another_op_is_not_left_out(change: object, why: str) -> None:
    whole = recasting(mixed_precision_step(1, params=MIB), ("p32_0",))
    once = casts_once(whole)
    assert callable(change)
    forged = replace(whole, ops=tuple(map(change, whole.ops)))
    with pytest.raises(PlanError, match=why):
        check_cast_once(forged, once)


def test_a_copy_made_after_the_parameter_is_written_is_another() -> None:
    whole = recasting(mixed_precision_step(1, params=MIB), ("p32_0",))
    ops = list(whole.ops)
    at = next(i for i, op in enumerate(ops) if op.name == "cast_again_p16_0")
    write = Op("write", "aten.mul_", Phase.BACKWARD, ("p32_0",), ("p32_0",))
    ops.insert(at, write)
    forged = replace(whole, ops=tuple(ops))
    with pytest.raises(PlanError, match="no copy of p32_0"):
        check_cast_once(forged, casts_once(forged))


def test_an_op_that_reads_another_copy_is_refused() -> None:
    whole = recasting(mixed_precision_step(2, params=MIB), ("p32_0", "p32_1"))
    once = casts_once(whole)
    swapped = {"p16_0": "p16_1"}
    ops = tuple(
        replace(op, reads=tuple(swapped.get(n, n) for n in op.reads))
        if op.phase is Phase.BACKWARD
        else op
        for op in once.ops
    )
    with pytest.raises(PlanError, match="reads"):
        check_cast_once(whole, replace(once, ops=ops))


@pytest.mark.parametrize("in_pieces", [False, True])
def test_a_weight_on_the_host_is_updated_on_the_device_in_pieces(in_pieces: bool) -> None:
    """It comes for its update alone, as its other uses are of the copy: in pieces, too."""
    whole = recasting(mixed_precision_step(3, params=MIB), ("p32_0", "p32_2"))
    groups = tuple(replace(group, elements=MIB) for group in whole.updates)
    problem = formulate(replace(whole, updates=groups), find("h100"), PLENTY)
    placement = streamed(problem.dataflow)
    homes = {**placement.homes, **{group.param: Tier.HOST for group in groups}}
    once = replace(placement, homes=homes, casts_once=True, piece_bytes=MIB if in_pieces else 0)
    plan = schedule(problem, once)
    check(problem, plan)
    assert bool(place_plan(problem, plan).dataflow.pieces.parts) is in_pieces
    if in_pieces:
        copied = {task.buffer for task in plan.transfers if task.is_fetch}
        assert not copied.intersection(group.param for group in groups)
