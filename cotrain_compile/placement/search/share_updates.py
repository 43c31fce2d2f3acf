"""Share updates: a placement in which some of the updates on the host are on the device instead.

In: a placement that updates parameters on the host. Out: the same in which a share of them, spread
over the step, has its states fetched to the device. While the host updates the one part, the link
carries the other: a greedy sees neither, since both come after the peak of memory, and a program
that is short of a solution never says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from cotrain_compile.dataflow import UpdateGroup
from cotrain_compile.machine import Tier
from cotrain_compile.placement.decisions.strategies import Strategy
from cotrain_compile.placement.problem import Problem
from cotrain_compile.placement.residency import low_precision_copies
from cotrain_compile.placement.schedule.find_moves import moves_of
from cotrain_compile.placement.schedule.moves import Moves
from cotrain_compile.placement.search.cover import covered
from cotrain_compile.plan import Lane, Placement, UpdateMode

# What an update on the device may take of its budget: a little is there besides.
ROOM = 0.9
# So many are left to the host because they hold too much where the device is full.
DROPPED = 3


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
) -> Iterator[tuple[Placement, Moves]]:
    """`placement` with about `share` of the bytes that the host updates streamed instead.

    With their gradients offloaded until their updates, and with these on the device; each with its
    moves. What then stays on the device where that is full is left to the host; where that is not
    enough, values that leave are chosen anew.
    """
    hosted = hosted_updates(problem, placement)
    for gradient_offloaded in (True, False):
        found = _that_fits(problem, placement, share, hosted, gradient_offloaded)
        if found is None and gradient_offloaded:
            found = _covered(problem, placement, _spread(problem, hosted, share))
        if found is not None:
            yield found


def _that_fits(
    problem: Problem,
    placement: Placement,
    share: float,
    hosted: Sequence[UpdateGroup],
    gradient_offloaded: bool,
) -> tuple[Placement, Moves] | None:
    """The share streamed, with one after the other left to the host until it fits."""
    among = [*hosted]
    for _ in range(DROPPED + 1):
        if not (chosen := _spread(problem, among, share)):
            return None
        shared = _streamed(problem, placement, chosen, gradient_offloaded)
        moves = moves_of(problem, shared)
        if max(moves.slot_bytes) <= problem.budgets[Tier.DEVICE]:
            return shared, moves
        if (hindering := _largest_where_full(moves, chosen)) is None:
            return None
        among.remove(hindering)
    return None


def _covered(
    problem: Problem, placement: Placement, chosen: list[UpdateGroup]
) -> tuple[Placement, Moves] | None:
    """`chosen` streamed, beside other values that leave, where that fits."""
    if not chosen:
        return None
    budget_bytes = problem.budgets[Tier.DEVICE]
    shared, moves = covered(problem, _streamed(problem, placement, chosen, True), budget_bytes)
    return (shared, moves) if max(moves.slot_bytes) <= budget_bytes else None


def _largest_where_full(moves: Moves, groups: Sequence[UpdateGroup]) -> UpdateGroup | None:
    """The one of `groups` that holds most in the slot in which most is on the device."""
    full = max(range(len(moves.slot_bytes)), key=moves.slot_bytes.__getitem__)
    there = {i.buffer.name: i.buffer.nbytes for i in moves.instances if i.first <= full < i.last}
    copies = low_precision_copies(moves.program.dataflow)

    def held(group: UpdateGroup) -> int:
        names = {group.param, copies.get(group.param), group.gradient}
        return sum(there.get(name, 0) for name in names if name is not None)

    largest = max(groups, key=held)
    return largest if held(largest) else None


def _spread(problem: Problem, groups: Sequence[UpdateGroup], share: float) -> list[UpdateGroup]:
    """About `share` of the bytes of `groups`, from the first to the last."""
    chosen = list[UpdateGroup]()
    due = taken = 0.0
    for group in sorted(groups, key=lambda group: problem.dataflow.position[group.ops[0]]):
        nbytes = _nbytes(problem, group)
        due += share * nbytes
        if due - taken >= nbytes / 2:
            chosen.append(group)
            taken += nbytes
    return chosen


def _streamed(
    problem: Problem, placement: Placement, groups: list[UpdateGroup], gradient_offloaded: bool
) -> Placement:
    dataflow = problem.dataflow
    copies = low_precision_copies(dataflow)
    homes, updates, offloaded = (
        dict(placement.homes),
        dict(placement.updates),
        dict.fromkeys(placement.offloaded),
    )
    for group in groups:
        param = group.param
        fetched = copies.get(param, param)
        fetches = 0 if homes[param] is Tier.DEVICE else 1 + (fetched in offloaded)
        passes = dataflow.buffer[group.gradient].is_passing  # what is kept has a home
        leaves = gradient_offloaded and passes and fetches != 1
        placed = Strategy(UpdateMode.STREAMED, fetches, leaves).placed(dataflow, param, fetched)
        for name in (fetched, group.gradient):
            offloaded.pop(name, None)
        homes |= placed.homes
        updates |= placed.updates
        offloaded |= dict.fromkeys(placed.offloaded)
    chosen = {group.param for group in groups}
    guesses = tuple(name for name in placement.speculative if name not in chosen)
    return replace(
        placement, homes=homes, updates=updates, offloaded=tuple(offloaded), speculative=guesses
    )


def _nbytes(problem: Problem, group: UpdateGroup) -> int:
    buffer = problem.dataflow.buffer
    return sum(buffer[name].nbytes for name in (group.param, *group.states))
