"""Cuts: where to cut a chain of ops into stretches that are each made again from what enters them.

In: the bytes that each op makes to be kept, and the values that ops behind it read. Out: stretches
of ops. In the end what leaves a stretch is kept, and while the backward is in a stretch all of it:

    minimise   sum over stretches of   bytes leaving  +  bytes made^2 / bytes made by all

as for checkpoints in a chain (Chen et al., arXiv 1604.06174), but for the size of a stretch, which
is the mean over all bytes instead of the largest: a head with large logits, which no cut makes
smaller, leaves the layers something to gain. Found by dynamic programming over the last cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.float64]


@dataclass(frozen=True)
class Value:
    """What an op makes: that op, the last one that reads it, and its size."""

    maker: int
    last: int
    nbytes: int


def stretches(kept_bytes: Sequence[int], values: Sequence[Value]) -> list[range]:
    """The ops 0, 1, ... in stretches; op i makes `kept_bytes[i]` that the backward reads."""
    count = len(kept_bytes)
    made: Bytes = np.concatenate(([0.0], np.cumsum(kept_bytes, dtype=np.float64)))
    by_maker, by_last = _sizes(values, count)
    alive: Bytes = np.zeros(count)
    least: Bytes = np.zeros(count + 1)
    starts = [0] * (count + 1)  # by where a stretch ends, where it starts; first of equal ones
    for end in range(1, count + 1):
        alive[end - 1] += by_maker[end - 1]
        for maker, nbytes in by_last[end - 1]:
            alive[maker] -= nbytes
        leaving = np.cumsum(alive[:end][::-1])[::-1]  # of a stretch, by where it starts
        costs = least[:end] + leaving + (made[end] - made[:end]) ** 2 / max(made[-1], 1.0)
        starts[end] = int(costs.argmin())
        least[end] = costs.min()
    return _followed(starts)


def _sizes(values: Sequence[Value], count: int) -> tuple[list[int], list[list[tuple[int, int]]]]:
    """Bytes of what each op makes for others; by op, what it is the last to read."""
    by_maker = [0] * count
    by_last: list[list[tuple[int, int]]] = [[] for _ in range(count)]
    for value in values:
        if value.last > value.maker:
            by_maker[value.maker] += value.nbytes
            by_last[value.last].append((value.maker, value.nbytes))
    return by_maker, by_last


def _followed(starts: Sequence[int]) -> list[range]:
    """The stretches, from the last one back."""
    found, end = list[range](), len(starts) - 1
    while end > 0:
        found.append(range(starts[end], end))
        end = starts[end]
    return found[::-1]
