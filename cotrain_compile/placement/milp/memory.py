"""The program's memory: what both tiers hold, by decision and by what flows have brought and taken.

In: a `Model` with its `Flows`, and budgets in MiB. Out: constraints at every checkpoint of the
device, and one for the host.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from cotrain_compile.machine import Tier
from cotrain_compile.placement.decisions.effects import Effect, Flow, Hold, UpdateEffect
from cotrain_compile.placement.milp.flows import Flows
from cotrain_compile.placement.milp.linear import summed
from cotrain_compile.placement.milp.model import MIB, Model, in_mib
from cotrain_compile.plan import Lane
from cotrain_compile.plan.on_disk import most_room_bytes


def add_device_memory(
    model: Model, flows: Flows, budget_mib: float, need_mib: float | None = None
) -> Any:
    """At each checkpoint: what is there by decision, and what flows have brought and taken.

    With `need_mib` that may be beyond the budget, and what would be there if each copy was made at
    the last moment is at most `need_mib`. Returns MiB beyond the budget, of all buckets.
    """
    changes = _Running(model, _changes(model))
    if model.relaxed:
        _add_room_for_any_update(model, budget_mib)
        _add_op_needs(model, budget_mib)
    workspace = {} if model.relaxed else _workspaces(model)
    held = _held_flows(model)
    beyond: dict[int, Any] = {}
    for bucket, nbytes in model.space.checkpoints:
        used = in_mib(nbytes) + changes.up_to(bucket) + _in_flight(model, flows, held, bucket)
        used += workspace.get(bucket, 0.0)
        if need_mib is not None:
            beyond[bucket] = beyond.get(bucket) or model.variable(f"beyond_{bucket}")
        model.add(used - beyond.get(bucket, 0.0) <= budget_mib)
    if need_mib is not None:
        _add_need(model, need_mib)
    return summed(beyond.values())


def _add_op_needs(model: Model, budget_mib: float) -> None:
    """Relaxed: what single ops need with every copy at the last moment, where that may not fit.

    In no row may what is there at the least be beyond the budget: a plan does have as much.
    """
    needs = model.space.op_needs
    if needs is None:
        return
    # Of temporaries the first option, to stay, holds nothing beside what is fixed.
    variables = [[None, *each] for each in model.activations] + model.params
    most, least = needs.fixed.copy(), needs.fixed.copy()
    for rows in needs.held:
        most += np.max(rows, axis=0)
        least += np.min(rows, axis=0)
    chosen = [
        (row, variable)
        for rows, own in zip(needs.held, variables, strict=True)
        for row, variable in zip(rows, own, strict=True)
        if variable is not None
    ]
    held = summed(())
    before = np.zeros(len(chosen))
    columns = np.array([row for row, _ in chosen]).reshape(len(chosen), len(most))
    for number in np.flatnonzero(most > budget_mib * MIB):
        change = columns[:, number] - before
        due = [in_mib(change[i]) * chosen[i][1] for i in np.flatnonzero(change)]
        held, before = model.running(held + summed(due)) if due else held, columns[:, number]
        model.add(in_mib(needs.fixed[number]) + held <= max(budget_mib, in_mib(least[number])))


def _add_need(model: Model, need_mib: float) -> None:
    """At each checkpoint: what is there if each copy is made at the last moment."""
    changes = _Running(model, _needs(model))
    for bucket, nbytes in model.space.checkpoints:
        model.add(in_mib(nbytes) + changes.up_to(bucket) <= need_mib)


def _needs(model: Model) -> Iterable[tuple[int, Any]]:
    """(first bucket, MiB more or less from there on) of every decision, all at the last moment."""
    for option in model.options:
        for hold in option.effect.holds:
            yield hold.first, in_mib(hold.nbytes) * option.z
            if hold.last is not None:
                yield hold.last + 1, -in_mib(hold.nbytes) * option.z


class _Running:
    """The sum of `changes`, each of which counts from its bucket on, as one variable at a time."""

    def __init__(self, model: Model, changes: Iterable[tuple[int, Any]]) -> None:
        self._model = model
        self._sum: Any = summed(())
        self._changes = deque(sorted(changes, key=lambda change: change[0]))

    def up_to(self, bucket: int) -> Any:
        """The sum in `bucket`; buckets are asked for in ascending order."""
        due = []
        while self._changes and self._changes[0][0] <= bucket:
            due.append(self._changes.popleft()[1])
        if due:
            self._sum = self._model.running(self._sum + summed(due))
        return self._sum


def add_host_memory(model: Model, flows: Flows, budget_mib: float) -> None:
    """Homes, and in a few buckets the copies that are there.

    Conservative: what the largest update makes is there as well, and the rooms of what rests on
    disk; cyclic, what updates read of the step before, too. Relaxed: of gradients what has been
    sent and waits for its update.
    """
    home = [in_mib(option.effect.host_bytes) * option.z for option in model.options]
    if model.cyclic and not model.relaxed:
        home += [in_mib(_sent_bytes(option.effect)) * option.z for option in model.options]
    if not model.relaxed and _most_mib(model) > budget_mib:
        home.append(_host_workspace(model))
    disk_bytes = model.space.problem.disk_bytes
    if disk_bytes:
        resting = [in_mib(option.effect.disk_bytes) * option.z for option in model.options]
        model.add(summed(resting) <= in_mib(disk_bytes))
        if not model.relaxed:
            budget_mib -= in_mib(most_room_bytes(model.space.problem.dataflow))
    at_home = model.running(summed(home))
    for bucket in model.space.host_buckets:
        copies = _gradients_waiting(model, flows, bucket) if model.relaxed else summed(())
        copies += summed(
            in_mib(hold.nbytes) * option.z
            for option in model.options
            for hold in option.effect.host_holds
            if (hold.is_certain_in(bucket) if model.relaxed else hold.is_in(bucket))
        )
        model.add(at_home + copies <= budget_mib)


def _gradients_waiting(model: Model, flows: Flows, bucket: int) -> Any:
    """Relaxed: MiB on the host at the least of gradients that no update can have read."""
    waiting = summed(())
    waiting.plus(flows.own[Flow.GRADIENT].by(bucket))
    for option in model.options:
        update, effect = option.effect.update, option.effect
        if update is not None and (update.guesses or update.released <= bucket):
            waiting.plus(in_mib(effect.bytes_of(Flow.GRADIENT)) * option.z, -1.0)
    return waiting


def _most_mib(model: Model) -> float:
    """With all on the host that can be there; in more than that the largest update has room."""
    effects = model.space.effects
    most = sum(max(_all_at_once(e) + _sent_bytes(e) for e in each) for each in effects)
    updates = (effect.update for each in effects for effect in each)
    return in_mib(most + max((u.made_bytes for u in updates if u is not None), default=0))


def _all_at_once(effect: Effect) -> int:
    return effect.host_bytes + sum(hold.nbytes for hold in effect.host_holds)


def _host_workspace(model: Model) -> Any:
    """Room for what is made in the largest update on the host."""
    room = model.variable("host_workspace")
    for option in model.options:
        update = option.effect.update
        if update is not None and update.tier is Tier.HOST:
            model.add(room >= in_mib(update.made_bytes) * option.z)
    return room


def _sent_bytes(effect: Effect) -> float:
    """What is sent down for an update on the host."""
    return effect.bytes_of(Flow.GRADIENT, Flow.MASTER)


def _changes(model: Model) -> Iterable[tuple[int, Any]]:
    """(first bucket, MiB more or less from there on) of every decision."""
    for option in model.options:
        for hold in _holds(model, option.effect):
            for bucket, nbytes in _changes_of(hold, model.lag):
                yield bucket, in_mib(nbytes) * option.z


def _holds(model: Model, effect: Effect) -> Iterator[Hold]:
    """What an effect holds; relaxed, only what it holds in every plan."""
    return (hold for hold in effect.holds if hold.certain or not model.relaxed)


def _changes_of(hold: Hold, lag: int) -> Iterable[tuple[int, int]]:
    """Where a hold begins and ends, but for what flows and updates do.

    In a bucket that something begins in, the conservative version counts it as there; the relaxed
    one, which looks at the start of the bucket, does not. What is missing is counted the other
    way round: the conservative version misses it only in between.
    """
    is_missing = hold.nbytes < 0
    if hold.begins is None:
        early = lag if not is_missing else 1 - lag
        yield (hold.first + 1 - early if hold.first else 0), hold.nbytes
    if hold.ends is None and hold.last is not None and not hold.until_update:
        yield hold.last + (1 - lag if is_missing else 1), -hold.nbytes


def _in_flight(model: Model, flows: Flows, held_flows: Iterable[Flow], k: int) -> Any:
    """What flows hold on the device in bucket `k`: arrived and not yet used or sent."""
    arrived = k - 1 if model.relaxed and k < model.epilogue else k
    gone = k if k == model.epilogue else k - 1
    held = summed(())
    for flow in held_flows:
        comes = flow.lane is Lane.H2D
        total = flows.gone if flow is Flow.OFFLOAD else flows.own[flow]
        held.plus(total.by(arrived if comes else gone), 1.0 if comes else -1.0)
    for stream in flows.streams:
        held.plus(stream.up.by(arrived))
        held.plus(stream.stored.by(gone), -1.0 / stream.down)
        held.plus(stream.updated.by(gone), -stream.freed)
    return held


def _held_flows(model: Model) -> tuple[Flow, ...]:
    """The flows that begin and end holds: up they bring memory, down they free it."""
    holds = [hold for option in model.options for hold in option.effect.holds]
    ends = [end for hold in holds for end in (hold.begins, hold.ends)]
    return tuple(dict.fromkeys(end.flow for end in ends if end is not None))


def _workspaces(model: Model) -> dict[int, Any]:
    """Conservative: room in which the largest update of a bucket runs."""
    by_bucket: dict[int, list[Any]] = {}
    streamed = model.variable("workspace")
    first = model.epilogue
    for option in model.options:
        effect, z = option.effect, option.z
        if (update := effect.resident_update) is not None and update.workspace_bytes:
            need = in_mib(update.workspace_bytes) * z
            by_bucket.setdefault(update.released, []).append(need)
        if (update := effect.streamed) is not None:
            model.add(streamed >= in_mib(update.workspace_bytes + update.up_bytes) * z)
        if (update := effect.streamed or effect.resident_update) is not None:
            first = min(first, update.released)
        for transient in effect.transients:
            by_bucket.setdefault(transient.bucket, []).append(in_mib(transient.nbytes) * z)
    result: dict[int, Any] = {}
    for k in model.buckets[min([first, *by_bucket]) :]:
        room = result[k] = model.variable(f"room_{k}")
        for need in (streamed, *by_bucket.get(k, ())):
            model.add(room >= need)
    return result


def _add_room_for_any_update(model: Model, budget_mib: float) -> None:
    """Relaxed: whenever an update runs on the device, what rests there is there too.

    Values inside an update grow with its parameter, so a part of a cluster needs its part.
    """
    resting = model.running(
        summed(
            in_mib(hold.nbytes) * option.z
            for option in model.options
            for hold in _holds(model, option.effect)
            if hold.is_resting
        )
    )
    for decision, variables in zip(model.space.params, model.params, strict=True):
        updates = [option.effect.update for option in decision.options]
        terms = [
            _part_mib(update) * z
            for update, z in zip(updates, variables, strict=True)
            if update is not None and update.tier is Tier.DEVICE
        ]
        if terms:
            model.add(resting + summed(terms) <= budget_mib)


def _part_mib(update: UpdateEffect) -> float:
    """What the update of the largest of any part of a cluster needs at the least."""
    arriving = update.least_largest * in_mib(update.up_bytes + update.gradient_bytes)
    share = update.least_largest / update.largest if update.largest else 0.0
    return share * in_mib(update.workspace_bytes) + arriving
