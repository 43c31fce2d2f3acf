"""Stays: the first and the last slot of each time that a buffer is on the device.

In: the slots that touch a buffer, and the gaps between them in which it is offloaded. Out: its
stays, in their order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from cotrain_compile.placement.op_order import Gap


def stays(touched: Sequence[int], gaps: Iterable[Gap]) -> list[tuple[int, int]]:
    """One around each of the `gaps`; none where nothing touches it."""
    if not touched:
        return []
    return [(a, b) for (_, a), (b, _) in pairwise([(0, touched[0]), *gaps, (touched[-1], 0)])]
