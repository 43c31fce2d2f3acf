"""Overlapping plans: random plans in which updates on the host go on in the next step.

A sound plan and a random generator in; out comes the same plan with some of its host updates, and
the ways back of their weights, deferred to a random wait in the next step. Independent of the
scheduler, like `random_plans`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import replace

from cotrain_compile.machine import Tier
from cotrain_compile.placement.placed import place, place_plan
from cotrain_compile.placement.problem import Problem
from cotrain_compile.placement.residency import DeviceProgram
from cotrain_compile.plan import HostRegion, Plan, Task, Transfer


def overlapping(problem: Problem, plan: Plan, rng: random.Random, share: float = 0.7) -> Plan:
    """`plan` with about `share` of what may be deferred, and host memory for it."""
    program = place_plan(problem, plan).program
    waits = {
        task.name: rng.choice((use, rng.randint(0, use), 0))
        for task, use in _may_be_deferred(program, plan)
        if rng.random() < share
    }
    tasks = tuple(_after_previous(program, _deferred(program, t, waits), waits) for t in plan.tasks)
    placement = replace(plan.placement, overlap_steps=True)
    placed = place(problem, placement, tasks, plan.moved)
    budgets = {**plan.budgets, Tier.HOST: placed.host_bytes}
    return replace(plan, placement=placement, tasks=tasks, budgets=budgets)


def _may_be_deferred(program: DeviceProgram, plan: Plan) -> Iterator[tuple[Task, int]]:
    """Host updates and ways back whose results no op of their own step uses; next use of each."""
    dataflow, position = program.dataflow, program.dataflow.position
    for task in plan.tasks:
        is_back = isinstance(task, Transfer) and task.direction == "prefetch" and task.destination
        param = task.destination if isinstance(task, Transfer) else task.param
        is_update = isinstance(task, HostRegion) and not task.makes
        if not (is_back or is_update):
            continue
        touched = program.touches.get(program.fetched.get(param, param), [])
        write = max(position[name] for name in dataflow.update[param].ops)
        if touched and all(position[program.ops[slot].name] < write for slot in touched):
            yield task, touched[0]


def _deferred(program: DeviceProgram, task: Task, waits: Mapping[str, int]) -> Task:
    if task.name not in waits:
        return task
    return replace(task, deferred=True, wait_before=program.ops[waits[task.name]].name)


def _after_previous(program: DeviceProgram, task: Task, waits: Mapping[str, int]) -> Task:
    """`task` after what the step before may still write of what it reads at the start of a step."""
    param = task.param if isinstance(task, HostRegion) else task.buffer
    param = next((p for p, copy in program.fetched.items() if copy == param), param)
    writers = tuple(name for name in (f"update.{param}", f"back.{param}") if name in waits)
    is_update = isinstance(task, HostRegion) and not task.makes
    is_back = isinstance(task, Transfer) and task.direction == "prefetch" and task.destination
    return task if is_update or is_back else replace(task, after_previous=writers)
