"""Residency: the bytes that the device holds at every op of a step, given homes and tasks.

One slot per op that the device runs, in the order it runs them, and a last one for the end of the
step. What is counted is what the runtime holds: a value to its last use, the source of a transfer
to the wait for it, whether the copy happens to be faster or not. So a peak does not depend on
timing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from cotrain_compile.dataflow import Buffer, Dataflow, Op, Role, UpdateGroup
from cotrain_compile.machine import Tier
from cotrain_compile.plan import (
    MovedOps,
    Placement,
    Task,
    Transfer,
    UpdateMode,
)

# About as many flops take a device as long as moving one byte.
FLOPS_A_BYTE = 128
HOST_MODES = frozenset({UpdateMode.HOST, UpdateMode.HOST_STREAMED})


@dataclass(frozen=True)
class DeviceProgram:
    """The ops that the device runs, in order, when `host_groups` are updated on the host.

    `fetched` names, for each parameter at home off the device, the buffer that is fetched for its
    uses: itself, or its low-precision copy, which the host then makes. A kept gradient at home
    there is fetched itself.
    """

    dataflow: Dataflow
    ops: tuple[Op, ...]
    host_groups: tuple[UpdateGroup, ...]
    fetched: Mapping[str, str]

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
        """Slots in which each buffer is read or written on the device, ascending.

        What an exchange has is touched until it is awaited.
        """
        found: dict[str, list[int]] = {}
        for index, op in enumerate(self.ops):
            begun = self.slot[op.awaits] if op.awaits else index
            for name in op.touched:
                slots = found.setdefault(name, [])
                first = max(begun, slots[-1] + 1) if slots and slots[-1] >= begun else index
                slots.extend(range(first, index + 1))
        return found

    @cached_property
    def work(self) -> list[float]:
        """What the ops before each slot do together: about their seconds, on no machine at all."""
        each = (max(op.bytes_moved, op.flops / FLOPS_A_BYTE) for op in self.ops)
        return list(accumulate(each, initial=0.0))

    @cached_property
    def _written(self) -> dict[str, int]:
        return {name: index for index, op in enumerate(self.ops) for name in op.writes}

    def last_write(self, buffer: str) -> int:
        """Slot of the last op that writes `buffer`, -1 for an input that none writes."""
        return self._written.get(buffer, -1)

    def issue_slot(self, task: Task) -> int:
        """Slot of the op that `task` is issued after, -1 for the start of the step."""
        return -1 if task.issue_after is None else self.slot[task.issue_after]

    def wait_slot(self, task: Task) -> int:
        """Slot of the op that `task` is waited for before; the end of its step if it is carried."""
        if task.wait_before is None or task.carried:
            return self.end
        return self.slot[task.wait_before]


def device_program(
    dataflow: Dataflow, placement: Placement, moved: Sequence[MovedOps] = ()
) -> DeviceProgram:
    """What is left for the device under `placement`, in the order that `moved` gives."""
    groups = tuple(g for g in dataflow.updates if placement.updates[g.param] in HOST_MODES)
    away = {name for group in groups for name in group.ops}
    fetched = fetched_buffers(dataflow, placement)
    casts = {copy for param, copy in fetched.items() if copy != param}
    staying = {name for entry in moved for name in entry.ops}
    behind: dict[str | None, list[str]] = {}
    for entry in moved:
        behind.setdefault(entry.after, []).extend(entry.ops)
    ops = [dataflow.ops[dataflow.position[name]] for name in behind.get(None, ())]
    for op in dataflow.ops:
        if op.name in away or op.name in staying or not casts.isdisjoint(op.writes):
            continue
        ops.append(op)
        ops += [dataflow.ops[dataflow.position[name]] for name in behind.get(op.name, ())]
    return DeviceProgram(dataflow, tuple(ops), groups, fetched)


def fetched_buffers(dataflow: Dataflow, placement: Placement) -> dict[str, str]:
    """What crosses the link for the uses of each parameter or kept gradient on the host."""
    on_host = [
        buffer.name
        for buffer in dataflow.buffers
        if buffer.role is Role.PARAM and placement.is_off_device(buffer.name)
    ]
    copies = low_precision_copies(dataflow) if on_host else {}
    fetched = {param: copies.get(param, param) for param in on_host}
    return fetched | {name: name for name in gradients_at_home(dataflow, placement)}


def gradients_at_home(dataflow: Dataflow, placement: Placement) -> list[str]:
    """The kept gradients that the step finds at home on the host."""
    return [
        buffer.name
        for buffer in dataflow.buffers
        if buffer.param and buffer.is_input and placement.homes.get(buffer.name) is Tier.HOST
    ]


def low_precision_copies(dataflow: Dataflow) -> dict[str, str]:
    """The low-precision copy of each parameter that the step uses in no other way, by parameter.

    Only such a parameter need not come to the device itself when the host makes the copy.
    """
    copy_of = {g.param: g.low_precision for g in dataflow.updates if g.low_precision}
    own = {name for group in dataflow.updates for name in group.ops}
    used_otherwise = {
        name
        for op in dataflow.ops
        if op.name not in own
        for name in op.reads
        if name in copy_of and (_made(dataflow, op) != [copy_of[name]] or op.reads != (name,))
    }
    return {param: copy for param, copy in copy_of.items() if param not in used_otherwise}


def owners(dataflow: Dataflow) -> dict[str, str]:
    """The parameter that each buffer is decided on with: itself, its copy, states and gradients."""
    found = {b.name: b.name for b in dataflow.buffers if b.role is Role.PARAM}
    found |= {copy: param for param, copy in low_precision_copies(dataflow).items()}
    for param, gradients in dataflow.kept_gradients.items():
        found |= dict.fromkeys(gradients, param)
    for group in dataflow.updates:
        found |= dict.fromkeys((*group.states, group.gradient), group.param)
    return found


def _made(dataflow: Dataflow, op: Op) -> list[str]:
    """What `op` writes that others may read."""
    return [name for name in op.writes if dataflow.buffer[name].role is not Role.WORKSPACE]


def longest_gap(program: DeviceProgram, touched: Sequence[int]) -> tuple[int, int] | None:
    """The neighbouring touches with the most work between them, None if there is none.

    It is the same one on every machine, so that what a step needs at the least is, too.
    """
    gaps = [(a, b) for a, b in pairwise(touched) if b > a + 1]
    return max(gaps, key=lambda gap: _work_in(program, gap), default=None)


def gaps_behind(program: DeviceProgram, name: str, first: tuple[int, int]) -> list[tuple[int, int]]:
    """The gaps between touches of a buffer behind its `first` one, none where it is written there.

    What was sent in the first one is still there to be fetched.
    """
    touched = program.touches[name]
    if program.last_write(name) > first[0]:
        return []
    return [(a, b) for a, b in pairwise(touched[bisect_left(touched, first[1]) :]) if b > a + 1]


def gaps_away(program: DeviceProgram, name: str, *, again: bool) -> list[tuple[int, int]]:
    """The longest gap of a buffer, and if it is to be fetched `again` the longest one behind it."""
    first = longest_gap(program, program.touches.get(name, ()))
    if first is None:
        return []
    behind = gaps_behind(program, name, first) if again else []
    return [first, *sorted(behind, key=lambda gap: -_work_in(program, gap))[:1]]


def written_before(program: DeviceProgram, name: str, last: int) -> int:
    """Slot of the last write of a buffer up to its use in slot `last`; a copy may begin behind it.

    That use itself, where the buffer is written again later.
    """
    written = program.last_write(name)
    return written if written <= last else last


def _work_in(program: DeviceProgram, gap: tuple[int, int]) -> float:
    return program.work[gap[1]] - program.work[gap[0] + 1]


@dataclass(frozen=True)
class Instance:
    """A copy of `buffer` on the device in slots [first, last), which ops use from `current` on."""

    buffer: Buffer
    first: int
    last: int
    current: int = 0


def instances(
    program: DeviceProgram, placement: Placement, tasks: Sequence[Task]
) -> Iterator[Instance]:
    """Every stretch in which a buffer is on the device: the original and each fetched copy."""
    arrivals: dict[str, list[tuple[int, int]]] = {}
    departures: dict[str, list[tuple[int, int]]] = {}
    for task in tasks:
        if isinstance(task, Transfer):
            issue, wait = program.issue_slot(task), program.wait_slot(task)
            if task.is_offload:
                departures.setdefault(task.buffer, []).append((issue, wait))
            elif task.is_fetch:
                arrivals.setdefault(task.buffer, []).append((wait, issue + 1))
    for buffer in program.dataflow.buffers:
        name = buffer.name
        fetches = sorted(arrivals[name]) if name in arrivals else []
        spans = _spans(program, placement, buffer, fetches)
        if not fetches and name not in departures:
            ((first, last),) = spans
            if first < last:
                yield Instance(buffer, first, last, -1)
            continue
        for number, (first, last) in enumerate(spans):
            current_from = fetches[number - 1][0] if number else -1
            current_to = fetches[number][0] if number < len(fetches) else program.end + 2
            held = [
                wait if wait < program.end else program.end + 1
                for issue, wait in departures.get(name, ())
                if current_from < issue + 1 <= current_to
            ]
            last = max([last, *held])
            if first < last:
                yield Instance(buffer, first, last, current_from)


def _spans(
    program: DeviceProgram, placement: Placement, buffer: Buffer, fetches: list[tuple[int, int]]
) -> list[tuple[int, int]]:
    """Slots of the original (empty where there is none) and of each fetched copy, uses alone."""
    end = program.end + 1
    touched = program.touches.get(buffer.name, [])
    on_host = placement.homes.get(buffer.name, Tier.DEVICE) is not Tier.DEVICE
    if not (fetches or on_host):
        if buffer.is_input:
            return [(0, end)]
        first, last = (touched[0], touched[-1] + 1) if touched else (0, 0)
        return [(first, end if buffer.is_output else last)]
    waits = [wait for wait, _ in fetches]
    limits = [*waits, end]
    if on_host and buffer.is_input:
        spans = [(0, 0)]
    else:
        before = touched[: bisect_left(touched, limits[0])]
        spans = [(before[0], before[-1] + 1) if before else (0, 0)]
    for number, (wait, first) in enumerate(fetches):
        inside = touched[bisect_left(touched, wait) : bisect_left(touched, limits[number + 1])]
        spans.append((first, inside[-1] + 1 if inside else wait + 1))
    return spans


def device_bytes(program: DeviceProgram, held: Iterable[Instance]) -> list[int]:
    """Bytes alive on the device in each slot, the last one being the end of the step."""
    curve = IntervalSum(program.end + 1)
    for instance in held:
        curve.add(instance.buffer.nbytes, instance.first, instance.last)
    return curve.values()


class IntervalSum:
    """A sum of intervals, by differences: O(1) to add one."""

    def __init__(self, slots: int) -> None:
        self._differences = [0] * (slots + 1)

    def add(self, nbytes: int, first: int, last: int) -> None:
        """`nbytes` more in slots [first, last)."""
        self._differences[first] += nbytes
        self._differences[min(last, len(self._differences) - 1)] -= nbytes

    def values(self) -> list[int]:
        """The sum in each slot."""
        return list(accumulate(self._differences))[:-1]
