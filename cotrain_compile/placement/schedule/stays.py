"""Stays: the first and the last slot of each time that a buffer is on the device.

In: the program of the device, and the slots that touch a buffer. Out: its stays, in their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from cotrain_compile.placement.residency import DeviceProgram, gaps_away, longest_gap


def stays(program: DeviceProgram, touched: Sequence[int], *, away: bool) -> list[tuple[int, int]]:
    """One for all uses; two where it is `away` in the longest gap between them."""
    if not touched:
        return []
    gap = longest_gap(program, touched) if away else None
    if gap is None:
        return [(touched[0], touched[-1])]
    return [(touched[0], gap[0]), (gap[1], touched[-1])]


def stays_of_refetched(
    program: DeviceProgram, name: str, touched: Sequence[int]
) -> list[tuple[int, int]]:
    """Where it is away once more behind the longest gap, in the longest one there."""
    gaps = gaps_away(program, name, again=True)
    return [(a, b) for (_, a), (b, _) in pairwise([(0, touched[0]), *gaps, (touched[-1], 0)])]
