"""Schedule: Placement -> Plan. Decides when each task is issued and how long it may take.

A gradient is offloaded as soon as it is complete, and waited for as late as the budget allows: the
wait is what frees it on the device. Updates start after the backward, or, with early updates, when
their gradients have landed and the old parameter has been read. A parameter is sent down
during the forward, where the link is idle, so that no copy of it outlives the step on the host and
none can be stale (`docs/decisions/0003-no-stale-copies.md`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import NoReturn

from cotrain_compile.dataflow import PERSISTENT_ROLES, Phase, Role, UpdateGroup
from cotrain_compile.errors import PlacementError
from cotrain_compile.machine import Tier
from cotrain_compile.placement.predict import predict
from cotrain_compile.placement.problem import Problem
from cotrain_compile.placement.residency import (
    DeviceProgram,
    device_bytes,
    device_program,
    device_span,
    host_bytes,
)
from cotrain_compile.plan import HostRegion, Placement, Plan, Task, Transfer
from cotrain_compile.units import format_bytes


def schedule(problem: Problem, placement: Placement) -> Plan:
    """The plan that carries out `placement` within the budgets of `problem`.

    Raises `PlacementError` with the shortfall in bytes when it cannot.
    """
    program = device_program(problem.dataflow, placement)
    tasks = _tasks(program, early=placement.early_updates)
    tasks = _with_latest_waits(problem, placement, program, tasks)
    _check_host_budget(problem, placement, tasks)
    return Plan(
        fingerprint=problem.dataflow.fingerprint,
        machine=problem.machine.name,
        budgets=problem.budgets,
        placement=placement,
        tasks=tuple(tasks),
        predicted=predict(problem, placement, tasks),
    )


def _tasks(program: DeviceProgram, early: bool) -> list[Task]:
    """All tasks in order of issue; each offload is waited for at the end of the step."""
    offloads: dict[str, Transfer] = {}
    updates: list[tuple[int, Task]] = []
    # Parameters whose gradients come first are updated first, so they go down first.
    for group in sorted(program.host_groups, key=lambda g: program.last_write(g.gradient)):
        sources = [group.param, group.gradient, *_on_device(program, group.scalars)]
        for name in sources:
            offloads.setdefault(name, _offload(program, name))
        issue, wait = _update_window(program, group, early)
        after = tuple(offloads[name].name for name in sources)
        region = HostRegion(
            name=f"update.{group.param}",
            param=group.param,
            ops=group.ops,
            issue_after=_op_at(program, issue),
            wait_before=wait,
            after=after,
        )
        back = Transfer(
            name=f"prefetch.{group.param}",
            direction="prefetch",
            buffer=group.param,
            nbytes=program.dataflow.buffer[group.param].nbytes,
            issue_after=region.issue_after,
            wait_before=wait,
            after=(region.name,),
            destination=group.param,
        )
        updates += [(issue, region), (issue, back)]
    issued = [(_issue_slot(program, task), task) for task in offloads.values()] + updates
    return [task for _, task in sorted(issued, key=lambda pair: pair[0])]


def _offload(program: DeviceProgram, buffer: str) -> Transfer:
    complete = program.last_write(buffer)
    return Transfer(
        name=f"offload.{buffer}",
        direction="offload",
        buffer=buffer,
        nbytes=program.dataflow.buffer[buffer].nbytes,
        issue_after=_op_at(program, complete),
        wait_before=None,
    )


def _on_device(program: DeviceProgram, scalars: tuple[str, ...]) -> list[str]:
    """Those of `scalars` that the device computes; hyper-parameters are on the host already."""
    host_side = (Role.HYPERPARAMETER, Role.CONSTANT)
    return [name for name in scalars if program.dataflow.buffer[name].role not in host_side]


def _update_window(
    program: DeviceProgram, group: UpdateGroup, early: bool
) -> tuple[int, str | None]:
    """Slot after which the update is issued, and the op that needs the new parameter (or None).

    Everything that reads the old parameter runs before it; so does, unless `early`, the rest of the
    backward, as far as the step does not read the new parameter before its end.
    """
    write = max(program.dataflow.position[name] for name in group.ops)
    touches = program.touches.get(group.param, [])
    before = [i for i in touches if program.dataflow.position[program.ops[i].name] < write]
    later = [i for i in touches if program.dataflow.position[program.ops[i].name] > write]
    inputs = [program.last_write(name) for name in (group.gradient, *group.scalars)]
    earliest = max([-1, *before, *inputs])
    limit = later[0] if later else program.end
    backward = [i for i in range(limit) if program.ops[i].phase is Phase.BACKWARD]
    issue = earliest if early else max([earliest, *backward[-1:]])
    return issue, program.ops[limit].name if later else None


def _op_at(program: DeviceProgram, slot: int) -> str | None:
    return program.ops[slot].name if slot >= 0 else None


def _issue_slot(program: DeviceProgram, task: Task) -> int:
    return -1 if task.issue_after is None else program.slot[task.issue_after]


def _with_latest_waits(
    problem: Problem, placement: Placement, program: DeviceProgram, tasks: list[Task]
) -> list[Task]:
    """Wait for each offload as late as the memory it keeps still fits under the budget."""
    budget = problem.budgets[Tier.DEVICE]
    alone = device_bytes(program, placement, [])
    if max(alone) > budget:
        _refuse(problem, placement, program, alone)
    room = [budget - nbytes for nbytes in alone]
    scheduled: list[Task] = []
    for task in tasks:
        if isinstance(task, Transfer) and task.direction == "offload":
            task = replace(task, wait_before=_latest_wait(program, placement, task, room))
        scheduled.append(task)
    return scheduled


def _latest_wait(
    program: DeviceProgram, placement: Placement, task: Transfer, room: list[int]
) -> str | None:
    span = device_span(program, placement, program.dataflow.buffer[task.buffer])
    assert span is not None, f"{task.buffer} is offloaded but never on the device"
    # Waiting before the op that the copy is issued after would wait for ever.
    slot = max(span[1], _issue_slot(program, task) + 1)
    while slot <= program.end and room[slot] >= task.nbytes:
        room[slot] -= task.nbytes
        slot += 1
    return program.ops[slot].name if slot < program.end else None


def _check_host_budget(problem: Problem, placement: Placement, tasks: list[Task]) -> None:
    needed = host_bytes(problem.dataflow, placement, tasks)
    budget = problem.budgets[Tier.HOST]
    if needed > budget:
        raise PlacementError(
            f"policy {placement.policy!r} needs {format_bytes(needed)} on the host for "
            f"optimizer states, gradients and parameters in flight, but host_memory_budget is "
            f"{format_bytes(budget)}: {format_bytes(needed - budget)} short; raise "
            "host_memory_budget, or memory_budget so that more stays on the device",
            shortfall_bytes=needed - budget,
        )


def _refuse(
    problem: Problem, placement: Placement, program: DeviceProgram, used: list[int]
) -> NoReturn:
    budget = problem.budgets[Tier.DEVICE]
    slot = max(range(len(used)), key=used.__getitem__)
    op = program.ops[min(slot, program.end - 1)]
    alive = [
        buffer
        for buffer in program.dataflow.buffers
        if (span := device_span(program, placement, buffer)) and span[0] <= slot < span[1]
    ]
    kinds: dict[str, int] = {}
    for buffer in alive:
        kind = buffer.role.value if buffer.role in PERSISTENT_ROLES else "activations and gradients"
        kinds[kind] = kinds.get(kind, 0) + buffer.nbytes
    parts = ", ".join(f"{kind} {format_bytes(n)}" for kind, n in kinds.items() if n)
    where = f"at {op.target}" + (f" in {op.module}" if op.module else "")
    way_on = (
        "use policy='zero-offload', or raise memory_budget"
        if placement.policy == "resident"
        else "raise memory_budget, or make the batch smaller"
    )
    short = max(used) - budget
    raise PlacementError(
        f"policy {placement.policy!r} needs {format_bytes(max(used))} on the device ({where}: "
        f"{parts}), but memory_budget is {format_bytes(budget)}: {format_bytes(short)} "
        f"({short:,} bytes) short; {way_on}",
        shortfall_bytes=short,
    )
