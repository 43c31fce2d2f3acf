"""Refusals: what to say when a placement does not fit its budgets.

Peak: the op at which a placement needs most of the device, and what is alive there by kind.

In: `Moves` of a placement. Out: a `PeakOp`, for refusals: where it is, what it is made of, and what
a user can change about that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

from cotrain_compile.dataflow import PERSISTENT_ROLES, Buffer, Op, Role
from cotrain_compile.errors import PlacementError
from cotrain_compile.machine import Tier
from cotrain_compile.placement.problem import Problem
from cotrain_compile.placement.schedule.moves import Moves
from cotrain_compile.plan import Placement
from cotrain_compile.plan.on_disk import RESTING_RULE
from cotrain_compile.support.units import format_budget, format_bytes, format_exactly


def refuse_device(
    problem: Problem,
    placement: Placement,
    moves: Moves,
    shortfall_bytes: int,
    auto_bytes: int | None = None,
) -> NoReturn:
    """Raise `PlacementError`: the step needs `shortfall_bytes` more, and what is there then.

    `auto_bytes` is the least device budget of any plan, where it is known.
    """
    budget = problem.budgets[Tier.DEVICE]
    peak = peak_of(moves)
    parts = ", ".join(f"{kind} {format_bytes(nbytes)}" for kind, nbytes in peak.kinds.items())
    ways_on = _ways_on(budget, auto_bytes, peak)
    raise PlacementError(
        f"policy {placement.policy!r} needs {format_bytes(budget + shortfall_bytes)} on the device "
        f"({peak.where}: {parts}), but memory_budget is {format_budget(budget)}: "
        f"{format_exactly(shortfall_bytes)} short; {ways_on}",
        shortfall_bytes=shortfall_bytes,
    )


def _ways_on(budget_bytes: int, auto_bytes: int | None, peak: PeakOp) -> str:
    """Ways on: first what is sure to do, and what the peak is made of before more memory."""
    auto = "policy='auto', which also moves activations and weights"
    more = "raise memory_budget"
    ways: list[str | None]
    if auto_bytes is None:
        ways = [f"use {auto}", peak.way_on, more]
    elif auto_bytes <= budget_bytes:
        needs = f"needs at least {format_bytes(auto_bytes)} on the device"
        ways = [f"use {auto} and {needs}", peak.way_on, more]
    else:
        least = f"{format_bytes(auto_bytes)} ({auto_bytes:,} bytes) and use {auto}"
        ways = [f"{more} to at least {least}", peak.way_on]
    return "; or ".join(filter(None, ways))


def refuse_disk(problem: Problem, placement: Placement, needed: int) -> NoReturn:
    """Raise `PlacementError`: what rests on disk needs `needed` bytes there."""
    budget = problem.disk_bytes
    told, way_on = "there is no disk: ", "set disk to a folder"
    if budget:
        told = (
            f"disk_budget is {format_budget(budget)}: {format_bytes(needed - budget)} short; raise "
            "disk_budget, or "
        )
        way_on += " on a larger drive"
    if placement.policy != RESTING_RULE:
        way_on = "raise host_memory_budget"
    raise PlacementError(
        f"policy {placement.policy!r} needs {format_bytes(needed)} on disk, but {told}{way_on}",
        shortfall_bytes=needed - budget,
        tier=Tier.DISK,
    )


def refuse_host(problem: Problem, placement: Placement, needed: int) -> NoReturn:
    """Raise `PlacementError`: the plan needs `needed` bytes on the host."""
    budget = problem.budgets[Tier.HOST]
    raise PlacementError(
        f"policy {placement.policy!r} needs {format_bytes(needed)} on the host for optimizer "
        f"states, gradients and parameters in flight, but host_memory_budget is "
        f"{format_budget(budget)}: {format_bytes(needed - budget)} short; raise "
        "host_memory_budget, or use policy='auto', which leaves on the device what memory_budget "
        f"has room for{_or_a_disk(problem)}",
        shortfall_bytes=needed - budget,
        tier=Tier.HOST,
    )


def _or_a_disk(problem: Problem) -> str:
    """Where nothing may rest on disk: how it would."""
    return "" if problem.disk_bytes else ", or let states rest on a drive (option disk)"


ACTIVATIONS, GRADIENTS = "activations", Role.GRADIENT.value
# With less than this share of the peak, activations are not worth a change.
SHARE = 0.25


@dataclass(frozen=True)
class PeakOp:
    """`kinds` has bytes by kind, largest first; `largest` the three largest buffers.

    `op` is None in a step that does nothing but update.
    """

    op: Op | None
    kinds: Mapping[str, int]
    largest: tuple[Buffer, ...]

    @property
    def nbytes(self) -> int:
        """All that is alive there."""
        return sum(self.kinds.values())

    @property
    def where(self) -> str:
        """The op and its module."""
        if self.op is None:
            return "at an update"
        return f"at {self.op.target}" + (f" in {self.op.module}" if self.op.module else "")

    def of_it(self, *kinds: str) -> str:
        """How much of the peak is of these kinds, in words."""
        part = sum(self.kinds.get(kind, 0) for kind in kinds)
        there = format_bytes(self.nbytes)
        told = "all" if format_bytes(part) == there else format_bytes(part)
        return f"{told} of the {there} there"

    @property
    def way_on(self) -> str | None:
        """What a user can change about the step to lower it, where that is worth it."""
        if self.kinds.get(ACTIVATIONS, 0) < SHARE * self.nbytes:
            return None
        return (
            "make the batch or the sequence smaller, or keep fewer activations (remat=True, "
            f"torch.utils.checkpoint): they are {self.of_it(ACTIVATIONS)}"
        )


def peak_of(moves: Moves) -> PeakOp:
    """The first op at which most is alive, by the least that `moves` need."""
    used, ops = moves.slot_bytes, moves.program.ops
    slot = max(range(len(used)), key=used.__getitem__)
    alive = [held.buffer for held in moves.instances if held.first <= slot < held.last]
    kinds: Counter[str] = Counter()
    gradients = {group.gradient for group in moves.program.dataflow.updates}
    for buffer in alive:
        kinds[_kind(buffer, gradients)] += buffer.nbytes
    return PeakOp(
        op=ops[min(slot, len(ops) - 1)] if ops else None,
        kinds={kind: nbytes for kind, nbytes in kinds.most_common() if nbytes},
        largest=tuple(sorted(alive, key=lambda buffer: -buffer.nbytes)[:3]),
    )


def _kind(buffer: Buffer, gradients: set[str]) -> str:
    if buffer.role in PERSISTENT_ROLES or buffer.role is Role.WORKSPACE:
        return buffer.role.value.replace("_", " ")
    return GRADIENTS if buffer.name in gradients else ACTIVATIONS
