"""Gather again: sharded parameters that are whole for the forward, and once more for the backward.

In: the levels of a step, its Dataflow and costs. Out: the same levels with one more, from which on
every gather runs again. What is gathered once stays for the backward (as ZeRO-2 keeps parameters);
gathered again it is freed after the forward (ZeRO-3, Rajbhandari et al., SC 2020). The level is
where its price is: seconds of the network for the bytes that are not kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cotrain_compile.analysis.costs import CostTable
from cotrain_compile.dataflow import Dataflow, Op
from cotrain_compile.placement.recompute.levels import StepLevel
from cotrain_compile.placement.recompute.regions import saved_bytes
from cotrain_compile.placement.recompute.rewrite import gathers, without_order


def gathered(dataflow: Dataflow) -> dict[str, Op]:
    """What the backward reads and may be gathered again, each buffer with the op that does so."""
    ops = (dataflow.ops[dataflow.position[name]] for name in gathers(dataflow))
    found = {name: op for op in ops for name in without_order(dataflow, op.writes)}
    read = saved_bytes(dataflow, found)
    return {name: op for name, op in found.items() if name in read}


def with_gathers(
    levels: Sequence[StepLevel], dataflow: Dataflow, costs: CostTable
) -> tuple[StepLevel, ...]:
    """`levels`, of which the first is nothing, with a level that gathers again.

    Each gather counts as a region of its own, so that parts of them may run again. Without a
    network nobody knows what they take, and they do not.
    """
    found = {name: op for name, op in gathered(dataflow).items() if op.name in costs.network_s}
    if not found:
        return tuple(levels)
    nbytes = sum(dataflow.buffer[name].nbytes for name in found)
    seconds = sum(costs.network_s[op.name] + costs.device_s[op.name] for op in found.values())
    place = 1
    while place < len(levels) and _price(levels[place - 1], levels[place]) < seconds / nbytes:
        place += 1
    kept, again = (frozenset[str](),) * len(found), tuple(frozenset({name}) for name in found)
    below = [replace(level, by_region=(*level.by_region, *kept)) for level in levels[:place]]
    above = [
        StepLevel(
            level.recomputed.union(found),
            level.saved_bytes + nbytes,
            level.seconds + seconds,
            (*level.by_region, *again),
        )
        for level in levels[place - 1 :]
    ]
    return (*below, *above)


def _price(less: StepLevel, more: StepLevel) -> float:
    """Seconds for each further byte."""
    return (more.seconds - less.seconds) / max(1, more.saved_bytes - less.saved_bytes)
