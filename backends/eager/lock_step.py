"""Lock step: small updates that run side by side, each of their ops once for all of them.

    %mul, %add, %copy_, %mul_1, %add_1, %copy__1   ->   [%mul, %mul_1], [%add, %add_1], [...]

In: the calls of a placed step, and the room that its plan leaves. Out: the same calls, with small
updates in rows: ops that are alike, one of each of several updates, as one call for all of their
tensors. What a row makes goes to the next ones as the list that it is. What it takes is room, as
the values inside of several updates are there at once. It is taken only below the step's own peak,
so that neither the peak nor a budget knows of it, and for small values alone: large ones stay in
the cache between the ops of one update, and take longer than their calls.

Room: what a plan has alive on the device around its updates, and how much more would fit.

In: a Problem and a Plan. Out: bytes by op, from `residency`. For whoever runs updates in another
order than the plan's, below the peak that the step has anyway.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import groupby, takewhile
from operator import itemgetter
from typing import Any

import torch
from torch import fx

from cotrain_compile.backends.eager.calls import COPY, AlikeOps, Call, Column
from cotrain_compile.machine.op_classes import SMALL_BYTES
from cotrain_compile.placement.placed import place_plan
from cotrain_compile.placement.problem import Problem
from cotrain_compile.plan import Plan
from cotrain_compile.runtime.bound_ops import list_op


def rows_of(updates: Sequence[Sequence[Call]]) -> list[AlikeOps]:
    """The rows of `updates`."""
    place = {call.node: number for number, call in enumerate(updates[0])}
    inside = {call.node for calls in updates for call in calls}
    last = {place[n]: number for number, call in enumerate(updates[0]) for n in _own(call, place)}
    rows = []
    for number, calls in enumerate(zip(*updates, strict=True)):
        nodes = [call.node for call in calls]
        columns = zip(*(node.args for node in nodes), strict=True)
        rows.append(
            AlikeOps(
                nodes=nodes,
                compute=list_op(nodes),
                columns=[_column(values, place) for values in columns],
                copies=nodes[0].target is COPY,
                overwrites_input=calls[0].overwrites_input,
                writes=[write for call in calls for write in call.writes],
                kept=[(at, n) for at, n in enumerate(nodes) if not inside >= n.users.keys()],
                done_with=[row for row, at in last.items() if at == number],
            )
        )
    return rows


def _own(call: Call, place: dict[fx.Node, int]) -> list[fx.Node]:
    return [node for node in (call.node, *call.node.all_input_nodes) if node in place]


def _column(values: Sequence[Any], place: dict[fx.Node, int]) -> Column:
    first = values[0]
    if not isinstance(first, fx.Node):
        return lambda _, made: first
    if first in place:
        row = place[first]
        return lambda _, made: made[row]
    take = itemgetter(*values)
    return lambda given, _: take(given)


# What is made in rows and there at once stays in a core's cache.
MOST_BYTES = 1 << 20


class _Update:
    """The calls of one update within a stretch of updates, in their order."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self.calls = calls
        self.place = {call.node: number for number, call in enumerate(calls)}
        self.names = [call.node.name for call in calls]

    @cached_property
    def kind(self) -> object:
        """Equal for updates whose ops are alike one by one, and use each other's results alike."""

        def told(value: object) -> object:
            return self.place.get(value, "given") if isinstance(value, fx.Node) else repr(value)

        return tuple(
            (
                str(call.node.target),
                *map(told, call.node.args),
                *sorted((name, told(value)) for name, value in call.node.kwargs.items()),
                call.node.meta["val"].dtype,
                call.overwrites_input,
            )
            for call in self.calls
        )

    @cached_property
    def fits_in_rows(self) -> bool:
        """Whether its values are small, and what it makes and takes is what rows know of."""
        return all(
            _bytes_of(call.node.meta["val"]) <= SMALL_BYTES
            and (call.node.target is COPY or self.place.keys() >= call.node.users.keys())
            and not any(isinstance(value, list | tuple | dict | slice) for value in call.node.args)
            and not any(isinstance(value, fx.Node) for value in call.node.kwargs.values())
            for call in self.calls
        )

    @cached_property
    def made_bytes(self) -> list[int]:
        """Of what it makes, the bytes there at each of its ops."""
        there, end = [0] * len(self.calls), len(self.calls) - 1
        for number, call in enumerate(self.calls):
            if call.is_new:
                last = max((self.place.get(n, end) for n in call.node.users), default=number)
                for at in range(number, last + 1):
                    there[at] += call.traced_bytes
        return there

    @cached_property
    def left_bytes(self) -> int:
        """Of what it makes, the bytes that others need."""
        made = [call for call in self.calls if call.is_new]
        return sum(c.traced_bytes for c in made if not self.place.keys() >= c.node.users.keys())


