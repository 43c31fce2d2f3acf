"""The program's flows: what crosses the link and runs on the host, by which bucket.

In: a `Model`, whose options have effects. Out: `Flows`, with the laws that nothing moves before it
exists, everything that is needed is there in time, and all that the decisions send is sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from cotrain_compile.placement.decisions.effects import Demand, Effect, Flow, UpdateEffect
from cotrain_compile.placement.milp.linear import summed
from cotrain_compile.placement.milp.model import Model, Total, amount_of, by_bucket, in_mib
from cotrain_compile.plan import Lane

# These are there where something is kept in `.grad`, and where something may rest on disk.
_KEPT = (Flow.KEPT_UP, Flow.KEPT_DOWN)
_DISK = (Flow.DISK_READ, Flow.DISK_WRITE)
_DISK_FETCH = (Flow.DISK_FETCH,)
_DISK_STORE = (Flow.DISK_STORE,)
# Where steps overlap, what the step before has left to do of these has totals of its own.
_LATE = {Flow.HOST_UPDATE: "late_host", Flow.NEW_WEIGHT: "late_back"}

_Asked = Sequence[tuple[Demand, Any]]


@dataclass(frozen=True)
class Stream:
    """Streamed updates whose bytes are in one proportion: states up, then the update, states down.

    Running totals in MiB of states up, `stored` in MiB down. Per MiB of states: `freed` MiB by the
    update, `down` MiB after it, `ms` of device time.
    """

    freed: float
    down: float
    ms: float
    up: Total
    updated: Total
    stored: Total


@dataclass(frozen=True)
class Flows:
    """Running totals of each flow, in MiB or in milliseconds of one worker of the host.

    `gone` is what offloads have freed, which is no more than they have copied. `late` are what the
    step before has left to do, none where steps do not overlap.
    """

    own: Mapping[Flow, Total]
    gone: Total
    late: Mapping[Flow, Total]
    streams: Sequence[Stream]

    def on(self, lane: Lane) -> tuple[Total, ...]:
        """All that occupies a link, or the host."""
        every = (*self.own.items(), *self.late.items())
        found = [total for flow, total in every if flow.lane is lane]
        if lane is Lane.D2H:
            found += [stream.stored for stream in self.streams]
        elif lane is Lane.H2D:
            found += [stream.up for stream in self.streams]
        return tuple(found)


def add_flows(model: Model) -> Flows:
    """Add all flows and their laws to `model`."""
    asked: dict[Flow, list[tuple[Demand, Any]]] = {flow: [] for flow in Flow}
    for option in model.options:
        for demand in option.effect.demands:
            if demand.certain or not model.relaxed:
                asked[demand.flow].append((demand, amount_of(demand) * option.z))
    for some in (_KEPT, _DISK, _DISK_FETCH, _DISK_STORE):
        if not any(asked[flow] for flow in some):
            asked = {flow: demands for flow, demands in asked.items() if flow not in some}
    own = {flow: Total(flow.value, model) for flow in asked}
    late = {flow: Total(name, model) for flow, name in _LATE.items() if model.cyclic}
    for flow, demands in asked.items():
        if model.cyclic and flow in _DISK:  # they go on under the next step, at any time
            model.add(own[flow].total == summed(amount for _, amount in demands))
            continue
        _add_demands(model, own[flow], demands, late.get(flow))
    _add_out_before_in(model, own, asked[Flow.RELOAD])
    if not model.relaxed:
        _add_host_pipeline(model, own)
    gone = _add_gone(model, own[Flow.OFFLOAD], asked[Flow.OFFLOAD])
    return Flows(own, gone, late, _add_streams(model))


def _add_out_before_in(model: Model, own: Mapping[Flow, Total], asked: _Asked) -> None:
    """What comes back has been sent, or came before: what is fetched again is sent no second time.

    That has no reason to come before it is gone once more.
    """
    again = by_bucket((d.released, amount) for d, amount in asked if d.released is not None)
    known = summed(())
    for k in model.buckets:
        known = model.running(known + again[k]) if k in again else known
        sent = own[Flow.OFFLOAD].by(k if k == model.epilogue else k - model.lag)
        model.add(own[Flow.RELOAD].by(k) <= sent + known)


def _add_gone(model: Model, sent: Total, asked: _Asked) -> Total:
    """What offloads have freed: what they have copied, of what nobody needs any more."""
    relaxed = model.relaxed
    if all(d.exists(relaxed=relaxed) == d.frees(relaxed=relaxed) for d, _ in asked):
        return sent
    gone = Total("act_gone", model)
    frees = [(d.frees(relaxed=relaxed), amount) for d, amount in asked]
    gone.at_most((bucket, amount) for bucket, amount in frees if bucket is not None)
    for k in model.buckets:
        model.add(gone.by(k) <= sent.by(k))
    return gone


def _add_demands(model: Model, total: Total, asked: _Asked, late: Total | None) -> None:
    """One flow: nothing too early or too late, and all of it by the end of the step.

    `late` is what is left of it to the next step.
    """
    needed = [(d.needed, amount) for d, amount in asked if d.needed is not None]
    if needed:
        total.at_least(needed)
        total.not_before(min(0 if d.released is None else d.released for d, _ in asked))
    released = [
        (d.exists(relaxed=model.relaxed), amount) for d, amount in asked if d.needed is None
    ]
    exists = [(bucket, amount) for bucket, amount in released if bucket is not None]
    if exists:
        total.at_most(exists)
    passed = total.total
    if late is not None:
        again = ((d.needed_again, amount) for d, amount in asked)
        late.at_least(((k, amount) for k, amount in again if k is not None), before=passed)
        passed += late.total
    model.add(passed == summed(amount for _, amount in asked))


def _add_host_pipeline(model: Model, own: Mapping[Flow, Total]) -> None:
    """Conservative: an update follows its gradient and is followed by its weight, on average."""
    totals = dict.fromkeys(Flow, 0.0)
    for demand in chain.from_iterable(option.effect.demands for option in model.options):
        totals[demand.flow] += amount_of(demand)
    gradients, work, back = (
        totals[flow] for flow in (Flow.GRADIENT, Flow.HOST_UPDATE, Flow.NEW_WEIGHT)
    )
    for k in range(model.epilogue):
        if gradients:
            done = own[Flow.HOST_UPDATE].by(k)
            model.add(done <= (work / gradients) * own[Flow.GRADIENT].by(k - 1))
        if back and work:
            returned = own[Flow.NEW_WEIGHT].by(k)
            model.add(returned <= (back / work) * own[Flow.HOST_UPDATE].by(k - 1))


def _add_streams(model: Model) -> list[Stream]:
    """One stream for all streamed updates in about the same proportion."""
    groups: dict[tuple[float, float], list[tuple[UpdateEffect, Any]]] = {}
    for option in model.options:
        if (update := option.effect.streamed) is not None:
            groups.setdefault(_proportion(update, option.effect), []).append((update, option.z))
    return [
        _add_stream(model, f"s{number}", freed, down, members)
        for number, ((freed, down), members) in enumerate(groups.items())
    ]


def _proportion(update: UpdateEffect, effect: Effect) -> tuple[float, float]:
    """Bytes freed and sent home for each byte that comes.

    How long that takes is not part of it: those of small parameters take longer for a byte, each
    size another time, and no parameters are so few of all bytes and so many rows of a program.
    """
    up = update.up_bytes
    return round(effect.freed_bytes / up, 4), round(update.home_bytes / up, 4)


def _add_stream(
    model: Model,
    prefix: str,
    freed: float,
    down: float,
    members: Iterable[tuple[UpdateEffect, Any]],
) -> Stream:
    up, updated, stored = (Total(f"{prefix}_{name}", model) for name in ("up", "updated", "stored"))
    amounts = [(update, in_mib(update.up_bytes), z) for update, z in members]
    terms = [(update.released, mib * z) for update, mib, z in amounts]
    updated.at_most(terms)
    for k in model.buckets:
        lag = 0 if k == model.epilogue else model.lag
        model.add(updated.by(k) <= up.by(k - lag))
        model.add(stored.by(k) <= down * updated.by(k - lag))
    total = summed(amount for _, amount in terms)
    model.add(up.total == total)
    model.add(updated.total == total)
    model.add(stored.total == down * total)
    if model.relaxed:
        ms = min(1e3 * update.seconds / mib for update, mib, _ in amounts)
    else:
        ms = 1e3 * sum(u.seconds for u, _, _ in amounts) / sum(mib for _, mib, _ in amounts)
    return Stream(freed, down, ms, up, updated, stored)
