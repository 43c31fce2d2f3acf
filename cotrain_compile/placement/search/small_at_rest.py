"""Small at rest: a placement in which the smallest parameters are updated where they compute.

In: a placement that moves parameters. Out: the same, in which those that have next to no bytes rest
on the device with their states. A copy of a few KiB takes the link's latency and the interpreter's
time, each way and for each state, and gives next to no memory back
(`docs/decisions/0039-small-tensors-stay.md`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from cotrain_compile.dataflow import Dataflow, UpdateGroup
from cotrain_compile.machine import Tier
from cotrain_compile.placement.policies import smallest
from cotrain_compile.plan import Placement, UpdateMode

# Where not all of them fit, the smaller ones of them may.
PARTS = (1, 2, 4, 8)


def with_small_at_rest(dataflow: Dataflow, placement: Placement) -> Iterator[Placement]:
    """Placements in which small parameters that move stay, the one with the most first."""
    sizes = {g.param: _nbytes(dataflow, g) for g in dataflow.updates}
    small = smallest(sizes)
    moving = [g for g in dataflow.updates if g.param in small and _moves(placement, g)]
    resting = sorted(moving, key=lambda group: sizes[group.param])
    for part in PARTS:
        if chosen := resting[: len(resting) // part]:
            yield _resting(placement, chosen)


def _moves(placement: Placement, group: UpdateGroup) -> bool:
    """Whether it is updated otherwise than on the device; a gradient at home elsewhere stays."""
    gradient_stays = placement.homes.get(group.gradient) is not Tier.HOST
    return gradient_stays and placement.updates[group.param] is not UpdateMode.RESIDENT


def _nbytes(dataflow: Dataflow, group: UpdateGroup) -> int:
    return sum(dataflow.buffer[name].nbytes for name in (group.param, *group.states))


def _resting(placement: Placement, groups: list[UpdateGroup]) -> Placement:
    names = {name for group in groups for name in (group.param, *group.states)}
    weights = names | {group.low_precision for group in groups if group.low_precision}
    return replace(
        placement,
        homes={**placement.homes, **dict.fromkeys(names, Tier.DEVICE)},
        updates={
            **placement.updates,
            **dict.fromkeys((group.param for group in groups), UpdateMode.RESIDENT),
        },
        away=tuple(name for name in placement.away if name not in weights),
    )
