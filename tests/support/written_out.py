"""Written out: steps whose updates are written as optimizers are, with an op for each little thing.

In: a Dataflow with one op for each update. Out: the same step in which that op is some eight, on
all elements and on single numbers in turn, the last of them called as before.
"""

from __future__ import annotations

from dataclasses import replace

from cotrain_compile.dataflow import Buffer, Dataflow, Op, Phase, Role, UpdateGroup

ITEM = 4  # bytes


def written_out(dataflow: Dataflow, *, in_pieces: bool = True) -> Dataflow:
    """`dataflow` with each update written out, and elements told where it may go `in_pieces`."""
    ops: list[Op] = []
    buffers = [*dataflow.buffers]
    updates = {group.ops[-1]: group for group in dataflow.updates}
    groups: list[UpdateGroup] = []
    for op in dataflow.ops:
        if op.name not in updates:
            ops.append(op)
            continue
        group = updates[op.name]
        own = _Update(dataflow, group, op)
        ops += own.ops
        buffers += own.buffers
        names = (*group.ops[:-1], *(each.name for each in own.ops))
        groups.append(replace(group, ops=names, elements=own.elements if in_pieces else 0))
    in_order = {group.param: group for group in groups}
    return replace(
        dataflow,
        ops=tuple(ops),
        buffers=tuple(buffers),
        updates=tuple(in_order[group.param] for group in dataflow.updates),
    )


class _Update:
    """The ops and buffers of one update, written out."""

    def __init__(self, dataflow: Dataflow, group: UpdateGroup, op: Op) -> None:
        self.name = op.name
        self.ops: list[Op] = []
        self.buffers: list[Buffer] = []
        nbytes = dataflow.buffer[group.param].nbytes
        self.elements = nbytes // ITEM
        written = [name for name in op.writes if name != group.param]
        moments = [n for n in written if dataflow.buffer[n].nbytes >= self.elements]
        numbers = [name for name in written if name not in moments]
        reads = tuple(name for name in op.reads if name not in numbers)
        self._make("scale", reads, nbytes)
        for number in numbers:
            self._op(f"count_{number}", (number,), (number,))
            self._make(f"bias_{number}", (number,), ITEM)
        for moment in moments:
            self._op(f"decay_{moment}", (moment, f"{op.name}.scale"), (moment,))
        self._make("root", (*moments, f"{op.name}.scale"), nbytes)
        self._make("step", (f"{op.name}.root", *(f"{op.name}.bias_{n}" for n in numbers)), nbytes)
        self.ops.append(replace(op, reads=(*reads, f"{op.name}.step"), writes=(group.param,)))

    def _make(self, what: str, reads: tuple[str, ...], nbytes: int) -> None:
        self.buffers.append(Buffer(f"{self.name}.{what}", nbytes, Role.TEMPORARY))
        self._op(what, reads, (f"{self.name}.{what}",))

    def _op(self, what: str, reads: tuple[str, ...], writes: tuple[str, ...]) -> None:
        op = Op(f"{self.name}_{what}", "aten.mul.Tensor", Phase.OPTIMIZER, reads, writes, 10, 100)
        self.ops.append(op)
