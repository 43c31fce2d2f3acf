"""Exchanges: when the device waits for the network, if nothing else is done meanwhile.

In: ops in order, what each takes on the device, and exchanges on the network, which take turns on
a lane of their own (`CostTable.network_s`). Out: the seconds that each op waits before it runs. The
same ops in the same order never take less: an exchange begins behind its op, and ends before what
awaits it.
"""

from __future__ import annotations

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


def chain_of(ops: Iterable[Op], device_s: Mapping[str, float], problem: Problem) -> Chain:
    """What `ops` in this order take, by their seconds; an exchange begun before them is done."""
    network_s = problem.costs.network_s
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


def elapsed_with_stalls(
    problem: Problem, ops: Sequence[Op], elapsed_s: Sequence[float]
) -> Sequence[float]:
    """`elapsed_s`, of the device before each of `ops`, with what it waits for the network."""
    if not problem.costs.network_s:
        return elapsed_s
    stalls = chain_of(ops, problem.costs.device_s, problem).stalls
    waited = accumulate(stalls, initial=0.0)
    return [taken + stalled for taken, stalled in zip(elapsed_s, waited, strict=True)]
