"""The program's memory: what both tiers hold, by decision and by what flows have brought and taken.

In: a `Model` with its `Flows`, and budgets in MiB. Out: constraints at every checkpoint of the
device, and one for the host.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from cotrain_compile.placement.choices import Way, Weights
from cotrain_compile.placement.linear import pulp
from cotrain_compile.placement.program_flows import Flows
from cotrain_compile.placement.program_model import Model, in_mib
from cotrain_compile.plan import UpdateMode


def add_device_memory(model: Model, flows: Flows, budget_mib: float) -> None:
    """At each checkpoint: what is there by decision, and what flows have brought and taken."""
    changes = sorted(_changes(model), key=lambda change: change[0])
    fixed: Any = 0.0
    next_change = 0
    if model.relaxed:
        _add_room_for_any_update(model, budget_mib)
    workspace = {} if model.relaxed else _workspaces(model)
    for segment, nbytes in model.choices.checkpoints:
        due = []
        while next_change < len(changes) and changes[next_change][0] <= segment:
            due.append(changes[next_change][1])
            next_change += 1
        if due:
            fixed = model.running(fixed + pulp.lpSum(due))
        in_flight = _in_flight(model, flows, segment)
        used = in_mib(nbytes) + fixed + in_flight + workspace.get(segment, 0.0)
        model.add(used <= budget_mib)


def add_host_memory(model: Model, budget_mib: float) -> None:
    """Homes, copies and all that is away, as if all at once.

    Careful: what the largest update makes is there as well; cyclic, what updates read of the step
    before, too.
    """
    activations = zip(model.choices.activations, model.away, strict=True)
    used = [in_mib(bundle.nbytes) * x for bundle, x in activations]
    used += [in_mib(bundle.host_bytes(way)) * z for bundle, way, z in model.options()]
    if model.cyclic and not model.relaxed:
        used += [in_mib(_sent_bytes(bundle, way)) * z for bundle, way, z in model.options()]
    if not model.relaxed and _most_mib(model) > budget_mib:
        used.append(_host_workspace(model))
    model.add(pulp.lpSum(used) <= budget_mib)


def _most_mib(model: Model) -> float:
    """With all on the host that can be there; in more than that the largest update has room."""
    most = sum(bundle.nbytes for bundle in model.choices.activations)
    for bundle in model.choices.weights:
        most += max(bundle.host_bytes(way) + _sent_bytes(bundle, way) for way in bundle.ways)
    return in_mib(most + max((b.made_bytes for b in model.choices.weights), default=0))


def _host_workspace(model: Model) -> Any:
    """Room for what is made in the largest update on the host."""
    room = model.variable("host_workspace")
    for bundle, way, z in model.options():
        if way.on_host:
            model.add(room >= in_mib(bundle.made_bytes) * z)
    return room


def _sent_bytes(bundle: Weights, way: Way) -> int:
    """What is sent down for an update on the host."""
    if not way.on_host:
        return 0
    return bundle.gradient_bytes + bundle.param_bytes * (way.mode is UpdateMode.HOST)


def _changes(model: Model) -> Iterable[tuple[int, Any]]:
    """(first segment, MiB more or less from there on) of every decision.

    In a segment that something begins in, the careful version counts it as there; the relaxed
    one, which looks at the start of the segment, does not.
    """
    for bundle, way, z in model.options():
        changes = (
            *_weight_changes(bundle, way, model.lag),
            *_update_changes(bundle, way, model.lag),
        )
        for segment, nbytes in changes:
            yield segment, in_mib(nbytes) * z


def _weight_changes(bundle: Weights, way: Way, lag: int) -> Iterable[tuple[int, int]]:
    if way.trips == 0:
        yield 0, bundle.param_bytes
        yield bundle.kept.made + 1 - lag if bundle.kept.made else 0, bundle.kept.nbytes
    elif bundle.thin:
        # The copy is part of what stays; where it is fetched it flows instead.
        yield bundle.first + lag, -bundle.fetched_bytes
        yield bundle.last + 1 - lag, bundle.fetched_bytes
    if way.trips == 2:
        yield bundle.leaves + 1, -bundle.fetched_bytes
    if way.trips and not bundle.keeps_weight(way):
        yield bundle.last + 1, -bundle.fetched_bytes


def _update_changes(bundle: Weights, way: Way, lag: int) -> Iterable[tuple[int, int]]:
    if way.mode is None:
        return
    resident = way.mode is UpdateMode.RESIDENT
    if not way.on_host:
        yield 0, bundle.state_bytes * resident + bundle.kept_state_bytes
    yield bundle.gradient_made + 1 - lag, bundle.gradient_bytes
    if resident:
        yield bundle.release + 1, -bundle.gradient_bytes


def _in_flight(model: Model, flows: Flows, k: int) -> Any:
    """What flows hold on the device in segment `k`: arrived and not yet used or sent."""
    arrived = k - 1 if model.relaxed and k < model.tail else k
    gone = k if k == model.tail else k - 1
    held = flows.act_in.by(arrived) - flows.act_out.by(gone)
    held += flows.forward.by(arrived) + flows.backward.by(arrived) - flows.gradients.by(gone)
    for stream in flows.streams:
        held += stream.up.by(arrived) - (1.0 / stream.down) * stream.stored.by(gone)
        held -= stream.freed * stream.updated.by(gone)
    return held


def _workspaces(model: Model) -> dict[int, Any]:
    """Careful: room in which the largest update of a segment runs."""
    by_segment: dict[int, list[Any]] = {}
    streamed = model.variable("workspace")
    for bundle, way, z in model.options():
        need = in_mib(bundle.workspace_bytes)
        if way.mode is UpdateMode.RESIDENT and need:
            by_segment.setdefault(bundle.release, []).append(need * z)
        elif way.mode is UpdateMode.STREAMED:
            up, _ = bundle.streamed_bytes(way)
            model.add(streamed >= (need + in_mib(up)) * z)
        for segment in bundle.kept.crossings(way, model.tail):
            # One on its way up, the one before on its way down.
            crossing = 2 * bundle.largest * in_mib(bundle.kept.nbytes)
            by_segment.setdefault(segment, []).append(crossing * z)
    first = min((b.release for b, way, _ in model.options() if not way.on_host), default=0)
    first = min([first, *by_segment])
    result: dict[int, Any] = {}
    for k in model.segments[first:]:
        room = result[k] = model.variable(f"room_{k}")
        for need in (streamed, *by_segment.get(k, ())):
            model.add(room >= need)
    return result


def _add_room_for_any_update(model: Model, budget_mib: float) -> None:
    """Relaxed: whenever an update runs on the device, what is at home there is there too.

    Values inside an update grow with its parameter, so a part of a bundle needs its part.
    """
    options = list(model.options())
    params = pulp.lpSum(in_mib(b.param_bytes) * z for b, way, z in options if way.trips == 0)
    states = pulp.lpSum(
        in_mib(b.state_bytes) * z for b, way, z in options if way.mode is UpdateMode.RESIDENT
    )
    resting = model.running(params + states)
    for bundle, variables in zip(model.choices.weights, model.taken, strict=True):
        terms = [
            _part_mib(bundle, way) * z
            for way, z in zip(bundle.ways, variables, strict=True)
            if way.mode in (UpdateMode.RESIDENT, UpdateMode.STREAMED)
        ]
        if terms:
            model.add(resting + pulp.lpSum(terms) <= budget_mib)


def _part_mib(bundle: Weights, way: Way) -> float:
    """What the update of the largest of any part of a bundle needs at the least."""
    up = bundle.streamed_bytes(way)[0] if way.mode is UpdateMode.STREAMED else 0
    arriving = bundle.least_largest * in_mib(up + bundle.gradient_bytes)
    share = bundle.least_largest / bundle.largest if bundle.largest else 0.0
    return share * in_mib(bundle.workspace_bytes) + arriving
