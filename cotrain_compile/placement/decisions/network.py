"""Network: what the exchanges of a step take, by bucket: fixed work on a lane of its own.

In: a `BucketedStep`. Out: a `NetworkWork`, which the program and the bound count beside what is
decided (`milp/time.py`). Nothing where the machine has no network, or the step no exchange.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from cotrain_compile.dataflow import Op
from cotrain_compile.placement.decisions.bucketed_step import BucketedStep
from cotrain_compile.placement.decisions.effects import Exchanged
from cotrain_compile.placement.schedule.exchanges import (
    chain_of,
    is_shifted,
    loosest,
    shifted_along,
)


@dataclass(frozen=True)
class NetworkWork:
    """The exchanges of a step, as it has them; `loose`, as far apart as any plan may have them.

    As the step has them no bucket takes less than its part of `least_s`, in no plan less than that
    of `loose_s`, but for the ops that are moved with an exchange: they take `shifted_s` together.
    No plan takes less than `chain_s`: what the others take in the loosest order, with the exchanges
    that they wait for, without any that a plan may leave to the host.
    """

    exchanges: tuple[Exchanged, ...] = ()
    loose: tuple[Exchanged, ...] = ()
    least_s: tuple[float, ...] = ()
    loose_s: tuple[float, ...] = ()
    chain_s: float = 0.0
    shifted_s: float = 0.0


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
    last = step.bucket(program.end)
    loose = tuple(
        replace(
            each,
            begun=0 if kind.startswith("all_gather") else each.begun,
            awaited=last if kind.startswith("reduce_scatter") else each.awaited,
        )
        for each, kind in zip(exchanges, _kinds(program.ops, network_s), strict=True)
    )
    casts = set(step.low_precision_copies.values())
    staying_s = {
        op.name: 0.0 if casts.intersection(op.writes) else problem.costs.device_s[op.name]
        for op in program.ops
    }
    along = shifted_along(program.ops)
    unshifted_s = staying_s | dict.fromkeys(along, 0.0)
    fixed = {op.name for op in program.ops if not is_shifted(op)}
    return NetworkWork(
        exchanges,
        loose,
        _least(step, staying_s, network_s),
        _least(step, staying_s, {name: s for name, s in network_s.items() if name in fixed}),
        chain_of(loosest(program.ops), unshifted_s, network_s).end_s,
        sum(staying_s[name] for name in along),
    )


def _least(
    step: BucketedStep, device_s: Mapping[str, float], network_s: Mapping[str, float]
) -> tuple[float, ...]:
    """What each bucket takes at least: its own ops, and the exchanges that they wait for."""
    ops = step.program.ops
    least = [0.0]
    for start, end in zip(step.starts, step.ends, strict=True):
        stalls = chain_of(ops[start:end], device_s, network_s).stalls
        least.append(sum(stalls) + sum(device_s[op.name] for op in ops[start:end]))
    return (*least, 0.0)


def _kinds(ops: Sequence[Op], network_s: Mapping[str, float]) -> list[str]:
    return [op.collective.kind for op in ops if op.collective and op.name in network_s]
