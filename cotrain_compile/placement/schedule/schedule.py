"""Schedule: Placement -> Plan. Decides when each move is issued and how long it may take.

A list scheduler: it goes through the step op by op with the predicted time of the device and of
every lane, and in each gap between two ops feeds each lane with the most urgent move whose memory
fits. An offload is waited for when it is predicted to be done, or earlier where its memory is
needed. A weight is sent down for a host update while the link is idle, so that no copy of it
outlives the step on the host and none can be stale (`docs/decisions/0003-no-stale-copies.md`).

The memory that a move takes for good is planned in whole ranges of ops, so that the scheduler never
paints itself into a corner: what fits when everything moves at the last moment, always fits.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from cotrain_compile.errors import PlacementError
from cotrain_compile.machine import Tier
from cotrain_compile.placement.placed import PlacedStep, place
from cotrain_compile.placement.problem import Problem
from cotrain_compile.placement.residency import DeviceProgram
from cotrain_compile.placement.schedule.books import DoesNotFit
from cotrain_compile.placement.schedule.bundles import Bundler, alone, calls_s, settled
from cotrain_compile.placement.schedule.exchanges_ahead import with_exchanges_ahead
from cotrain_compile.placement.schedule.find_moves import moves_of
from cotrain_compile.placement.schedule.list_scheduler import EAGER, ListScheduler, Tactics
from cotrain_compile.placement.schedule.moves import Moves
from cotrain_compile.placement.schedule.overflow_to_disk import overflowing_to_disk
from cotrain_compile.placement.schedule.refuse import refuse_device, refuse_disk, refuse_host
from cotrain_compile.placement.simulate.predict import predict, step_s
from cotrain_compile.placement.simulate.works import starts_of
from cotrain_compile.plan import MovedOps, Placement, Plan, Task, Transfer

# How many ops later than by itself a task of a bundle may be issued, tried in turn; None: any.
REACHES = (None, 256, 32, 0)
# What Python takes to start a small task on the emulated device, where no calibration says it: the
# mean of copies down, copies up and updates (`python -m bench.runtime.issue_cost`).
START_S = 12e-6
# The same sums in another order differ by so much of a step.
ROUNDING = 1e-9

# Updates of a layer are at one place.
BY_LAYER = Tactics(by_layer=True)


@dataclass(frozen=True)
class Draft:
    """A placement with its schedule and how long its step takes, before the timeline is drawn.

    `tactics` are those of the schedule.
    """

    placement: Placement
    tasks: tuple[Task, ...]
    moved: tuple[MovedOps, ...]
    step_s: float
    tactics: Tactics = EAGER


def schedule(
    problem: Problem,
    placement: Placement,
    *,
    tactics: Tactics = EAGER,
    compiled: bool | None = False,
) -> Plan:
    """The plan that carries out `placement` within the budgets of `problem`; see `finished`.

    Raises `PlacementError` with the shortfall in bytes when the placement does not fit.
    """
    return finished(problem, draft(problem, placement, tactics=tactics), compiled=compiled)


def draft(
    problem: Problem,
    placement: Placement,
    *,
    tactics: Tactics = EAGER,
    moves: Moves | None = None,
) -> Draft:
    """As `schedule`, but only what is needed to compare plans.

    `moves` are those of the placement, where they have been found.
    """
    problem = problem.under(placement)
    moves = moves or moves_of(problem, placement, by_layer=tactics.by_layer)
    listed, moved = list_schedule(problem, placement, moves, tactics)
    placed = with_exchanges_ahead(place(problem, placement, listed, moved))
    placed = overflowing_to_disk(with_latest_waits(placed))
    if placed.host_bytes > problem.budgets[Tier.HOST]:
        refuse_host(problem, placement, placed.host_bytes)
    if placed.disk_bytes > problem.disk_bytes:
        refuse_disk(problem, placement, placed.disk_bytes)
    return Draft(placed.placement, placed.tasks, placed.moved, step_s(placed), tactics)


def finished(problem: Problem, draft: Draft, *, compiled: bool | None = False) -> Plan:
    """The plan of a draft, with its predicted timeline.

    Where the device runs `compiled` code (None: if the machine's does) its tasks are settled, and
    the updates of a layer are at one place, where that fits and takes no longer: see
    `bundles.settled`.
    """
    problem = problem.under(draft.placement)
    settles = problem.machine.fuses_updates if compiled is None else compiled
    if settles:
        draft = min(_as_compiled(problem, draft), key=partial(_cost_s, problem))
    return as_drafted(problem, _in_bundles(problem, draft))


def as_drafted(problem: Problem, draft: Draft) -> Plan:
    """The plan of a draft with its predicted timeline, and nothing changed."""
    problem = problem.under(draft.placement)
    return Plan(
        fingerprint=problem.dataflow.fingerprint,
        machine=problem.machine.name,
        budgets=problem.budgets,
        placement=draft.placement,
        tasks=draft.tasks,
        predicted=predict(_placed(problem, draft)),
        moved=draft.moved,
        rates=problem.machine.rates,
    )


def _in_bundles(problem: Problem, found: Draft) -> Draft:
    """`found` with small tasks in bundles, where a step takes no longer so."""
    tasks = alone(found.tasks)
    placed = place(problem, found.placement, tasks, found.moved)
    program, best = placed.program, found
    limit_s = _started_s(problem, found.step_s, tasks) * (1 + ROUNDING)
    bundler, tried = Bundler(program, tasks), list[list[Task]]()
    for reach in REACHES if program.ops else ():
        joined = bundler.within(program.end if reach is None else reach)
        if joined is None or joined in tried:
            continue
        tried.append(joined)
        in_bundles = replace(placed, tasks=tuple(joined))
        seconds = step_s(in_bundles)
        takes_s = _started_s(problem, seconds, joined)
        if takes_s <= limit_s and _fits(in_bundles):
            best, limit_s = replace(found, tasks=in_bundles.tasks, step_s=seconds), takes_s
    return best


def _fits(placed: PlacedStep) -> bool:
    budgets = placed.problem.budgets
    on_device = max(placed.device_bytes) <= budgets[Tier.DEVICE]
    return on_device and placed.host_bytes <= budgets[Tier.HOST]


def _started_s(problem: Problem, seconds: float, tasks: Sequence[Task]) -> float:
    """What a step of `seconds` takes with what Python takes for its tasks where that is not told.

    A device that runs ahead waits for Python no longer than the simulation says. Any other waits
    for each task, whether or not somebody has measured how long.
    """
    if problem.machine.runs_ahead or problem.machine.issue_s:
        return seconds
    return seconds + START_S * starts_of(tasks)


def _as_compiled(problem: Problem, found: Draft) -> Iterator[Draft]:
    """`found` in the ways in which compiled code may run it, the one with least kinds first."""
    if found.moved:
        with suppress(PlacementError):
            yield _settled(problem, draft(problem, found.placement, tactics=BY_LAYER))
    yield _settled(problem, found)
    yield found


def _settled(problem: Problem, found: Draft) -> Draft:
    placed = _placed(problem, found)
    if not found.tasks or not placed.program.ops:
        return found
    tasks = tuple(settled(placed))
    return replace(found, tasks=tasks, step_s=step_s(replace(placed, tasks=tasks)))


def _cost_s(problem: Problem, found: Draft) -> float:
    """What compiled code takes for it."""
    return found.step_s + calls_s(_placed(problem, found))


def _placed(problem: Problem, found: Draft) -> PlacedStep:
    return place(problem, found.placement, found.tasks, found.moved)


def list_schedule(
    problem: Problem, placement: Placement, moves: Moves, tactics: Tactics
) -> tuple[list[Task], tuple[MovedOps, ...]]:
    """Tasks in order of issue, and the ops that were moved; raises as `schedule`."""
    try:
        return ListScheduler(problem, moves, tactics).run()
    except DoesNotFit:
        refuse_device(problem, placement, moves, shortfall_bytes(problem, moves))


def shortfall_bytes(problem: Problem, moves: Moves) -> int:
    """How much more than its budget the device needs for `moves`; 0 where they fit.

    With less memory updates have other deadlines, so that what is said to be missing there may be
    more than is: then the least that does is between.
    """
    enough = 0
    while missing := _missing_bytes(problem, moves, enough):
        enough += missing
    if not enough or _missing_bytes(problem, moves, enough - 1):
        return enough
    less = range(enough)
    return bisect_left(less, True, 1, key=lambda more: not _missing_bytes(problem, moves, more))


def _missing_bytes(problem: Problem, moves: Moves, more: int) -> int:
    """What `moves` lack on a device with so many bytes `more`, 0 where they fit."""
    larger = problem.with_budget(Tier.DEVICE, problem.budgets[Tier.DEVICE] + more)
    try:
        ListScheduler(larger, moves, EAGER)
    except DoesNotFit as error:
        return error.nbytes
    return 0


def with_latest_waits(placed: PlacedStep) -> PlacedStep:
    """Wait for each offload as late as the memory it keeps still fits under the budget.

    A wait can only ever hold up the device, so a later one makes a plan sturdier against links that
    are slower than predicted.
    """
    offloaded = (t.buffer for t in placed.tasks if isinstance(t, Transfer) and t.is_offload)
    # Of each copy of a buffer that leaves when it ends, by when it is current.
    ends: dict[str, dict[int, int]] = {name: {} for name in offloaded}
    for held in placed.instances:
        if held.buffer.name in ends:
            ends[held.buffer.name][held.current] = held.last
    room = placed.problem.budgets[Tier.DEVICE] - np.array(placed.device_bytes, dtype=np.int64)
    result: list[Task] = []
    for task in placed.tasks:
        if isinstance(task, Transfer) and task.is_offload:
            task = _with_latest_wait(placed.program, ends[task.buffer], task, room)
        result.append(task)
    return replace(placed, tasks=tuple(result))


def _with_latest_wait(
    program: DeviceProgram, ends: Mapping[int, int], task: Transfer, room: NDArray[np.int64]
) -> Transfer:
    """`task` with its latest wait; `room` are the bytes free in each slot, less what that takes."""
    issued, waited, end = program.issue_slot(task), program.wait_slot(task), program.end
    current = max((since for since in ends if since <= issued), default=None)
    if current is None:
        return task
    held_to = ends[current]
    first = max(waited, min(held_to, end))  # before it the source is there anyway
    (tight,) = np.nonzero(room[first:end] < task.nbytes)
    slot = first + int(tight[0]) if len(tight) else end
    room[first:slot] -= task.nbytes
    if waited < slot == end and held_to <= slot:
        if room[slot] < task.nbytes:
            slot -= 1
        else:
            room[slot] -= task.nbytes
    return task.between(task.issue_after, program.ops[slot].name if slot < end else None)
