"""Op order: ops in the order in which the device runs them, and where each buffer is touched.

In: a Dataflow and the names of the ops that the device leaves out. Out: an `OpOrder`, and the same
one to whoever asks again: most placements that a search compares differ only in what leaves the
device meanwhile, and what is found about an order holds for all of these.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

from cotrain_compile.dataflow import PERSISTENT_ROLES, Buffer, Dataflow, Op, Phase
from cotrain_compile.placement.remembered import remembered_last

# About as many flops take a device as long as moving one byte.
FLOPS_A_BYTE = 128
# So many orders of a step are kept: those of the device with and without the updates that move.
KEPT = 8

Gap = tuple[int, int]  # two neighbouring touches of a buffer, with ops between them


class Instance(NamedTuple):
    """A copy of `buffer` on the device in slots [first, last), which ops use from `current` on."""

    buffer: Buffer
    first: int
    last: int
    current: int = 0


@dataclass(frozen=True)
class OpOrder:
    """One slot for each of `ops`, in the order in which the device runs them, on `buffers`."""

    ops: tuple[Op, ...]
    buffers: tuple[Buffer, ...]

    @property
    def end(self) -> int:
        """The slot after the last op."""
        return len(self.ops)

    @cached_property
    def slot(self) -> dict[str, int]:
        """Position of each op."""
        return {op.name: index for index, op in enumerate(self.ops)}

    @cached_property
    def touches(self) -> dict[str, list[int]]:
        """Slots in which each buffer is read or written on the device, ascending.

        What an exchange has is touched until it is awaited.
        """
        found: dict[str, list[int]] = {}
        for index, op in enumerate(self.ops):
            if op.awaits:
                self._touch_since(self.slot[op.awaits], index, found)
                continue
            for name in op.touched:
                if name in found:
                    found[name].append(index)
                else:
                    found[name] = [index]
        return found

    def _touch_since(self, begun: int, index: int, found: dict[str, list[int]]) -> None:
        """The op in slot `index` awaits what has `begun`."""
        for name in self.ops[index].touched:
            slots = found.setdefault(name, [])
            first = max(begun, slots[-1] + 1) if slots and slots[-1] >= begun else index
            slots.extend(range(first, index + 1))

    @cached_property
    def work(self) -> list[float]:
        """What the ops before each slot do together: about their seconds, on no machine at all."""
        each = (max(op.bytes_moved, op.flops / FLOPS_A_BYTE) for op in self.ops)
        return list(accumulate(each, initial=0.0))

    @cached_property
    def written(self) -> dict[str, int]:
        """Slot of the last op that writes each buffer, of those that any writes."""
        return {name: index for index, op in enumerate(self.ops) for name in op.writes}

    def at_its_uses(self, buffer: Buffer) -> tuple[Instance, ...]:
        """When a buffer is on the device that no task brings or takes: nothing where it never is.

        An input is there from the beginning, and as an output to the end.
        """
        if buffer.is_input:
            return (Instance(buffer, 0, self.end + 1, -1),)
        if not (touched := self.touches.get(buffer.name)):
            return ()
        last = self.end if buffer.is_output else touched[-1]
        return (Instance(buffer, touched[0], last + 1, -1),)

    @cached_property
    def at_uses(self) -> list[tuple[Instance, ...]]:
        """The same for each of the buffers."""
        touches, found = self.touches, list[tuple[Instance, ...]]()
        for buffer in self.buffers:
            touched = touches.get(buffer.name)
            if touched and not (buffer.is_input or buffer.is_output):  # as most are
                found.append((Instance(buffer, touched[0], touched[-1] + 1, -1),))
            else:
                found.append(self.at_its_uses(buffer))
        return found

    @cached_property
    def unmoved(self) -> list[tuple[Instance, ...]]:
        """The same, and whatever outlives the step is there to its end."""
        return [
            (held[0]._replace(last=self.end + 1),)
            if held and buffer.role in PERSISTENT_ROLES and held[0].last <= self.end
            else held
            for buffer, held in zip(self.buffers, self.at_uses, strict=True)
        ]

    @cached_property
    def following(self) -> Mapping[str | None, str | None]:
        """The op that comes after each op; None stands for the start and the end of the step."""
        names = [op.name for op in self.ops]
        return dict(zip([None, *names], [*names, None], strict=True))

    @cached_property
    def backward(self) -> list[int]:
        """Slots of the ops of the backward."""
        return [slot for slot, op in enumerate(self.ops) if op.phase is Phase.BACKWARD]

    @cached_property
    def _offloaded_gaps(self) -> dict[str, tuple[Gap, ...]]:
        return {}

    def longest_gap(self, touched: Sequence[int]) -> Gap | None:
        """The neighbouring touches with the most work between them, None if there is none.

        It is the same one on every machine, so that what a step needs at the least is, too.
        """
        work, longest, most = self.work, None, -math.inf
        for a, b in pairwise(touched):
            if b > a + 1 and (inside := work[b] - work[a + 1]) > most:
                longest, most = (a, b), inside
        return longest

    def gaps_behind(self, name: str, first: Gap) -> list[Gap]:
        """The gaps between touches of a buffer behind its `first` one, none where it is written.

        What was sent in the first one is still there to be fetched.
        """
        return [(a, b) for a, b in pairwise(self._unwritten_behind(name, first)) if b > a + 1]

    def offloaded_gaps(self, name: str) -> tuple[Gap, ...]:
        """The longest gap of a buffer, and the longest one behind it, as far as there are any."""
        found = self._offloaded_gaps.get(name)
        if found is None:
            first = self.longest_gap(self.touches.get(name, ()))
            second = first and self.longest_gap(self._unwritten_behind(name, first))
            found = self._offloaded_gaps[name] = tuple(gap for gap in (first, second) if gap)
        return found

    def _unwritten_behind(self, name: str, first: Gap) -> list[int]:
        """The touches of a buffer from the end of its `first` gap, none where it is written."""
        if self.written.get(name, -1) > first[0]:
            return []
        touched = self.touches[name]
        return touched[bisect_left(touched, first[1]) :]


@remembered_last(KEPT)
def order_without(dataflow: Dataflow, left_out: frozenset[str]) -> OpOrder:
    """The ops of a step, as it has them, but for those that are `left_out`, by name."""
    ops = tuple(op for op in dataflow.ops if op.name not in left_out)
    return OpOrder(ops, dataflow.buffers)
