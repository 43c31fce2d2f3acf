"""The program's flows: what crosses the link and runs on the host, by which segment.

In: a `Model`. Out: `Flows`, with the laws that nothing moves before it exists, everything that is
needed is there in time, and all that the decisions send is sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import log2
from typing import Any

from cotrain_compile.placement.choices import Way, Weights
from cotrain_compile.placement.linear import pulp
from cotrain_compile.placement.program_model import Flow, Model, in_mib
from cotrain_compile.plan import UpdateMode

_Option = tuple[Weights, Way, Any]


@dataclass(frozen=True)
class Stream:
    """Streamed updates whose bytes are in one proportion: states up, then the update, states down.

    Running totals in MiB of states up, `stored` in MiB down. Per MiB of states: `freed` MiB by the
    update, `down` MiB after it, `ms` of device time.
    """

    freed: float
    down: float
    ms: float
    up: Flow
    updated: Flow
    stored: Flow


@dataclass(frozen=True)
class Flows:
    """In MiB, by class; `work` and `casting` in milliseconds of one worker of the host.

    Down: activations, gradients and `masters` (parameters) for updates on the host. Up:
    activations, new weights `back`, weights for the forward and again for the backward. `late_work`
    and `late_back` are what the step before has left to do, none where steps do not overlap. Both
    ways go gradients that are `kept` in `.grad`, if there are any.
    """

    act_out: Flow
    act_in: Flow
    gradients: Flow
    masters: Flow
    back: Flow
    forward: Flow
    backward: Flow
    work: Flow
    casting: Flow
    late_work: Sequence[Flow]
    late_back: Sequence[Flow]
    kept_up: Sequence[Flow]
    kept_down: Sequence[Flow]
    streams: Sequence[Stream]

    @property
    def down(self) -> tuple[Flow, ...]:
        """All that passes from the device to the host."""
        stored = (stream.stored for stream in self.streams)
        return self.act_out, self.gradients, self.masters, *self.kept_down, *stored

    @property
    def up(self) -> tuple[Flow, ...]:
        """All that passes from the host to the device."""
        states = (stream.up for stream in self.streams)
        weights = (self.back, *self.late_back, self.forward, self.backward)
        return self.act_in, *weights, *self.kept_up, *states

    @property
    def host(self) -> tuple[Flow, ...]:
        """All that the host works at."""
        return self.work, *self.late_work, self.casting


def add_flows(model: Model) -> Flows:
    """Add all flows and their laws to `model`."""
    act_out, act_in = Flow("act_out", model), Flow("act_in", model)
    gradients, masters, back = (Flow(name, model) for name in ("grad", "master", "back"))
    late = [Flow(name, model) for name in ("late_host", "late_back") if model.cyclic]
    forward, backward = Flow("wf", model), Flow("wb", model)
    _add_activations(model, act_out, act_in)
    work, casting = _add_host_updates(model, gradients, masters, back, late)
    streams = _add_streams(model)
    _add_weight_trips(model, forward, backward)
    kept_up, kept_down = _add_kept_gradients(model)
    return Flows(
        act_out=act_out,
        act_in=act_in,
        gradients=gradients,
        masters=masters,
        back=back,
        forward=forward,
        backward=backward,
        work=work,
        casting=casting,
        late_work=late[:1],
        late_back=late[1:],
        kept_up=kept_up,
        kept_down=kept_down,
        streams=streams,
    )


def _add_activations(model: Model, act_out: Flow, act_in: Flow) -> None:
    """Out when last used, back for the next use; gradients that are away until the update too."""
    away = list(zip(model.choices.activations, model.away, strict=True))
    out = [(a.leaves, in_mib(a.nbytes) * x) for a, x in away]
    back = [(a.returns, in_mib(a.nbytes) * x) for a, x in away]
    for bundle, way, z in model.options():
        if way.gradient_away:
            out.append((bundle.gradient_used, in_mib(bundle.gradient_bytes) * z))
            back.append((bundle.release, in_mib(bundle.gradient_bytes) * z))
    act_out.at_most(out)
    act_in.at_least(back)
    for k in model.segments:
        sent = act_out.by(k if k == model.tail else k - model.lag)
        model.add(act_in.by(k) <= sent)
    model.add(act_out.total == _sum(out))
    model.add(act_in.total == _sum(out))


def _add_host_updates(
    model: Model, gradients: Flow, masters: Flow, back: Flow, late: Sequence[Flow]
) -> tuple[Flow, Flow]:
    """Gradients down, work on the host, new weights up; returns the work and the casts.

    `late` are the work and the new weights of the step before, where steps overlap.
    """
    hosted = [(b, w, z) for b, w, z in model.options() if w.on_host]
    home = [(b, w, z) for b, w, z in hosted if w.trips == 0]
    landed = [
        (b.gradient_made if model.relaxed else b.gradient_used, in_mib(b.gradient_bytes) * z)
        for b, _, z in hosted
    ]
    weights = [(b.release, in_mib(b.param_bytes) * z) for b, _, z in home]
    gradients.at_most(landed)
    model.add(gradients.total == _sum(landed))
    model.add(masters.total == _sum(weights))
    work, casting = Flow("host", model), Flow("cast", model)
    updates = [(b.release, 1e3 * b.host_s * z) for b, _, z in hosted]
    work.at_most(updates)
    model.add(pulp.lpSum(flow.total for flow in (work, *late[:1])) == _sum(updates))
    casts = [(b.first, 1e3 * b.cast_s * z) for b, w, z in model.options() if w.trips and b.thin]
    casting.at_least(casts)
    model.add(casting.total == _sum(casts))
    back.at_most(weights)
    model.add(pulp.lpSum(flow.total for flow in (back, *late[1:])) == masters.total)
    needed = (
        [(b.first, 1e3 * b.host_s * z) for b, _, z in hosted],
        [(b.first, in_mib(b.param_bytes) * z) for b, _, z in home],
    )
    for flow, terms, before in zip(late, needed, (work, back), strict=False):
        flow.at_least(terms, before.total)
    if not model.relaxed:
        _add_host_pipeline(model, hosted, home, (gradients, work, back))
    return work, casting


def _add_host_pipeline(
    model: Model, hosted: Iterable[_Option], home: Iterable[_Option], flows: tuple[Flow, Flow, Flow]
) -> None:
    """Careful: an update follows its gradient and is followed by its weight, on average."""
    gradients, work, back = flows
    work_ms = sum(1e3 * b.host_s for b, _, _ in hosted)
    arriving = sum(in_mib(b.gradient_bytes) for b, _, _ in hosted)
    returning = sum(in_mib(b.param_bytes) for b, _, _ in home)
    for k in range(model.tail):
        if arriving:
            model.add(work.by(k) <= (work_ms / arriving) * gradients.by(k - 1))
        if returning and work_ms:
            model.add(back.by(k) <= (returning / work_ms) * work.by(k - 1))


def _add_streams(model: Model) -> list[Stream]:
    """One stream for all streamed updates in about the same proportion."""
    groups: dict[tuple[float, ...], list[_Option]] = {}
    for bundle, way, z in model.options():
        if way.mode is UpdateMode.STREAMED:
            up, down = bundle.streamed_bytes(way)
            freed = (0 if way.gradient_away else bundle.gradient_bytes) + (
                bundle.fetched_bytes if bundle.keeps_weight(way) else 0
            )
            ms = 1e3 * bundle.device_s / in_mib(up)
            key = (round(freed / up, 4), round(down / up, 4), round(8 * log2(ms + 1e-9)))
            groups.setdefault(key, []).append((bundle, way, z))
    return [
        _add_stream(model, f"s{number}", freed, down, members)
        for number, ((freed, down, _), members) in enumerate(groups.items())
    ]


def _add_stream(
    model: Model, prefix: str, freed: float, down: float, members: Sequence[_Option]
) -> Stream:
    up, updated, stored = (Flow(f"{prefix}_{name}", model) for name in ("up", "updated", "stored"))
    amounts = [in_mib(bundle.streamed_bytes(way)[0]) for bundle, way, _ in members]
    terms = [(b.release, mib * z) for (b, _, z), mib in zip(members, amounts, strict=True)]
    updated.at_most(terms)
    for k in model.segments:
        lag = 0 if k == model.tail else model.lag
        model.add(updated.by(k) <= up.by(k - lag))
        model.add(stored.by(k) <= down * updated.by(k - lag))
    total = _sum(terms)
    model.add(up.total == total)
    model.add(updated.total == total)
    model.add(stored.total == down * total)
    if model.relaxed:
        ms = min(b.device_s * 1e3 / mib for (b, _, _), mib in zip(members, amounts, strict=True))
    else:
        ms = sum(b.device_s for b, _, _ in members) * 1e3 / sum(amounts)
    return Stream(freed, down, ms, up, updated, stored)


def _add_weight_trips(model: Model, forward: Flow, backward: Flow) -> None:
    """Weights that are fetched are there for their uses; the second time after they have left."""
    fetched = [(b, w, in_mib(b.fetched_bytes) * z) for b, w, z in model.options() if w.trips]
    once = [(b.first, amount) for b, _, amount in fetched]
    twice = [(b.returns, amount) for b, w, amount in fetched if w.trips == 2]
    forward.at_least(once)
    backward.at_least(twice)
    model.add(forward.total == _sum(once))
    model.add(backward.total == _sum(twice))
    first = min((b.leaves for b, w, _ in fetched if w.trips == 2), default=0)
    for k in range(first):
        model.add(backward.by(k) == 0)


def _add_kept_gradients(model: Model) -> tuple[Sequence[Flow], Sequence[Flow]]:
    """What lies in `.grad` on the host is there for its uses, and goes home when it is written.

    Relaxed: one way up is enough for all uses.
    """
    if not any(bundle.kept.nbytes for bundle in model.choices.weights):
        return (), ()
    up, down = Flow("kept_up", model), Flow("kept_down", model)
    arriving, leaving = [], []
    for bundle, way, z in model.options():
        fetched = bundle.kept.up(way, model.tail)
        arriving += [(k, in_mib(n) * z) for k, n in (fetched[:1] if model.relaxed else fetched)]
        leaving += [(k, in_mib(nbytes) * z) for k, nbytes in bundle.kept.down(way)]
    up.at_least(arriving)
    down.at_most(leaving)
    model.add(up.total == _sum(arriving))
    model.add(down.total == _sum(leaving))
    return (up,), (down,)


def _sum(terms: Iterable[tuple[int, Any]]) -> Any:
    return pulp.lpSum(amount for _, amount in terms)
