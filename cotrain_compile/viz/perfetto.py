"""Perfetto: a specification as a trace in Chrome's JSON format, for https://ui.perfetto.dev.

In: what to draw (predicted, measured) and, to look at both at once, the trace that `torch.profiler`
made of the measured step. Out: one file. A panel is a process, its lanes are threads, its memory is
a counter for each tier, by kind, and arrows go from each task to those that wait for it: from an
offload to the prefetch that brings the copy back. Times are in microseconds.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cotrain_compile.errors import FormatError
from cotrain_compile.files import write_whole
from cotrain_compile.plan.timeline import STEP_BEGINS
from cotrain_compile.viz.specification import Bar, Panel, Specification

Event = dict[str, Any]
# Perfetto counts nanoseconds: what takes less is a slice of no length, which nobody can point at.
_SHORTEST_S = 1e-9
_EMPTY: Mapping[str, Any] = {"displayTimeUnit": "ms", "traceEvents": []}


def save_trace(drawn: Specification, path: Path, *, profiled: Path | None = None) -> None:
    """Write the panels to `path`, from one zero on.

    `profiled` is a trace of `torch.profiler` (`export_chrome_trace`, .json or .json.gz) with the
    measured step in it: the panels then start where the last step in it began. Raises `FormatError`
    when no step is in it, OSError when a file cannot be read or written.
    """
    document = _read(profiled) if profiled else _EMPTY
    events: list[Event] = list(document["traceEvents"])
    zero_us = _step_begins_us(events, profiled) if profiled else 0.0
    taken = max((e["pid"] for e in events if isinstance(e.get("pid"), int)), default=0)
    for process, panel in enumerate(drawn.panels, start=taken + 1):
        began_us = zero_us + 1e6 * panel.zero_s
        events += _labels(panel, process, drawn.heading)
        events += _slices(panel, process, began_us)
        events += _counters(panel, process, began_us)
        events += _arrows(panel, process, began_us)
    write_whole(path, json.dumps({**document, "traceEvents": events}) + "\n")


def _labels(panel: Panel, process: int, heading: str) -> Iterator[Event]:
    name = panel.title.replace(panel.source, f"{panel.source} step", 1)
    shared = {"ph": "M", "pid": process}
    yield {**shared, "name": "process_name", "args": {"name": name}}
    yield {**shared, "name": "process_labels", "args": {"labels": heading}}
    for thread, title in enumerate(panel.lanes.values(), start=1):
        yield {**shared, "name": "thread_name", "tid": thread, "args": {"name": title}}
        order = {"sort_index": thread}
        yield {**shared, "name": "thread_sort_index", "tid": thread, "args": order}


def _slices(panel: Panel, process: int, began_us: float) -> Iterator[Event]:
    """A slice for all that takes time, as a view does not."""
    threads = _threads(panel)
    for bar in panel.bars:
        if bar.busy_s >= _SHORTEST_S:
            yield {
                "ph": "X",
                "name": bar.name,
                "cat": bar.kind,
                "pid": process,
                "tid": threads[bar.lane],
                "ts": began_us + bar.start_s * 1e6,
                "dur": (bar.end_s - bar.start_s) * 1e6,
                "args": _said(bar),
            }


def _said(bar: Bar) -> Mapping[str, Any]:
    """What a click on a slice shows: what is known of it."""
    said: dict[str, Any] = {"node": bar.span, "layer": bar.layer, "what": bar.what}
    if bar.nbytes:
        said |= {"bytes": bar.nbytes, "GB/s": round(bar.bytes_per_s / 1e9, 3)}
    return {key: value for key, value in (said | {"parameter": bar.param}).items() if value}


def _counters(panel: Panel, process: int, began_us: float) -> Iterator[Event]:
    for tier, curve in panel.memory.items():
        for number, (seconds, nbytes) in enumerate(zip(curve.times_s, curve.total, strict=True)):
            by_kind = {kind: values[number] for kind, values in curve.by_kind.items()}
            yield {
                "ph": "C",
                "name": f"{tier} memory",
                "pid": process,
                "ts": began_us + seconds * 1e6,
                "args": by_kind or {"bytes": nbytes},
            }


def _threads(panel: Panel) -> Mapping[str, int]:
    return {lane: number for number, lane in enumerate(panel.lanes, start=1)}


def _arrows(panel: Panel, process: int, began_us: float) -> Iterator[Event]:
    """From the end of each task to the start of those that follow it.

    An arrow binds to the bar that encloses it, so it leaves right before the end.
    """
    bars = {bar.span: bar for bar in panel.bars if bar.busy_s >= _SHORTEST_S}
    threads = _threads(panel)
    for number, (before, after) in enumerate(panel.arrows):
        if before not in bars or after not in bars:
            continue
        source, target = bars[before], bars[after]
        shared = {"name": "then", "cat": "task", "id": process * len(bars) ** 2 + number}
        yield {
            **shared,
            "ph": "s",
            "pid": process,
            "tid": threads[source.lane],
            "ts": began_us + (source.start_s + 0.999 * (source.end_s - source.start_s)) * 1e6,
        }
        yield {
            **shared,
            "ph": "f",
            "bp": "e",
            "pid": process,
            "tid": threads[target.lane],
            "ts": began_us + target.start_s * 1e6,
        }


def _read(path: Path) -> dict[str, Any]:
    content = path.read_bytes()
    try:
        document = json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)
    except ValueError as error:
        raise FormatError(f"{path}: not a whole JSON document ({error}); make it again") from None
    if not isinstance(document, dict) or not isinstance(document.get("traceEvents"), list):
        raise FormatError(
            f"{path}: not a trace of torch.profiler; make one with export_chrome_trace"
        )
    return document


def _step_begins_us(events: Sequence[Event], path: Path) -> float:
    """When the last step in a profiler's trace began: where its marker ends."""
    marks = [e["ts"] + e["dur"] for e in events if e.get("name") == STEP_BEGINS and "dur" in e]
    if not marks:
        raise FormatError(
            f"{path}: no step of this backend in it; profile the call of a compiled step"
        )
    return float(max(marks))
