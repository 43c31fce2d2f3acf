"""Network: what the exchanges of a step take, by bucket: fixed work on a lane of its own.

In: a `BucketedStep`. Out: a `Network`, which the program and the bound count beside what is decided
(`milp/time.py`). Nothing where the machine has no network, or the step no exchange.
"""

from __future__ import annotations

from dataclasses import dataclass

from cotrain_compile.placement.decisions.bucketed_step import BucketedStep
from cotrain_compile.placement.schedule.exchanges import chain_of


@dataclass(frozen=True)
class Exchanged:
    """Seconds on the network, that begin in bucket `begun` and are over in bucket `awaited`."""

    seconds: float
    begun: int
    awaited: int


@dataclass(frozen=True)
class NetworkWork:
    """The exchanges of a step.

    No bucket takes less than its part of `least_s`, nor the step less than `chain_s`: that is what
    its ops take in their order, with the exchanges between them, without any that a plan may leave
    to the host.
    """

    exchanges: tuple[Exchanged, ...] = ()
    least_s: tuple[float, ...] = ()
    chain_s: float = 0.0


NO_NETWORK = NetworkWork()


def network_work(step: BucketedStep) -> NetworkWork:
    """The exchanges of `step`, in the buckets that it is cut in."""
    problem, program = step.problem, step.program
    network_s = problem.costs.network_s
    if not network_s:
        return NO_NETWORK
    awaited = {op.awaits: slot for slot, op in enumerate(program.ops) if op.awaits}
    exchanges = tuple(
        Exchanged(
            network_s[op.name],
            step.bucket(slot),
            step.bucket(awaited.get(op.name, program.end)),
        )
        for slot, op in enumerate(program.ops)
        if op.name in network_s
    )
    casts = set(step.low_precision_copies.values())
    staying_s = {
        op.name: 0.0 if casts.intersection(op.writes) else problem.costs.device_s[op.name]
        for op in program.ops
    }
    stretches = [program.ops[start:end] for start, end in zip(step.starts, step.ends, strict=True)]
    least = []
    for ops in stretches:
        stalls = chain_of(ops, staying_s, problem).stalls
        least.append(sum(stalls) + sum(staying_s[op.name] for op in ops))
    return NetworkWork(
        exchanges, (0.0, *least, 0.0), chain_of(program.ops, staying_s, problem).end_s
    )
