"""Peak: the op at which a placement needs most of the device, and what is alive there by kind.

In: `Moves` of a placement. Out: a `Peak`, for refusals: where it is, what it is made of, and what a
user can change about that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from cotrain_compile.dataflow import PERSISTENT_ROLES, Buffer, Op, Role
from cotrain_compile.placement.schedule.moves import Moves
from cotrain_compile.support.units import format_bytes

ACTIVATIONS, GRADIENTS = "activations", Role.GRADIENT.value
# With less than this share of the peak, activations are not worth a change.
SHARE = 0.25


@dataclass(frozen=True)
class Peak:
    """`kinds` has bytes by kind, largest first; `largest` the three largest buffers.

    `op` is None in a step that does nothing but update.
    """

    op: Op | None
    kinds: Mapping[str, int]
    largest: tuple[Buffer, ...]

    @property
    def nbytes(self) -> int:
        """All that is alive there."""
        return sum(self.kinds.values())

    @property
    def where(self) -> str:
        """The op and its module."""
        if self.op is None:
            return "at an update"
        return f"at {self.op.target}" + (f" in {self.op.module}" if self.op.module else "")

    def of_it(self, *kinds: str) -> str:
        """How much of the peak is of these kinds, in words."""
        part = sum(self.kinds.get(kind, 0) for kind in kinds)
        there = format_bytes(self.nbytes)
        told = "all" if format_bytes(part) == there else format_bytes(part)
        return f"{told} of the {there} there"

    @property
    def way_on(self) -> str | None:
        """What a user can change about the step to lower it, where that is worth it."""
        if self.kinds.get(ACTIVATIONS, 0) < SHARE * self.nbytes:
            return None
        return (
            "make the batch or the sequence smaller, or keep fewer activations (remat=True, "
            f"torch.utils.checkpoint): they are {self.of_it(ACTIVATIONS)}"
        )


def peak_of(moves: Moves) -> Peak:
    """The first op at which most is alive, by the least that `moves` need."""
    used, ops = moves.slot_bytes, moves.program.ops
    slot = max(range(len(used)), key=used.__getitem__)
    alive = [held.buffer for held in moves.instances if held.first <= slot < held.last]
    kinds: Counter[str] = Counter()
    gradients = {group.gradient for group in moves.program.dataflow.updates}
    for buffer in alive:
        kinds[_kind(buffer, gradients)] += buffer.nbytes
    return Peak(
        op=ops[min(slot, len(ops) - 1)] if ops else None,
        kinds={kind: nbytes for kind, nbytes in kinds.most_common() if nbytes},
        largest=tuple(sorted(alive, key=lambda buffer: -buffer.nbytes)[:3]),
    )


def _kind(buffer: Buffer, gradients: set[str]) -> str:
    if buffer.role in PERSISTENT_ROLES or buffer.role is Role.WORKSPACE:
        return buffer.role.value.replace("_", " ")
    return GRADIENTS if buffer.name in gradients else ACTIVATIONS
