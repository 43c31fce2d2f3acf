"""Liveness: for every buffer, the span of ops during which it must exist.

In: a Dataflow. Out: lifespans, the gaps in them, and the bytes alive during each op: what an op
reads and what it writes exist side by side. A pure function.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from cotrain_compile.dataflow import Buffer, Dataflow, Role

# An input with one of these roles belongs to the user, who still holds it after the step.
USER_HELD_ROLES = frozenset(
    {
        Role.PARAM,
        Role.OPTIMIZER_STATE,
        Role.BUFFER,
        Role.GRADIENT,
        Role.BATCH,
        Role.HYPERPARAMETER,
        Role.CONSTANT,
    }
)


@dataclass(frozen=True)
class Lifespan:
    """`[start, end)` in op indices during which a buffer must exist.

    `touches` are the indices of the ops that read or write it, in order; `gaps` the longest
    stretches `[start, end)` inside the lifespan in which nobody does.
    """

    start: int
    end: int
    touches: tuple[int, ...]

    @cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        edges = (self.start - 1, *self.touches, self.end)
        return tuple((before + 1, after) for before, after in pairwise(edges) if after > before + 1)


@dataclass(frozen=True)
class Liveness:
    """Lifespans by buffer name, and the bytes alive during each op."""

    buffers: tuple[Buffer, ...]
    lifespans: Mapping[str, Lifespan]
    live_bytes: tuple[int, ...]

    @property
    def peak_bytes(self) -> int:
        """The most bytes alive during any op; 0 for a step without ops."""
        return max(self.live_bytes, default=0)

    @property
    def peak_op(self) -> int:
        """Index of the first op at the peak; 0 for a step without ops."""
        return self.live_bytes.index(self.peak_bytes) if self.live_bytes else 0

    def live_at(self, index: int) -> tuple[Buffer, ...]:
        """The buffers alive during op `index`, largest first."""
        alive = (
            buffer
            for buffer in self.buffers
            if self.lifespans[buffer.name].start <= index < self.lifespans[buffer.name].end
        )
        return tuple(sorted(alive, key=lambda buffer: (-buffer.nbytes, buffer.name)))


def liveness(dataflow: Dataflow) -> Liveness:
    """Lifespans and live bytes of `dataflow`, in time linear in its ops and buffers.

    Inputs exist from the first op. Outputs, and inputs that the user holds, exist to the end;
    every other buffer from its first touching op to its last, and nowhere when none touches it.
    Raises KeyError when an op touches a buffer that the dataflow does not have.
    """
    touches: dict[str, list[int]] = {buffer.name: [] for buffer in dataflow.buffers}
    for index, op in enumerate(dataflow.ops):
        for name in {*op.reads, *op.writes}:
            touches[name].append(index)
    count = len(dataflow.ops)
    lifespans = {
        buffer.name: _lifespan(buffer, tuple(touches[buffer.name]), count)
        for buffer in dataflow.buffers
    }
    sizes = ((lifespans[buffer.name], buffer.nbytes) for buffer in dataflow.buffers)
    return Liveness(dataflow.buffers, lifespans, live_totals(sizes, count))


def live_totals(sizes: Iterable[tuple[Lifespan, int]], count: int) -> tuple[int, ...]:
    """Sum of the sizes alive during each of `count` ops."""
    change = [0] * (count + 1)
    for lifespan, size in sizes:
        change[lifespan.start] += size
        change[lifespan.end] -= size
    return tuple(accumulate(change[:count]))


def _lifespan(buffer: Buffer, touches: tuple[int, ...], count: int) -> Lifespan:
    stays = buffer.is_output or (buffer.is_input and buffer.role in USER_HELD_ROLES)
    start = 0 if buffer.is_input else min(touches, default=count)
    end = count if stays else max(touches, default=start - 1) + 1
    return Lifespan(start, end, touches)
