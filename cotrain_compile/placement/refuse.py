"""Refusals: what to say when a placement does not fit its budgets."""

from __future__ import annotations

from typing import NoReturn

from cotrain_compile.dataflow import PERSISTENT_ROLES
from cotrain_compile.errors import PlacementError
from cotrain_compile.machine import Tier
from cotrain_compile.placement.moves import Moves
from cotrain_compile.placement.problem import Problem
from cotrain_compile.plan import Placement
from cotrain_compile.units import format_bytes


def refuse_device(
    problem: Problem, placement: Placement, moves: Moves, shortfall_bytes: int
) -> NoReturn:
    """Raise `PlacementError`: the step needs `shortfall_bytes` more, and what is there then."""
    budget = problem.budgets[Tier.DEVICE]
    used = moves.slot_bytes
    slot = max(range(len(used)), key=used.__getitem__)
    op = moves.program.ops[min(slot, moves.program.end - 1)]
    kinds: dict[str, int] = {}
    for held in moves.instances:
        if held.first <= slot < held.last:
            role = held.buffer.role
            kind = role.value if role in PERSISTENT_ROLES else "activations and gradients"
            kinds[kind] = kinds.get(kind, 0) + held.buffer.nbytes
    parts = ", ".join(f"{kind} {format_bytes(n)}" for kind, n in kinds.items() if n)
    where = f"at {op.target}" + (f" in {op.module}" if op.module else "")
    way_on = (
        "use policy='zero-offload', or raise memory_budget"
        if placement.policy == "resident"
        else "raise memory_budget, or make the batch smaller"
    )
    raise PlacementError(
        f"policy {placement.policy!r} needs {format_bytes(budget + shortfall_bytes)} on the device "
        f"({where}: {parts}), but memory_budget is {format_bytes(budget)}: "
        f"{format_bytes(shortfall_bytes)} ({shortfall_bytes:,} bytes) short; {way_on}",
        shortfall_bytes=shortfall_bytes,
    )


def refuse_host(problem: Problem, placement: Placement, needed: int) -> NoReturn:
    """Raise `PlacementError`: the plan needs `needed` bytes on the host."""
    budget = problem.budgets[Tier.HOST]
    raise PlacementError(
        f"policy {placement.policy!r} needs {format_bytes(needed)} on the host for optimizer "
        f"states, gradients and parameters in flight, but host_memory_budget is "
        f"{format_bytes(budget)}: {format_bytes(needed - budget)} short; raise host_memory_budget, "
        "or memory_budget so that more stays on the device",
        shortfall_bytes=needed - budget,
    )
