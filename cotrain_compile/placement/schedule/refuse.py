"""Refusals: what to say when a placement does not fit its budgets."""

from __future__ import annotations

from typing import NoReturn

from cotrain_compile.errors import PlacementError
from cotrain_compile.machine import Tier
from cotrain_compile.placement.problem import Problem
from cotrain_compile.placement.schedule.moves import Moves
from cotrain_compile.placement.schedule.peak import Peak, peak_of
from cotrain_compile.plan import Placement
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


def _ways_on(budget_bytes: int, auto_bytes: int | None, peak: Peak) -> str:
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
    raise PlacementError(
        f"policy {placement.policy!r} needs {format_bytes(needed)} on disk, "
        f"but disk_budget is {format_budget(budget)}: {format_bytes(needed - budget)} short; raise "
        "disk_budget, or host_memory_budget",
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
