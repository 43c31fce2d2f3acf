"""Overflow to disk: of a schedule that the host has no room for, some rests on disk instead.

In: a placed step with its tasks. Out: the same with about as little on disk as is enough, where the
problem allows it. Nothing else of the schedule changes: updates, casts and fetches read what rests
on disk themselves, and updates and offloads write it, beside others.

Activations go last: each step writes them anew, and a drive wears out by what is written.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from cotrain_compile.dataflow import Role, UpdateGroup
from cotrain_compile.machine import Tier
from cotrain_compile.placement.host_memory import left_on_host
from cotrain_compile.placement.op_order import Instance
from cotrain_compile.placement.placed import PlacedStep
from cotrain_compile.placement.residency import IntervalSum
from cotrain_compile.plan import HostRegion, UpdateMode
from cotrain_compile.plan.on_disk import (
    RESTING_RULE,
    gradients_may_rest,
    may_rest_on_disk,
    value_may_rest,
    weight_may_rest,
    whole_blocks,
)

# Rooms depend on what passes through them: after so many looks the host has room, or never will.
LOOKS = 5


def overflowing_to_disk(placed: PlacedStep) -> PlacedStep:
    """`placed` within the host's budget, as far as the disk helps; whatever rested there before.

    Of the rule that says itself what rests there it is as it was.
    """
    if placed.placement.policy == RESTING_RULE:
        return placed
    homes = placed.placement.homes
    in_memory = {name: Tier.HOST if tier is Tier.DISK else tier for name, tier in homes.items()}
    placed = _with(placed, in_memory, ())
    problem, found = placed.problem, placed
    for _ in range(LOOKS):
        short = found.host_bytes - problem.budgets[Tier.HOST]
        disk_left = problem.disk_bytes - found.disk_bytes
        if short <= 0 or disk_left <= 0:
            break
        moved = _moved(found, short, disk_left)
        values = [] if moved else _values_of(found, short, disk_left)
        if not (moved or values):
            break
        homes = {**found.placement.homes, **dict.fromkeys(moved, Tier.DISK)}
        found = _with(found, homes, (*found.placement.offloaded_to_disk, *values))
    return found if found.host_bytes < placed.host_bytes else placed  # rooms may be larger


def _with(placed: PlacedStep, homes: Mapping[str, Tier], offloaded: Sequence[str]) -> PlacedStep:
    placement = replace(placed.placement, homes=homes, offloaded_to_disk=tuple(offloaded))
    return replace(placed, placement=placement)


def _moved(placed: PlacedStep, short: int, disk_left: int) -> list[str]:
    """The homes that are to leave the host for `short` bytes.

    First what is only read, then states, which are read once in a step, then parameters that are
    updated, and what is kept in the `.grad` of those that are there, which is read and written in
    each step. Of states those go first whose updates are issued first: the drive is at work from
    then on.
    """
    sizes = placed.dataflow.buffer
    moved: list[str] = []
    for some in (_frozen(placed, short), *_updated(placed), *_kept(placed)):
        nbytes = sum(whole_blocks(sizes[name].nbytes) for name in some)
        if short > 0 and nbytes <= disk_left:
            moved += some
            disk_left -= nbytes
            short -= sum(sizes[name].nbytes for name in some)
    return moved


def _frozen(placed: PlacedStep, short: int) -> list[str]:
    """Frozen parameters of `short` bytes, or all that may, as far apart in the step as can be."""
    dataflow, touches = placed.dataflow, placed.program.touches
    sizes, params = dataflow.buffer, (b.name for b in dataflow.buffers if b.role is Role.PARAM)
    frozen = (p for p in params if p not in dataflow.update and weight_may_rest(dataflow, p))
    found = sorted(_on_host(placed, frozen), key=lambda name: touches.get(name, [0])[0])
    total, chosen = sum(sizes[name].nbytes for name in found), list[str]()
    passed = taken = 0
    for name in found:
        passed += sizes[name].nbytes
        if taken < min(1.0, short / total) * passed:
            chosen.append(name)
            taken += sizes[name].nbytes
    return chosen


def _updated(placed: PlacedStep) -> Iterator[Sequence[str]]:
    """Of each update on the host its states, and after all of these each parameter."""
    groups = [*_updated_on_host(placed)]
    for group in groups:
        yield _on_host(placed, may_rest_on_disk(placed.dataflow, group))
    modes = placed.placement.updates
    for group in groups:
        rests = modes[group.param] is UpdateMode.HOST_STREAMED
        if rests and weight_may_rest(placed.dataflow, group.param):
            yield _on_host(placed, [group.param])


def _kept(placed: PlacedStep) -> Iterator[Sequence[str]]:
    """Of each parameter that is off the device what is kept in its `.grad`."""
    dataflow, placement = placed.dataflow, placed.placement
    in_memory = {UpdateMode.STREAMED, UpdateMode.RESIDENT}
    for param in dataflow.kept_gradients:
        may = placement.updates.get(param) not in in_memory and param not in placement.speculative
        if may and placement.is_off_device(param):
            yield _on_host(placed, gradients_may_rest(dataflow, param))


def _values_of(placed: PlacedStep, short: int, disk_left: int) -> list[str]:
    """Values that are offloaded, to be so on disk, with which the host holds `short` bytes less.

    Those that are there when it holds most, and of these those that are offloaded longest: for the
    drive is the slower way.
    """
    dataflow, placement, end = placed.dataflow, placed.placement, placed.program.end + 1
    may = {name for name in placement.offloaded if value_may_rest(dataflow, name)}
    may -= set(placement.offloaded_to_disk)
    copies = IntervalSum(end)
    spans: dict[str, Instance] = {}
    for left in left_on_host(placed.program, placement, placed.tasks):
        copies.add(left.buffer.nbytes, left.first, left.last)
        if left.buffer.name in may:
            spans[left.buffer.name] = left
    held = np.array(copies.values(), dtype=np.int64)
    allowed = int(held.max(initial=0)) - short
    longest = sorted(spans.values(), key=lambda span: span.first - span.last)
    chosen: list[str] = []
    for span in longest:
        over = held[span.first : span.last] > allowed
        nbytes = whole_blocks(span.buffer.nbytes)
        if over.any() and nbytes <= disk_left:
            chosen.append(span.buffer.name)
            held[span.first : span.last] -= span.buffer.nbytes
            disk_left -= nbytes
    return chosen


def _on_host(placed: PlacedStep, names: Iterable[str]) -> list[str]:
    homes = placed.placement.homes
    return [name for name in names if homes[name] is Tier.HOST]


def _updated_on_host(placed: PlacedStep) -> Iterator[UpdateGroup]:
    """The groups that the host updates for good and not on guesses, in their order of issue."""
    speculative = set(placed.placement.speculative)
    for task in placed.tasks:
        if isinstance(task, HostRegion) and not task.makes and task.param not in speculative:
            yield placed.dataflow.update[task.param]
