"""Host memory: the bytes that a placed step holds on the host at most.

Homes, copies that tasks leave there, rooms of what rests on disk, and the values inside updates.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from typing import assert_never

from cotrain_compile.dataflow import Dataflow, UpdateGroup
from cotrain_compile.guesses import second_bytes
from cotrain_compile.machine import Tier
from cotrain_compile.on_disk import room_bytes
from cotrain_compile.placement.op_order import Instance
from cotrain_compile.placement.remembered import once, remembered
from cotrain_compile.placement.residency import DeviceProgram, IntervalSum
from cotrain_compile.plan import HostRegion, Placement, Task, Transfer, carried_out


def host_bytes(
    program: DeviceProgram, placement: Placement, tasks: Sequence[Task], workers: int
) -> int:
    """Most bytes the plan can hold on the host: homes, copies left there, values in updates.

    Of what rests on disk it is the rooms that it passes through. What updates on guesses save stays
    between steps, so that it is there when the next one comes. As many updates as there are
    `workers` run at once, at any time, and free the values inside them at the last use.
    """
    dataflow = program.dataflow
    homes = sum(
        dataflow.buffer[name].nbytes for name, tier in placement.homes.items() if tier is Tier.HOST
    )
    second = sum(
        second_bytes(dataflow, dataflow.update[task.param])
        for task in tasks
        if isinstance(task, HostRegion) and task.guesses
    )
    inside = sum(heapq.nlargest(workers, _inside_bytes(program, tasks)))
    copies = IntervalSum(program.end + 1)
    for left in left_on_host(program, placement, tasks):
        copies.add(left.buffer.nbytes, left.first, left.last)
    rooms = room_bytes(dataflow, placement)
    return homes + second + inside + rooms + max(copies.values())


def left_on_host(
    program: DeviceProgram, placement: Placement, tasks: Sequence[Task]
) -> Iterator[Instance]:
    """The copies that tasks leave on the host, from their issue to the last wait for a reader.

    Nobody waits for a cast but who reads what it makes. What a deferred task reads is there until
    it has, in the next step: at any time in both.
    """
    dataflow = program.dataflow
    made: dict[str, tuple[int, int]] = {}
    deferred: set[str] = set()
    on_disk = set(placement.offloaded_to_disk)
    for task in tasks:  # in order of issue: a copy comes before its readers
        first, wait = max(0, program.issue_slot(task)), program.wait_slot(task) + 1
        for name in _read_on_host(dataflow, task):
            if name in made:
                made[name] = made[name][0], max(wait, made[name][1])
                deferred |= {name} if task.deferred else set()
        match task:
            case Transfer():
                rests = placement.is_off_device(task.buffer) or task.buffer in on_disk
                name = task.buffer if task.is_offload and not (task.destination or rests) else ""
            case HostRegion():
                name = task.makes
            case _:
                assert_never(task)
        if name:
            made[name] = first, wait if task.is_offload else first + 1
    for name, (first, last) in made.items():
        yield Instance(dataflow.buffer[name], first, last)
    for name in deferred:
        yield Instance(dataflow.buffer[name], 0, program.end + 1)


def _read_on_host(dataflow: Dataflow, task: Task) -> Iterator[str]:
    """The buffers that `task` reads on the host."""
    match task:
        case Transfer():
            if not task.is_offload:
                yield task.buffer
        case HostRegion():
            yield from _read_by(dataflow, task.ops)
        case _:
            assert_never(task)


@remembered
def _read_by(dataflow: Dataflow, ops: tuple[str, ...]) -> tuple[str, ...]:
    """What the ops of a task read, each once."""
    reads = (name for op in ops for name in dataflow.ops[dataflow.position[op]].reads)
    return tuple(dict.fromkeys(reads))


def _inside_bytes(program: DeviceProgram, tasks: Sequence[Task]) -> Iterator[int]:
    """The most that the values inside each update take, of a bundle those inside all of them."""
    made = _made_bytes(program.dataflow)
    for members in carried_out([task for task in tasks if isinstance(task, HostRegion)]):
        yield sum(made.get(task.param, 0) for task in members if isinstance(task, HostRegion))


@once
def _made_bytes(dataflow: Dataflow) -> Mapping[str, int]:
    """What `made_by` says of the update of each parameter."""
    return {group.param: made_by(dataflow, group) for group in dataflow.updates}


def made_by(dataflow: Dataflow, group: UpdateGroup) -> int:
    """Most bytes that the values made inside the update of `group` take at once."""
    spans, curve = spans_in(dataflow, group), IntervalSum(len(group.ops))
    for name in made_in(dataflow, group):
        curve.add(dataflow.buffer[name].nbytes, *spans[name])
    return max(curve.values(), default=0)


def made_in(dataflow: Dataflow, group: UpdateGroup) -> set[str]:
    """The buffers that ops of `group` make."""
    ops = (dataflow.ops[dataflow.position[name]] for name in group.ops)
    return {name for op in ops for name in op.writes if not dataflow.buffer[name].is_input}


def spans_in(dataflow: Dataflow, group: UpdateGroup) -> dict[str, tuple[int, int]]:
    """The ops [first, last) of `group` from the first to the last that touches each buffer."""
    spans: dict[str, tuple[int, int]] = {}
    for index, op_name in enumerate(group.ops):
        op = dataflow.ops[dataflow.position[op_name]]
        for name in (*op.reads, *op.writes):
            spans[name] = (spans.get(name, (index, index))[0], index + 1)
    return spans
