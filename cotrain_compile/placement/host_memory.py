"""Host memory: the bytes that a placed step holds on the host at most.

Homes, copies that tasks leave there, rooms of what rests on disk, and the values inside updates.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import assert_never

from cotrain_compile.dataflow import Buffer, Dataflow, Op, Phase, UpdateGroup
from cotrain_compile.dataflow.guesses import second_bytes
from cotrain_compile.machine import Tier
from cotrain_compile.placement.op_order import Instance
from cotrain_compile.placement.remembered import Same, once, once_alike, remembered
from cotrain_compile.placement.residency import DeviceProgram, IntervalSum
from cotrain_compile.plan import HostRegion, Placement, Task, Transfer, carried_out
from cotrain_compile.plan.on_disk import room_bytes


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
def updates_alone(dataflow: Dataflow) -> tuple[object, Same[object]]:
    """What tells all that `once_alike` keeps of updates, which have no part in what is made again.

    That is the updates with what else the optimizer does, and what these ops make.
    """
    if not dataflow.updates:
        return dataflow.pieces, Same()
    own = {name for group in dataflow.updates for name in group.ops}
    ops = [op for op in dataflow.ops if op.phase is Phase.OPTIMIZER or op.name in own]
    made = {name for op in ops for name in op.writes}
    made.update(group.gradient for group in dataflow.updates)
    buffers = (buffer for buffer in dataflow.buffers if buffer.name in made)
    owner, *others = dataflow.updates
    return owner, Same([dataflow.pieces, *ops, *buffers, *others])


@once
@once_alike(updates_alone)
def _made_bytes(dataflow: Dataflow) -> Mapping[str, int]:
    """What `made_by` says of the update of each parameter."""
    return {group.param: made_by(dataflow, group) for group in dataflow.updates}


def made_by(dataflow: Dataflow, group: UpdateGroup) -> int:
    """Most bytes that the values made inside the update of `group` take at once."""
    return inside_update(dataflow, group).made_bytes


@dataclass(frozen=True)
class Inside:
    """The `length` in ops of an update; when ops of it touch what they touch; what they make.

    The `spans` [first, last) are in ops of the update, `made` has bytes of what is made. All that
    is `made` takes `made_bytes` at once, at the most.
    """

    length: int
    spans: Mapping[str, tuple[int, int]]
    made: Mapping[str, int]

    @cached_property
    def made_bytes(self) -> int:
        return max(self.curve(self.made).values(), default=0)

    def curve(self, names: Iterable[str]) -> IntervalSum:
        """The bytes of those of `made` at each op of the update."""
        found = IntervalSum(self.length)
        for name in names:
            found.add(self.made[name], *self.spans[name])
        return found


def inside_update(dataflow: Dataflow, group: UpdateGroup) -> Inside:
    """What is inside the update of `group`: the same, whatever else is made of the step."""
    ops = [dataflow.ops[dataflow.position[name]] for name in group.ops]
    written = [dataflow.buffer[name] for op in ops for name in op.writes]
    return _inside(group, (Same(ops), Same(written)))


@remembered
def _inside(group: UpdateGroup, touching: tuple[Same[Op], Same[Buffer]]) -> Inside:
    """Of an update with these ops, which write these buffers."""
    ops, written = touching
    first, last = dict[str, int](), dict[str, int]()
    for index, op in enumerate(ops):
        for name in op.touched:
            first.setdefault(name, index)
            last[name] = index + 1
    made = {buffer.name: buffer.nbytes for buffer in written if not buffer.is_input}
    return Inside(len(ops), {name: (first[name], last[name]) for name in first}, made)
