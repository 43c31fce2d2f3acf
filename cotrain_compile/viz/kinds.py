"""Kinds: what each span of a timeline is, and how lanes and kinds are called and coloured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from markupsafe import Markup

from cotrain_compile.dataflow import Phase
from cotrain_compile.placement.recompute.rewrite import is_again
from cotrain_compile.plan import Lane, Plan, Span, Timeline

# Kinds of work in the order of the legend, on a light ground and on a dark one. A copy's colour
# says what is copied, its lane where to. Hues are those of Okabe and Ito (2008), which colour-blind
# readers tell apart, darkened to 3:1 against white and lightened to 4.5:1 against a dark page.
COLOURS: Mapping[str, str] = {
    "forward": "#2E8BC5",
    "backward": "#0A4F80",
    "recomputed": "#5B3FB5",
    "optimizer": "#B5558C",
    "work on the device": "#2E8BC5",
    "weight": "#C88100",
    "gradient": "#C24A00",
    "optimizer state": "#5F6B00",
    "activation": "#6E6E6E",
    "copy": "#C88100",
    "update on the host": "#007F5F",
    "cast on the host": "#3C9A82",
    "exchange with other ranks": "#882255",
    "states on disk": "#8A5A2B",
}
DARK: Mapping[str, str] = {
    "forward": "#8FD0F5",
    "backward": "#4F9FE0",
    "recomputed": "#B7A6F5",
    "optimizer": "#E59CC8",
    "work on the device": "#8FD0F5",
    "weight": "#F2B33D",
    "gradient": "#F5884A",
    "optimizer state": "#F0E442",
    "activation": "#B3B3B3",
    "copy": "#F2B33D",
    "update on the host": "#2CC295",
    "cast on the host": "#A8E6D0",
    "exchange with other ranks": "#E0789F",
    "states on disk": "#D6A370",
}
# What lies in a memory, from below, each in the colour in which its copies are drawn.
MEMORY_KINDS: Mapping[str, str] = {
    "parameters": "weight",
    "gradients": "gradient",
    "optimizer states": "optimizer state",
    "activations": "activation",
    "temporaries": "forward",
    "batch and other inputs": "cast on the host",
    "copies and work": "update on the host",
}
OF_LANE: Mapping[str, str] = {
    Lane.DEVICE: "work on the device",
    Lane.HOST: "update on the host",
    Lane.D2H: "copy",
    Lane.H2D: "copy",
    Lane.NETWORK: "exchange with other ranks",
    Lane.DISK_READ: "states on disk",
    Lane.DISK_WRITE: "states on disk",
}
LANE_TITLES: Mapping[str, str] = {
    Lane.DEVICE: "device",
    Lane.D2H: "device to host",
    Lane.HOST: "host",
    Lane.H2D: "host to device",
    Lane.NETWORK: "network",
    Lane.DISK_READ: "disk to host",
    Lane.DISK_WRITE: "host to disk",
}
# Lanes that are shown where anything is on them.
_WHERE_USED = (Lane.NETWORK, Lane.DISK_READ, Lane.DISK_WRITE)


def palettes_css() -> Markup:
    """The colours of the kinds as custom properties of a page, light and dark."""
    light, dark = (
        " ".join(f"--{css_property(kind)}: {colour};" for kind, colour in palette.items())
        for palette in (COLOURS, DARK)
    )
    return Markup(
        f":root {{ {light} }}\n@media screen and (prefers-color-scheme: dark) "
        f"{{ :root {{ {dark} }} }}"
    )


def css_property(kind: str) -> str:
    """What the property is called that has the colour of `kind`."""
    return kind.replace(" ", "-")


def lane_titles(*timelines: Timeline) -> Mapping[str, str]:
    """What the lanes of `timelines` are called, from above.

    Those of one device are always there, network and drive where they do anything, and whatever
    other lanes occur, by their own names: those of several devices.
    """
    used = dict.fromkeys(str(span.lane) for timeline in timelines for span in timeline.spans)
    titles = {
        str(n): title for n, title in LANE_TITLES.items() if n in used or n not in _WHERE_USED
    }
    if used and not titles.keys() & used.keys():
        titles = {}
    return titles | {name: name for name in used if name not in titles}


def kinds_of(plan: Plan, phases: Mapping[str, Phase] | None = None) -> dict[str, str]:
    """What each task of `plan`, and each op whose phase is given, is: a key of `COLOURS`."""
    kinds = {name: phase.value for name, phase in (phases or {}).items()}
    if plan.placement.recomputed:
        ops = (span.name for span in plan.predicted.lane(Lane.DEVICE))
        kinds |= {name: "recomputed" for name in ops if is_again(name, phases or {})}
    kinds |= {cast.name: "cast on the host" for cast in plan.host_regions if cast.makes}
    copied = copied_kinds(plan)
    return kinds | {task.name: copied[task.buffer] for task in plan.transfers}


def copied_kinds(plan: Plan) -> dict[str, str]:
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
            yield span, kinds.get(span.name, OF_LANE.get(span.lane, OF_LANE[Lane.DEVICE]))
