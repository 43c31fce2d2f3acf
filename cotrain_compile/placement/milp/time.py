"""The program's time: how long each bucket takes for device, links, host and network, and the end.

In: a `Model` with its `Flows`. Out: constraints on the buckets' lengths, in milliseconds.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from cotrain_compile.machine import Tier
from cotrain_compile.placement.decisions.effects import Flow
from cotrain_compile.placement.milp.flows import Flows
from cotrain_compile.placement.milp.linear import summed
from cotrain_compile.placement.milp.model import MIB, Model, Total, by_bucket, in_mib
from cotrain_compile.plan import Lane


def add_times(model: Model, flows: Flows) -> None:
    """Add to `model` that no bucket is shorter than what happens in it."""
    _add_device(model, flows)
    _add_links_and_host(model, flows)
    _add_network(model)
    _add_end_of_step(model, flows)


def _add_device(model: Model, flows: Flows) -> None:
    """A bucket takes its ops, what is decided besides, its stall and the updates in it."""
    resident = [
        (update.released, 1e3 * update.seconds * option.z)
        for option in model.options
        if (update := option.effect.resident_update) is not None
    ]
    decided = by_bucket(
        (work.bucket, 1e3 * work.seconds * option.z)
        for option in model.options
        for work in option.effect.device_work
        if not (model.relaxed and work.earliest is not None)
    )
    at_once = by_bucket(resident)
    again = _done_earlier(model)
    later = Total("updates", model)
    if model.relaxed:
        later.at_most(resident)
        model.add(later.total == summed(amount for _, amount in resident))
    for k, seconds in enumerate(model.space.seconds):
        streamed = summed(stream.ms * stream.updated.within(k) for stream in flows.streams)
        updates = later.within(k) if model.relaxed else at_once.get(k, 0.0)
        ops_ms = 1e3 * seconds + decided.get(k, 0.0)
        ops_ms += again.within(k) if again is not None else 0.0
        model.add(model.length[k] == ops_ms + model.stall[k] + updates + streamed)


def _done_earlier(model: Model) -> Total | None:
    """Relaxed: work that is done when it suits best, by the end of its bucket; None without."""
    if not model.relaxed:
        return None
    asked = [
        (work.earliest, work.bucket, 1e3 * work.seconds * option.z)
        for option in model.options
        for work in option.effect.device_work
        if work.earliest is not None
    ]
    if not asked:
        return None
    total = Total("again", model)
    total.at_most((earliest, ms) for earliest, _, ms in asked)
    total.at_least((latest, ms) for _, latest, ms in asked)
    return total


def _add_links_and_host(model: Model, flows: Flows) -> None:
    """Each direction of the link, both together, and the host have so much time a bucket."""
    shared = model.machine.slowdown(Lane.H2D, (Lane.D2H,))
    disturbed = 1.0 - 1.0 / model.machine.slowdown(Lane.HOST, (Lane.H2D, Lane.D2H))
    _add_disk(model, flows)
    for k, length in enumerate(model.length):
        down = summed(flow.within(k) for flow in flows.on(Lane.D2H)) * (1.0 / model.down_rate)
        up = summed(flow.within(k) for flow in flows.on(Lane.H2D)) * (1.0 / model.up_rate)
        # While both directions are busy each takes `shared` times as long, so that the longer
        # one ends after itself and what the shorter one has cost it.
        model.add(down + (shared - 1.0) * up <= length)
        model.add(up + (shared - 1.0) * down <= length)
        host = summed(flow.within(k) for flow in flows.on(Lane.HOST)) * (
            1.0 / model.machine.lanes[Lane.HOST]
        )
        if model.relaxed:
            model.add(host + disturbed * down <= length)
            model.add(host + disturbed * up <= length)
        else:  # as if a copy were running all the time
            model.add(host <= (1.0 - disturbed) * length)


def _add_disk(model: Model, flows: Flows) -> None:
    """Each way of the drive, and both together, have so much time a bucket."""
    if not (flows.on(Lane.DISK_READ) or flows.on(Lane.DISK_WRITE)):
        return
    shared = model.machine.slowdown(Lane.DISK_READ, (Lane.DISK_WRITE,))
    for k, length in enumerate(model.length):
        read, write = (
            summed(flow.within(k) for flow in flows.on(lane))
            * (MIB * 1e3 / model.machine.links[lane].bytes_per_s)
            for lane in (Lane.DISK_READ, Lane.DISK_WRITE)
        )
        model.add(read + (shared - 1.0) * write <= length)
        model.add(write + (shared - 1.0) * read <= length)


def _add_network(model: Model) -> None:
    """Exchanges take turns on the network, each between where it begins and where it is awaited.

    Relaxed: between where any plan may begin and await it. Conservative: where the step does, and a
    bucket takes its own ops with the exchanges that they wait for. What is gathered again by
    decision is among them, in the relaxed version from the beginning of the step on.
    """
    work = model.space.network
    if not work.exchanges:
        return
    sent = Total("network", model)
    exchanges = work.loose if model.relaxed else work.exchanges
    least_s = work.loose_s if model.relaxed else work.least_s
    asked = [
        (each, 1e3 * each.seconds * option.z)
        for option in model.options
        for each in option.effect.exchanges
    ]
    begun = by_bucket((0 if model.relaxed else each.begun, ms) for each, ms in asked)
    awaited = by_bucket((each.awaited, ms) for each, ms in asked)
    begun_ms: Any = 0.0  # of what is decided
    awaited_ms: Any = 0.0
    for k, (length, least) in enumerate(zip(model.length, least_s, strict=True)):
        begun_ms = model.running(begun_ms + begun[k]) if k in begun else begun_ms
        awaited_ms = model.running(awaited_ms + awaited[k]) if k in awaited else awaited_ms
        fixed_begun, fixed_awaited = (
            1e3 * sum(each.seconds for each in exchanges if bucket(each) <= k)
            for bucket in (attrgetter("begun"), attrgetter("awaited"))
        )
        model.add(sent.by(k) <= fixed_begun + begun_ms)
        model.add(sent.by(k) >= fixed_awaited + awaited_ms)
        model.add(sent.within(k) <= length)
        model.add(length >= 1e3 * least)


def _add_end_of_step(model: Model, flows: Flows) -> None:
    """The epilogue ends with a whole update on its way home, which no fluid shows.

    Conservative: of all that passes through link and device one after the other, the largest adds
    its own way home to the way in of the rest (a flow shop of two machines, Johnson 1954).
    """
    k, length = model.epilogue, model.length[model.epilogue]
    up = summed(stream.up.within(k) for stream in flows.streams) * (1.0 / model.up_rate)
    home_rate = {Tier.DEVICE: model.down_rate, Tier.HOST: model.up_rate}
    for option in model.options:
        update, z = option.effect.update, option.z
        if update is None or not update.home_bytes or update.released < k - model.lag:
            continue
        share = update.least_largest if model.relaxed else update.largest
        home_ms = share * in_mib(update.home_bytes) / home_rate[update.tier]
        own_ms = share * 1e3 * update.seconds
        if update.tier is Tier.DEVICE:
            model.add(length >= (own_ms + home_ms) * z + (0.0 if model.relaxed else up))
        elif not model.cyclic:
            before = own_ms * z * (not update.guesses)
            before = before if model.relaxed else flows.own[Flow.HOST_UPDATE].within(k)
            model.add(length >= home_ms * z + before)
