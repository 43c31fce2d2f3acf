"""Rules: what other systems make again, and keep on the host, layer by layer.

In: a Dataflow and its recomputable buffers. Out: which of its values are made again and which are
away on the host between forward and backward. They know neither times nor budgets; a plan should be
better. A layer is one of `regions_of`; what leaves it is kept, as by a checkpoint.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from cotrain_compile.dataflow import Dataflow, Phase, Role
from cotrain_compile.placement.recompute.regions import Region, inside, regions_of, saved_bytes


@dataclass(frozen=True)
class LayerChoice:
    """Buffers that are made again and buffers that are away until the backward; none is both."""

    recomputed: frozenset[str] = frozenset()
    away: frozenset[str] = frozenset()


def every_layer(dataflow: Dataflow, recomputable: Collection[str]) -> LayerChoice:
    """Each layer is made again from what enters it (Chen et al., arXiv 1604.06174)."""
    return LayerChoice(_made_again(dataflow, regions_of(dataflow, recomputable), recomputable))


def every_other_layer(dataflow: Dataflow, recomputable: Collection[str]) -> LayerChoice:
    """The first layer is made again, the next one is kept, and so on."""
    chosen = regions_of(dataflow, recomputable)[::2]
    return LayerChoice(_made_again(dataflow, chosen, recomputable))


def interleaved(
    dataflow: Dataflow, recomputable: Collection[str], swapped: int, checkpointed: int
) -> LayerChoice:
    """The blocks of ProTrain (Yang et al., arXiv 2406.08334): each is swapped, made again or kept.

    The last ones are kept, as the backward needs them first and at once. Before them, `swapped`
    blocks are spread evenly among `checkpointed` ones, the first of all being swapped: so the copy
    of one has the time in which the next ones are made again. Where the step has several
    micro-batches, so in each. Raises ValueError where a micro-batch has fewer blocks.
    """
    to_swap, to_make_again = list[Region](), list[Region]()
    for blocks in _by_backward(dataflow, regions_of(dataflow, recomputable)):
        count = swapped + checkpointed
        if min(swapped, checkpointed) < 0 or count > len(blocks):
            raise ValueError(f"{swapped} + {checkpointed} of {len(blocks)} blocks")
        for number, block in enumerate(blocks[:count]):
            is_swapped = number * swapped % count < swapped
            (to_swap if is_swapped else to_make_again).append(block)
    return LayerChoice(
        _made_again(dataflow, to_make_again, recomputable), _saved_in(dataflow, to_swap)
    )


def _made_again(
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


def _saved_in(dataflow: Dataflow, regions: Sequence[Region]) -> frozenset[str]:
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


def _by_backward(dataflow: Dataflow, regions: Iterable[Region]) -> list[list[Region]]:
    """The regions before each backward."""
    backward = [i for i, op in enumerate(dataflow.ops) if op.phase is Phase.BACKWARD]
    groups: dict[int, list[Region]] = {}
    for region in regions:
        before = next((n for n, i in enumerate(backward) if i > region.ops[-1]), len(backward))
        groups.setdefault(before, []).append(region)
    return list(groups.values())
