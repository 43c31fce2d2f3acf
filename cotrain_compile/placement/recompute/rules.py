"""Rules: what users make again, layer by layer.

In: a Dataflow and its recomputable buffers. Out: which of its values are made again. They know
neither times nor budgets; a plan should be better. A layer is one of `regions_of`; what leaves it
is kept, as by a checkpoint.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from cotrain_compile.dataflow import Dataflow
from cotrain_compile.placement.recompute.regions import Region, inside, regions_of, saved_bytes


def every_layer(dataflow: Dataflow, recomputable: Collection[str]) -> frozenset[str]:
    """Each layer is made again from what enters it (Chen et al., arXiv 1604.06174)."""
    return made_again(dataflow, regions_of(dataflow, recomputable), recomputable)


def every_other_layer(dataflow: Dataflow, recomputable: Collection[str]) -> frozenset[str]:
    """The first layer is made again, the next one is kept, and so on."""
    return made_again(dataflow, regions_of(dataflow, recomputable)[::2], recomputable)


def made_again(
    dataflow: Dataflow, regions: Sequence[Region], recomputable: Collection[str]
) -> frozenset[str]:
    """All inside of `regions` that the backward reads, and what of the rest that is made from."""
    found: set[str] = set()
    for region, free in zip(regions, inside(dataflow, regions, recomputable), strict=True):
        needed = set(saved_bytes(dataflow, free))
        for position in reversed(region.ops):
            op = dataflow.ops[position]
            if needed.intersection(op.writes):
                needed.update(free.intersection(op.reads))
        found |= needed
    return frozenset(found)
