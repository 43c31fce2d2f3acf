"""Exchanges: when the device waits for the network, if nothing else is done meanwhile.

In: ops in order, what each takes on the device, and exchanges on the network, which take turns on
a lane of their own (`CostTable.network_s`). Out: the seconds that each op waits before it runs. The
same ops in the same order never take less: an exchange begins behind its op, and ends before what
awaits it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from cotrain_compile.dataflow import Op
from cotrain_compile.placement.problem import Problem


@dataclass(frozen=True)
class Chain:
    """The device and the network, with nothing beside them.

    `stalls` has the seconds that the device waits before each op, `end_s` when both are done.
    """

    stalls: Sequence[float]
    end_s: float


def chain_of(
    ops: Iterable[Op], device_s: Mapping[str, float], network_s: Mapping[str, float]
) -> Chain:
    """What `ops` in this order take, by their seconds; an exchange begun before them is done."""
    now_s = free_s = 0.0
    done_s: dict[str, float] = {}
    stalls = []
    for op in ops:
        stall = max(0.0, done_s.get(op.awaits, 0.0) - now_s)
        stalls.append(stall)
        now_s += stall + device_s[op.name]
        if op.name in network_s:
            free_s = done_s[op.name] = max(now_s, free_s) + network_s[op.name]
    return Chain(stalls, max(now_s, free_s))


# What goes along with an exchange that a plan moves is little: a cast, padding, a norm.
MOST_ALONG = 12


def is_shifted(op: Op) -> bool:
    """Whether a plan may let what `op` begins overlap more of the step than the step does."""
    kind = "" if op.collective is None else op.collective.kind
    return kind.startswith(("all_gather", "reduce_scatter"))


def shifted_along(ops: Iterable[Op]) -> set[str]:
    """At least the ops that a plan may move so that exchanges overlap more of the step."""
    found = set[str]()
    maker: dict[str, Op] = {}
    of_wait: dict[str, str] = {}  # what a wait for a scatter brings, and what is made of that
    count = Counter[str]()
    scatters = set[str]()
    for op in ops:
        if is_shifted(op) and op.collective and op.collective.kind.startswith("all_gather"):
            found.update(_makers(op, maker))
        elif is_shifted(op):
            scatters.add(op.name)
        maker.update(dict.fromkeys(op.writes, op))
        waits = {op.name} if op.awaits in scatters else set[str]()
        waits.update(of_wait[name] for name in (*op.reads, *op.writes) if name in of_wait)
        for wait in waits:
            count[wait] += 1
            if count[wait] <= MOST_ALONG:
                found.add(op.name)
                of_wait.update(dict.fromkeys(op.writes, wait))
    return found


def _makers(begin: Op, maker: Mapping[str, Op]) -> set[str]:
    """The op itself, and those that make its input and compute nothing."""
    found, queue = {begin.name}, list(begin.reads)
    for read in queue:  # grows while it is read
        op = maker.get(read)
        if op and op.name not in found and not (op.flops or op.awaits or op.collective):
            found.add(op.name)
            queue += op.reads
    return found


def loosest(ops: Iterable[Op]) -> list[Op]:
    """`ops` with each gather right behind the exchange before it, and no wait for a scatter.

    In no plan does a gather begin earlier (`exchanges_ahead.py`) or a wait hold up less.
    """
    found: list[Op] = []
    waits: list[Op] = []
    last = 0  # behind the exchange that began last
    scatters = set[str]()
    for op in ops:
        kind = "" if op.collective is None else op.collective.kind
        if op.awaits in scatters:
            waits.append(op)
        elif kind.startswith("all_gather"):
            found.insert(last, op)
            last += 1
        else:
            found.append(op)
            if kind:
                last = len(found)
            if kind.startswith("reduce_scatter"):
                scatters.add(op.name)
    return [*found, *waits]


def elapsed_with_stalls(
    problem: Problem, ops: Sequence[Op], elapsed_s: Sequence[float]
) -> Sequence[float]:
    """`elapsed_s`, of the device before each of `ops`, with what it waits for the network."""
    if not problem.costs.network_s:
        return elapsed_s
    stalls = chain_of(ops, problem.costs.device_s, problem.costs.network_s).stalls
    waited = accumulate(stalls, initial=0.0)
    return [taken + stalled for taken, stalled in zip(elapsed_s, waited, strict=True)]
