"""Guessing: a schedule with updates on guesses added to it.

In: a Problem and what was found for it. Out: the same placement with those of its updates on the
host on guesses that begin early enough. A plan is hedged where that is all that guesses have
changed: while they are held back it is the plan that waits, which was looked for without them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import replace

from cotrain_compile.errors import PlacementError
from cotrain_compile.guesses import guesses_of
from cotrain_compile.placement.problem import Problem
from cotrain_compile.placement.residency import HOST_MODES
from cotrain_compile.placement.schedule.schedule import Draft, draft, finished
from cotrain_compile.placement.simulate.outcomes import outcomes
from cotrain_compile.plan import HostRegion, Plan

ROUNDING = 1.0 + 1e-9


def on_guesses(problem: Problem, found: Draft, guessed: Collection[str]) -> Iterator[Draft]:
    """`found` with the updates on guesses that begin early enough, where there are any.

    Guesses may be made in updates of the parameters `guessed`.
    """
    modes = found.placement.updates
    hosted = [param for param in guessed if modes[param] in HOST_MODES]
    if not hosted or not found.placement.early_updates:
        return
    # Not where the host has no room for what they save.
    with suppress(PlacementError):
        placement = replace(found.placement, speculative=tuple(hosted))
        tried = draft(problem, placement, tactics=found.tactics)
        begun = {t.param for t in tried.tasks if isinstance(t, HostRegion) and t.guesses}
        placement = replace(placement, speculative=tuple(p for p in hosted if p in begun))
        yield replace(tried, placement=placement)


def hedged(problem: Problem, waiting: Plan, found: Draft, *, compiled: bool | None) -> Plan:
    """`waiting`, the plan of `found`, with guesses where they gain and cost nothing held back."""
    waits_s = outcomes(problem, waiting).right_s * ROUNDING
    for tried in on_guesses(problem, found, tuple(guesses_of(problem.dataflow))):
        plan = finished(problem, tried, compiled=compiled)
        gains = plan.predicted.makespan_s < waiting.predicted.makespan_s
        if plan.speculations and gains and outcomes(problem, plan).held_back_s <= waits_s:
            return plan
    return waiting
