"""Share updates: a placement in which some of the updates on the host are on the device instead.

In: a placement that updates parameters on the host. Out: the same in which a share of them, spread
over the step, has its states fetched to the device. While the host updates the one part, the link
carries the other: a greedy sees neither, since both come after the peak of memory, and a program
that is short of a solution never says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from cotrain_compile.dataflow import UpdateGroup
from cotrain_compile.machine import Tier
from cotrain_compile.placement.decisions.strategies import Strategy, strategy_of
from cotrain_compile.placement.problem import Problem
from cotrain_compile.placement.residency import low_precision_copies
from cotrain_compile.plan import Lane, Placement, UpdateMode

# What an update on the device may take of its budget: a little is there besides.
ROOM = 0.9


def balanced_share(problem: Problem, placement: Placement) -> float:
    """The share with which the link takes as long as the host; 0 where no update is on the host.

    A streamed update has its parameter, in full precision, and its states come and go.
    """
    hosted, host_s = hosted_updates(problem, placement), hosted_s(problem, placement)
    nbytes = sum(_nbytes(problem, group) for group in hosted)
    machine = problem.machine
    link_s = max(machine.copy_s(nbytes, *machine.links[lane].ends) for lane in (Lane.H2D, Lane.D2H))
    return host_s / (host_s + link_s) if hosted else 0.0


def hosted_s(problem: Problem, placement: Placement) -> float:
    """Seconds of those updates on the host."""
    hosted = hosted_updates(problem, placement)
    return sum(problem.costs.host_update_s[group.param] for group in hosted)


def hosted_updates(problem: Problem, placement: Placement) -> list[UpdateGroup]:
    """What the host updates, and the device could: it has room for all that such an update has."""
    dataflow, room = problem.dataflow, ROOM * problem.budgets[Tier.DEVICE]
    return [
        group
        for group in dataflow.updates
        if placement.updates[group.param] in (UpdateMode.HOST, UpdateMode.HOST_STREAMED)
        and group.states
        and placement.homes.get(group.gradient) is not Tier.HOST
        and _nbytes(problem, group) + dataflow.buffer[group.gradient].nbytes <= room
    ]


def with_share_streamed(
    problem: Problem, placement: Placement, share: float
) -> Iterator[Placement]:
    """`placement` with about `share` of the bytes that the host updates streamed instead.

    With their gradients away until their updates, and with these on the device.
    """
    hosted, chosen = hosted_updates(problem, placement), list[UpdateGroup]()
    due = taken = 0.0
    for group in sorted(hosted, key=lambda group: problem.dataflow.position[group.ops[0]]):
        nbytes = _nbytes(problem, group)
        due += share * nbytes
        if due - taken >= nbytes / 2:
            chosen.append(group)
            taken += nbytes
    if chosen:
        for gradient_away in (True, False):
            yield _streamed(problem, placement, chosen, gradient_away)


def _streamed(
    problem: Problem, placement: Placement, groups: list[UpdateGroup], gradient_away: bool
) -> Placement:
    dataflow = problem.dataflow
    copies = low_precision_copies(dataflow)
    homes, updates, away = (
        dict(placement.homes),
        dict(placement.updates),
        dict.fromkeys(placement.away),
    )
    for group in groups:
        param = group.param
        fetched = copies.get(param, param)
        before = strategy_of(dataflow, placement, param, fetched)
        passes = dataflow.buffer[group.gradient].is_passing  # what is kept has a home
        leaves = gradient_away and passes and before.fetches in (0, 2)
        placed = Strategy(UpdateMode.STREAMED, before.fetches, leaves).placed(
            dataflow, param, fetched
        )
        for name in (fetched, group.gradient):
            away.pop(name, None)
        homes |= placed.homes
        updates |= placed.updates
        away |= dict.fromkeys(placed.away)
    chosen = {group.param for group in groups}
    guesses = tuple(name for name in placement.speculative if name not in chosen)
    return replace(placement, homes=homes, updates=updates, away=tuple(away), speculative=guesses)


def _nbytes(problem: Problem, group: UpdateGroup) -> int:
    buffer = problem.dataflow.buffer
    return sum(buffer[name].nbytes for name in (group.param, *group.states))
