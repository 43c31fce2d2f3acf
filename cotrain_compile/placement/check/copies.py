"""Copies: what a replay knows of each copy of a buffer: whose value it has, since when, until when.

A value is named after the op that wrote it last, "" for what the step started with. Two accesses to
one copy, one of them a write, must not be under way at the same time. Times are ticks: five between
the end of one op and the end of the next, as `plan.Transfer` orders what happens there.

Timetable: the ops that the device runs under a plan, in their order, and when tasks go on.

In: a Dataflow and a Plan. Out: a `Timetable`, or `PlanError` where an op is moved that cannot be,
or a task is issued or waited for where nothing is, or in another order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from itertools import accumulate

from cotrain_compile.dataflow import Dataflow, Op, Phase
from cotrain_compile.placement.check.rules import require, unsound
from cotrain_compile.plan import Plan, Task

TICKS_PER_OP = 5


class Moment(IntEnum):
    """What happens between two ops, in this order, and then the op itself."""

    ISSUE = 0
    OFFLOADS_DONE = 1
    FETCH = 2
    DONE = 3
    OP = 4


def tick_of(slot: int, moment: Moment) -> int:
    """The tick of a moment before, or of, the op in `slot`."""
    return TICKS_PER_OP * slot + moment


@dataclass(frozen=True)
class Actor:
    """An op or a task that touches copies. Tasks in `done` and `after` are done before it starts.

    `done` may grow while the actor is at work; nothing is asked of it then.
    """

    name: str
    done: Set[str]
    after: Set[str] = frozenset()

    def follows(self, task: str) -> bool:
        """Whether `task` is done before this starts, or is this."""
        return task == self.name or task in self.done or task in self.after


@dataclass(eq=False)
class Copy:
    """A copy of `buffer` in ticks [born, last]; `readers` and `writers` are the tasks so far."""

    buffer: str
    nbytes: int
    place: str
    born: int
    last: int
    value: str = ""
    readers: set[str] = field(default_factory=set)
    writers: set[str] = field(default_factory=set)

    def expect(self, actor: Actor, needed: str) -> None:
        """Raise `PlanError` unless `actor` finds the value `needed`."""
        if self.value != needed:
            raise unsound(
                f"{actor.name} needs {self.buffer} {_as_left(needed)}, but finds it {self.place} "
                f"{_as_left(self.value)}"
            )

    def read(self, actor: Actor) -> None:
        """`actor` reads the value. Raises `PlanError` if a writer may still be at work."""
        self._require_done(actor, self.writers, "read")

    def write(self, actor: Actor, value: str) -> None:
        """`actor` replaces the value. Raises `PlanError` if anybody may still be at work."""
        self._require_done(actor, self.writers | self.readers, "overwrite")
        self.value = value

    def _require_done(self, actor: Actor, tasks: Iterable[str], verb: str) -> None:
        for task in tasks:
            if not actor.follows(task):
                raise unsound(
                    f"{actor.name} may {verb} {self.buffer} {self.place} before {task} is done "
                    "with it: wait for that first, or name it in `after`"
                )


def _as_left(value: str) -> str:
    return f"as {value} left it" if value else "as the step found it"


@dataclass(frozen=True)
class LeftOver:
    """A deferred task of the step before: what it may still read and write, by buffer.

    `reads` and `writes` outlive the steps; the copies of `sent` on the host go with the task.
    `after` are the other deferred tasks that are done when it is.
    """

    after: frozenset[str]
    reads: frozenset[str]
    writes: frozenset[str]
    sent: frozenset[str]


def peak(copies: Iterable[Copy], end_tick: int) -> tuple[int, int]:
    """The most bytes that `copies` take at any tick, and that tick."""
    change = [0] * (end_tick + 2)
    for copy in copies:
        change[copy.born] += copy.nbytes
        change[copy.last + 1] -= copy.nbytes
    totals = list(accumulate(change))
    tick = max(range(len(totals)), key=totals.__getitem__)
    return totals[tick], tick


@dataclass(frozen=True)
class Values:
    """What program order says: the value of each buffer that each op must find, and the last."""

    needed: Mapping[str, Mapping[str, str]]
    final: Mapping[str, str]


def values_of(dataflow: Dataflow) -> Values:
    """Values by program order.

    An op that writes a buffer must find the value before its own too, so that ops which run
    elsewhere keep every dependence: true, anti and output.
    """
    needed: dict[str, dict[str, str]] = {}  # a piece that nobody wrote has the value of its whole
    last: dict[str, str] = {}
    wholes = dataflow.pieces.wholes
    for op in dataflow.ops:
        needed[op.name] = {
            name: last.get(name, last.get(wholes.get(name, name), "")) for name in op.touched
        }
        last.update(dict.fromkeys(op.writes, op.name))
    return Values(needed, {buffer.name: last.get(buffer.name, "") for buffer in dataflow.buffers})


def known_to_the_host(dataflow: Dataflow) -> set[str]:
    """Hyper-parameters and constants that stay as they are, and what the optimizer makes of them.

    A host region has or repeats these itself.
    """
    known = set(dataflow.fixed)
    for op in dataflow.ops:
        if op.phase is Phase.OPTIMIZER and known.issuperset(op.reads):
            known.update(name for name in op.writes if not dataflow.buffer[name].is_input)
        else:
            known.difference_update(op.writes)
    return known


@dataclass(frozen=True)
class Timetable:
    """What the device runs; by tick, the tasks that are issued and those that are waited for.

    `waits_before` has the deferred tasks of the step before, by name.
    """

    ops: tuple[Op, ...]
    issues: Mapping[int, list[Task]]
    waits: Mapping[int, list[Task]]
    waits_before: Mapping[int, list[str]]

    @cached_property
    def gaps(self) -> frozenset[int]:
        """The slots before which any task goes on."""
        ticks = (*self.issues, *self.waits, *self.waits_before)
        return frozenset(tick // TICKS_PER_OP for tick in ticks)

    def where(self, tick: int) -> str:
        """Where in the step a tick is, in words."""
        slot, moment = divmod(tick, len(Moment))
        if slot == len(self.ops):
            return "at the end of the step"
        return f"{'at' if moment == Moment.OP else 'before'} {self.ops[slot].name}"


def timetable(dataflow: Dataflow, plan: Plan) -> Timetable:
    """When the device of `plan` runs which op, issues which task and waits for it."""
    ops = run_order(dataflow, plan)
    slot: dict[str | None, int] = {op.name: index for index, op in enumerate(ops)}
    issues: defaultdict[int, list[Task]] = defaultdict(list)
    waits: defaultdict[int, list[Task]] = defaultdict(list)
    waits_before: defaultdict[int, list[str]] = defaultdict(list)
    latest = 0
    for task in plan.tasks:
        for place in (task.issue_after, task.wait_before):
            require(
                place is None or place in slot,
                f"{task.name} names {place}, which the device does not run",
            )
        gap = 0 if task.issue_after is None else slot[task.issue_after] + 1
        require(gap >= latest, f"{task.name} is listed after a task that is issued later")
        latest = gap
        issue = tick_of(gap, Moment.FETCH if task.is_fetch else Moment.ISSUE)
        issues[issue].append(task)
        if task.deferred:
            waits_before[tick_of(slot[task.wait_before], Moment.DONE)].append(task.name)
            continue
        gap = len(ops) if task.wait_before is None else slot[task.wait_before]
        wait = tick_of(gap, Moment.OFFLOADS_DONE if task.is_offload else Moment.DONE)
        require(issue < wait, f"{task.name} is waited for before its issue")
        waits[wait].append(task)
    return Timetable(ops, issues, waits, waits_before)


def run_order(dataflow: Dataflow, plan: Plan) -> tuple[Op, ...]:
    """The ops that the device runs, in order."""
    position = dataflow.position
    on_host = {name for region in plan.host_regions for name in region.ops}
    moved = [name for entry in plan.moved for name in entry.ops]
    require(len(set(moved)) == len(moved), "an op is moved twice")
    for name in moved:
        require(name in position, f"{name} is moved, which the step has not")
        require(name not in on_host, f"{name} is moved, but it runs on the host")
    elsewhere = on_host.union(moved)
    behind: dict[str | None, list[str]] = {}
    for entry in plan.moved:
        known = entry.after is None or entry.after in position
        stays = known and entry.after not in elsewhere
        require(stays, f"ops are moved behind {entry.after}, which is not at its place")
        behind.setdefault(entry.after, []).extend(entry.ops)
    order = [*behind.get(None, ())]
    for op in dataflow.ops:
        if op.name not in elsewhere:
            order += [op.name, *behind.get(op.name, ())]
    return tuple(dataflow.ops[position[name]] for name in order)
