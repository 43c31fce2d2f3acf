"""Gradient types: each gradient cast to the type of its parameter once, where it is complete.

In: a step of one device, with numbers for sizes. Out: the same step as ranks exchange gradients and
micro-batches add them up: as large as their parameters. A step of one device may keep a gradient in
the type of the backward, and cast it for a norm and once more within its update. No torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from cotrain_compile.dataflow import Dataflow, Op, Phase, UpdateGroup
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
