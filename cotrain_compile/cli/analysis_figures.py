"""Analysis figures: what `analyze` says of a step, as plain data for --json.

In: a step, a machine and the bytes that a dynamic size may grow to. Out: dictionaries.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cotrain_compile.analysis.costs import roofline
from cotrain_compile.analysis.critical_path import critical_path
from cotrain_compile.analysis.liveness import liveness
from cotrain_compile.analysis.reuse import reuse_distances
from cotrain_compile.analysis.symbolic import largest
from cotrain_compile.cli.figures import step_figures
from cotrain_compile.dataflow import Dataflow
from cotrain_compile.errors import PlacementError
from cotrain_compile.machine import Machine


def analysis_figures(dataflow: Dataflow, machine: Machine, budget_bytes: int) -> Mapping[str, Any]:
    """Peak and what makes it, roofline times, reuse distances, largest sizes."""
    seconds = roofline(dataflow, machine).device_s
    alive = liveness(dataflow)
    return {
        **step_figures(dataflow),
        "machine": machine.name,
        "rates": machine.rates,
        "budget_bytes": budget_bytes,
        "alive_at_the_peak": {b.name: b.nbytes for b in alive.live_at(alive.peak_op)},
        "device_s": sum(seconds.values()),
        "critical_path_s": critical_path(dataflow, seconds).seconds,
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
