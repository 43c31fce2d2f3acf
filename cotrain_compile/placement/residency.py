"""Residency: the bytes that the device holds at every op of a step, given homes and tasks.

One slot per op that the device runs, in the order it runs them, and a last one for the end of the
step. What is counted is what the runtime holds: a value to its last use, the source of a transfer
to the wait for it, whether the copy happens to be faster or not. So a peak does not depend on
timing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import numpy as np

from cotrain_compile.dataflow import Buffer, Dataflow, Op, Role, UpdateGroup
from cotrain_compile.machine import Tier
from cotrain_compile.placement.op_order import Instance, OpOrder, order_without
from cotrain_compile.placement.remembered import once
from cotrain_compile.plan import (
    MovedOps,
    Placement,
    Task,
    Transfer,
    UpdateMode,
)

HOST_MODES = frozenset({UpdateMode.HOST, UpdateMode.HOST_STREAMED})


@dataclass(frozen=True)
class DeviceProgram:
    """The ops that the device runs, in order, when `host_groups` are updated on the host.

    `fetched` names, for each parameter at home off the device, the buffer that is fetched for its
    uses: itself, or its low-precision copy, which the host then makes. A kept gradient at home
    there is fetched itself. Of the step's ops some are `left_out`, by name.
    """

    dataflow: Dataflow
    order: OpOrder
    host_groups: tuple[UpdateGroup, ...]
    fetched: Mapping[str, str]
    left_out: frozenset[str]

    @cached_property
    def ops(self) -> tuple[Op, ...]:
        """In the order in which they run."""
        return self.order.ops

    @cached_property
    def slot(self) -> dict[str, int]:
        """Position of each device op in this program."""
        return self.order.slot

    @cached_property
    def end(self) -> int:
        """The slot after the last op."""
        return self.order.end

    @cached_property
    def touches(self) -> dict[str, list[int]]:
        """As of its order."""
        return self.order.touches

    @property
    def unmoved(self) -> list[tuple[Instance, ...]]:
        """As of its order."""
        return self.order.unmoved

    @cached_property
    def work(self) -> list[float]:
        """As of its order."""
        return self.order.work

    def last_write(self, buffer: str) -> int:
        """Slot of the last op that writes `buffer`, -1 for an input that none writes."""
        return self.order.written.get(buffer, -1)

    def issue_slot(self, task: Task) -> int:
        """Slot of the op that `task` is issued after, -1 for the start of the step."""
        return -1 if task.issue_after is None else self.slot[task.issue_after]

    def wait_slot(self, task: Task) -> int:
        """Slot of the op that `task` is waited for before; the end of its step if deferred."""
        if task.wait_before is None or task.deferred:
            return self.end
        return self.slot[task.wait_before]


def device_program(
    dataflow: Dataflow, placement: Placement, moved: Sequence[MovedOps] = ()
) -> DeviceProgram:
    """What is left for the device under `placement`, in the order that `moved` gives."""
    groups = tuple(g for g in dataflow.updates if placement.updates[g.param] in HOST_MODES)
    fetched = fetched_buffers(dataflow, placement)
    makers = low_precision_makers(dataflow) if fetched else {}
    offloaded = {name for group in groups for name in group.ops}
    offloaded.update(op for param, copy in fetched.items() if copy != param for op in makers[copy])
    left_out = frozenset(offloaded)
    order = _reordered(dataflow, order_without(dataflow, left_out), moved)
    return DeviceProgram(dataflow, order, groups, fetched, left_out)


def without_ops(program: DeviceProgram, taken: Collection[str]) -> DeviceProgram:
    """`program` without the ops that are `taken` out, by name."""
    left_out = program.left_out.union(taken)
    if left_out == program.left_out:
        return program
    return replace(program, order=order_without(program.dataflow, left_out), left_out=left_out)


def _reordered(dataflow: Dataflow, order: OpOrder, moved: Sequence[MovedOps]) -> OpOrder:
    """`order` with `moved` ops, each behind the op that they follow."""
    if not moved:
        return order
    behind: dict[str | None, list[str]] = {}
    for entry in moved:
        behind.setdefault(entry.after, []).extend(entry.ops)
    staying = {name for entry in moved for name in entry.ops}
    names = [*behind.get(None, ())]
    for op in order.ops:
        if op.name not in staying:
            names.append(op.name)
            if op.name in behind:
                names += behind[op.name]
    ops = tuple(dataflow.ops[dataflow.position[name]] for name in names)
    return OpOrder(ops, dataflow.buffers)


def fetched_buffers(dataflow: Dataflow, placement: Placement) -> dict[str, str]:
    """What crosses the link for the uses of each parameter or kept gradient on the host."""
    on_host = [name for name in _params(dataflow) if placement.is_off_device(name)]
    narrow = on_host and not placement.fetched_whole
    copies = low_precision_copies(dataflow) if narrow else {}
    fetched = {param: copies.get(param, param) for param in on_host}
    return fetched | {name: name for name in gradients_at_home(dataflow, placement)}


def gradients_at_home(dataflow: Dataflow, placement: Placement) -> list[str]:
    """The kept gradients that the step finds at home on the host."""
    return [name for name in _found_gradients(dataflow) if placement.homes.get(name) is Tier.HOST]


@once
def _found_gradients(dataflow: Dataflow) -> tuple[str, ...]:
    """Those that the step finds in `.grad`."""
    return tuple(b.name for b in dataflow.buffers if b.param and b.is_input)


@once
def _params(dataflow: Dataflow) -> tuple[str, ...]:
    return tuple(b.name for b in dataflow.buffers if b.role is Role.PARAM)


@once
def low_precision_makers(dataflow: Dataflow) -> Mapping[str, tuple[str, ...]]:
    """The ops that write each low-precision copy."""
    found: dict[str, tuple[str, ...]] = dict.fromkeys(low_precision_copies(dataflow).values(), ())
    copies = found.keys()
    for op in dataflow.ops if found else ():
        if not copies.isdisjoint(op.writes):
            for name in copies & op.writes:
                found[name] = (*found[name], op.name)
    return found


@once
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


@once
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


def written_before(program: DeviceProgram, name: str, last: int) -> int:
    """Slot of the last write of a buffer up to its use in slot `last`; a copy may begin behind it.

    That use itself, where the buffer is written again later.
    """
    written = program.last_write(name)
    return written if written <= last else last


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
    off_device = (name for name in placement.homes if placement.is_off_device(name))
    others = {*arrivals, *departures, *off_device}
    for buffer, at_its_uses in zip(program.dataflow.buffers, program.order.at_uses, strict=True):
        name = buffer.name
        if name not in others:
            yield from at_its_uses
            continue
        fetches = sorted(arrivals.get(name, ()))
        spans = _spans(program, placement, buffer, fetches)
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
    on_host = placement.is_off_device(buffer.name)
    if not (fetches or on_host):
        return [(held.first, held.last) for held in program.order.at_its_uses(buffer)] or [(0, 0)]
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
    there = [*held]
    return summed(
        program.end + 1,
        [instance.buffer.nbytes for instance in there],
        [instance.first for instance in there],
        [instance.last for instance in there],
    )


def summed(
    slots: int, nbytes: Sequence[int], firsts: Sequence[int], lasts: Sequence[int]
) -> list[int]:
    """The sum in each slot of intervals [first, last) of so many bytes, as of an `IntervalSum`."""
    differences = np.zeros(slots + 1, dtype=np.int64)
    sizes = np.array(nbytes, dtype=np.int64)
    np.add.at(differences, np.array(firsts, dtype=np.int64), sizes)
    np.subtract.at(differences, np.minimum(np.array(lasts, dtype=np.int64), slots), sizes)
    found: list[int] = np.cumsum(differences)[:-1].tolist()
    return found


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
