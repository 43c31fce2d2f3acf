"""Small parameters: those with next to no bytes rest on the device with their states.

In: a Problem, or a placement. Out: the problem in which the smallest are not decided about, or the
placement with more of them at rest. A copy of a few KiB takes the link's latency and the
interpreter's time, each way and for each state, and gives next to no memory back
(`docs/decisions/0039-small-tensors-stay.md`). Biases and norms are more than half of most models'
tensors, so that to leave them out is half of what there is to schedule.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import replace

from cotrain_compile.dataflow import Dataflow, UpdateGroup
from cotrain_compile.machine import Tier
from cotrain_compile.placement.policies import smallest
from cotrain_compile.placement.problem import Problem
from cotrain_compile.plan import Placement, UpdateMode

# What a parameter has in all, its states and gradient included, is small up to so many bytes: a
# link takes longer to begin than to carry them.
SMALL_BYTES = 1 << 16
# All that rests takes at most this part of the device's budget.
SHARE = 0.01
# Where not all of them fit, the smaller ones of them may.
PARTS = (1, 2, 4, 8)


def with_small_resting(problem: Problem) -> Problem:
    """`problem` in which the smallest parameters that are updated rest on the device.

    Those whose update takes the device no longer than their copies would take the link.
    """
    left = SHARE * problem.budgets[Tier.DEVICE]
    resting: list[str] = []
    for nbytes, param in sorted(_small(problem)):
        left -= nbytes
        if left < 0:
            break
        resting.append(param)
    return replace(problem, resting=frozenset(resting)) if resting else problem


def _small(problem: Problem) -> Iterator[tuple[int, str]]:
    """Small parameters with the bytes of all that they have."""
    dataflow, machine = problem.dataflow, problem.machine
    for group in dataflow.updates:
        nbytes = _nbytes(dataflow, group)
        nbytes_in_all = nbytes + dataflow.buffer[group.gradient].nbytes
        if nbytes_in_all > SMALL_BYTES or group.param in dataflow.kept_gradients:
            continue
        update_s = math.fsum(problem.costs.device_s[name] for name in group.ops)
        copies = 1 + len(group.states)
        ways = (machine.h2d, machine.d2h)
        copies_s = math.fsum(copies * way.latency_s + nbytes / way.bytes_per_s for way in ways)
        if update_s <= copies_s:
            yield nbytes_in_all, group.param


def with_small_at_rest(dataflow: Dataflow, placement: Placement) -> Iterator[Placement]:
    """Placements in which small parameters that move stay, the one with the most first."""
    sizes = {g.param: _nbytes(dataflow, g) for g in dataflow.updates}
    small = smallest(sizes)
    moving = [g for g in dataflow.updates if g.param in small and _moves(placement, g)]
    resting = sorted(moving, key=lambda group: sizes[group.param])
    for part in PARTS:
        if chosen := resting[: len(resting) // part]:
            yield at_rest(placement, chosen)


def at_rest(placement: Placement, groups: Collection[UpdateGroup]) -> Placement:
    """`placement` with the parameters of `groups` on the device, with their states."""
    names = {name for group in groups for name in (group.param, *group.states)}
    weights = names | {group.low_precision for group in groups if group.low_precision}
    return replace(
        placement,
        homes={**placement.homes, **dict.fromkeys(names, Tier.DEVICE)},
        updates={
            **placement.updates,
            **dict.fromkeys((group.param for group in groups), UpdateMode.RESIDENT),
        },
        offloaded=tuple(name for name in placement.offloaded if name not in weights),
    )


def as_in(placement: Placement, other: Placement, groups: Collection[UpdateGroup]) -> Placement:
    """`placement` with the parameters of `groups` where `other` has them, and all they own."""
    owned = {name for group in groups for name in (group.param, *group.states)}
    weights = owned | {group.low_precision for group in groups if group.low_precision}
    weights |= {group.gradient for group in groups}
    others = (name for name in placement.offloaded if name not in weights)
    return replace(
        placement,
        homes={**placement.homes, **{name: other.homes[name] for name in owned}},
        updates={**placement.updates, **{g.param: other.updates[g.param] for g in groups}},
        offloaded=(*others, *(name for name in other.offloaded if name in weights)),
    )


def _moves(placement: Placement, group: UpdateGroup) -> bool:
    """Whether it is updated otherwise than on the device; a gradient at home elsewhere stays."""
    gradient_stays = placement.homes.get(group.gradient) is not Tier.HOST
    return gradient_stays and placement.updates[group.param] is not UpdateMode.RESIDENT


def _nbytes(dataflow: Dataflow, group: UpdateGroup) -> int:
    return sum(dataflow.buffer[name].nbytes for name in (group.param, *group.states))