def in_lock_step(calls: Sequence[Call], room: PlannedPeak) -> list[Call]:
    """`calls` with the small updates that stand side by side in lock step."""
    found: list[Call] = []
    for are_updates, group in groupby(calls, lambda call: _may_join(call, room)):
        stretch = list(group)
        planned = _as_planned(stretch, room) if are_updates else len(stretch)
        found += stretch[:planned]
        if stretch[planned:]:
            found += _in_rows(stretch[planned:], room)
    return found


def _may_join(call: Call, room: PlannedPeak) -> bool:
    """Whether it is an op of an update that makes a tensor of known size, or writes one over."""
    value = call.node.meta.get("val")
    makes_one = call.node.target is COPY or (call.is_plain and call.is_new)
    is_known = isinstance(value, torch.Tensor) and isinstance(value.numel(), int)
    return makes_one and is_known and call.node.name in room.param_of


def _as_planned(stretch: Sequence[Call], room: PlannedPeak) -> int:
    """How many calls of a stretch of updates run as they are planned, for the sake of the peak.

    Where that is in updates alone, up to the end of the first of these: in another order there
    might be another peak, which a plan knows nothing of.
    """
    if not room.is_peak_in_updates:
        return 0
    names = [call.node.name for call in stretch]
    at = next((n for n, name in enumerate(names) if room.used_bytes[name] >= room.peak_bytes), -1)
    behind = takewhile(lambda name: room.param_of[name] == room.param_of[names[at]], names[at:])
    return at + len(list(behind)) if at >= 0 else 0


def _in_rows(calls: list[Call], room: PlannedPeak) -> list[Call]:
    """A stretch of updates, in lock step where that fits."""
    by_param: dict[str, list[Call]] = {}
    for call in calls:
        by_param.setdefault(room.param_of[call.node.name], []).append(call)
    updates = [_Update(own) for own in by_param.values()]
    if not room.are_independent([update.names for update in updates]):
        return calls
    chunks = _chunks(updates, room)
    if all(len(chunk) == 1 for chunk in chunks):
        return calls
    return _freeing([call for chunk in chunks for call in _calls_of(chunk)], calls)


def _chunks(updates: Sequence[_Update], room: PlannedPeak) -> list[list[_Update]]:
    """`updates` by those that run in lock step, in a new order; none where that does not fit."""
    first, chunks = updates[0].calls[0], list[list[_Update]]()
    used_bytes = room.used_bytes[first.node.name] - first.traced_bytes * first.is_new
    freed_bytes = room.freed_bytes([update.names for update in updates])
    left = {u: u.left_bytes - freed for u, freed in zip(updates, freed_bytes, strict=True)}
    kinds: dict[object, deque[_Update]] = {}
    for update in updates:
        kinds.setdefault(update.kind, deque()).append(update)
    for alike in kinds.values():
        while alike:
            chunk, there = _chunk(alike, min(MOST_BYTES, room.peak_bytes - used_bytes))
            if used_bytes + max(there) > room.peak_bytes:
                return []
            used_bytes += sum(left[update] for update in chunk)
            chunks.append(chunk)
    return chunks


