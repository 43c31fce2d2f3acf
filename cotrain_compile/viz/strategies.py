"""Strategies: the answer for a cluster as rows of a table, in words, and as panels of timelines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from cotrain_compile.cluster.model.strategy import Answer, RankedStrategy
from cotrain_compile.plan import Timeline
from cotrain_compile.support.units import format_bytes, format_seconds
from cotrain_compile.viz.specification import Bar, Panel, Specification, bars_of


def headings(found: Answer) -> tuple[str, ...]:
    """Those of `rows`, without the one of the name."""
    counted = any(one.tokens_per_s != one.samples_per_s for one in found.strategies)
    rate = "tokens/s" if counted else "samples/s"
    return ("step", "at least", "peak", "devices", "traffic", rate, "fits")


def cells(strategy: RankedStrategy) -> Iterator[str]:
    """The name of a strategy, then what `headings` say."""
    yield strategy.name
    for seconds in (strategy.step_s, strategy.bound_s):
        yield "-" if seconds is None else format_seconds(seconds)
    yield format_bytes(max(strategy.peak_bytes)) if strategy.peak_bytes else "-"
    yield str(strategy.devices or "-")
    yield format_bytes(sum(strategy.traffic.values())) if strategy.step_s is not None else "-"
    rate = strategy.tokens_per_s
    yield "-" if rate is None else f"{rate:,.0f}" if rate >= 100 else f"{rate:.1f}"
    unknown = "-" if strategy.step_s is None else "unknown"
    yield {True: "yes", False: "no", None: unknown}[strategy.fits]


HOW_TO_READ = (
    "Simulated; nothing was run. At least: what no timing of the same works can beat. The peak is "
    "that of the fullest device, traffic is of all devices together."
)


def title(found: Answer) -> str:
    """What was asked."""
    return f"{found.profile} on {found.cluster}, {found.samples} samples a step"


def verdict(strategy: RankedStrategy, found: Answer) -> str:
    """That it is the best, or why another one is."""
    spent = f", {strategy.spent}" if strategy.spent else ""
    why = strategy.loses or (f"the best{spent}" if strategy is found.best else strategy.reason)
    if strategy.step_s is not None and strategy.reason and strategy.reason not in why:
        why += f"; {strategy.reason}"
    return why


def details(strategy: RankedStrategy) -> Iterator[str]:
    """What was chosen, and how to run it where it may fit."""
    rests = f"{format_bytes(strategy.host_bytes)} on hosts" if strategy.host_bytes else ""
    chosen = "; ".join(filter(None, (strategy.setting, rests)))
    if chosen:
        yield chosen
    if strategy.step_s is not None and strategy.fits is not False:
        yield f"run: {strategy.run}"


def specify_strategies(found: Answer) -> Specification:
    """A panel for each strategy that has a timeline, all on one axis."""
    panels = (_panel(one, one.timeline) for one in found.strategies if one.timeline is not None)
    return Specification(title(found), tuple(panels), {})


def _panel(strategy: RankedStrategy, timeline: Timeline) -> Panel:
    lanes = sorted({str(span.lane) for span in timeline.spans}, key=_place)
    return Panel(
        title=strategy.name,
        source=timeline.source,
        lanes={lane: lane for lane in lanes},
        bars=tuple(
            replace(bar, kind=_kind(bar), layer=bar.lane, what=strategy.name)
            for bar in bars_of(timeline)
        ),
        memory={},
        peak_bytes=timeline.peak_bytes,
        makespan_s=timeline.makespan_s,
        zero_s=min((span.start_s for span in timeline.spans), default=0.0),
    )


def _place(lane: str) -> tuple[int, str, int, str]:
    """Devices from above by their number, each with its lanes, then what is between them."""
    head, _, stream = lane.partition("/")
    words = head.rstrip("0123456789")
    number = int(head[len(words) :] or 0)
    return (0 if lane.startswith(("device", "compute")) else 1), words[:6], number, stream


def _kind(bar: Bar) -> str:
    """What a span of a strategy is, by its lane and name; a key of `COLOURS`."""
    stream = bar.lane.partition("/")[2]
    task, _, own = bar.name.rpartition(": ")
    if stream.startswith("swap"):
        moved = own.partition(" ")[0]
        return {"weights": "weight", "gradients": "gradient"}.get(moved, "activation")
    if stream == "host":
        return "update on the host" if "update" in own else "copy"
    if stream.startswith("peer") or not bar.lane.startswith(("device", "compute")):
        return "exchange with other ranks"
    if task.startswith("backward") and own.startswith("forward"):
        return "recomputed"
    named = {"forward": "forward", "backward": "backward", "update": "optimizer"}
    return named.get(own.split(" ")[0].rstrip(","), "work on the device")
