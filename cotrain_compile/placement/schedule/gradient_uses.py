"""Gradient uses: when the device touches a gradient that lies in `.grad`, on the host.

In: a DeviceProgram without updates, and the slot that needs the result of the update.
Out: `GradientUses`: the stays on the device that these touches make, and what is written in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cotrain_compile.placement.residency import DeviceProgram
from cotrain_compile.placement.schedule.stays import stays


@dataclass(frozen=True)
class GradientUses:
    """First and last slot of each of the `stays`; slots touched `before` the update's limit.

    `written` are the slots that write it, one at most but for steps that no optimizer has made.
    """

    stays: Sequence[tuple[int, int]]
    before: Sequence[int]
    written: Sequence[int]

    @property
    def written_before(self) -> bool:
        """Whether the update reads what the device has written."""
        return bool(set(self.before).intersection(self.written))

    @property
    def written_late(self) -> bool:
        """Whether it is written when its update is over."""
        return bool(self.written) and self.written[-1] not in self.before


def gradient_uses(program: DeviceProgram, name: str, limit: int) -> GradientUses:
    """The uses of gradient `name`, offloaded in the longest gap before its write or update.

    So there is nothing to bring back when it leaves.
    """
    touched = program.touches.get(name, [])
    before = [slot for slot in touched if slot < limit]
    written = [slot for slot in touched if name in program.ops[slot].writes]
    unchanged = [slot for slot in before if slot <= min(written, default=program.end)]
    gap = program.order.longest_gap(unchanged)
    return GradientUses(stays(touched, () if gap is None else (gap,)), before, written)
