"""A chain without a link: with each op run again at most once, as few as with any number of times.

What runs again under the best choice of values, against a search over everything that could run
and be dropped at any moment (Checkmate's freedom, which is Revolve's optimum on a chain), at every
budget for which one more run of each op is enough.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations

import pytest

from cotrain_compile.dataflow import Dataflow, Phase
from cotrain_compile.machine import MEMORIES, Tier
from cotrain_compile.placement.policies import resident
from cotrain_compile.placement.problem import formulate
from cotrain_compile.placement.recompute.recomputable import recomputable
from cotrain_compile.placement.recompute.rewrite import recomputed_ops
from cotrain_compile.placement.schedule.schedule import schedule
from cotrain_compile.presets import find
from tests.support.nets import MIB, Layer, step_of


def unit_chain(length: int) -> Dataflow:
    """Each op makes as much as the one before it, and its backward reads what it read."""
    net = [Layer(f"l{i}", (f"l{i - 1}" if i else "x",)) for i in range(length)]
    dataflow = step_of("chain", net)
    ops = (
        replace(op, target="aten.mul.Tensor") if op.phase is Phase.FORWARD else op
        for op in dataflow.ops
    )
    return replace(dataflow, ops=tuple(ops))


def least_once(length: int) -> dict[int, int]:
    """By MiB of the device, the fewest ops that run again in any plan that moves nothing."""
    dataflow = unit_chain(length)
    roomy = formulate(dataflow, find("rtx4090"), dict.fromkeys(MEMORIES, 1 << 40))
    values = sorted(recomputable(dataflow))
    found: dict[int, int] = {}
    for count in range(len(values) + 1):
        for names in combinations(values, count):
            placement = replace(resident(dataflow), recomputed=names)
            peak_bytes = schedule(roomy, placement).predicted.peak_bytes[Tier.DEVICE]
            again, mib = len(recomputed_ops(dataflow, names)), peak_bytes // MIB
            found[mib] = min(again, found.get(mib, again))
    return found


def least_ever(length: int, mib: int) -> int | None:
    """The fewest further runs of any order of runs, drops and backwards; None where none fits.

    A state is what is there, as bits, and the backwards done, the loss among them. The batch stays,
    and of gradients the one that was made last.
    """
    start, is_done = (0, 0), length + 1
    cost = {start: 0}
    waiting = [(0, start)]
    while waiting:
        spent, state = heapq.heappop(waiting)
        if state[1] == is_done:
            return spent - length
        if spent > cost[state]:
            continue
        for more, after in moves(length, mib, *state):
            if spent + more < cost.get(after, 1 << 30):
                cost[after] = spent + more
                heapq.heappush(waiting, (spent + more, after))
    return None


def moves(length: int, mib: int, there: int, done: int) -> Iterator[tuple[int, tuple[int, int]]]:
    """What can come next, with the forward ops that it takes."""
    held = 1 + there.bit_count() + (done > 0)

    def has(value: int) -> bool:
        return value < 0 or bool(there >> value & 1)

    for value in range(length):
        if has(value):
            yield 0, (there & ~(1 << value), done)
        elif has(value - 1) and held < mib:
            yield 1, (there | 1 << value, done)
    if has(length - 1 - done) and held + (done < length) <= mib:
        yield 0, (there, done + 1)


@pytest.mark.parametrize("length", [4, 7, pytest.param(10, marks=pytest.mark.long)])
def test_once_again_is_enough_for_the_least_of_all_replays(length: int) -> None:
    once = least_once(length)
    tightest, roomiest = min(once), max(once)
    assert once[roomiest] == 0
    for mib in range(tightest, roomiest + 1):
        best = min(again for needed, again in once.items() if needed <= mib)
        assert best == least_ever(length, mib), mib
    assert tightest < roomiest
    more = least_ever(length, tightest - 1)  # in less, some op would have to run a third time
    assert more is None or more > once[tightest]
