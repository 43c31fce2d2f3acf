"""Diff: two plans of a step in words: what is kept otherwise, what that does to time and memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from cotrain_compile.dataflow import Dataflow
from cotrain_compile.machine import Rates, Tier
from cotrain_compile.plan import Plan
from cotrain_compile.support.units import format_bytes, format_seconds

# So many names are said of each change.
NAMED = 4


def describe_diff(before: Plan, after: Plan, dataflow: Dataflow | None = None) -> str:
    """What differs between two plans, whose numbers are their own predictions.

    With the `dataflow` that they were made for, each change has its bytes.
    """
    sections = (
        _settings(before, after),
        _numbers(before, after),
        _kept_otherwise(before, after, dataflow),
        _away(before, after, dataflow),
        _recomputed(before, after, dataflow),
    )
    lines = [line for section in sections for line in section]
    return "\n".join(lines or ["the plans say the same"])


def _settings(before: Plan, after: Plan) -> Iterator[str]:
    told: Mapping[str, Callable[[Plan], str]] = {
        "step": lambda plan: plan.fingerprint,
        "machine": lambda plan: plan.on_machine,
        "policy": lambda plan: plan.placement.policy,
        "device budget": lambda plan: format_bytes(plan.budgets[Tier.DEVICE]),
        "host budget": lambda plan: format_bytes(plan.budgets[Tier.HOST]),
    }
    for heading, tell in told.items():
        if tell(before) != tell(after):
            yield f"{heading:14} {tell(before)} -> {tell(after)}"


def _numbers(before: Plan, after: Plan) -> Iterator[str]:
    was_s, is_s = before.predicted.makespan_s, after.predicted.makespan_s
    if was_s != is_s:
        change = f"  ({is_s / was_s - 1:+.1%})" if was_s else ""
        heading = "a guessed step" if after.rates is Rates.GUESSED else "a step"
        yield f"{heading:14} {format_seconds(was_s)} -> {format_seconds(is_s)}{change}"
    nbytes: Mapping[str, Callable[[Plan], int]] = {
        "device peak": lambda plan: plan.predicted.peak_bytes[Tier.DEVICE],
        "host peak": lambda plan: plan.predicted.peak_bytes[Tier.HOST],
        "down": lambda plan: plan.bytes_moved("offload"),
        "up": lambda plan: plan.bytes_moved("prefetch"),
    }
    for heading, tell in nbytes.items():
        was, now = tell(before), tell(after)
        if was != now:
            sign = "-" if now < was else "+"
            change = f"  ({sign}{format_bytes(abs(now - was))})"
            yield f"{heading:14} {format_bytes(was)} -> {format_bytes(now)}{change}"


def _kept_otherwise(before: Plan, after: Plan, dataflow: Dataflow | None) -> Iterator[str]:
    """Parameters by how they are updated and where they live, before and after."""
    changed: dict[tuple[str, str], list[str]] = {}
    was, now = _kept(before), _kept(after)
    for name in (*was, *(name for name in now if name not in was)):
        pair = was.get(name, "not there"), now.get(name, "not there")
        if pair[0] != pair[1]:
            changed.setdefault(pair, []).append(name)
    for (old, new), names in changed.items():
        yield f"{old} -> {new}: {_some(names, dataflow)}"


def _kept(plan: Plan) -> dict[str, str]:
    """How each persistent tensor is kept: its home, with the update mode of a parameter."""
    placement = plan.placement
    kept = {name: f"{tier.value}" for name, tier in placement.homes.items()}
    for param, mode in placement.updates.items():
        kept[param] = f"{mode.value} at home on {kept[param]}"
    return kept


def _away(before: Plan, after: Plan, dataflow: Dataflow | None) -> Iterator[str]:
    was, now = before.placement.offloaded, after.placement.offloaded
    yield from _changed(was, now, "leave the device", "stay on the device", dataflow)


def _recomputed(before: Plan, after: Plan, dataflow: Dataflow | None) -> Iterator[str]:
    was, now = before.placement.recomputed, after.placement.recomputed
    yield from _changed(was, now, "recomputed for the backward", "not recomputed", dataflow)


def _changed(
    was: Iterable[str], now: Iterable[str], more: str, less: str, dataflow: Dataflow | None
) -> Iterator[str]:
    """What only the second plan names, as `more`, and what only the first one does, as `less`."""
    if added := sorted({*now} - {*was}):
        yield f"{more} now: {_some(added, dataflow)}"
    if left := sorted({*was} - {*now}):
        yield f"{less} now: {_some(left, dataflow)}"


def _some(names: Iterable[str], dataflow: Dataflow | None) -> str:
    names = list(names)
    size = ""
    if dataflow is not None:
        total = sum(dataflow.buffer[n].nbytes for n in names if n in dataflow.buffer)
        size = f" ({format_bytes(total)})"
    more = f", and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"{len(names)} tensors{size}: {', '.join(names[:NAMED])}{more}"
