"""Rank step: the step of one of several ranks that shard it, made of the step of one device.

In: a traced step with numbers for sizes, and how many ranks there are. Out: the step of one rank
with those sizes, as it is traced where the model is in `fully_shard`.

    parameter   rests in parts, and is gathered before the first op that reads it; the forward and
                the backward read what was gathered
    gradient    in the parameter's type, scattered once it is complete; what reads it in the
                optimizer reads the part of this rank
    update      its ops and its states are of the part

Each exchange is waited for at once: a plan moves it, and gathers again. The norm that clips has an
exchange of a few bytes, which is left out. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from cotrain_compile.cluster.rank_exchanges import Exchanges, Gradient
from cotrain_compile.dataflow import (
    Buffer,
    Collective,
    Dataflow,
    Op,
    Phase,
    Role,
    SizeExpressions,
    UpdateGroup,
)
from cotrain_compile.errors import OptionError

_GROUP = "group.ranks"
# What has no more is a scalar, and every rank has it.
_SCALAR_BYTES = 8


def rank_step(step: Dataflow, ranks: int) -> Dataflow:
    """The step of one of `ranks`; `step` itself where there is one.

    Raises OptionError where `step` is of several ranks already, keeps gradients between steps, or
    has an update that multiplies matrices.
    """
    _refuse(step)
    if ranks == 1:
        return step
    exchanges = Exchanges(step)
    order = _Order(exchanges, ranks)
    for op in step.ops:
        order.take(op)
    return _of_parts(step, order, exchanges.gradients)


def _refuse(step: Dataflow) -> None:
    if step.ranks > 1 or any(op.collective for op in step.ops):
        raise OptionError(
            "the step exchanges data between ranks already; give one that was traced for one device"
        )
    kept = [buffer.name for buffer in step.buffers if buffer.param]
    if kept:
        raise OptionError(
            f"the step finds or keeps gradients ({kept[0]}), which no rank has whole; trace a step "
            "that ends with optimizer.zero_grad()"
        )
    for group in step.updates:
        if any(step.ops[step.position[name]].flops for name in group.ops):
            raise OptionError(
                f"the update of {group.param} multiplies matrices, and no rank has its gradient "
                "whole; take an optimizer that works element by element"
            )


class _Order:
    """The ops of the rank, in order: those of the step, and exchanges where they are due."""

    def __init__(self, exchanges: Exchanges, ranks: int) -> None:
        self.exchanges, self.ranks = exchanges, ranks
        self.ops: list[Op] = []
        self.made: dict[str, Buffer] = {}
        self._held: list[Op] = []  # ops that wait for a part
        gradients = exchanges.gradients
        self._unmade = {each.part for each in gradients}
        self._parts = {name: each.part for each in gradients for name in each.replaced}
        self._casts = {each.ready: each.cast for each in gradients if each.cast}
        self._dropped = {name for each in gradients for name in each.dropped}
        gathered = exchanges.gathered.items()
        self._whole = {param: whole for whole, params in gathered for param in params}

    def take(self, op: Op) -> None:
        """The next op of the step."""
        if op.name in self._dropped:
            return
        in_place = self._parts if op.phase is Phase.OPTIMIZER else self._whole
        op = replace(op, reads=tuple(in_place.get(name, name) for name in op.reads))
        for whole in dict.fromkeys(op.reads):
            if whole in self.exchanges.gathered and whole not in self.made:
                self._gather(whole, op)
        self._add(op)
        if op.name in self._casts:
            self._add(replace(self._casts[op.name], phase=op.phase, module=op.module))
        for bucket in self.exchanges.scattered.get(op.name, ()):
            self._scatter(bucket, op)

    def part_bytes(self, nbytes: int) -> int:
        """What each rank has of so many bytes, the last part padded."""
        return -(-nbytes // self.ranks)

    def _gather(self, whole: str, reader: Op) -> None:
        params, size = self.exchanges.gathered[whole], self.exchanges.step.buffer
        nbytes = sum(size[param].nbytes for param in params)
        self.made[whole] = Buffer(whole, nbytes, Role.TEMPORARY)
        self._exchange("all_gather_into_tensor", params, (whole,), nbytes, reader)

    def _scatter(self, bucket: Sequence[Gradient], maker: Op) -> None:
        nbytes = 0
        for each in bucket:
            whole = self.exchanges.step.buffer[each.sent].nbytes
            self.made[each.part] = Buffer(each.part, self.part_bytes(whole), Role.TEMPORARY)
            nbytes += whole
        sent, parts = tuple(each.sent for each in bucket), tuple(each.part for each in bucket)
        self._exchange("reduce_scatter_tensor", sent, parts, nbytes, maker)
        self._unmade.difference_update(parts)
        held, self._held = self._held, []
        for op in held:
            self._add(op)

    def _exchange(
        self, kind: str, reads: tuple[str, ...], writes: tuple[str, ...], nbytes: int, near: Op
    ) -> None:
        """Begun and waited for; what it reads is held until then."""
        self.made.setdefault(_GROUP, Buffer(_GROUP, 0, Role.GROUP, is_input=True, is_output=True))
        begin = Op(
            f"{kind}.{writes[0]}",
            kind,
            near.phase,
            (*reads, _GROUP),
            (_GROUP, *writes),
            bytes_moved=nbytes + self.part_bytes(nbytes),
            module=near.module,
            collective=Collective(kind, self.ranks, nbytes),
        )
        wait = Op(
            f"wait.{begin.name}",
            "wait_tensor",
            near.phase,
            (*writes, *reads),
            writes,
            module=near.module,
            awaits=begin.name,
        )
        self.ops += [begin, wait]

    def _add(self, op: Op) -> None:
        """Now, or, if it waits for a part or for what is held, behind that."""
        made = {name for held in self._held for name in held.writes}
        touched = made.union(*(held.reads for held in self._held))
        if (self._unmade | made).intersection(op.reads) or touched.intersection(op.writes):
            self._held.append(op)
        else:
            self.ops.append(op)


def _of_parts(step: Dataflow, order: _Order, gradients: Sequence[Gradient]) -> Dataflow:
    """The step of these ops, in which all that follows from a part has a part of its bytes."""
    buffers = {**step.buffer, **order.made}
    parts = set(_parts(step, order.ops, buffers, {each.part for each in gradients}))
    ops = [
        replace(op, bytes_moved=order.part_bytes(op.bytes_moved))
        if op.phase is Phase.OPTIMIZER and not parts.isdisjoint((*op.reads, *op.writes))
        else op
        for op in order.ops
    ]
    used = {name for op in ops for name in (*op.reads, *op.writes)}
    sized = (
        replace(buffer, nbytes=order.part_bytes(buffer.nbytes))
        if name in parts and name not in order.made
        else buffer
        for name, buffer in buffers.items()
        if buffer.is_input or name in used
    )
    return replace(
        step,
        fingerprint=f"shard{order.ranks}.{step.fingerprint}",
        ops=tuple(ops),
        buffers=tuple(sized),
        updates=tuple(_updates(step, ops, gradients)),
        symbols={},
        expressions=SizeExpressions(),
        ranks=order.ranks,
    )


def _parts(
    step: Dataflow, ops: Sequence[Op], buffers: Mapping[str, Buffer], gradients: set[str]
) -> Iterator[str]:
    """Parameters, parts of gradients, and what the optimizer makes of them or beside them."""
    found = {*gradients, *(b.name for b in step.buffers if b.role is Role.PARAM)}
    found |= {state for group in step.updates for state in group.states}
    for op in ops:
        if op.phase is Phase.OPTIMIZER and not found.isdisjoint((*op.reads, *op.writes)):
            found.update(op.writes)
    return (name for name in found if buffers[name].nbytes > _SCALAR_BYTES)


def _updates(
    step: Dataflow, ops: Sequence[Op], gradients: Sequence[Gradient]
) -> Iterator[UpdateGroup]:
    place = {op.name: i for i, op in enumerate(ops)}
    for group, gradient in zip(step.updates, gradients, strict=True):
        left = [name for name in group.ops if name not in gradient.dropped]
        own = tuple(sorted(left, key=place.__getitem__))
        yield replace(group, gradient=gradient.part, ops=own, low_precision="")
