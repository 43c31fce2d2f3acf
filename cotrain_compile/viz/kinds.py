"""Kinds: what each span of a timeline is, and how lanes and kinds are called and coloured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from cotrain_compile.dataflow import Phase
from cotrain_compile.placement.recompute.rewrite import again_name
from cotrain_compile.plan import Lane, Plan, Span, Timeline

# Kinds of work in the order of the legend; colours that differ for colour-blind readers as well
# (Okabe and Ito 2008). A copy's colour says what is copied, its lane where to.
COLOURS: Mapping[str, str] = {
    "forward": "#56B4E9",
    "backward": "#0072B2",
    "made again": "#332288",
    "optimizer": "#CC79A7",
    "work on the device": "#56B4E9",
    "weight": "#E69F00",
    "gradient": "#D55E00",
    "optimizer state": "#F0E442",
    "activation": "#7F7F7F",
    "copy": "#E69F00",
    "update on the host": "#009E73",
    "cast on the host": "#8FD6BE",
    "exchange with other ranks": "#882255",
}
OF_LANE: Mapping[str, str] = {
    Lane.DEVICE: "work on the device",
    Lane.HOST: "update on the host",
    Lane.D2H: "copy",
    Lane.H2D: "copy",
    Lane.NETWORK: "exchange with other ranks",
}
LANE_TITLES: Mapping[str, str] = {
    Lane.DEVICE: "device",
    Lane.D2H: "device to host",
    Lane.HOST: "host",
    Lane.H2D: "host to device",
    Lane.NETWORK: "network",
}


def lane_titles(*timelines: Timeline) -> Mapping[str, str]:
    """What the lanes of `timelines` are called; the network is one where it does anything."""
    is_used = any(timeline.lane(Lane.NETWORK) for timeline in timelines)
    return {n: title for n, title in LANE_TITLES.items() if is_used or n != Lane.NETWORK}


def kinds_of(plan: Plan, phases: Mapping[str, Phase] | None = None) -> dict[str, str]:
    """What each task of `plan`, and each op whose phase is given, is: a key of `COLOURS`."""
    kinds = {name: phase.value for name, phase in (phases or {}).items()}
    if plan.placement.recomputed:
        kinds |= {again_name(name): "made again" for name in phases or {}}
    kinds |= {cast.name: "cast on the host" for cast in plan.host_regions if cast.makes}
    copied = _copied(plan)
    return kinds | {task.name: copied[task.buffer] for task in plan.transfers}


def _copied(plan: Plan) -> dict[str, str]:
    """What each buffer is that `plan` copies, a key of `COLOURS`."""
    params = set(plan.placement.updates)
    offloads = [task for task in plan.transfers if task.direction == "offload"]
    states = {task.destination for task in offloads if task.destination} - params
    left = {task.buffer for task in offloads if not task.destination} - params
    # An activation comes back for the backward, a gradient at most for an update that runs early.
    moved = {name for ops in plan.moved for name in ops.ops}
    fetches = [task for task in plan.transfers if task.is_fetch]
    back = {task.buffer for task in fetches if task.wait_before not in moved}
    return {
        **dict.fromkeys((task.buffer for task in plan.transfers), "weight"),
        **dict.fromkeys(states, "optimizer state"),
        **dict.fromkeys(left - back, "gradient"),
        **dict.fromkeys(left & back, "activation"),
    }


def spans_with_kinds(timeline: Timeline, kinds: Mapping[str, str]) -> Iterator[tuple[Span, str]]:
    """Each span with what it is; a view that a pass has made again is as the op before it."""
    on_device = timeline.lane(Lane.DEVICE)
    known = (kinds[span.name] for span in on_device if span.name in kinds)
    kind = next(known, OF_LANE[Lane.DEVICE])
    for span in on_device:
        kind = kinds.get(span.name, kind)
        yield span, kind
    for span in timeline.spans:
        if span.lane != Lane.DEVICE:
            yield span, kinds.get(span.name, OF_LANE[span.lane])
