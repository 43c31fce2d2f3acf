"""Exchanges ahead: gathers that begin early, scatters that are awaited late, within the budget.

In: a placed step with its tasks, and the ops that are moved already. Out: the same with more moved
ops. A step that was traced awaits gathers and scatters at once, and the device does nothing
meanwhile; both hold what they read until they are awaited, so to have more of them under way takes
memory. A gather begins before the wait for one that is `UNDER_WAY` before it, with what makes its
input; the wait for a scatter comes before as many later ones begin, with what only follows from it.

No exchange begins before one that began before it: every rank has the same order, also where each
has a plan of its own.

Exchanges: when the device waits for the network, if nothing else is done meanwhile.

In: ops in order, what each takes on the device, and exchanges on the network, which take turns on
a lane of their own (`CostTable.network_s`). Out: the seconds that each op waits before it runs. The
same ops in the same order never take less: an exchange begins behind its op, and ends before what
awaits it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from cotrain_compile.dataflow import Op
from cotrain_compile.machine import Tier
from cotrain_compile.placement.placed import PlacedStep, place
from cotrain_compile.placement.problem import Problem
from cotrain_compile.placement.residency import DeviceProgram
from cotrain_compile.placement.simulate.predict import step_s
from cotrain_compile.plan import MovedOps, Task

# So many exchanges of parameters or gradients are under way at most, beside those of all kinds that
# are awaited late anyway.
UNDER_WAY = 2


@dataclass(frozen=True)
class _Shift:
    """The ops `names` go behind op `after`; exchange `begin` is under way from it until `wait`."""

    names: tuple[str, ...]
    after: str | None
    begin: str
    wait: str


def with_exchanges_ahead(placed: PlacedStep) -> PlacedStep:
    """`placed` with what lets exchanges overlap the device, unless it gains nothing by it."""
    if not placed.problem.costs.network_s:
        return placed
    staying = set[str]()
    while shifts := list(_shifts(placed, staying)):
        more = (*placed.moved, *(MovedOps(shift.names, shift.after) for shift in shifts))
        ahead = place(placed.problem, placed.placement, placed.tasks, more)
        too_much = _under_way_at_the_peak(ahead, shifts)
        if not too_much:
            return ahead if step_s(ahead) < step_s(placed) else placed
        staying |= too_much  # what follows one that stays may have another place
    return placed


def _under_way_at_the_peak(placed: PlacedStep, shifts: Sequence[_Shift]) -> set[str]:
    """Those of `shifts`, all of them made, that are under way where the budget is passed."""
    budget = placed.problem.budgets[Tier.DEVICE]
    over = [nbytes > budget for nbytes in placed.device_bytes]
    if not any(over):
        return set()
    before, slot = list(accumulate(over, initial=0)), placed.program.slot
    found = {s.begin for s in shifts if before[slot[s.begin]] < before[slot[s.wait] + 1]}
    return found or {shift.begin for shift in shifts}


def _shifts(placed: PlacedStep, staying: Collection[str]) -> Iterator[_Shift]:
    """What can be shifted of all but the exchanges that begin with `staying` ops."""
    moving = {name for entry in placed.moved for name in entry.ops}
    finder = _Finder(placed.program, placed.tasks, moving)
    finder.anchors.update(entry.after for entry in placed.moved)  # what others are behind stays
    for number, slot in enumerate(finder.begun):
        stays = finder.ops[slot].name in staying
        early = finder.earlier(number, stays)
        shift = early or (None if stays else finder.later(number))
        if shift is not None:
            finder.moving.update(shift.names)
            finder.anchors.add(shift.after)
            finder.early.update(early.names if early else ())
            yield shift


class _Finder:
    """Finds where exchanges may begin or be awaited, in their order; `moving` ops have places."""

    def __init__(self, program: DeviceProgram, tasks: Sequence[Task], moving: set[str]) -> None:
        self.program, self.ops, self.slot = program, program.ops, program.slot
        self.moving = moving
        self.begun = [slot for slot, op in enumerate(self.ops) if op.collective is not None]
        self.awaited = {op.awaits: slot for slot, op in enumerate(self.ops) if op.awaits}
        self.early = set[str]()  # run before the next gather, however early that begins
        self.first_place = 0  # of the next gather: not before the one before it
        self.anchors = {task.issue_after for task in tasks}  # ops that something is placed by
        self.tasks_of: dict[str, list[Task]] = {}
        self.waited_for_by: dict[str, list[Task]] = {}
        for task in tasks:
            for name in _touched(task):
                self.tasks_of.setdefault(name, []).append(task)
            if task.wait_before is not None:
                self.waited_for_by.setdefault(task.wait_before, []).append(task)

    def earlier(self, number: int, stays: bool) -> _Shift | None:
        """Where gather `number` of the exchanges may begin; None where it `stays`."""
        start = self.begun[number]
        wait = None if stays else self._wait(start, "all_gather")
        if number and self.ops[self.begun[number - 1]].name not in self.moving:
            self.first_place = max(self.first_place, self.begun[number - 1] + 1)
        if number >= UNDER_WAY:
            ahead = self.ops[self.begun[number - UNDER_WAY]].name
            self.first_place = max(self.first_place, self.awaited.get(ahead, start) + 1)
        place = self.first_place
        along = self._needed(self.ops[start], place, start) if wait else None
        if wait is None or along is None:
            return None
        shift = self._shift(along, place, self.ops[start], wait)
        return shift if self._may_begin(along, place, start, shift.after) else None

    def later(self, number: int) -> _Shift | None:
        """Where scatter `number` of the exchanges may be awaited; None where it stays."""
        start = self.begun[number]
        wait = self._wait(start, "reduce_scatter")
        if wait is None:
            return None
        following = self.begun[number + 1 : number + 1 + UNDER_WAY]
        limit = following[-1] if len(following) == UNDER_WAY else self.program.end
        along, place = self._following(wait, limit)
        tied = any(op.name in self.anchors or op.name in self.waited_for_by for op in along)
        if tied or place <= self.slot[along[-1].name] + 1:
            return None
        return self._shift(along, place, self.ops[start], wait)

    def _wait(self, start: int, kind: str) -> Op | None:
        """The wait for the exchange of that kind that begins in a slot, if both are at home."""
        begin = self.ops[start]
        collective, waited = begin.collective, self.awaited.get(begin.name)
        if collective is None or waited is None or not collective.kind.startswith(kind):
            return None
        wait = self.ops[waited]
        return None if {begin.name, wait.name} & self.moving else wait

    def _needed(self, begin: Op, place: int, start: int) -> list[Op] | None:
        """The ops from `place` on that make what `begin` reads, and it; None if they are many."""
        along, needed = [begin], set(begin.reads)
        for op in reversed(self.ops[place:start]):
            if op.name not in self.early and needed.intersection(op.writes):
                along.append(op)
                needed.update(op.reads)
                if op.awaits or op.collective or op.flops or len(along) > MOST_ALONG:
                    return None
        return along[::-1]

    def _may_begin(self, along: Sequence[Op], place: int, start: int, after: str | None) -> bool:
        """Whether these ops, up to the one in slot `start`, can run behind `after`, at `place`."""
        names = {op.name for op in along}
        reads = {name for op in along for name in op.reads}
        writes = {name for op in along for name in op.writes}
        if place >= start or names & (self.moving | self.anchors):
            return False
        for op in self.ops[place:start]:
            if op.name not in names | self.early and (
                not (reads | writes).isdisjoint(op.writes) or not writes.isdisjoint(op.reads)
            ):
                return False
        own = [task for name in names for task in self.waited_for_by.get(name, ())]
        others = [task for name in reads | writes for task in self.tasks_of.get(name, ())]
        issue, wait = self.program.issue_slot, self.program.wait_slot
        anchor = -1 if after is None else self.slot[after]
        return all(issue(task) <= anchor and not task.deferred for task in own) and all(
            task in own or wait(task) <= anchor or issue(task) >= start for task in others
        )

    def _following(self, wait: Op, limit: int) -> tuple[list[Op], int]:
        """`wait` and what follows from it alone, and the slot before which they have to be."""
        along, made, read = [wait], set(wait.writes), set(wait.reads)
        for slot in range(self.slot[wait.name] + 1, limit):
            op = self.ops[slot]
            follows = not made.isdisjoint((*op.reads, *op.writes))
            if not read.isdisjoint(op.writes) and not follows:
                return along, slot
            if follows:
                if op.name in self.moving or self._is_heavy(op) or len(along) == MOST_ALONG:
                    return along, slot
                along.append(op)
                made.update(op.writes)
                read.update(op.reads)
            if any(self._is_issued(name, slot) for name in made):
                return along, slot
        return along, limit

    def _is_heavy(self, op: Op) -> bool:
        """Whether it is an exchange, or writes what outlives the step."""
        updates = any(self.program.dataflow.buffer[name].is_input for name in op.writes)
        return op.collective is not None or bool(op.awaits) or updates

    def _is_issued(self, buffer: str, slot: int) -> bool:
        """Whether a task that has to do with `buffer` begins behind the op in `slot`."""
        return any(self.program.issue_slot(t) == slot for t in self.tasks_of.get(buffer, ()))

    def _shift(self, along: Sequence[Op], place: int, begin: Op, wait: Op) -> _Shift:
        names = tuple(op.name for op in along)
        staying = (
            op.name
            for op in reversed(self.ops[:place])
            if op.name not in self.moving and op.name not in names
        )
        return _Shift(names, next(staying, None), begin.name, wait.name)


def _touched(task: Task) -> Iterator[str]:
    """The buffers that a task has to do with."""
    match task.kind:
        case "transfer":
            yield from {task.buffer, task.destination} - {""}
        case "host_region":
            yield from {task.param, task.makes} - {""}


@dataclass(frozen=True)
class Chain:
    """The device and the network, with nothing beside them.

    `stalls` has the seconds that the device waits before each op, `end_s` when both are done.
    """

    stalls: Sequence[float]
    end_s: float


def chain_of(
    ops: Iterable[Op], device_s: Mapping[str, float], network_s: Mapping[str, float]
) -> Chain:
    """What `ops` in this order take, by their seconds; an exchange begun before them is done."""
    now_s = free_s = 0.0
    done_s: dict[str, float] = {}
    stalls = []
    for op in ops:
        stall = max(0.0, done_s.get(op.awaits, 0.0) - now_s)
        stalls.append(stall)
        now_s += stall + device_s[op.name]
        if op.name in network_s:
            free_s = done_s[op.name] = max(now_s, free_s) + network_s[op.name]
    return Chain(stalls, max(now_s, free_s))


# What goes along with an exchange that a plan moves is little: a cast, padding, a norm.
MOST_ALONG = 12


def is_shifted(op: Op) -> bool:
    """Whether a plan may let what `op` begins overlap more of the step than the step does."""
    kind = "" if op.collective is None else op.collective.kind
    return kind.startswith(("all_gather", "reduce_scatter"))


def shifted_along(ops: Iterable[Op]) -> set[str]:
    """At least the ops that a plan may move so that exchanges overlap more of the step."""
    found = set[str]()
    maker: dict[str, Op] = {}
    of_wait: dict[str, str] = {}  # what a wait for a scatter brings, and what is made of that
    count = Counter[str]()
    scatters = set[str]()
    for op in ops:
        if is_shifted(op) and op.collective and op.collective.kind.startswith("all_gather"):
            found.update(_makers(op, maker))
        elif is_shifted(op):
            scatters.add(op.name)
        maker.update(dict.fromkeys(op.writes, op))
        waits = {op.name} if op.awaits in scatters else set[str]()
        waits.update(of_wait[name] for name in (*op.reads, *op.writes) if name in of_wait)
        for wait in waits:
            count[wait] += 1
            if count[wait] <= MOST_ALONG:
                found.add(op.name)
                of_wait.update(dict.fromkeys(op.writes, wait))
    return found


def _makers(begin: Op, maker: Mapping[str, Op]) -> set[str]:
    """The op itself, and those that make its input and compute nothing."""
    found, queue = {begin.name}, list(begin.reads)
    for read in queue:  # grows while it is read
        op = maker.get(read)
        if op and op.name not in found and not (op.flops or op.awaits or op.collective):
            found.add(op.name)
            queue += op.reads
    return found


def loosest(ops: Iterable[Op]) -> list[Op]:
    """`ops` with each gather right behind the exchange before it, and no wait for a scatter.

    In no plan does a gather begin earlier (`exchanges_ahead.py`) or a wait hold up less.
    """
    found: list[Op] = []
    waits: list[Op] = []
    last = 0  # behind the exchange that began last
    scatters = set[str]()
    for op in ops:
        kind = "" if op.collective is None else op.collective.kind
        if op.awaits in scatters:
            waits.append(op)
        elif kind.startswith("all_gather"):
            found.insert(last, op)
            last += 1
        else:
            found.append(op)
            if kind:
                last = len(found)
            if kind.startswith("reduce_scatter"):
                scatters.add(op.name)
    return [*found, *waits]


def elapsed_with_stalls(
    problem: Problem, ops: Sequence[Op], elapsed_s: Sequence[float]
) -> Sequence[float]:
    """`elapsed_s`, of the device before each of `ops`, with what it waits for the network."""
    if not problem.costs.network_s:
        return elapsed_s
    stalls = chain_of(ops, problem.costs.device_s, problem.costs.network_s).stalls
    waited = accumulate(stalls, initial=0.0)
    return [taken + stalled for taken, stalled in zip(elapsed_s, waited, strict=True)]
