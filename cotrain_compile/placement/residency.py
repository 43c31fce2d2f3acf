"""Residency: the bytes each tier holds at every op of a step, given homes and tasks.

One slot per op that the device runs, in program order, and a last one for the end of the step. What
is counted is what the runtime holds: a value to its last use, the source of a transfer to the wait
for it, whether the copy happens to be faster or not. So a peak does not depend on timing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from cotrain_compile.dataflow import PERSISTENT_ROLES, Buffer, Dataflow, Op, UpdateGroup
from cotrain_compile.machine import Tier
from cotrain_compile.plan import Placement, Task, Transfer, UpdateMode

HOST_MODES = frozenset({UpdateMode.HOST, UpdateMode.HOST_STREAMED})


@dataclass(frozen=True)
class DeviceProgram:
    """The ops that run on the device when `host_groups` are updated on the host."""

    dataflow: Dataflow
    ops: tuple[Op, ...]
    host_groups: tuple[UpdateGroup, ...]

    @cached_property
    def slot(self) -> dict[str, int]:
        """Position of each device op in this program."""
        return {op.name: index for index, op in enumerate(self.ops)}

    @property
    def end(self) -> int:
        """The slot after the last op."""
        return len(self.ops)

    @cached_property
    def touches(self) -> dict[str, list[int]]:
        """Slots in which each buffer is read or written on the device, ascending."""
        found: dict[str, list[int]] = {}
        for index, op in enumerate(self.ops):
            for name in {*op.reads, *op.writes}:
                found.setdefault(name, []).append(index)
        return found

    def last_write(self, buffer: str) -> int:
        """Slot of the last op that writes `buffer`, -1 for an input that none writes."""
        slots = [i for i in self.touches.get(buffer, ()) if buffer in self.ops[i].writes]
        return slots[-1] if slots else -1


def device_program(dataflow: Dataflow, placement: Placement) -> DeviceProgram:
    """What is left for the device under `placement`."""
    groups = tuple(g for g in dataflow.updates if placement.updates[g.param] in HOST_MODES)
    away = {name for group in groups for name in group.ops}
    return DeviceProgram(dataflow, tuple(op for op in dataflow.ops if op.name not in away), groups)


def device_bytes(program: DeviceProgram, placement: Placement, tasks: Sequence[Task]) -> list[int]:
    """Bytes alive on the device in each slot, the last one being the end of the step."""
    curve = _Curve(program.end + 1)
    held = _held_by_offloads(program, tasks)
    for buffer in program.dataflow.buffers:
        span = device_span(program, placement, buffer)
        if span is None:
            continue
        first, last = span
        curve.add(buffer.nbytes, first, max(last, held.get(buffer.name, 0)))
    return curve.values()


def device_span(
    program: DeviceProgram, placement: Placement, buffer: Buffer
) -> tuple[int, int] | None:
    """Slots [first, last) in which `buffer` is on the device by itself, None if it never is."""
    end = program.end + 1
    if placement.homes.get(buffer.name) is Tier.HOST:
        return None
    if buffer.role in PERSISTENT_ROLES or buffer.is_input:
        return 0, end
    touched = program.touches.get(buffer.name)
    if touched is None:
        return None
    return touched[0], end if buffer.is_output else touched[-1] + 1


def host_bytes(dataflow: Dataflow, placement: Placement, tasks: Iterable[Task]) -> int:
    """Most bytes the plan can hold on the host: homes, every offloaded copy, one region's values.

    Host copies are counted to the end of the step. Regions run one after the other; the values
    inside one are counted without reuse.
    """
    homes = sum(
        dataflow.buffer[name].nbytes for name, tier in placement.homes.items() if tier is Tier.HOST
    )
    copies = sum(t.nbytes for t in tasks if isinstance(t, Transfer) and t.direction == "offload")
    regions = [
        _bytes_made_by(dataflow, group)
        for group in dataflow.updates
        if placement.updates[group.param] in HOST_MODES
    ]
    return homes + copies + max(regions, default=0)


def _bytes_made_by(dataflow: Dataflow, group: UpdateGroup) -> int:
    made = {
        name
        for op in group.ops
        for name in dataflow.ops[dataflow.position[op]].writes
        if not dataflow.buffer[name].is_input
    }
    return sum(dataflow.buffer[name].nbytes for name in made)


def _held_by_offloads(program: DeviceProgram, tasks: Iterable[Task]) -> dict[str, int]:
    """Slot to which the wait of an offload keeps its source alive, by buffer."""
    held: dict[str, int] = {}
    for task in tasks:
        if isinstance(task, Transfer) and task.direction == "offload":
            slot = program.end + 1 if task.wait_before is None else program.slot[task.wait_before]
            held[task.buffer] = max(held.get(task.buffer, 0), slot)
    return held


class _Curve:
    """A sum of intervals, by differences: O(1) to add one."""

    def __init__(self, slots: int) -> None:
        self._differences = [0] * (slots + 1)

    def add(self, nbytes: int, first: int, last: int) -> None:
        self._differences[first] += nbytes
        self._differences[min(last, len(self._differences) - 1)] -= nbytes

    def values(self) -> list[int]:
        return list(accumulate(self._differences))[:-1]
