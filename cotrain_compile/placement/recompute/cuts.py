"""Cuts: where to cut a chain of ops into stretches that are each made again from what enters them.

In: the bytes that each op makes to be kept, and the values that ops behind it read. Out: stretches
of ops. In the end what leaves a stretch is kept, and while the backward is in a stretch all of it:

    minimise   bytes that leave a stretch, over all of them  +  bytes of the largest stretch

as for checkpoints in a chain (Chen et al., arXiv 1604.06174). For a given largest stretch the least
that leaves is found by dynamic programming over the last cut; a few largest stretches are tried.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# The largest stretch is one of so many parts of the whole, or a single op.
_PARTS = (4, 6, 8, 12, 16, 24, 32)

Bytes = NDArray[np.int64]


@dataclass(frozen=True)
class Value:
    """What an op makes: that op, the last one that reads it, and its size."""

    maker: int
    last: int
    nbytes: int


def stretches(kept_bytes: Sequence[int], values: Sequence[Value]) -> list[range]:
    """The ops 0, 1, ... in stretches; op i makes `kept_bytes[i]` that the backward reads."""
    made = np.concatenate(([0], np.cumsum(kept_bytes, dtype=np.int64)))
    firsts = [_first_starts(made, int(made[-1]) // parts) for parts in _PARTS]
    leaving, starts = _least_leaving(values, np.stack(firsts))
    found = []
    for bytes_, start_of in zip(leaving, starts, strict=True):
        cut = _followed(start_of)
        found.append((int(bytes_) + max(int(made[s.stop] - made[s.start]) for s in cut), cut))
    return min(found, key=lambda result: result[0])[1]


def _first_starts(made: Bytes, most: int) -> Bytes:
    """By where a stretch ends, the first place where it may start to make no more than `most`."""
    ends = np.arange(len(made))
    return np.minimum(np.searchsorted(made, made - most), np.maximum(ends - 1, 0))


def _least_leaving(values: Sequence[Value], firsts: Bytes) -> tuple[Bytes, Bytes]:
    """For each row of `firsts`: the least bytes that leave all stretches, and by where a stretch
    ends where it starts then. Of equal starts it is the first, so that equal layers are cut alike.
    """
    rows, count = len(firsts), firsts.shape[1] - 1
    by_maker, by_last = _sizes(values, count)
    alive: Bytes = np.zeros(count, np.int64)
    least: Bytes = np.zeros((rows, count + 1), np.int64)
    starts: Bytes = np.zeros((rows, count + 1), np.int64)
    for end in range(1, count + 1):
        alive[end - 1] += by_maker[end - 1]
        for maker, nbytes in by_last[end - 1]:
            alive[maker] -= nbytes
        widest = int(firsts[:, end].min())
        leaving = np.cumsum(alive[widest:end][::-1])[::-1]  # of a stretch, by where it starts
        for row in range(rows):
            first = int(firsts[row, end])
            costs = least[row, first:end] + leaving[first - widest :]
            starts[row, end] = first + int(costs.argmin())
            least[row, end] = costs.min()
    return least[:, -1], starts


def _sizes(values: Sequence[Value], count: int) -> tuple[list[int], list[list[tuple[int, int]]]]:
    """Bytes of what each op makes for others; by op, what it is the last to read."""
    by_maker = [0] * count
    by_last: list[list[tuple[int, int]]] = [[] for _ in range(count)]
    for value in values:
        if value.last > value.maker:
            by_maker[value.maker] += value.nbytes
            by_last[value.last].append((value.maker, value.nbytes))
    return by_maker, by_last


def _followed(starts: Bytes) -> list[range]:
    """The stretches, from the last one back."""
    found, end = list[range](), len(starts) - 1
    while end > 0:
        start = int(starts[end])
        found.append(range(start, end))
        end = start
    return found[::-1]
