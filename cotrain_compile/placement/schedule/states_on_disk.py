"""States on disk: of a schedule that the host has no room for, some states rest on disk instead.

In: a placed step with its tasks. Out: the same with as few states on disk as are enough, where the
problem allows it. Nothing else of the schedule changes: an update on the host reads and writes what
rests on disk itself, beside others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from cotrain_compile.dataflow import UpdateGroup
from cotrain_compile.machine import Tier
from cotrain_compile.on_disk import PIECE_BYTES, ROOMS, may_rest_on_disk, resting, whole_blocks
from cotrain_compile.placement.placed import PlacedStep
from cotrain_compile.plan import HostRegion


def with_states_on_disk(placed: PlacedStep) -> PlacedStep:
    """`placed` within the host's budget, as far as states on disk help.

    First go those whose updates are issued first: the drive is at work from then on.
    """
    problem, sizes = placed.problem, placed.dataflow.buffer
    short = placed.host_bytes - problem.budgets[Tier.HOST]
    disk_left = problem.disk_bytes - placed.disk_bytes
    if short <= 0 or disk_left <= 0:
        return placed
    moved: list[str] = []
    rooms = 0
    for group in _updated_on_host(placed):
        already = resting(placed.placement, group)
        states = [name for name in may_rest_on_disk(placed.dataflow, group) if name not in already]
        nbytes = sum(whole_blocks(sizes[name].nbytes) for name in states)
        if nbytes > disk_left:
            continue
        piece = sum(min(PIECE_BYTES, whole_blocks(sizes[name].nbytes)) for name in states)
        rooms = max(rooms, ROOMS * piece)
        moved += states
        disk_left -= nbytes
        short -= sum(sizes[name].nbytes for name in states)
        if short + rooms <= 0:
            break
    homes = {**placed.placement.homes, **dict.fromkeys(moved, Tier.DISK)}
    found = replace(placed, placement=replace(placed.placement, homes=homes))
    return found if found.host_bytes < placed.host_bytes else placed  # rooms may be larger


def _updated_on_host(placed: PlacedStep) -> Iterator[UpdateGroup]:
    """The groups that the host updates for good and not on guesses, in their order of issue."""
    speculative = set(placed.placement.speculative)
    for task in placed.tasks:
        if isinstance(task, HostRegion) and not task.makes and task.param not in speculative:
            yield placed.dataflow.update[task.param]
