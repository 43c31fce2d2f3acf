"""Infeasible: nothing fits. Says what would: the least budget, what is alive there, what helps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NoReturn

from cotrain_compile.errors import PlacementError, PlanError
from cotrain_compile.machine import Tier
from cotrain_compile.placement.choices import Choices
from cotrain_compile.placement.find_moves import moves_of
from cotrain_compile.placement.greedy import least_memory
from cotrain_compile.placement.moves import Moves
from cotrain_compile.placement.problem import Problem
from cotrain_compile.placement.residency import device_program, host_bytes
from cotrain_compile.placement.schedule import draft, shortfall_bytes
from cotrain_compile.plan import Placement
from cotrain_compile.units import format_bytes


def refuse(problem: Problem, cuts: Sequence[Choices], failure: str = "") -> NoReturn:
    """Raise `PlacementError` with the least device (or host) budget that would do.

    Raises `PlanError` where the budgets would do: time was too short, or the solver failed, and
    `failure` says how.

    The least device budget is that of the placement in which everything leaves that can; `cuts`
    are the same step cut in several ways.
    """
    frugal = [(choices, moves_of(problem, _frugal(choices))) for choices in cuts]
    choices, moves = min(frugal, key=lambda pair: shortfall_bytes(problem, pair[1]))
    short = shortfall_bytes(problem, moves)
    budget = problem.budgets[Tier.DEVICE]
    if short > 0:
        raise PlacementError(
            f"the step needs at least {format_bytes(budget + short)} on the device "
            f"({_peak(moves)}) with every update on the host and all that can away, but "
            f"memory_budget is {format_bytes(budget)}: {format_bytes(short)} ({short:,} bytes) "
            f"short; raise memory_budget, or {_advice(moves)}",
            shortfall_bytes=short,
        )
    plenty = replace(problem, budgets={**problem.budgets, Tier.HOST: 1 << 62})
    needed = _host_bytes(plenty, choices)
    host = problem.budgets[Tier.HOST]
    if needed <= host and failure:
        raise PlanError(
            f"the solver failed ({failure}), though there is a plan; try the other one (solver), "
            "or use policy 'auto', which falls back on simpler ways"
        )
    if needed <= host:
        raise PlanError(
            "the solver found no plan in its time limit, though there is one; give it more time "
            "(time_limit), or use policy 'auto', which falls back on simpler ways"
        )
    raise PlacementError(
        f"no plan was found within memory_budget {format_bytes(budget)} and host_memory_budget "
        f"{format_bytes(host)}; with everything away that can be, the step takes "
        f"{format_bytes(needed)} on the host: raise host_memory_budget by up to "
        f"{format_bytes(needed - host)}, or memory_budget so that more stays on the device",
        shortfall_bytes=needed - host,
    )


def _frugal(choices: Choices) -> Placement:
    """The placement in which everything leaves that can."""
    decisions = least_memory(choices)
    return choices.placement("auto", decisions.ways, decisions.away)


def _host_bytes(problem: Problem, choices: Choices) -> int:
    """Host bytes of the plan in which everything leaves."""
    placement = _frugal(choices)
    found = draft(problem, placement)
    program = device_program(problem.dataflow, placement, found.moved)
    return host_bytes(program, placement, found.tasks)


def _peak(moves: Moves) -> str:
    """Where the peak is and the largest buffers alive there."""
    slot = _peak_slot(moves)
    op = moves.program.ops[min(slot, moves.program.end - 1)]
    alive = [held.buffer for held in moves.instances if held.first <= slot < held.last]
    largest = sorted(alive, key=lambda buffer: -buffer.nbytes)[:3]
    buffers = ", ".join(f"{b.name} {format_bytes(b.nbytes)}" for b in largest)
    return f"at {op.target}" + (f" in {op.module}" if op.module else "") + f": {buffers}"


def _peak_slot(moves: Moves) -> int:
    used = moves.slot_bytes
    return max(range(len(used)), key=used.__getitem__)


def _advice(moves: Moves) -> str:
    """What would lower the peak: a smaller batch where it is made of temporaries."""
    slot = _peak_slot(moves)
    alive = [held.buffer for held in moves.instances if held.first <= slot < held.last]
    temporary = sum(b.nbytes for b in alive if not b.is_input)
    if 2 * temporary >= sum(b.nbytes for b in alive):
        return "make the batch or the sequence smaller: the peak is made of values of one op"
    return "use a smaller model: the peak is made of what must stay on the device"
