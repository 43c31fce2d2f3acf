"""Rewrite: the step in which some forward values are made again, as a Dataflow.

In: a Dataflow and the names of buffers. Out: the Dataflow in which the ops that make them run again
right before the first op outside the forward that reads one of them, and all such ops read what is
made there. What is made `apart` has copies of its own of what it is made of, which nobody else
reads: they are gone at once, and whoever needs such a value, too, makes it once more. A gather that
runs again begins before the wait for the one before it. Schedule,
simulation, check and replay see nothing but that step. The pass `recompute_values` does the same to
the graph, and a law says that the two agree.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from cotrain_compile.dataflow import Dataflow, Op, Phase, Role, SizeExpressions
from cotrain_compile.placement.recompute.recomputable import BY_MASK, as_again
from cotrain_compile.placement.remembered import remembered

# What the name of an op that runs again ends with, behind the name of the op.
SUFFIX = "_recomputed"
_NOTHING: Mapping[str, str] = {}


def recomputed(dataflow: Dataflow, names: Iterable[str], apart: Iterable[str] = ()) -> Dataflow:
    """The step in which the buffers `names` are made again for what follows the forward.

    Their makers run again with all that they make; what else they read is kept for that, or is
    among `names` itself. Each op runs again at most once, and once more for each of those `names`
    that are made `apart` and need it. The fingerprint stays that of the step.
    """
    chosen = frozenset(names)
    return _rewritten(dataflow, (chosen, frozenset(apart)))[0] if chosen else dataflow


def recomputed_ops(
    dataflow: Dataflow, names: Iterable[str], apart: Iterable[str] = ()
) -> Mapping[str, str]:
    """By the name of each op that runs again in `recomputed` of the same, that of the first.

    In the order in which they run.
    """
    chosen = frozenset(names)
    return _rewritten(dataflow, (chosen, frozenset(apart)))[1] if chosen else {}


@remembered
def _rewritten(
    dataflow: Dataflow, chosen: tuple[frozenset[str], frozenset[str]]
) -> tuple[Dataflow, Mapping[str, str]]:
    rewriting = _Rewriting(dataflow, *chosen)
    made = rewriting.run()
    return made, rewriting.runs


@dataclass
class _Rewriting:
    """`copied` and `again` have what all read, by what it is a copy of; `values` and `runs` have
    for each copy what it is one of."""

    dataflow: Dataflow
    names: frozenset[str]
    apart: frozenset[str]
    ops: list[Op] = field(default_factory=list)
    copied: dict[str, str] = field(default_factory=dict)
    again: dict[str, str] = field(default_factory=dict)
    values: dict[str, str] = field(default_factory=dict)
    runs: dict[str, str] = field(default_factory=dict)

    def run(self) -> Dataflow:
        maker = {
            name: op
            for op in self.dataflow.ops
            if op.phase is Phase.FORWARD
            for name in op.writes
            if name in self.names and not op.awaits
        }
        for op in self.dataflow.ops:
            if op.phase is not Phase.FORWARD and not self.names.isdisjoint(op.reads):
                for name in op.reads:
                    if name in maker:
                        self._make_again(name, maker)
                reads = self._mapped(op.reads)
                if reads != op.reads:
                    op = replace(op, reads=reads)
            self.ops.append(op)
        self._gather_ahead()
        copies = [
            replace(self.dataflow.buffer[old], name=new, is_output=False)
            for new, old in self.values.items()
        ]
        return replace(
            self.dataflow,
            ops=tuple(self.ops),
            buffers=(*self.dataflow.buffers, *copies),
            expressions=self._expressions(),
        )

    def _make_again(self, name: str, maker: Mapping[str, Op]) -> None:
        """Run the op again that made `name`, and before it what that reads, where it is chosen."""
        waiting = [name]
        while waiting:
            op = maker.get(waiting[-1])
            if op is None or op.name in self.again:
                waiting.pop()
                continue
            if not self.apart.isdisjoint(op.writes):
                waiting.pop()
                self._make_apart(op, maker)
                continue
            missing = [read for read in op.reads if self._is_missing(read, maker)]
            if missing:
                waiting += reversed(missing)
                continue
            waiting.pop()
            self._copy(op, again_name(op.name), self.copied)

    def _make_apart(self, last: Op, maker: Mapping[str, Op]) -> None:
        """Run `last` again, and before it what is missing for that, which nobody else reads.

        But for gathers, which come first: what they bring is for all.
        """
        for op in self._missing_for(last, maker):
            if op.collective is not None:
                self._make_again(op.writes[0], maker)
        own = dict[str, str]()
        for op in self._missing_for(last, maker):
            self._copy(op, again_name(op.name, last.name), own, own)
        self._copy(last, again_name(last.name), self.copied, own)

    def _missing_for(self, last: Op, maker: Mapping[str, Op]) -> Sequence[Op]:
        """The ops that have to run again before `last` does, in their order."""
        waiting, found = [last], dict[str, Op]()
        while waiting:
            op = waiting[-1]
            reads = (read for read in op.reads if self._is_missing(read, maker))
            missing = [maker[read] for read in reads if maker[read].name not in found]
            if missing:
                waiting += reversed(missing)
                continue
            found[waiting.pop().name] = op
        found.pop(last.name)
        return tuple(found.values())

    def _is_missing(self, name: str, maker: Mapping[str, Op]) -> bool:
        return name in maker and maker[name].name not in self.again

    def _copy(
        self, op: Op, copy: str, made: dict[str, str], own: Mapping[str, str] = _NOTHING
    ) -> None:
        """Run `op` again as `copy`, on its `own` copies before those for all; note what it has
        `made`."""
        op = as_again(op)
        self.runs[copy] = op.name
        if made is self.copied:
            self.again[op.name] = copy
        reads = tuple(
            own.get(name) or read
            for name, read in zip(op.reads, self._mapped(op.reads), strict=True)
        )
        writes = []
        for name in op.writes:
            if self.dataflow.buffer[name].role is Role.GROUP:
                writes.append(name)
                continue
            part = "" if op.target == BY_MASK else name.removeprefix(op.name).rstrip("~")
            writes.append(self._unused(copy + part))
            made[name] = writes[-1]
            self.values[writes[-1]] = name
        self.ops.append(
            replace(op, name=copy, phase=Phase.BACKWARD, reads=reads, writes=tuple(writes))
        )
        if op.collective is not None:
            self._await_again(op)

    def _await_again(self, gather: Op) -> None:
        (wait,) = [op for op in self.dataflow.ops if op.awaits == gather.name]
        self.again[wait.name] = again_name(wait.name)
        self.runs[again_name(wait.name)] = wait.name
        copy = replace(
            wait,
            name=again_name(wait.name),
            phase=Phase.BACKWARD,
            reads=self._mapped(wait.reads),
            writes=self._mapped(wait.writes),
            awaits=again_name(gather.name),
        )
        self.ops.append(copy)

    def _gather_ahead(self) -> None:
        """Let each gather that runs again begin before the wait for the one before it.

        But for one that reads what is made again itself.
        """
        again, made = set(self.again.values()), set(self.copied.values())
        waits = [op for op in self.ops if op.awaits and op.name in again]
        if len(waits) < 2:
            return
        begins = {op.name: op for op in self.ops if op.collective is not None}
        early = {
            before.name: begins[wait.awaits]
            for before, wait in pairwise(waits)
            if made.isdisjoint(begins[wait.awaits].reads)
        }
        moved = {op.name for op in early.values()}
        self.ops = [
            op
            for each in self.ops
            if each.name not in moved
            for op in (*([early[each.name]] if each.name in early else ()), each)
        ]

    def _unused(self, name: str) -> str:
        while name in self.dataflow.buffer:
            name += "~"
        return name

    def _mapped(self, reads: Iterable[str]) -> tuple[str, ...]:
        """`reads` of an op outside the forward."""
        return tuple(self.copied.get(name, name) if name in self.names else name for name in reads)

    def _expressions(self) -> SizeExpressions:
        of = self.dataflow.expressions
        return SizeExpressions(
            _with_copies(of.buffer_nbytes, self.values),
            _with_copies(of.op_flops, self.runs),
            _with_copies(of.op_bytes_moved, self.runs),
        )


def again_name(op: str, last: str = "") -> str:
    """The name of the op that does the work of `op` again, for `last` alone where that is one."""
    return f"{op}{SUFFIX}_for_{last}" if last else op + SUFFIX


def is_again(name: str, ops: Container[str]) -> bool:
    """Whether an op of that name does the work of one of `ops` again."""
    return name.partition(SUFFIX)[0] in ops and SUFFIX in name and name not in ops


def _with_copies(texts: Mapping[str, str], copies: Mapping[str, str]) -> Mapping[str, str]:
    added = {new: texts[old] for new, old in copies.items() if old in texts}
    return {**texts, **added}
