"""ProTrain's blocks: which layers are swapped, made again or kept (Yang et al., arXiv 2406.08334).

In: a Dataflow and its recomputable buffers, two counts. Out: a `BlockChoice`. They know neither
times nor budgets; a plan should be better. A block is one of `regions_of`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from cotrain_compile.dataflow import Dataflow, Phase, Role
from cotrain_compile.placement.recompute.regions import (
    RecomputeRegion,
    inside,
    made_again,
    regions_of,
    saved_bytes,
)


@dataclass(frozen=True)
class BlockChoice:
    """Buffers that are recomputed, and those offloaded until the backward; none is both."""

    recomputed: frozenset[str]
    offloaded: frozenset[str]


def interleaved(
    dataflow: Dataflow, recomputable: Collection[str], swapped: int, checkpointed: int
) -> BlockChoice:
    """Each block is swapped, made again or kept.

    The last ones are kept, as the backward needs them first and at once. Before them, `swapped`
    blocks are spread evenly among `checkpointed` ones, the first of all being swapped: so the copy
    of one has the time in which the next ones are made again. Where the step has several
    micro-batches, so in each. Raises ValueError where a micro-batch has fewer blocks.
    """
    to_swap, to_make_again = list[RecomputeRegion](), list[RecomputeRegion]()
    for blocks in _by_backward(dataflow, regions_of(dataflow, recomputable)):
        count = swapped + checkpointed
        if min(swapped, checkpointed) < 0 or count > len(blocks):
            raise ValueError(f"{swapped} + {checkpointed} of {len(blocks)} blocks")
        for number, block in enumerate(blocks[:count]):
            is_swapped = number * swapped % count < swapped
            (to_swap if is_swapped else to_make_again).append(block)
    return BlockChoice(
        made_again(dataflow, to_make_again, recomputable), _saved_in(dataflow, to_swap)
    )


def _saved_in(dataflow: Dataflow, regions: Sequence[RecomputeRegion]) -> frozenset[str]:
    """All that ops of `regions` make, for no other region, and that the backward reads.

    The low-precision copy of a parameter is not among it: it is the parameter's.
    """
    copies = {group.low_precision for group in dataflow.updates}
    made = {
        name
        for region in regions
        for position in region.ops
        for name in dataflow.ops[position].writes
        if dataflow.buffer[name].role is Role.TEMPORARY and name not in copies
    }
    own = frozenset[str]().union(*inside(dataflow, regions, made))
    return frozenset(saved_bytes(dataflow, own))


def _by_backward(
    dataflow: Dataflow, regions: Iterable[RecomputeRegion]
) -> list[list[RecomputeRegion]]:
    """The regions before each backward."""
    backward = [i for i, op in enumerate(dataflow.ops) if op.phase is Phase.BACKWARD]
    groups: dict[int, list[RecomputeRegion]] = {}
    for region in regions:
        before = next((n for n, i in enumerate(backward) if i > region.ops[-1]), len(backward))
        groups.setdefault(before, []).append(region)
    return list(groups.values())