def _chunk(alike: deque[_Update], limit_bytes: int) -> tuple[list[_Update], list[int]]:
    """The next ones of `alike` that run in lock step, and what they make at each of their ops."""
    chunk = [alike.popleft()]
    there = chunk[0].made_bytes
    while alike and chunk[0].fits_in_rows and alike[0].fits_in_rows:
        more = [a + b for a, b in zip(there, alike[0].made_bytes, strict=True)]
        if max(more) > limit_bytes:
            break
        there = more
        chunk.append(alike.popleft())
    return chunk, there


def _calls_of(chunk: Sequence[_Update]) -> Sequence[Call]:
    """What runs `chunk`; what each call frees is found out by `_freeing`."""
    first = chunk[0].calls
    if len(chunk) == 1:
        return first
    rows = rows_of([update.calls for update in chunk])
    return [replace(chunk[-1].calls[-1], is_plain=False, is_new=False, writes=(), rows=rows)]


def _freeing(calls: Sequence[Call], before: Sequence[Call]) -> list[Call]:
    """`calls`, which do what those `before` did, each with what nobody needs behind it."""
    dying = {node for call in before for node in call.done_with}
    found = []
    for call in reversed(calls):
        used = {value for node in call.nodes for value in (node, *node.all_input_nodes)}
        done_with = (used & dying) - _hidden(call)
        dying -= done_with
        found.append(replace(call, done_with=tuple(done_with)))
    return found[::-1]


def _bytes_of(value: torch.Tensor) -> int:
    """Of a value of known size; `nbytes` is not told where torch keeps sizes as symbols."""
    return int(value.numel() * value.element_size())


def _hidden(call: Call) -> set[fx.Node]:
    """The nodes whose results are in rows alone."""
    kept = {node for row in call.rows for _, node in row.kept}
    return set(call.nodes) - kept - {call.node}


class PlannedPeak:
    """What a plan has alive on the device.

    By op there, `param_of` names the parameter that it updates, `used_bytes` is what is alive then;
    `peak_bytes` is the most that the step has alive, which `is_peak_in_updates` alone or not.
    """

    def __init__(self, problem: Problem, plan: Plan) -> None:
        placed = place_plan(problem, plan)
        self._program, slots = placed.program, placed.device_bytes
        on_device, updates = placed.program.slot, placed.dataflow.updates
        self.param_of = {n: g.param for g in updates for n in g.ops if n in on_device}
        self.used_bytes = {name: slots[slot] for name, slot in on_device.items()}
        self.peak_bytes = max(slots)
        others = (used for name, used in self.used_bytes.items() if name not in self.param_of)
        self.is_peak_in_updates = self.peak_bytes > max(others, default=0)
        self._instances = placed.instances

    def are_independent(self, updates: Sequence[Sequence[str]]) -> bool:
        """Whether no update, given by its ops, touches a buffer that another of them writes."""
        touched_by: dict[str, int] = {}
        written_by: dict[str, int] = {}
        for number, names in enumerate(updates):
            touched, written = self._touched(names), self._written(names)
            if any(touched_by.get(buffer, number) != number for buffer in written):
                return False
            if any(written_by.get(buffer, number) != number for buffer in touched):
                return False
            touched_by |= dict.fromkeys(touched, number)
            written_by |= dict.fromkeys(written, number)
        return True

    def freed_bytes(self, updates: Sequence[Sequence[str]]) -> list[int]:
        """Of updates that stand side by side, what each alone touches and was there before them.

        Where it is gone after them.
        """
        slots = [self._program.slot[name] for names in updates for name in names]
        first, end = min(slots), max(slots) + 1
        freed: Counter[str] = Counter()
        for held in self._instances:
            if held.first < first < held.last <= end:
                freed[held.buffer.name] += held.buffer.nbytes
        touched = [self._touched(names) for names in updates]
        users = Counter(buffer for buffers in touched for buffer in buffers)
        return [sum(freed[b] for b in buffers if users[b] == 1) for buffers in touched]

    def _touched(self, names: Sequence[str]) -> set[str]:
        ops = [self._program.ops[self._program.slot[name]] for name in names]
        return {buffer for op in ops for buffer in (*op.reads, *op.writes)}

    def _written(self, names: Sequence[str]) -> set[str]:
        return {b for name in names for b in self._program.ops[self._program.slot[name]].writes}
