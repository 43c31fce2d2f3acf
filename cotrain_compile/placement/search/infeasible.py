"""Infeasible: nothing fits, or not what was asked for. Says what would, and what helps most.

The least is what the placement needs in which everything leaves the device that can. Whatever else
is decided, each buffer is on the device in the slots in which it is there too, so no placement
needs less. It depends on the step alone, as far as the gaps do, and on no machine.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NoReturn

from cotrain_compile.dataflow import PERSISTENT_ROLES, Dataflow
from cotrain_compile.errors import PlacementError, PlanError
from cotrain_compile.machine import Tier
from cotrain_compile.placement.decisions.find_decisions import decision_space
from cotrain_compile.placement.placed import place
from cotrain_compile.placement.problem import Problem
from cotrain_compile.placement.residency import low_precision_copies, owners
from cotrain_compile.placement.schedule.find_moves import moves_of
from cotrain_compile.placement.schedule.moves import Moves
from cotrain_compile.placement.schedule.refuse import (
    ACTIVATIONS,
    GRADIENTS,
    PeakOp,
    peak_of,
    refuse_device,
)
from cotrain_compile.placement.schedule.schedule import draft, shortfall_bytes
from cotrain_compile.placement.search.greedy import least_memory
from cotrain_compile.plan import Placement
from cotrain_compile.support.units import format_budget, format_bytes, format_exactly


def floor_bytes(dataflow: Dataflow) -> int:
    """Device bytes that every plan needs: the most that one op touches which no plan offloads.

    Known without looking for a plan. `refuse` tells of as much or more: the least with everything
    offloaded that can be.
    """
    copies = set(low_precision_copies(dataflow).values())
    on_host = {name for group in dataflow.updates for name in group.ops}
    on_host |= {op.name for op in dataflow.ops if copies.intersection(op.writes)}
    touched = ({*op.reads, *op.writes} for op in dataflow.ops if op.name not in on_host)
    return max((sum(dataflow.buffer[b].nbytes for b in each) for each in touched), default=0)


def refuse(problem: Problem, least: Least, failure: str = "", *, limit: str = "") -> NoReturn:
    """Raise `PlacementError` with the `least` device (or host) budget that would do.

    Raises `PlanError` where the budgets would do: the search was too short, or the solver failed,
    and `failure` says how. Where a `limit` ended the search, in words that begin with the option,
    it does not know what is needed on the host: other plans may need less there.
    """
    budget = problem.budgets[Tier.DEVICE]
    if least.nbytes > budget:
        short = least.nbytes - budget
        peak = peak_of(least.moves)
        raise PlacementError(
            f"the step needs at least {format_bytes(least.nbytes)} on the device "
            f"({_in_words(peak)}), even with every update on the host and everything offloaded "
            f"that can be, but memory_budget is {format_budget(budget)}: {format_exactly(short)} "
            f"short; raise memory_budget, or {_advice(peak)}",
            shortfall_bytes=short,
        )
    plenty = problem.with_budget(Tier.HOST, 1 << 62)
    needed = _host_bytes(plenty, least)
    host = problem.budgets[Tier.HOST]
    if needed <= host and failure:
        raise PlanError(
            f"the solver failed ({failure}), though there is a plan; try the other one (solver), "
            "or use policy 'auto', which falls back on simpler ways"
        )
    if needed <= host:
        raise PlanError(
            "the solver found no plan within its limit, though there is one; give it more "
            "(work_limit), or use policy 'auto', which falls back on simpler ways"
        )
    within = (
        f"within memory_budget {format_budget(budget)} and host_memory_budget {format_budget(host)}"
    )
    if limit:
        raise PlacementError(
            f"the search ended at its {limit} before it found a plan {within}: there may be one. "
            f"Raise {limit.split()[0]}; where that finds none either, raise "
            "host_memory_budget or memory_budget, or make the batch or the sequence smaller",
            shortfall_bytes=needed - host,
            tier=Tier.HOST,
        )
    raise PlacementError(
        f"no plan was found {within}; with everything offloaded that can be, the step takes "
        f"{format_bytes(needed)} on the host: raise host_memory_budget by up to "
        f"{format_bytes(needed - host)}, or {_less_on_the_host(problem, least)}",
        shortfall_bytes=needed - host,
        tier=Tier.HOST,
    )


def refuse_rule(
    problem: Problem, placement: Placement, refusal: PlacementError, least: Least
) -> NoReturn:
    """Raise the refusal of a simple rule's `placement`, with what policy 'auto' would need."""
    moves = moves_of(problem, placement)
    short = shortfall_bytes(problem, moves)
    if not short:  # the host's is missing
        raise refusal
    refuse_device(problem, placement, moves, short, least.nbytes)


def _host_bytes(problem: Problem, least: Least) -> int:
    """Host bytes of the plan in which everything leaves."""
    found = draft(problem, least.placement)
    return place(problem, least.placement, found.tasks, found.moved).host_bytes


def _in_words(peak: PeakOp) -> str:
    """Where the peak is and the largest buffers alive there."""
    buffers = ", ".join(f"{b.name} {format_bytes(b.nbytes)}" for b in peak.largest)
    return f"{peak.where}: {buffers}"


def _advice(peak: PeakOp) -> str:
    """What would lower the peak: a smaller batch where it is made of temporaries."""
    temporary = sum(peak.kinds.get(kind, 0) for kind in (ACTIVATIONS, GRADIENTS))
    if 2 * temporary >= peak.nbytes:
        return (
            "make the batch or the sequence smaller: what is made around this one op is "
            f"{peak.of_it(ACTIVATIONS, GRADIENTS)}"
        )
    return "use a smaller model: the peak is made of what must stay on the device"


def _less_on_the_host(problem: Problem, least: Least) -> str:
    """What would need less of the host, the larger part of what is there first."""
    kept = problem.dataflow.total_bytes(*PERSISTENT_ROLES)
    ways = [
        (
            kept,
            "raise memory_budget so that more stays on the device (parameters and states are "
            f"{format_bytes(kept)})",
        ),
        (
            least.offloaded_bytes,
            "make the batch or the sequence smaller, or keep fewer activations (remat=True, "
            f"torch.utils.checkpoint): {format_bytes(least.offloaded_bytes)} of them are offloaded",
        ),
    ]
    ways.sort(key=lambda way: -way[0])
    return ", or ".join(text for nbytes, text in ways if nbytes)


@dataclass(frozen=True)
class Least:
    """A placement with what it moves and the device bytes that it needs.

    Of its temporaries `offloaded_bytes` are offloaded.
    """

    placement: Placement
    moves: Moves
    nbytes: int
    offloaded_bytes: int


def least_of(problem: Problem) -> Least:
    """What needs least of the device; what `problem` makes again is given.

    What may be offloaded is looked for op by op: longer buckets hide gaps.
    """
    space = decision_space(problem, None, everything=True)
    placement = space.placement("auto", least_memory(space))
    program = place(problem, placement).program
    owned = owners(program.dataflow)
    passing = (name for name in placement.offloaded if name not in owned)
    again = tuple(name for name in passing if len(program.order.offloaded_gaps(name)) > 1)
    placement = replace(placement, refetched=again)
    moves = moves_of(problem, placement)
    nbytes = shortfall_bytes(problem.with_budget(Tier.DEVICE, 0), moves)
    offloaded_bytes = sum(decision.cluster.nbytes for decision in space.activations)
    return Least(placement, moves, nbytes, offloaded_bytes)
