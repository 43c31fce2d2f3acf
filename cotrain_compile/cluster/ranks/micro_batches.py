"""Micro-batches: a step of one micro-batch, as the step of several of them one behind the other.

In: the step of a rank, with numbers for sizes, whose gradients have the type of their parameters.
Out: the step that runs its forward and backward for each micro-batch, adds gradients up, and
updates once behind the last, as a captured loop over micro-batches does. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from cotrain_compile.dataflow import Buffer, Dataflow, Op, Phase, Role
from cotrain_compile.machine.op_classes import OpKind

# What is there once for each micro-batch: its samples, and all that is made of them.
_OWN = frozenset({Role.BATCH, Role.TEMPORARY, Role.WORKSPACE})


def in_micro_batches(step: Dataflow, count: int) -> Dataflow:
    """`step` for so many micro-batches of its batch; `step` itself for one."""
    if count == 1:
        return step
    made = [_MicroBatch(step, i) for i in range(count)]
    last = made[-1]
    ops = [op for copy in made for op in copy.ops(copy is last)]
    updates = tuple(
        replace(group, gradient=last.summed[group.gradient], low_precision="")
        for group in step.updates
    )
    values = step.checkpoints.values
    again = tuple(copy.own.get(name, name) for copy in made for name in values)
    return replace(
        step,
        fingerprint=f"{count}.{step.fingerprint}",
        ops=tuple(ops),
        buffers=tuple(_buffers(step, made)),
        updates=updates,
        checkpoints=replace(step.checkpoints, values=again),
    )


class _MicroBatch:
    """The ops of one micro-batch, by names of its own."""

    def __init__(self, step: Dataflow, number: int) -> None:
        self.step, self.number = step, number
        early = [op for op in step.ops if op.phase is not Phase.OPTIMIZER]
        touched = {name for op in early for name in (*op.reads, *op.writes)}
        self.own: Mapping[str, str] = {
            name: self._named(name) for name in touched if step.buffer[name].role in _OWN
        }
        self._begun = {op.name: self._named(op.name) for op in early}
        self._complete = {
            name: op.name for op in early for name in op.writes if name in self._gradients
        }
        self.summed = {name: self._sum(name, number) for name in self._gradients}

    @property
    def _gradients(self) -> set[str]:
        return {group.gradient for group in self.step.updates}

    def _named(self, name: str) -> str:
        return f"{name}.batch{self.number}"

    def _sum(self, gradient: str, number: int) -> str:
        """That of the micro-batches up to one; of the first its gradient itself."""
        return f"{gradient}.sum{number}" if number else f"{gradient}.batch0"

    def ops(self, is_last: bool) -> Iterator[Op]:
        """With the optimizer's behind the last one's."""
        for op in self.step.ops:
            if op.phase is Phase.OPTIMIZER:
                if is_last:
                    yield self._renamed(op, {**self.own, **self.summed})
                continue
            yield replace(
                self._renamed(op, self.own),
                name=self._begun[op.name],
                awaits=self._begun.get(op.awaits, ""),
            )
            for name in dict.fromkeys(op.writes):
                if self.number and self._complete.get(name) == op.name:
                    yield self._add(name, op)

    def _renamed(self, op: Op, names: Mapping[str, str]) -> Op:
        reads = tuple(names.get(name, name) for name in op.reads)
        return replace(op, reads=reads, writes=tuple(names.get(name, name) for name in op.writes))

    def _add(self, gradient: str, maker: Op) -> Op:
        reads = (self._sum(gradient, self.number - 1), self.own[gradient])
        nbytes = 3 * self.step.buffer[gradient].nbytes
        made = self.summed[gradient]
        return Op(
            f"add.{made}",
            "add",
            maker.phase,
            reads,
            (made,),
            bytes_moved=nbytes,
            kind=OpKind.POINTWISE,
        )


def _buffers(step: Dataflow, copies: list[_MicroBatch]) -> Iterator[Buffer]:
    for buffer in step.buffers:
        named = [copy.own[buffer.name] for copy in copies if buffer.name in copy.own]
        for name in named or [buffer.name]:
            yield replace(buffer, name=name)
        for copy in copies[1:]:
            if buffer.name in copy.summed:
                yield replace(buffer, name=copy.summed[buffer.name])
