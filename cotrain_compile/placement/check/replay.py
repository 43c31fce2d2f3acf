"""Replay: a step carried out as a plan says, with names in place of numbers.

In: a Dataflow and a Plan whose tasks fit its placement (`rules`). Out: the peak of each tier, or
`PlanError` where an op or task would find the wrong value, or one that another may be writing.

A task may start when the op it is issued after and the tasks in `after` are done, and is done when
it, or a task that comes after it, is waited for. Nothing else is taken for granted, not even that a
lane works in order.

Where tasks are deferred, the step is replayed twice: the second time with all that the first has
left to do still to be done. What comes after that is the second step again.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass
from typing import assert_never

from cotrain_compile.dataflow import PERSISTENT_ROLES, Dataflow, Op
from cotrain_compile.machine import Tier
from cotrain_compile.placement.check.copies import (
    Actor,
    Copy,
    LeftOver,
    Moment,
    known_to_the_host,
    peak,
    tick_of,
    timetable,
    values_of,
)
from cotrain_compile.placement.check.rules import require
from cotrain_compile.plan import HostRegion, Plan, Task, Transfer
from cotrain_compile.plan.on_disk import disk_bytes, room_bytes


@dataclass(frozen=True)
class ReplayedPeak:
    """The most bytes on a tier, and where in the step, in words."""

    nbytes: int
    where: str


def replay(dataflow: Dataflow, plan: Plan, host_workers: int = 1) -> Mapping[Tier, ReplayedPeak]:
    """The peak of each tier; that of the host, with so many workers, is an upper bound.

    On the device a copy counts from its first touch, a fetched one from its issue, to its last
    touch or the wait for the last task that uses it; inputs, outputs and homes to the end of the
    step. The host holds homes, what is copied there until the last task that reads it is waited
    for, be it in the next step, and the values inside the largest regions: as many as run at once.
    """
    first = _Replay(dataflow, plan, host_workers)
    peaks = first.run()
    if not plan.deferred:
        return peaks
    return _Replay(dataflow, plan, host_workers, first.left_over()).run()


def _before(task: str) -> str:
    """What a deferred task is called in the step after its own."""
    return f"{task} of the step before"


def _exchange(op: str) -> str:
    """What goes on beside the device from `op` on, until another awaits it."""
    return f"the exchange of {op}"


class _Replay:
    """One pass over the step, after one that has `left` so much to do. `run` once."""

    def __init__(
        self,
        dataflow: Dataflow,
        plan: Plan,
        host_workers: int,
        left: Mapping[str, LeftOver] | None = None,
    ) -> None:
        self.dataflow, self.plan, self.host_workers = dataflow, plan, host_workers
        self.left = left or {}
        self.times = timetable(dataflow, plan)
        self.ops = self.times.ops
        self.values = values_of(dataflow)
        # What each exchange has until it is awaited, by the op that begins it.
        self.awaited = {
            op.awaits: [name for name in op.touched if name in begin.touched]
            for op in self.ops
            if op.awaits
            for begin in (dataflow.ops[dataflow.position[op.awaits]],)
        }
        self.known = known_to_the_host(dataflow)
        self.tick = 0
        self.end_tick = tick_of(len(self.ops), Moment.DONE)
        self.device: dict[str, Copy] = {}  # the copy that ops touch
        self.homes: dict[str, Copy] = {}  # on the host
        self.sent: dict[str, Copy] = {}  # left on the host by a task of this step
        self.parts: dict[str, dict[str, Copy]] = {}  # of what is at home there, by whole and piece
        self.arriving: dict[str, Copy] = {}  # by the task that fetches it
        self.used_by: dict[str, list[Copy]] = {task.name: [] for task in plan.tasks}
        self.makes = {region.name: region.makes for region in plan.host_regions if region.makes}
        self.on_device: list[Copy] = []
        self.on_host: list[Copy] = []
        self.inside: dict[str, int] = {}  # the most that each region or bundle holds for itself
        # By the region that has guessed: what it has overwritten, with the values before.
        self.speculated: dict[str, list[tuple[Copy, str]]] = {}
        self.before: dict[str, frozenset[str]] = {}  # what each issued task comes after
        self.done: set[str] = set()

    def run(self) -> Mapping[Tier, ReplayedPeak]:
        self._begin()
        self._take_over()
        for slot in range(len(self.ops) + 1):
            if slot in self.times.gaps:
                for moment in (Moment.ISSUE, Moment.OFFLOADS_DONE, Moment.FETCH, Moment.DONE):
                    self._go_on(tick_of(slot, moment))
            if slot < len(self.ops):
                self.tick = tick_of(slot, Moment.OP)
                self._run_op(self.ops[slot])
        self._end()
        device, tick = peak(self.on_device, self.end_tick)
        host, host_tick = peak(self.on_host, self.end_tick)
        inside = sum(heapq.nlargest(self.host_workers, self.inside.values()))
        rooms = room_bytes(self.dataflow, self.plan.placement)
        on_disk = disk_bytes(self.dataflow, self.plan.placement)
        return {
            Tier.DEVICE: ReplayedPeak(device, self.times.where(tick)),
            Tier.HOST: ReplayedPeak(host + inside + rooms, self.times.where(host_tick)),
            **({Tier.DISK: ReplayedPeak(on_disk, "between steps")} if on_disk else {}),
        }

    def _go_on(self, tick: int) -> None:
        """What tasks do at `tick`."""
        self.tick = tick
        for task in self.times.issues.get(tick, ()):
            self._issue(task)
        for task in self.times.waits.get(tick, ()):
            self._wait(task.name)
        for name in self.times.waits_before.get(tick, ()):
            if name in self.left:
                self._wait(_before(name))

    def _begin(self) -> None:
        for buffer in self.dataflow.buffers:
            if not buffer.is_input:
                continue  # a gradient that the step makes is sent home
            home = self.plan.placement.homes.get(buffer.name)
            if home is Tier.HOST:
                self.homes[buffer.name] = self._new_on_host(buffer.name, "at its home on the host")
            elif home is Tier.DISK:
                self.homes[buffer.name] = self._new(buffer.name, "at its home on disk")
            else:
                self.device[buffer.name] = self._new_on_device(buffer.name)

    def _take_over(self) -> None:
        """What the step before has left to do is under way, and keeps its copies on the host."""
        sent = {
            name: self._new_on_host(name, "where the step before has left it on the host")
            for name in sorted({name for left in self.left.values() for name in left.sent})
        }
        for task, left in self.left.items():
            name = _before(task)
            self.before[name] = frozenset(_before(other) for other in left.after)
            used = self.used_by[name] = [sent[buffer] for buffer in left.sent]
            for buffer in left.reads | left.writes:
                copy = self.homes.get(buffer) or self.device[buffer]
                copy.readers |= {name} if buffer in left.reads else set()
                copy.writers |= {name} if buffer in left.writes else set()
                used.append(copy)

    def left_over(self) -> Mapping[str, LeftOver]:
        """What the deferred tasks may still do when the step has ended."""
        deferred = {task.name for task in self.plan.deferred}
        found: dict[str, LeftOver] = {}
        for name in deferred:
            used = self.used_by[name]
            sent = {copy.buffer for copy in used if self.sent.get(copy.buffer) is copy}
            kept = [c for c in used if c in (self.homes.get(c.buffer), self.device.get(c.buffer))]
            found[name] = LeftOver(
                after=self.before[name] & deferred,
                reads=frozenset(copy.buffer for copy in kept if name in copy.readers),
                writes=frozenset(copy.buffer for copy in kept if name in copy.writers),
                sent=frozenset(sent),
            )
        return found

    def _new(self, buffer: str, place: str) -> Copy:
        nbytes = self.dataflow.buffer[buffer].nbytes
        return Copy(buffer, nbytes, place, born=self.tick, last=self.tick)

    def _new_on_device(self, buffer: str, place: str = "on the device") -> Copy:
        self.on_device.append(self._new(buffer, place))
        return self.on_device[-1]

    def _new_on_host(self, buffer: str, place: str) -> Copy:
        self.on_host.append(self._new(buffer, place))
        return self.on_host[-1]

    def _actor(self, task: Task) -> Actor:
        return Actor(task.name, self.done, self.before[task.name])

    def _reads(self, task: Task, copy: Copy) -> None:
        """`task` reads `copy` until it is done."""
        for other in self._overlapping(copy):
            other.read(self._actor(task))
        copy.read(self._actor(task))
        copy.readers.add(task.name)
        self.used_by[task.name].append(copy)

    def _writes(self, task: Task, copy: Copy, value: str) -> None:
        """`task` replaces the value of `copy`, which is there when it is done."""
        for other in self._overlapping(copy):
            other.write(self._actor(task), other.value)
        copy.write(self._actor(task), value)
        copy.writers.add(task.name)
        self.used_by[task.name].append(copy)

    def _overlapping(self, copy: Copy) -> list[Copy]:
        """What else of the host has memory of `copy`: its whole, or its pieces."""
        whole = self.dataflow.pieces.wholes.get(copy.buffer)
        if whole is None:
            is_home = copy is self.homes.get(copy.buffer)
            return [*self.parts.get(copy.buffer, {}).values()] if is_home else []
        is_part = copy is self.parts.get(whole, {}).get(copy.buffer)
        return [self.homes[whole]] if is_part else []

    def _on_host(self, buffer: str) -> Copy | None:
        """What a copy from the host finds there: a home, what is left there, or a piece."""
        whole = self.dataflow.pieces.wholes.get(buffer)
        if whole is None:
            return self.homes.get(buffer) or self.sent.get(buffer)
        home = self.homes.get(whole)
        if home is None:
            return self.sent.get(whole)
        pieces = self.parts.setdefault(whole, {})
        if buffer not in pieces:  # memory of the home, which is counted there
            pieces[buffer] = Copy(buffer, 0, home.place, self.tick, self.tick, home.value)
        return pieces[buffer]

    def _run_op(self, op: Op) -> None:
        if op.awaits:
            self.done.add(_exchange(op.awaits))
        actor = Actor(op.name, self.done)
        for name in op.touched:
            copy = self.device.get(name)
            if copy is None:
                is_new = name not in op.reads and not self.dataflow.buffer[name].is_input
                require(is_new, f"{op.name} touches {name}, which is not on the device")
                copy = self.device[name] = self._new_on_device(name)
            copy.read(actor)
            copy.expect(actor, self.values.needed[op.name][name])
            if name in op.writes:
                copy.write(actor, op.name)
            copy.last = self.tick
        for name in self.awaited.get(op.name, ()):
            copy = self.device[name]
            (copy.writers if name in op.writes else copy.readers).add(_exchange(op.name))

    def _issue(self, task: Task) -> None:
        for name in task.after:
            require(name in self.before, f"{task.name} is issued before {name}, its `after`")
        left = [_before(name) for name in task.after_previous if name in self.left]
        earlier = (self.before[name] for name in (*task.after, *left))
        self.before[task.name] = frozenset((*task.after, *left)).union(*earlier) - self.done
        match task:
            case HostRegion():
                self._run_region(task)
            case Transfer():
                self._copy(task)
            case _:
                assert_never(task)

    def _copy(self, task: Transfer) -> None:
        match task.direction:
            case "offload":
                self._offload(task)
            case "prefetch":
                self._prefetch(task)
            case _:
                assert_never(task.direction)

    def _wait(self, task: str) -> None:
        self.done |= {task, *self.before[task]}
        for copy in self.used_by[task]:
            if copy.buffer != self.makes.get(task):  # that is there for its readers alone
                copy.last = self.tick
        if task in self.arriving:
            arrived = self.arriving.pop(task)
            self.device[arrived.buffer] = arrived

    def _offload(self, task: Transfer) -> None:
        source = self.device.get(task.buffer)
        require(source is not None, f"{task.name} copies {task.buffer} before it is on the device")
        assert source is not None
        self._reads(task, source)
        if task.destination:
            home = self._on_host(task.buffer)
            assert home is not None
            target = home
        else:
            placement = self.plan.placement
            rests = placement.is_off_device(task.buffer)
            on_disk = placement.homes.get(task.buffer) is Tier.DISK
            on_disk = on_disk or task.buffer in placement.offloaded_to_disk
            new = self._new if on_disk else self._new_on_host
            target = new(task.buffer, f"where {task.name} leaves it on the host")
            (self.homes if rests else self.sent)[task.buffer] = target
        self._writes(task, target, source.value)

    def _prefetch(self, task: Transfer) -> None:
        source = self._on_host(task.buffer)
        require(source is not None, f"{task.name} finds no {task.buffer} on the host")
        assert source is not None
        self._reads(task, source)
        if task.destination:
            target = self.device[task.buffer]
        else:
            place = f"where {task.name} brings it on the device"
            target = self.arriving[task.name] = self._new_on_device(task.buffer, place)
        self._writes(task, target, source.value)

    def _run_region(self, region: HostRegion) -> None:
        """The ops of `region` on what is on the host; what it makes on the way is its own."""
        self._confirm(region)
        own: dict[str, Copy] = {}
        before: dict[str, str] = {}  # values that are overwritten
        most = 0
        ops = [self.dataflow.ops[self.dataflow.position[name]] for name in region.ops]
        last_use = {name: op for op in ops for name in op.touched}
        for op in ops:
            for name in op.touched:
                is_known = name in self.known or name in region.guesses
                sent = self.sent.get(name)
                if sent and is_known and sent.writers.isdisjoint(region.after):
                    sent = None  # another's: what it knows it makes itself
                copy = own.get(name) or sent or self.homes.get(name)
                if copy is None and is_known and name not in op.writes:
                    continue
                if copy is None:
                    copy = self._made_by(region, op, name, own)
                self._reads(region, copy)
                copy.expect(self._actor(region), self.values.needed[op.name][name])
                if name in op.writes:
                    if name not in own:
                        before.setdefault(name, copy.value)
                    self._writes(region, copy, op.name)
            most = max(most, sum(copy.nbytes for copy in own.values()))
            own = {name: copy for name, copy in own.items() if last_use[name] is not op}
        at_once = region.bundle or region.name  # named after its first member
        self.inside[at_once] = self.inside.get(at_once, 0) + most
        if region.guesses:
            self._guessed(region, before)

    def _guessed(self, region: HostRegion, before: Mapping[str, str]) -> None:
        """What `region` has written on guesses, over these values, is nobody's until confirmed.

        The values are saved in second buffers, which stay from step to step.
        """
        self.speculated[region.name] = []
        for name, value in before.items():
            copy = self.sent.get(name) or self.homes[name]
            second = self._new_on_host(name, f"where {region.name} has saved it")
            second.born, second.last = 0, self.end_tick
            copy.value = f"{region.name} before it is confirmed"
            self.speculated[region.name].append((copy, value))

    def _confirm(self, region: HostRegion) -> None:
        """Before `region` runs, or finds that it has run, the values are those before guesses."""
        for copy, value in self.speculated.pop(region.confirms, ()):
            self._writes(region, copy, value)

    def _made_by(self, region: HostRegion, op: Op, name: str, own: dict[str, Copy]) -> Copy:
        is_new = name not in op.reads and not self.dataflow.buffer[name].is_input
        require(is_new, f"{region.name} needs {name} on the host, where no task has sent it")
        if name == region.makes:
            place = f"where {region.name} leaves it on the host"
            copy = self.sent[name] = self._new_on_host(name, place)
        else:
            copy = own[name] = self._new(name, f"inside {region.name}")
        return copy

    def _end(self) -> None:
        """Everything that outlives the step has its last value, where it should be."""
        self.tick = self.end_tick
        for task in self.plan.deferred:
            for used in self.used_by[task.name]:
                used.last = self.tick
        for buffer in self.dataflow.buffers:
            name, final = buffer.name, self.values.final[buffer.name]
            rests = self.plan.placement.homes.get(name, Tier.DEVICE) is not Tier.DEVICE
            copy = self.homes.get(name) if rests else self.device.get(name)
            is_kept = buffer.role in PERSISTENT_ROLES or buffer.is_output
            if is_kept and (buffer.is_input or final):
                where = "at its home on the host" if rests else "on the device"
                require(copy is not None, f"{name} is not {where} at the end of the step")
            if copy is not None and is_kept:
                copy.expect(Actor("what comes after the step", self.done), final)
            if copy is not None and buffer.is_output:
                copy.read(Actor("who gets what the step returns", self.done))
            if copy is not None and (is_kept or buffer.is_input):
                copy.last = self.tick
        for piece in (piece for pieces in self.parts.values() for piece in pieces.values()):
            piece.expect(
                Actor("what comes after the step", self.done), self.values.final[piece.buffer]
            )
        for copy in self.sent.values():
            require(bool(copy.readers), f"nothing reads {copy.buffer} {copy.place}")
