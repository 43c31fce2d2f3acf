"""Analysis in words: a step's peak, its time, reuse distances and largest sizes.

In: a dataflow, a machine and a budget. Out: lines, or the same as plain data. It loads networkx and
sympy, which no other text needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from cotrain_compile.analysis.costs import roofline
from cotrain_compile.analysis.liveness import liveness
from cotrain_compile.analysis.reuse import critical_path_s, reuse_distances
from cotrain_compile.analysis.symbolic import largest
from cotrain_compile.dataflow import Dataflow
from cotrain_compile.errors import PlacementError
from cotrain_compile.machine import Machine
from cotrain_compile.support.units import format_bytes, format_seconds

SHOWN = 5


def describe_analysis(dataflow: Dataflow, machine: Machine, budget_bytes: int) -> str:
    """Peak and what makes it, time on `machine`, reuse distances, largest sizes.

    Times are the machine's roofline. `budget_bytes` is what a dynamic size may grow to.
    """
    seconds = roofline(dataflow, machine).device_s
    sections = (
        _peak(dataflow, budget_bytes),
        _time(dataflow, seconds, machine),
        _reuse(dataflow, seconds),
        _sizes(dataflow, budget_bytes),
    )
    return "\n".join(line for section in sections for line in section)


def _peak(dataflow: Dataflow, budget_bytes: int) -> Iterator[str]:
    alive = liveness(dataflow)
    op = dataflow.ops[alive.peak_op]
    where = op.target + (f" in {op.module}" if op.module else "")
    yield (
        f"peak {format_bytes(alive.peak_bytes)} with everything on the device, at {where}; "
        f"budget {format_bytes(budget_bytes)}"
    )
    for buffer in alive.live_at(alive.peak_op)[:SHOWN]:
        yield f"  {format_bytes(buffer.nbytes):>10}  {buffer.name} ({buffer.role.value})"


def _time(dataflow: Dataflow, seconds: Mapping[str, float], machine: Machine) -> Iterator[str]:
    path_s = critical_path_s(dataflow, seconds)
    yield (
        f"time {format_seconds(sum(seconds.values()))} of device work on {machine.name}"
        f"{machine.rates.words}, critical path {format_seconds(path_s)}"
    )


def _reuse(dataflow: Dataflow, seconds: Mapping[str, float]) -> Iterator[str]:
    found = reuse_distances(dataflow, seconds)
    yield "reuse distance, from a gradient to the next use of its parameter:"
    ranked = sorted(found.items(), key=lambda item: item[1].seconds)
    few = ranked if len(ranked) <= 2 * SHOWN else [*ranked[:SHOWN], *ranked[-SHOWN:]]
    for param, distance in few:
        yield f"  {format_seconds(distance.seconds):>10}  {param}"


def _sizes(dataflow: Dataflow, budget_bytes: int) -> Iterator[str]:
    for symbol, size in dataflow.symbols.items():
        try:
            most = largest(dataflow, symbol, budget_bytes)
            yield f"{symbol} (traced at {size}) can grow to {most} with everything on the device"
        except PlacementError as error:
            yield f"{symbol} (traced at {size}): {error}"


def analysis_figures(dataflow: Dataflow, machine: Machine, budget_bytes: int) -> Mapping[str, Any]:
    """The same as plain data, of all buffers and parameters."""
    seconds = roofline(dataflow, machine).device_s
    alive = liveness(dataflow)
    return {
        "machine": machine.name,
        "rates": machine.rates,
        "budget_bytes": budget_bytes,
        "alive_at_the_peak": {b.name: b.nbytes for b in alive.live_at(alive.peak_op)},
        "device_s": sum(seconds.values()),
        "critical_path_s": critical_path_s(dataflow, seconds),
        "reuse_distance_s": {
            param: distance.seconds
            for param, distance in reuse_distances(dataflow, seconds).items()
        },
        "largest": {s: _largest(dataflow, s, budget_bytes) for s in dataflow.symbols},
    }


def _largest(dataflow: Dataflow, symbol: str, budget_bytes: int) -> int | None:
    """None where the step fits at no size."""
    try:
        return largest(dataflow, symbol, budget_bytes)
    except PlacementError:
        return None
