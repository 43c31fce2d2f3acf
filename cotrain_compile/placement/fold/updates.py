"""Updates: the step in which an update is one op on all elements, behind one on numbers.

In: a Dataflow. Out: one with fewer ops. An optimizer is written as some twenty ops for each
parameter, which are more than half of all ops of a step, and a plan decides about updates as
wholes. Of each stretch of such ops those on all elements become one op, and those on single numbers
another before it. What these make for themselves is no buffer any more: the op has a workspace, in
which the update needs what it needs at its fullest as written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from cotrain_compile.dataflow import Buffer, Dataflow, Op, Role, SizeExpressions, UpdateGroup
from cotrain_compile.placement.fold.folded import Folded
from cotrain_compile.placement.pieces import by_element
from cotrain_compile.placement.remembered import once

# A folded update needs at most so many bytes of the device more than as written; else it stays.
EXCESS = 4096

# Ops that become one, and the bytes of what they make for themselves.
_Part = tuple[tuple[Op, ...], int]


@once
def folded_updates(dataflow: Dataflow) -> Folded:
    """The step with its updates folded."""
    folding = _Folding(dataflow)
    param_of = {name: group.param for group in dataflow.updates for name in group.ops}
    for param, stretch in groupby(dataflow.ops, key=lambda op: param_of.get(op.name, "")):
        folding.add(dataflow.update[param] if param else None, tuple(stretch))
    return folding.done()


class _Folding:
    """A step that is made anew, stretch after stretch."""

    def __init__(self, dataflow: Dataflow) -> None:
        self.dataflow = dataflow
        self.touching: dict[str, list[int]] = {}
        for at, op in enumerate(dataflow.ops):
            for name in op.touched:
                self.touching.setdefault(name, []).append(at)
        self.named = set(dataflow.checkpoints.values)
        for group in dataflow.updates:
            self.named.update((group.gradient, group.low_precision, *group.scalars, *group.recasts))
        self.ops: list[Op] = []
        self.parts: dict[str, tuple[str, ...]] = {}
        self.gone: set[str] = set()
        self.workspace: list[Buffer] = []

    def add(self, group: UpdateGroup | None, stretch: tuple[Op, ...]) -> None:
        """Add the next ops, all of them of the update of `group`, or of none."""
        parts = self._folded(group, stretch) if group is not None else None
        for ops, nbytes in parts or [((op,), 0) for op in stretch]:
            op = self._as_one(ops, nbytes) if len(ops) > 1 else ops[0]
            self.ops.append(op)
            self.parts[op.name] = tuple(each.name for each in ops)

    def done(self) -> Folded:
        """The step of all that was added."""
        dataflow = self.dataflow
        group_of = {name: group.param for group in dataflow.updates for name in group.ops}
        ops: dict[str, list[str]] = {}
        for op, of in self.parts.items():
            if of[0] in group_of:
                ops.setdefault(group_of[of[0]], []).append(op)
        updates = tuple(replace(group, ops=tuple(ops[group.param])) for group in dataflow.updates)
        buffers = (*(b for b in dataflow.buffers if b.name not in self.gone), *self.workspace)
        return Folded(
            replace(
                dataflow,
                ops=tuple(self.ops),
                buffers=buffers,
                updates=updates,
                expressions=SizeExpressions(),
            ),
            self.parts,
        )

    def _folded(self, group: UpdateGroup, stretch: tuple[Op, ...]) -> list[_Part] | None:
        """What becomes one op; None where that needs more memory, or another order.

        Or awaits an exchange, which others may go before.
        """
        on_all = {op.name for op in by_element(self.dataflow, group)} if group.elements else None
        elements = tuple(op for op in stretch if on_all is None or op.name in on_all)
        numbers = tuple(op for op in stretch if on_all is not None and op.name not in on_all)
        awaits = any(op.awaits or op.collective is not None for op in stretch)
        if awaits or not elements or self._depends(numbers, elements):
            return None
        inside = self._inside(numbers), self._inside(elements)
        outside = {name for op in stretch for name in op.touched}.difference(*inside)
        missing = self._most_bytes(stretch) - self._nbytes(outside)
        for_numbers = self._nbytes(inside[0])
        if missing < for_numbers - EXCESS:
            return None
        parts = (numbers, for_numbers), (elements, max(0, missing))
        return [part for part in parts if part[0]]

    def _depends(self, numbers: Sequence[Op], elements: Sequence[Op]) -> bool:
        """Whether any of `numbers` has to come after one of `elements`."""
        made = {name for op in elements for name in op.writes}
        taken = {name for op in elements for name in op.reads}
        reads = {name for op in numbers for name in op.reads}
        writes = {name for op in numbers for name in op.writes}
        first = {self.dataflow.position[op.name] for op in numbers}
        anew = {name for name in writes if self.touching[name][0] in first}
        anew -= {name for name in writes if self.dataflow.buffer[name].is_input}
        return not (reads | writes).isdisjoint(made) or not (writes - anew).isdisjoint(taken)

    def _inside(self, ops: Sequence[Op]) -> set[str]:
        """What `ops` make for themselves."""
        own = {self.dataflow.position[op.name] for op in ops}
        return {
            name
            for op in ops
            for name in op.writes
            if self.dataflow.buffer[name].role is Role.TEMPORARY
            and self.dataflow.buffer[name].is_passing
            and name not in self.named
            and own.issuperset(self.touching[name])
        }

    def _most_bytes(self, stretch: Sequence[Op]) -> int:
        """The most that is alive at once of all that the ops of a stretch touch."""
        begins = self.dataflow.position[stretch[0].name]
        alive = [0] * len(stretch)
        for name in {name for op in stretch for name in op.touched}:
            buffer, places = self.dataflow.buffer[name], self.touching[name]
            first = 0 if buffer.is_input else max(0, places[0] - begins)
            last = len(stretch) - 1 if buffer.is_output or buffer.is_input else places[-1] - begins
            for at in range(first, min(last + 1, len(stretch))):
                alive[at] += buffer.nbytes
        return max(alive)

    def _nbytes(self, names: set[str]) -> int:
        return sum(self.dataflow.buffer[name].nbytes for name in names)

    def _as_one(self, ops: Sequence[Op], nbytes: int) -> Op:
        """The op that does what `ops` do, called as the last of them."""
        inside, last = self._inside(ops), ops[-1]
        self.gone |= inside
        made = dict.fromkeys(name for op in ops for name in op.writes if name not in inside)
        if nbytes:
            self.workspace.append(Buffer(self._workspace_name(last), nbytes, Role.WORKSPACE))
            made[self.workspace[-1].name] = None
        return replace(
            last,
            reads=tuple(dict.fromkeys(n for op in ops for n in op.reads if n not in inside)),
            writes=tuple(made),
            flops=sum(op.flops for op in ops),
            bytes_moved=sum(op.bytes_moved for op in ops),
            cost_is_known=all(op.cost_is_known for op in ops),
        )

    def _workspace_name(self, op: Op) -> str:
        name = f"{op.name}.folded"
        while name in self.dataflow.buffer:  # a user's parameter may be called so
            name += "~"
        return name
