"""Rank step: the step of one of several ranks, made of the step of one device.

In: a step with numbers for sizes, whose gradients have the type of their parameters
(`with_typed_gradients`), and how many ranks there are. Out: the step of one rank with those sizes,
as it is traced where the model is in `fully_shard`, or in `DistributedDataParallel`.

Of a shard
    parameter   rests in parts, and is gathered before the first op that reads it; the forward and
                the backward read what was gathered
    gradient    scattered once it is complete; the optimizer reads the part of this rank
    update      its ops and its states are of the part
Of a replica
    gradient    summed over all ranks once it is complete; the optimizer reads the sum

A shard awaits each exchange at once: a plan moves it, and gathers again. A replica awaits sums
behind its backward. The norm that clips a shard has an exchange of a few bytes, which is left out.
A step of one device may keep a gradient in the type of the backward, and cast it for a norm and
once more within its update. No torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from cotrain_compile.analysis.layers import layer
from cotrain_compile.dataflow import (
    SMALL_EXCHANGE_BYTES,
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


@dataclass(frozen=True)
class _Cast:
    """What becomes of a gradient: op `cast` makes `made` of it, behind `ready` where it is of the
    update; all that is `replaced` by that is made by no other op."""

    made: str
    replaced: tuple[str, ...]
    dropped: tuple[str, ...]
    ready: str = ""
    cast: Op | None = None


def with_typed_gradients(step: Dataflow) -> Dataflow:
    """`step`, whose gradients have the bytes of their parameters; OptionError where one is made by
    no backward."""
    readers = defaultdict[tuple[str, ...], list[Op]](list)
    makers: dict[str, Op] = {}
    for op in step.ops:
        readers[op.reads].append(op)
        makers |= dict.fromkeys(op.writes, op)
    casts = [
        _cast(step, group, makers.get(group.gradient), readers[(group.gradient,)])
        for group in step.updates
    ]
    moved = {each.ready: each.cast for each in casts if each.cast}
    dropped = {name for each in casts for name in each.dropped}
    instead = {name: each.made for each in casts for name in each.replaced}
    ops: list[Op] = []
    for op in step.ops:
        if op.name in dropped:
            continue
        if op.phase is Phase.OPTIMIZER:
            op = replace(op, reads=tuple(instead.get(name, name) for name in op.reads))
        ops.append(op)
        if op.name in moved:
            ops.append(replace(moved[op.name], phase=op.phase, module=op.module))
    used = {name for op in ops for name in (*op.reads, *op.writes)}
    return replace(
        step,
        ops=tuple(ops),
        buffers=tuple(b for b in step.buffers if b.is_input or b.name in used),
        updates=tuple(
            replace(
                group,
                gradient=each.made,
                ops=tuple(name for name in group.ops if name not in dropped),
            )
            for group, each in zip(step.updates, casts, strict=True)
        ),
    )


def _cast(step: Dataflow, group: UpdateGroup, maker: Op | None, readers: Sequence[Op]) -> _Cast:
    gradient, size = group.gradient, step.buffer
    if maker is None or maker.phase is Phase.OPTIMIZER:
        raise OptionError(f"no backward makes {gradient}, the gradient of {group.param}")
    whole = size[group.param].nbytes
    casts = [
        op
        for op in readers
        if len(op.writes) == 1 and size[op.writes[0]].nbytes == whole > size[gradient].nbytes
    ]
    if not casts:
        return _Cast(gradient, (), ())
    early = [op for op in casts if op.name not in group.ops]
    made = tuple(op.writes[0] for op in casts)
    if early:
        others = tuple(op.name for op in casts if op is not early[0])
        return _Cast(early[0].writes[0], (gradient, *made), others)
    dropped = tuple(op.name for op in casts)
    return _Cast(made[0], (gradient, *made), dropped, maker.name, casts[0])


# What has no more is a scalar, and every rank has it.
_SCALAR_BYTES = 8
_GROUP = "group.ranks"


def require_exchangeable(step: Dataflow) -> None:
    """OptionError where `step` is of several ranks already, or keeps gradients between steps."""
    if step.ranks > 1 or any(op.collective for op in step.ops):
        raise OptionError(
            "the step exchanges data between ranks already; give one that was traced for one device"
        )
    kept = [buffer.name for buffer in step.buffers if buffer.param]
    if kept:
        raise OptionError(
            f"the step finds or keeps gradients ({kept[0]}), and nobody knows what ranks exchange "
            "of them; trace a step that ends with optimizer.zero_grad()"
        )


def replica_step(step: Dataflow, ranks: int) -> Dataflow:
    """The step of one of `ranks` that have all of the model; `step` itself where there is one."""
    if ranks == 1:
        return step
    exchanges = _Exchanges(step)
    summed = {group.gradient: f"{group.gradient}.summed" for group in step.updates}
    order, waits = _RankOrder(ranks, summed.values()), list[Op]()
    last = max(exchanges.reduced, key=step.position.__getitem__, default="")
    for op in step.ops:
        in_place = summed if op.phase is Phase.OPTIMIZER else {}
        order.add(replace(op, reads=tuple(in_place.get(name, name) for name in op.reads)))
        for bucket in exchanges.reduced.get(op.name, ()):
            made = tuple(replace(step.buffer[name], name=summed[name]) for name in bucket)
            waits.append(order.begin("all_reduce", tuple(bucket), made, op))
        if op.name == last:
            order.end(*waits)
    return _of_rank(step, order, "replica", summed, order.ops, {**step.buffer, **order.made})


def shard_step(step: Dataflow, ranks: int) -> Dataflow:
    """The step of one of `ranks` that have a part each; `step` itself where there is one.

    Raises OptionError where an update multiplies matrices.
    """
    for group in step.updates:
        if any(step.ops[step.position[name]].flops for name in group.ops):
            raise OptionError(
                f"the update of {group.param} multiplies matrices, and no rank has its gradient "
                "whole; take an optimizer that works element by element"
            )
    if ranks == 1:
        return step
    parts = {group.gradient: f"{group.gradient}.part" for group in step.updates}
    order = _sharded(step, ranks, parts)
    buffers = {**step.buffer, **order.made}
    split = set(_split(step, order.ops, buffers, parts.values()))
    ops = [
        replace(op, bytes_moved=order.part_bytes(op.bytes_moved))
        if op.phase is Phase.OPTIMIZER and not split.isdisjoint((*op.reads, *op.writes))
        else op
        for op in order.ops
    ]
    for name in split - order.made.keys():
        buffers[name] = replace(buffers[name], nbytes=order.part_bytes(buffers[name].nbytes))
    return _of_rank(step, order, "shard", parts, ops, buffers)


def _sharded(step: Dataflow, ranks: int, parts: Mapping[str, str]) -> _RankOrder:
    """The ops of a shard, of which those of the optimizer have the bytes of the whole."""
    exchanges, order = _Exchanges(step), _RankOrder(ranks, parts.values())
    whole = {param: whole for whole, params in exchanges.gathered.items() for param in params}
    for op in step.ops:
        in_place = parts if op.phase is Phase.OPTIMIZER else whole
        reads = tuple(in_place.get(name, name) for name in op.reads)
        for name in dict.fromkeys(reads):
            if name in exchanges.gathered and name not in order.made:
                params = exchanges.gathered[name]
                nbytes = sum(step.buffer[param].nbytes for param in params)
                gathered = Buffer(name, nbytes, Role.TEMPORARY)
                order.end(order.begin("all_gather_into_tensor", params, (gathered,), op))
        order.add(replace(op, reads=reads))
        for bucket in exchanges.reduced.get(op.name, ()):
            own = [(parts[name], order.part_bytes(step.buffer[name].nbytes)) for name in bucket]
            made = tuple(Buffer(name, nbytes, Role.TEMPORARY) for name, nbytes in own)
            order.end(order.begin("reduce_scatter_tensor", tuple(bucket), made, op))
    return order


def _split(
    step: Dataflow, ops: Sequence[Op], buffers: Mapping[str, Buffer], parts: Iterable[str]
) -> Iterator[str]:
    """Parameters, parts of gradients, and what the optimizer makes of them or beside them."""
    found = {*parts, *(b.name for b in step.buffers if b.role is Role.PARAM)}
    found |= {state for group in step.updates for state in group.states}
    for op in ops:
        if op.phase is Phase.OPTIMIZER and not found.isdisjoint((*op.reads, *op.writes)):
            found.update(op.writes)
    return (name for name in found if buffers[name].nbytes > _SCALAR_BYTES)


def _of_rank(
    step: Dataflow,
    order: _RankOrder,
    what: str,
    gradients: Mapping[str, str],
    ops: Sequence[Op],
    buffers: Mapping[str, Buffer],
) -> Dataflow:
    """The step of these ops, whose updates read `gradients` in place of their own."""
    used = {name for op in ops for name in (*op.reads, *op.writes)}
    place = {op.name: i for i, op in enumerate(ops)}
    updates = (
        replace(
            group,
            gradient=gradients[group.gradient],
            ops=tuple(sorted(group.ops, key=place.__getitem__)),
            low_precision="" if what == "shard" else group.low_precision,
        )
        for group in step.updates
    )
    return replace(
        step,
        fingerprint=f"{what}{order.ranks}.{step.fingerprint}",
        ops=tuple(ops),
        buffers=tuple(b for b in buffers.values() if b.is_input or b.name in used),
        updates=tuple(updates),
        symbols={},
        expressions=SizeExpressions(),
        ranks=order.ranks,
    )


@dataclass(frozen=True)
class _Exchanges:
    """What ranks exchange of `step`; what is small goes with the others of its layer."""

    step: Dataflow

    @cached_property
    def gathered(self) -> Mapping[str, tuple[str, ...]]:
        """The parameters that are gathered together, by what holds them whole."""
        found = defaultdict[str, tuple[str, ...]](tuple)
        for buffer in self.step.buffers:
            if buffer.role is Role.PARAM:
                found[f"{self._bucket(buffer.name)}.whole"] += (buffer.name,)
        return found

    @cached_property
    def reduced(self) -> Mapping[str, Sequence[Sequence[str]]]:
        """The gradients that are reduced together, by the op that makes the last of them."""
        makers = {name: i for i, op in enumerate(self.step.ops) for name in op.writes}
        buckets = defaultdict[str, list[str]](list)
        for group in sorted(self.step.updates, key=lambda group: makers[group.gradient]):
            buckets[self._bucket(group.param)].append(group.gradient)
        found = defaultdict[str, list[Sequence[str]]](list)
        for bucket in buckets.values():
            found[self.step.ops[makers[bucket[-1]]].name].append(bucket)
        return found

    def _bucket(self, param: str) -> str:
        """What a parameter, and its gradient, are exchanged with."""
        is_small = self.step.buffer[param].nbytes <= SMALL_EXCHANGE_BYTES
        return f"small of {layer(param)}" if is_small and layer(param) else param


class _RankOrder:
    """The ops so far of one of so many ranks; `awaited` are the results of exchanges to come.

    What reads the result of an exchange that is not yet awaited waits for it.
    """

    def __init__(self, ranks: int, awaited: Collection[str]) -> None:
        self.ranks = ranks
        self.ops: list[Op] = []
        self.made: dict[str, Buffer] = {}
        self._unmade = set(awaited)
        self._held: list[Op] = []

    def part_bytes(self, nbytes: int) -> int:
        """What each rank has of so many bytes, the last part padded."""
        return -(-nbytes // self.ranks)

    def add(self, op: Op) -> None:
        """Now, or, if it waits for an exchange or for what is held, behind that."""
        made = {name for held in self._held for name in held.writes}
        touched = made.union(*(held.reads for held in self._held))
        if (self._unmade | made).intersection(op.reads) or touched.intersection(op.writes):
            self._held.append(op)
        else:
            self.ops.append(op)

    def begin(self, kind: str, reads: tuple[str, ...], made: tuple[Buffer, ...], near: Op) -> Op:
        """Begin an exchange of all of `reads` beside op `near`, and return what awaits it.

        A reduction of the whole works on a copy; until the others end they hold what they read.
        """
        self.made.setdefault(_GROUP, Buffer(_GROUP, 0, Role.GROUP, is_input=True, is_output=True))
        self.made |= {buffer.name: buffer for buffer in made}
        writes = tuple(buffer.name for buffer in made)
        results = sum(buffer.nbytes for buffer in made)
        whole = results * (self.ranks if kind.startswith("reduce_scatter") else 1)
        given = results if kind == "all_reduce" else self.part_bytes(whole)
        begin = Op(
            f"{kind}.{writes[0]}",
            kind,
            near.phase,
            (*reads, _GROUP),
            (_GROUP, *writes),
            bytes_moved=given + whole,
            module=near.module,
            collective=Collective(kind, self.ranks, whole),
        )
        self.ops.append(begin)
        held = () if kind == "all_reduce" else reads
        return Op(
            f"wait.{begin.name}",
            "wait_tensor",
            near.phase,
            (*writes, *held),
            writes,
            module=near.module,
            awaits=begin.name,
        )

    def end(self, *waits: Op) -> None:
        """Await exchanges, and then what has waited for them."""
        self.ops += waits
        self._unmade.difference_update(name for wait in waits for name in wait.writes)
        held, self._held = self._held, []
        for op in held:
            self.add(op)
