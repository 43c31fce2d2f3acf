"""Split: does the step in parts compute what the step does?

In: the Dataflow of a step and a Placement. Out: nothing, or `PlanError` with the region that is
wrong. Asked of the step itself: nothing outside of a region may need what only a part of it has,
and no part what a later one makes.
"""

from __future__ import annotations

from cotrain_compile.dataflow import Dataflow
from cotrain_compile.errors import PlanError
from cotrain_compile.plan import Placement
from cotrain_compile.regions import Region


def check_splits(dataflow: Dataflow, placement: Placement) -> None:
    """Raise `PlanError` unless every region of `placement.splits` is one of the step, in parts."""
    known = {region.name: region for region in dataflow.regions}
    for name, parts in placement.splits.items():
        _require(name in known, f"names {name}, which the step has not")
        rows = known[name].length
        _require(1 <= parts <= rows, f"has {name}, of {rows} rows, in {parts} parts")
        _check_region(dataflow, known[name])


def _check_region(dataflow: Dataflow, region: Region) -> None:
    inside = {op.name for op in region.ops}
    ops = [op for op in dataflow.ops if op.name in inside]
    made = {name for op in ops for name in op.writes}
    collected = {result.buffer for window in region.windows for result in window.collected}
    collected |= {counted.buffer for window in region.windows for counted in window.counted}
    for op in dataflow.ops:
        if op.name not in inside:
            lost = sorted(made.intersection((*op.reads, *op.writes)) - collected)
            _require(not lost, f"has {region.name}, but {op.name} needs all of {lost[:1]}")
    kept = sorted(name for name in made - collected if dataflow.buffer[name].is_output)
    _require(not kept, f"has {region.name}, whose {kept[:1]} the step gives back")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise PlanError(f"unsound plan: placement.splits {message}")
