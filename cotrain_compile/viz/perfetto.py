"""Perfetto: timelines as a trace in Chrome's JSON format, which https://ui.perfetto.dev opens.

In: timelines (predicted, measured), the plan they are of, and, to look at both at once, the trace
that `torch.profiler` made of the measured step. Out: one file. A timeline is a process, its lanes
are threads, its memory is a counter for each tier, and arrows go from each task to those that wait
for it: from an offload to the prefetch that brings the copy back. Times are in microseconds.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cotrain_compile.errors import FormatError
from cotrain_compile.files import write_whole
from cotrain_compile.plan import STEP_BEGINS, Plan, Timeline
from cotrain_compile.viz.kinds import LANE_TITLES, lane_titles, spans_with_kinds

Event = dict[str, Any]
_EMPTY: Mapping[str, Any] = {"displayTimeUnit": "ms", "traceEvents": []}


def save_trace(
    timelines: Sequence[Timeline],
    path: Path,
    *,
    plan: Plan | None = None,
    kinds: Mapping[str, str] | None = None,
    profiled: Path | None = None,
) -> None:
    """Write `timelines` to `path`, from one zero on; `kinds` from `kinds_of` are the categories.

    With `plan` there are arrows between its tasks. `profiled` is a trace of `torch.profiler`
    (`export_chrome_trace`, .json or .json.gz) with the measured step in it: the timelines then
    start where the last step in it began. Raises `FormatError` when no step is in it, OSError when
    a file cannot be read or written.
    """
    document = _read(profiled) if profiled else _EMPTY
    events: list[Event] = list(document["traceEvents"])
    zero_us = _step_begins_us(events, profiled) if profiled else 0.0
    taken = max((e["pid"] for e in events if isinstance(e.get("pid"), int)), default=0)
    for process, timeline in enumerate(timelines, start=taken + 1):
        events += _events(timeline, process, zero_us, kinds or {})
        if plan is not None:
            events += _arrows(timeline, plan, process, zero_us)
    write_whole(path, json.dumps({**document, "traceEvents": events}) + "\n")


def _events(
    timeline: Timeline, process: int, zero_us: float, kinds: Mapping[str, str]
) -> Iterator[Event]:
    name = {"name": timeline.title.replace(timeline.source, f"{timeline.source} step", 1)}
    yield {"ph": "M", "name": "process_name", "pid": process, "args": name}
    for lane, title in lane_titles(timeline).items():
        named = {"name": title}
        thread = _THREADS[lane]
        yield {"ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": named}
    for span, kind in spans_with_kinds(timeline, kinds):
        yield {
            "ph": "X",
            "name": span.name,
            "cat": kind,
            "pid": process,
            "tid": _THREADS[str(span.lane)],
            "ts": zero_us + span.start_s * 1e6,
            "dur": (span.end_s - span.start_s) * 1e6,
        }
    for tier, points in timeline.memory.items():
        for seconds, nbytes in points:
            yield {
                "ph": "C",
                "name": f"{tier} memory",
                "pid": process,
                "ts": zero_us + seconds * 1e6,
                "args": {"bytes": nbytes},
            }


_THREADS = {str(lane): number for number, lane in enumerate(LANE_TITLES, start=1)}


def _arrows(timeline: Timeline, plan: Plan, process: int, zero_us: float) -> Iterator[Event]:
    """From the end of each task to the start of those that follow it.

    An arrow binds to the bar that encloses it, so it leaves right before the end.
    """
    spans = {span.name: span for span in timeline.spans}
    pairs = ((before, task.name) for task in plan.tasks for before in task.after)
    for number, (before, after) in enumerate(pairs):
        if before not in spans or after not in spans:
            continue
        source, target = spans[before], spans[after]
        shared = {"name": "then", "cat": "task", "id": process * len(spans) ** 2 + number}
        yield {
            **shared,
            "ph": "s",
            "pid": process,
            "tid": _THREADS[str(source.lane)],
            "ts": zero_us + (source.start_s + 0.999 * (source.end_s - source.start_s)) * 1e6,
        }
        yield {
            **shared,
            "ph": "f",
            "bp": "e",
            "pid": process,
            "tid": _THREADS[str(target.lane)],
            "ts": zero_us + target.start_s * 1e6,
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
