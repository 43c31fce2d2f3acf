"""Rewrite: the step in which the ops of some regions run in parts, as a Dataflow.

In: a Dataflow and in how many parts each region is to run. Out: the Dataflow in which every window
of the region is its parts, one behind the other: what the rest of the step reads is made room for
first, and each part puts its rows there or adds to the sum. Views are the graph's, and no ops here.
Recomputation, schedule, simulation and check see nothing but that step. The pass `split_ops` does
the same to the graph, and a law says that the two agree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from cotrain_compile.dataflow import Buffer, Dataflow, Op, Phase, Role, UpdateGroup
from cotrain_compile.dataflow.regions import (
    Collected,
    Counted,
    Ends,
    Region,
    RegionOp,
    Window,
    collect_name,
    counts_name,
    ends_name,
    part_name,
    part_rows,
    shifted_name,
    sum_name,
)
from cotrain_compile.machine.op_classes import OpKind
from cotrain_compile.placement.remembered import remembered

ZEROS, EMPTY = "aten.zeros.default", "aten.empty.memory_format"
ADD, COPY, CONVERT = "aten.add_.Tensor", "aten.copy_.default", "aten._to_copy.default"
DIVIDE, COUNTS, COUNT = "aten.div.Tensor", "aten.ne.Scalar", "aten.sum.dim_IntList"
FULL = "aten.full.default"
SHIFT, HOLD = "aten.sub.Tensor", "aten.clamp.default"
_Rows = tuple[int, ...]  # of each part
KINDS = {EMPTY: OpKind.UNSAID, COUNT: OpKind.REDUCTION}  # the others go element by element


def split_regions(dataflow: Dataflow, parts: Mapping[str, int]) -> Dataflow:
    """The step in which each region of `dataflow.regions` named in `parts` runs in so many parts.

    One part is the step as it is. Raises ValueError where a region is not one of the step's.
    """
    known = {region.name: region for region in dataflow.regions}
    unknown = parts.keys() - known.keys()
    if unknown:
        raise ValueError(f"the step has no region {sorted(unknown)[0]} that runs in parts")
    all_rows = ((name, part_rows(known[name].length, parts[name])) for name in sorted(parts))
    rows = tuple((name, each) for name, each in all_rows if len(each) > 1)
    return _split(dataflow, rows) if rows else dataflow


@remembered
def _split(dataflow: Dataflow, rows: tuple[tuple[str, _Rows], ...]) -> Dataflow:
    known = {region.name: region for region in dataflow.regions}
    waiting = [(known[name], each) for name, each in rows]
    while waiting:
        together, waiting = _apart(dataflow, waiting)
        dataflow = _Split(dataflow, together).run()
    return dataflow


def _apart(
    dataflow: Dataflow, regions: Sequence[tuple[Region, _Rows]]
) -> tuple[list[tuple[Region, _Rows]], list[tuple[Region, _Rows]]]:
    """The first of `regions` and those whose windows are apart from one another; the others."""
    together, others = list[tuple[Region, _Rows]](), list[tuple[Region, _Rows]]()
    taken = list[tuple[int, int]]()
    at = dataflow.position
    for region, rows in regions:
        spans = [(at[w.ops[0].name], at[w.ops[-1].name]) for w in region.windows]
        if any(a <= end and begin <= b for a, b in spans for begin, end in taken):
            others.append((region, rows))
        else:
            together.append((region, rows))
            taken += spans
    return together, others


class _Split:
    """A step with some of its regions in parts, whose windows are apart."""

    def __init__(self, dataflow: Dataflow, regions: Sequence[tuple[Region, _Rows]]) -> None:
        self.dataflow, self.renamed = dataflow, dict[str, str]()
        self.regions = [_Parts(dataflow, *each, self.renamed) for each in regions]
        for parts in self.regions:
            self.renamed |= parts.own_names
        self.maker = {name: parts for parts in self.regions for name in parts.maker}

    def run(self) -> Dataflow:
        gone = self.maker.keys() - self.renamed.keys()
        kept = [
            replace(b, name=self.renamed[b.name]) if b.name in self.renamed else b
            for b in self.dataflow.buffers
            if b.name not in gone
        ]
        ops = tuple(self._ops())
        marked, done = self.dataflow.checkpoints, {parts.region.name for parts in self.regions}
        return replace(
            self.dataflow,
            ops=ops,
            buffers=(*kept, *(buffer for parts in self.regions for buffer in parts.added)),
            updates=tuple(map(self._update, self.dataflow.updates)),
            checkpoints=replace(marked, values=tuple(self._pieces(marked.values))),
            regions=tuple(r for r in self.dataflow.regions if r.name not in done),
        )

    def _ops(self) -> Iterator[Op]:
        begins = {
            window.ops[0].name: (parts, window)
            for parts in self.regions
            for window in parts.region.windows
        }
        items = {counted.value for parts in self.regions for counted in parts.counted.values()}
        waiting = list[Op]()
        parts, window = None, None
        for op in self.dataflow.ops:
            if op.name in begins:
                parts, window = begins[op.name]
                inside, later = {each.name for each in parts.region.ops}, frozenset(window.later)
            if op.name in items:
                continue
            if parts is None or window is None:
                yield self._outside(op)
            elif op.name in inside:
                for counted in window.counted:
                    if counted.op == op.name:
                        yield from parts.count(counted, window)
            elif op.name in later:
                waiting.append(self._outside(op))
            else:
                yield parts.filled(op) if op.name in window.unread else self._outside(op)
            if parts is not None and window is not None and op.name == window.ops[-1].name:
                yield from parts.of_window(window)
                yield from waiting
                parts, window, waiting = None, None, []

    def _outside(self, op: Op) -> Op:
        if self.renamed.keys().isdisjoint((*op.reads, *op.writes)):
            return op
        return replace(op, reads=self._whole(op.reads), writes=self._whole(op.writes))

    def _update(self, group: UpdateGroup) -> UpdateGroup:
        if self.renamed.keys().isdisjoint((group.gradient, *group.scalars)):
            return group
        (gradient,) = self._whole((group.gradient,))
        return replace(group, gradient=gradient, scalars=self._whole(group.scalars))

    def _whole(self, names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(self.renamed.get(name, name) for name in names)

    def _pieces(self, names: tuple[str, ...]) -> Iterator[str]:
        for name in names:
            if name in self.maker and name not in self.renamed:
                yield from self.maker[name].pieces(name)
            else:
                yield self.renamed.get(name, name)


class _Parts:
    """One region in parts. `renamed` has what any region makes that the rest of the step reads."""

    def __init__(
        self, dataflow: Dataflow, region: Region, rows: _Rows, renamed: Mapping[str, str]
    ) -> None:
        self.dataflow, self.region, self.rows, self.renamed = dataflow, region, rows, renamed
        self.sliced = frozenset(region.sliced)
        self.collected = {c.buffer: (c, w) for w in region.windows for c in w.collected}
        self.maker = {
            name: op.name
            for op in region.ops
            for name in dataflow.ops[dataflow.position[op.name]].writes
        }
        self.counted = {c.buffer: c for w in region.windows for c in w.counted}
        self.own_names = {name: c.room for name, (c, _) in self.collected.items()}
        self.own_names |= {name: c.value for name, c in self.counted.items()}
        self.ends = {ends.buffer: ends for ends in region.ends}
        self.added: list[Buffer] = []

    def pieces(self, name: str) -> Iterator[str]:
        """What the parts have of a buffer of the region."""
        return (self._piece(name, part) for part in range(len(self.rows)))

    def filled(self, op: Op) -> Op:
        """An op that looks at the shape of what it reads alone, without that."""
        nbytes = sum(map(self._nbytes, op.writes))
        return replace(op, target=FULL, reads=(), bytes_moved=nbytes, kind=OpKind.POINTWISE)

    def of_window(self, window: Window) -> Iterator[Op]:
        for result in window.collected:
            yield self._room(result, window)
        for part in range(len(self.rows)):
            for op in window.ops:
                for ends in self.region.ends:
                    if ends.op == op.name:
                        yield from self._ends_of(ends, part, window)
                if self._op(op.name).writes:
                    yield self._part(op, part, window)
                for result in window.collected:
                    if result.value == op.name and not result.at_end:
                        yield self._collect(result, part, window)
            for result in window.collected:
                if result.at_end:
                    yield self._collect(result, part, window)
        for result in window.collected:
            if result.sum_nbytes:
                yield self._rounded(result, window)

    def _part(self, of: RegionOp, part: int, window: Window) -> Op:
        op = self._op(of.name)
        for name in op.writes:
            if name in self.maker:
                buffer = self.dataflow.buffer[name]
                self.added.append(
                    replace(
                        buffer,
                        name=self._piece(name, part),
                        nbytes=self._share(buffer.nbytes, part)
                        if name in self.sliced
                        else buffer.nbytes,
                        role=buffer.role if buffer.role is Role.WORKSPACE else Role.TEMPORARY,
                        is_output=False,
                        param="",
                    )
                )
        return replace(
            self._phased(op, window),
            name=part_name(op.name, part),
            reads=tuple(self._read(name, part, window) for name in op.reads),
            writes=tuple(self._piece(name, part) for name in op.writes),
            flops=self._share(op.flops, part),
            bytes_moved=of.whole_bytes + self._share(op.bytes_moved - of.whole_bytes, part),
        )

    def _read(self, name: str, part: int, window: Window) -> str:
        """What a part reads of a buffer: its piece, or the whole that another window has made."""
        if name in self.ends:
            return ends_name(self.ends[name].value, part)
        if name not in self.maker:
            return self.renamed.get(name, name)
        found = self.collected.get(name)
        elsewhere = name in self.counted or (found is not None and found[1] is not window)
        return self.renamed[name] if elsewhere else self._piece(name, part)

    def _piece(self, name: str, part: int) -> str:
        op = self.maker[name]
        return part_name(op, part) + name.removeprefix(op).rstrip("~")

    def _ends_of(self, ends: Ends, part: int, window: Window) -> Iterator[Op]:
        """Where groups of rows end in a part: from its first row on, and within its rows."""
        op = replace(self._phased(self._op(ends.op), window), flops=0, bytes_moved=2 * ends.nbytes)
        reads = self.renamed.get(ends.buffer, ends.buffer)
        names = shifted_name(ends.value, part), ends_name(ends.value, part)
        for name, target in zip(names, (SHIFT, HOLD), strict=True):
            self.added.append(Buffer(name, ends.nbytes, Role.TEMPORARY))
            yield replace(
                op,
                name=name,
                target=target,
                reads=(reads,),
                writes=(name,),
                dtype=ends.dtype,
                cost_is_known=True,
                kind=OpKind.POINTWISE,
            )
            reads = name

    def _room(self, result: Collected, window: Window) -> Op:
        """What makes room for a result: zeros to add to, or memory for rows."""
        name, nbytes = result.room, self._nbytes(result.buffer)
        dtype = result.dtype
        if result.sum_nbytes:
            name, nbytes, dtype = sum_name(result.value), result.sum_nbytes, "float32"
            self.added.append(Buffer(name, nbytes, Role.TEMPORARY))
        op = self._made(result, window, name, ZEROS if result.is_sum else EMPTY, nbytes)
        return replace(op, writes=(name,), dtype=dtype)

    def _collect(self, result: Collected, part: int, window: Window) -> Op:
        piece, nbytes = self._piece(result.buffer, part), self._nbytes(result.buffer)
        into = sum_name(result.value) if result.sum_nbytes else result.room
        if result.is_sum:
            moved = nbytes + 2 * (result.sum_nbytes or nbytes)
        else:
            moved = 3 * self._share(nbytes, part)
        target = ADD if result.is_sum else COPY
        op = self._made(result, window, collect_name(result.value, part), target, moved)
        dtype = "float32" if result.sum_nbytes else result.dtype
        return replace(op, reads=(into, piece), writes=(into,), dtype=dtype)

    def _rounded(self, result: Collected, window: Window) -> Op:
        moved = result.sum_nbytes + self._nbytes(result.buffer)
        reads: tuple[str, ...] = (sum_name(result.value),)
        target = CONVERT
        if result.divided_by:
            (counted,) = (c for c in self.counted.values() if c.value == result.divided_by)
            moved += self._nbytes(counted.buffer)
            reads, target = (*reads, result.divided_by), DIVIDE
        op = self._made(result, window, result.value, target, moved)
        return replace(op, reads=reads, writes=(result.value,), dtype=result.dtype)

    def count(self, counted: Counted, window: Window) -> Iterator[Op]:
        """How many rows count: of each whether it does, and the sum of that."""
        value, flags = counted.value, counts_name(counted.value)
        self.added.append(Buffer(flags, counted.targets, Role.TEMPORARY))
        op = replace(self._phased(self._op(value), window), flops=0)
        yield replace(
            op,
            name=flags,
            target=COUNTS,
            reads=(counted.reads,),
            writes=(flags,),
            bytes_moved=counted.nbytes + counted.targets,
            dtype="bool",
            kind=OpKind.POINTWISE,
        )
        yield replace(
            op,
            target=COUNT,
            reads=(flags,),
            writes=(value,),
            bytes_moved=counted.targets + self._nbytes(counted.buffer),
            dtype="float32",
            kind=KINDS[COUNT],
        )

    def _made(self, result: Collected, window: Window, name: str, target: str, moved: int) -> Op:
        op = self._phased(self._op(result.value), window)
        return replace(
            op,
            name=name,
            target=target,
            reads=(),
            writes=(),
            flops=0,
            bytes_moved=0 if target == EMPTY else moved,
            kind=KINDS.get(target, OpKind.POINTWISE),
        )

    def _phased(self, op: Op, window: Window) -> Op:
        return replace(op, phase=Phase.BACKWARD) if window.joined else op

    def _op(self, name: str) -> Op:
        return self.dataflow.ops[self.dataflow.position[name]]

    def _nbytes(self, name: str) -> int:
        return self.dataflow.buffer[name].nbytes

    def _share(self, amount: int, part: int) -> int:
        return amount * self.rows[part] // self.region.length
