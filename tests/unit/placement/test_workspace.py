"""Workspace: what a kernel takes while it runs is there in that slot, for all that makes plans.

The laws hold on random steps, machines and budgets; what counts the bytes again is the replay of
`check`, which shares no code with what plans them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotrain_compile.dataflow import Buffer, Dataflow, Role
from cotrain_compile.errors import PlacementError, PlanError
from cotrain_compile.files import from_json, to_json
from cotrain_compile.machine import Tier
from cotrain_compile.placement.check.check import check
from cotrain_compile.placement.check.replay import replay
from cotrain_compile.placement.placed import place_dataflow
from cotrain_compile.placement.policies import resident
from cotrain_compile.placement.problem import Problem, formulate
from cotrain_compile.placement.residency import low_precision_copies
from cotrain_compile.placement.search.solve import SolveSettings, solve
from cotrain_compile.presets import find
from tests.support.dataflows import chain, mixed_precision_step
from tests.support.examples import examples
from tests.support.random_problems import PLENTY, problems, resident_bytes, with_budget


def on_device(dataflow: Dataflow) -> Sequence[int]:
    """Bytes in each slot of the resident step."""
    return place_dataflow(dataflow, resident(dataflow)).device_bytes


def test_a_workspace_is_there_while_its_op_runs_and_then_no_more() -> None:
    dataflow = chain(2, width=64, batch=64)
    op = dataflow.ops[3].name
    more = on_device(dataflow.with_workspace({op: 1000}))
    added = [b - a for a, b in zip(on_device(dataflow), more, strict=True)]
    assert [slot for slot, nbytes in enumerate(added) if nbytes] == [dataflow.position[op]]
    assert added[dataflow.position[op]] == 1000


def test_a_workspace_is_in_the_saved_step() -> None:
    dataflow = chain(1, width=64, batch=64)
    known = dataflow.with_workspace({dataflow.ops[0].name: 1000})
    read = from_json(to_json(known), Dataflow)
    assert read == known
    assert [buffer.nbytes for buffer in read.buffers if buffer.role is Role.WORKSPACE] == [1000]


def test_a_parameter_may_be_called_like_a_workspace() -> None:
    dataflow = chain(1, width=64, batch=64)
    op = dataflow.ops[0].name
    taken = Buffer(f"{op}.workspace", 8, Role.CONSTANT, is_input=True)
    found = replace(dataflow, buffers=(*dataflow.buffers, taken)).with_workspace({op: 1000})
    (added,) = [buffer for buffer in found.buffers if buffer.role is Role.WORKSPACE]
    assert found.ops[0].writes == (*dataflow.ops[0].writes, added.name)
    assert found.buffer[taken.name] == taken


def test_the_program_has_room_for_a_workspace_too() -> None:
    """Where most is alive, a workspace offloads as much more."""
    dataflow = chain(2, width=512, batch=512)
    problem = formulate(dataflow, find("rtx4090"), {Tier.DEVICE: PLENTY, Tier.HOST: PLENTY})
    budget = resident_bytes(problem)
    used = on_device(dataflow)
    peak = max(range(len(dataflow.ops)), key=used.__getitem__)
    known = replace(problem, dataflow=dataflow.with_workspace({dataflow.ops[peak].name: 1 << 20}))
    plan = solve(with_budget(known, budget), SolveSettings(policy="ilp", work_limit=5))
    check(known, plan)
    assert plan.predicted.peak_bytes[Tier.DEVICE] <= budget < max(on_device(known.dataflow))


@given(problems(most=2), st.data())
@examples(12)
def test_a_plan_has_room_for_every_workspace(problem: Problem, data: st.DataObject) -> None:
    names = [op.name for op in problem.dataflow.ops if op.writes]
    sizes = st.integers(1, resident_bytes(problem))
    drawn = data.draw(st.dictionaries(st.sampled_from(names), sizes, min_size=1, max_size=4))
    dataflow = problem.dataflow.with_workspace(drawn)
    known = replace(problem, dataflow=dataflow)
    # The plan without it has this much room at most, so there is one with it.
    roomy = problem.budgets[Tier.DEVICE] + max(drawn.values())
    plan = solve(with_budget(known, roomy), SolveSettings(policy="greedy"))
    check(known, plan)
    counted = replay(dataflow, plan)[Tier.DEVICE].nbytes
    assert counted == plan.predicted.peak_bytes[Tier.DEVICE] <= roomy
    on_host = {name for region in plan.host_regions for name in region.ops}
    staying = {op: nbytes for op, nbytes in drawn.items() if op not in on_host}
    assert counted >= max(staying.values(), default=0)
    short = {**plan.budgets, Tier.DEVICE: counted - 1}
    with pytest.raises(PlanError, match="bytes on the device"):
        check(known, replace(plan, budgets=short))


@given(problems(most=2), st.data())
@examples(10)
def test_what_no_plan_has_room_for_is_refused_by_the_bytes(
    problem: Problem, data: st.DataObject
) -> None:
    in_updates = {name for group in problem.dataflow.updates for name in group.ops}
    names = [op.name for op in problem.dataflow.ops if op.writes and op.name not in in_updates]
    copies = set(low_precision_copies(problem.dataflow).values())
    names = [n for n in names if copies.isdisjoint(problem.dataflow.ops[at(problem, n)].writes)]
    op = data.draw(st.sampled_from(names))
    budget = problem.budgets[Tier.DEVICE]
    known = replace(problem, dataflow=problem.dataflow.with_workspace({op: budget + 1}))
    with pytest.raises(PlacementError) as refusal:
        solve(known, SolveSettings(policy="greedy"))
    assert refusal.value.shortfall_bytes >= 1


def at(problem: Problem, op: str) -> int:
    return problem.dataflow.position[op]


def test_a_low_precision_copy_with_a_workspace_is_still_made_by_the_host() -> None:
    dataflow = mixed_precision_step(2, params=40_000)
    copies = low_precision_copies(dataflow)
    assert copies
    casts = {op.name: 64 for op in dataflow.ops if set(copies.values()) & set(op.writes)}
    assert low_precision_copies(dataflow.with_workspace(casts)) == copies
