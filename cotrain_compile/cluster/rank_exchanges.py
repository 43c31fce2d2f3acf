"""Rank exchanges: what ranks that shard a step gather and scatter, and when.

In: a step of one device, with numbers for sizes. Out: `Exchanges`: which parameters are gathered
together, which gradients are scattered together and behind which op, and what of the step makes way
for a gradient's part. No torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from cotrain_compile.analysis.layers import layer
from cotrain_compile.dataflow import SMALL_EXCHANGE_BYTES, Dataflow, Op, Phase, Role, UpdateGroup
from cotrain_compile.errors import OptionError


@dataclass(frozen=True)
class Gradient:
    """Of the gradient of `param`, what is `sent` once op `ready` has run.

    It is as large as the parameter: the gradient, or what it is cast to. Where only the update
    casts it, `cast` is the op that does, which goes behind `ready`. The optimizer reads the part in
    place of all that is `replaced`; the ops `dropped` would cast once more.
    """

    param: str
    sent: str
    ready: str
    replaced: tuple[str, ...]
    dropped: tuple[str, ...] = ()
    cast: Op | None = None

    @property
    def part(self) -> str:
        """What is left of it on each rank."""
        return f"{self.sent}.part"


@dataclass(frozen=True)
class Exchanges:
    """Those of `step`. What is small goes with the others of its layer, all else by itself."""

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
    def scattered(self) -> Mapping[str, Sequence[Sequence[Gradient]]]:
        """The gradients that are scattered together, by the op behind which that begins."""
        place = self.step.position
        buckets = defaultdict[str, list[Gradient]](list)
        for each in sorted(self.gradients, key=lambda each: place[each.ready]):
            buckets[self._bucket(each.param)].append(each)
        found = defaultdict[str, list[Sequence[Gradient]]](list)
        for bucket in buckets.values():
            found[bucket[-1].ready].append(bucket)
        return found

    @cached_property
    def gradients(self) -> Sequence[Gradient]:
        """Of every update one."""
        readers = defaultdict[tuple[str, ...], list[Op]](list)
        makers: dict[str, Op] = {}
        for op in self.step.ops:
            readers[op.reads].append(op)
            makers |= dict.fromkeys(op.writes, op)
        return [
            self._gradient(group, makers.get(group.gradient), readers[(group.gradient,)])
            for group in self.step.updates
        ]

    def _gradient(self, group: UpdateGroup, maker: Op | None, readers: Sequence[Op]) -> Gradient:
        if maker is None or maker.phase is Phase.OPTIMIZER:
            raise OptionError(f"no backward makes {group.gradient}, the gradient of {group.param}")
        size, whole = self.step.buffer, self.step.buffer[group.param].nbytes
        casts = [
            op
            for op in readers
            if len(op.writes) == 1
            and size[op.writes[0]].nbytes == whole > size[group.gradient].nbytes
        ]
        if not casts:
            return Gradient(group.param, group.gradient, maker.name, (group.gradient,))
        early = [op for op in casts if op.name not in group.ops]
        cast = (early or casts)[0]
        return Gradient(
            group.param,
            cast.writes[0],
            cast.name if early else maker.name,
            (group.gradient, *(op.writes[0] for op in casts)),
            tuple(op.name for op in casts if op is not cast or not early),
            None if early else cast,
        )

    def _bucket(self, param: str) -> str:
        """What a parameter, and its gradient, are exchanged with."""
        is_small = self.step.buffer[param].nbytes <= SMALL_EXCHANGE_BYTES
        return f"small of {layer(param)}" if is_small and layer(param) else param
