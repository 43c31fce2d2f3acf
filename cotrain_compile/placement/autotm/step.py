"""The step as AutoTM's program sees it: slots, tensors that may move, device memory at each op.

In: a `Problem`. Out: a `Step`. Slots are single ops, or short runs of ops where a step has many;
the last slot is the end of the step, where no op runs. No solver.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from cotrain_compile.dataflow import PERSISTENT_ROLES, Buffer, Role, UpdateGroup
from cotrain_compile.placement.problem import Problem

# A longer step is cut into about so many slots: the program grows with tensors times slots.
MAX_SLOTS = 48


class TensorKind(StrEnum):
    """What a tensor is. STATES are all states of one parameter: they rest and travel together."""

    ACTIVATION = "activation"
    GRADIENT = "gradient"
    PARAM = "param"
    STATES = "states"


@dataclass(frozen=True)
class Tensor:
    """Something that may move, alive at the ops `born` to `dies`, on a path from slot `first` to
    slot `last`.

    `uses` has the slots in which an op touches it, and whether one writes it there; ops of the
    tensor's own update, which may run on the host, count in `update_uses` instead. `param` is the
    parameter it belongs to, or "".
    """

    kind: TensorKind
    buffers: tuple[Buffer, ...]
    param: str
    born: int
    dies: int
    first: int
    last: int
    uses: Mapping[int, bool]
    update_uses: Mapping[int, bool]

    @property
    def name(self) -> str:
        return self.buffers[0].name

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers)

    @property
    def persists(self) -> bool:
        """Whether it outlives the step, so that it has a home."""
        return persists(self.buffers[0])

    @cached_property
    def touched(self) -> frozenset[int]:
        """Slots in which any op touches it."""
        return frozenset({*self.uses, *self.update_uses})

    @property
    def leaves(self) -> int:
        """The last slot in which it must be somewhere. A gradient may be gone after its last use;
        from then on its path only says whether the host has a copy."""
        if self.kind is TensorKind.GRADIENT and not self.persists:
            return max(self.touched, default=self.last)
        return self.last


def persists(buffer: Buffer) -> bool:
    """Whether the device or the host holds `buffer` when the step ends."""
    return buffer.is_input or buffer.is_output or buffer.role in PERSISTENT_ROLES


class MemoryRow(NamedTuple):
    """Memory at op `op`: `fixed_bytes`, `tensors` that are alive, and what device updates make."""

    op: int
    fixed_bytes: int
    tensors: frozenset[str]
    made: frozenset[str]


class Step:
    """Slots, tensors and memory rows of a problem's step.

    `unit_s` and `unit_bytes` are what the program counts in: bytes and seconds as such are numbers
    too far apart for a solver. A power of two divides bytes without rounding.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem, self.dataflow = problem, problem.dataflow
        self.group_of = {op: g.param for g in self.dataflow.updates for op in g.ops}
        self.slot_of = self._slots()
        self.end = self.slot_of[-1]
        self.unit_s = sum(problem.costs.device_s.values()) / 1000 or 1e-3
        largest = max((buffer.nbytes for buffer in self.dataflow.buffers), default=0)
        self.unit_bytes = min(1 << 20, 1 << max(largest.bit_length() - 1, 0))

    @cached_property
    def touches(self) -> Mapping[str, Mapping[int, bool]]:
        """Ops that touch each buffer, by index, and whether they write it."""
        found: dict[str, dict[int, bool]] = {b.name: {} for b in self.dataflow.buffers}
        for index, op in enumerate(self.dataflow.ops):
            for name in {*op.reads, *op.writes}:
                found[name][index] = name in op.writes
        return found

    def _slots(self) -> list[int]:
        """Slot of each op, and of the end of the step.

        Where ops must share, a slot is full when its share of all time and of all bytes touched is
        used up; the ops of one update stay together, and apart from the ops of no update.
        """
        ops, seconds = self.dataflow.ops, self.problem.costs.device_s
        if len(ops) <= MAX_SLOTS:
            return list(range(len(ops) + 1))
        touched = [sum(self.dataflow.buffer[n].nbytes for n in {*o.reads, *o.writes}) for o in ops]
        total_s, total_bytes = sum(seconds.values()) or 1.0, sum(touched) or 1
        slots, share = [0], 0.0
        for index, (before, op) in enumerate(pairwise(ops)):
            share += seconds[before.name] / total_s + touched[index] / total_bytes
            old, new = self.group_of.get(before.name), self.group_of.get(op.name)
            is_full = share >= 2 / MAX_SLOTS and (new is None or old != new)
            is_cut = is_full or (old is None) != (new is None)
            slots.append(slots[-1] + is_cut)
            share = 0.0 if is_cut else share
        return [*slots, slots[-1] + 1]

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """Everything that may move: parameters, their states and gradients, and temporaries that
        no op touches for at least one slot between two that do."""
        buffer = self.dataflow.buffer
        gradients = {g.gradient: g.param for g in self.dataflow.updates}
        copies = {g.low_precision: g.param for g in self.dataflow.updates}
        found = []
        for group in self.dataflow.updates:
            states = tuple(buffer[name] for name in group.states)
            if states:
                found.append(self._tensor(TensorKind.STATES, states, group.param))
        for item in self.dataflow.buffers:
            if item.name in gradients:
                found.append(self._tensor(TensorKind.GRADIENT, (item,), gradients[item.name]))
            elif item.role is Role.PARAM:
                found.append(self._tensor(TensorKind.PARAM, (item,), item.name))
            elif item.nbytes and not persists(item) and not self._maker(item) and self._idles(item):
                found.append(
                    self._tensor(TensorKind.ACTIVATION, (item,), copies.get(item.name, ""))
                )
        return {tensor.name: tensor for tensor in found}

    def _idles(self, buffer: Buffer) -> bool:
        slots = [self.slot_of[index] for index in self.touches[buffer.name]]
        return any(after > before + 1 for before, after in pairwise(slots))

    def _tensor(self, kind: TensorKind, buffers: tuple[Buffer, ...], param: str) -> Tensor:
        group = self.dataflow.update.get(param)
        own_ops = set(group.ops) if group else set()
        uses: dict[int, bool] = {}
        update_uses: dict[int, bool] = {}
        touches = [touch for b in buffers for touch in self.touches[b.name].items()]
        for index, writes in touches:
            found = update_uses if self.dataflow.ops[index].name in own_ops else uses
            slot = self.slot_of[index]
            found[slot] = found.get(slot, False) or writes
        count = len(self.dataflow.ops)
        stays = persists(buffers[0])
        born = 0 if stays else min((index for index, _ in touches), default=count)
        # A host update after the gradient's last slot still reads its copy, so its path goes on.
        dies = count if stays or kind is TensorKind.GRADIENT else max(index for index, _ in touches)
        first, last = self.slot_of[born], self.slot_of[dies]
        return Tensor(kind, buffers, param, born, dies, first, last, uses, update_uses)

    def _maker(self, buffer: Buffer) -> str:
        """The parameter whose update alone touches the temporary `buffer`; "" if there is none."""
        if persists(buffer):
            return ""
        makers = {
            self.group_of.get(self.dataflow.ops[i].name, "") for i in self.touches[buffer.name]
        }
        return makers.pop() if len(makers) == 1 else ""

    @cached_property
    def made_by(self) -> Mapping[str, str]:
        """Temporaries that exist only within one update, with its parameter."""
        makers = {b.name: self._maker(b) for b in self.dataflow.buffers}
        return {name: param for name, param in makers.items() if param and name not in self.tensors}

    @cached_property
    def place(self) -> Mapping[str, int]:
        """The slot in which each update ends where the step has it, by parameter."""
        return {g.param: self.slot_of[self._last_op(g)] for g in self.dataflow.updates}

    @cached_property
    def window(self) -> Mapping[str, range]:
        """Slots beside which the host can run each update, by parameter.

        Its gradient and scalars are complete by then, what it overwrites has been read, and nothing
        has asked for the result.
        """
        return {group.param: self._window(group) for group in self.dataflow.updates}

    def _window(self, group: UpdateGroup) -> range:
        place = self._last_op(group)
        overwritten = {group.param, *group.states}
        begin, limit = 0, self.end + 1
        for name in {*overwritten, group.gradient, *group.scalars}:
            for index, writes in self.touches[name].items():
                if self.group_of.get(self.dataflow.ops[index].name) == group.param:
                    continue
                if writes or name in overwritten:
                    if index > place:
                        limit = min(limit, self.slot_of[index])
                    else:
                        begin = max(begin, self.slot_of[index] + 1)
        return range(begin, limit)

    def _last_op(self, group: UpdateGroup) -> int:
        return max(self.dataflow.position[name] for name in group.ops)

    @cached_property
    def rows(self) -> list[MemoryRow]:
        """Memory at the ops and at the end, without the ops that another of the slot outweighs."""
        kept: dict[int, list[MemoryRow]] = defaultdict(list)
        for row in sorted(self._all_rows(), key=lambda r: (-r.fixed_bytes, -len(r.tensors))):
            others = kept[self.slot_of[row.op]]
            if not any(row.tensors <= o.tensors and row.made <= o.made for o in others):
                others.append(row)
        return [row for slot in sorted(kept) for row in kept[slot]]

    def _all_rows(self) -> Iterator[MemoryRow]:
        count = len(self.dataflow.ops)
        fixed = [0] * (count + 1)
        alive: list[set[str]] = [set() for _ in fixed]
        made: list[set[str]] = [set() for _ in fixed]
        members = {b.name for t in self.tensors.values() for b in t.buffers}
        for tensor in self.tensors.values():
            for index in range(tensor.born, tensor.dies + 1):
                alive[index].add(tensor.name)
        for buffer in self.dataflow.buffers:
            if buffer.name in members:
                continue
            for index in self._span(buffer):
                if buffer.name in self.made_by:
                    made[index].add(buffer.name)
                else:
                    fixed[index] += buffer.nbytes
        for index, nbytes in enumerate(fixed):
            yield MemoryRow(index, nbytes, frozenset(alive[index]), frozenset(made[index]))

    def _span(self, buffer: Buffer) -> range:
        """Ops at which the device holds a buffer that never moves."""
        touches, end = self.touches[buffer.name], len(self.dataflow.ops) + 1
        if buffer.is_input or buffer.role in PERSISTENT_ROLES:
            return range(end)
        if not touches:
            return range(0)
        return range(min(touches), end if buffer.is_output else max(touches) + 1)
