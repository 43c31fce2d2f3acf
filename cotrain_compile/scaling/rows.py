"""Rows: what a plan says of how ranks are arranged, for those that are started.

In: a `Layout`, a `StagePlan`, sizes by dimension, or the file of one of these or of an `Answer`.
Out: a `RanksRow`. What another function of this package runs is refused, with its name. No torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from cotrain_compile import files
from cotrain_compile.cluster.model.layout import DIMENSIONS, Layout, StagePlan
from cotrain_compile.cluster.model.strategy import Answer, RankedStrategy
from cotrain_compile.errors import DistributeError, OptionError

Plan = str | os.PathLike[str] | Layout | StagePlan | Mapping[str, int]

# Rows that have no mesh: what runs them.
_ELSEWHERE = {
    "burst": "cotrain_compile.burst(model, plan)",
    "byteps": "cotrain_compile.cpu_helpers(model, helpers)",
}
_DATA_PARALLEL = ("replicate", "shard")


@dataclass(frozen=True)
class RanksRow:
    """A row of an answer as ranks run it; `stages` where its layout has a pipeline. Harmony's
    replicas run micro-batches `by_layer`."""

    layout: Layout
    stages: StagePlan | None = None
    by_layer: bool = False


def read_row(
    plan: Plan, ranks: int, strategy: str | None = None, stages: StagePlan | None = None
) -> RanksRow:
    """The row of `plan` that `ranks` ranks run: the one named `strategy`, else the fastest.

    `stages` is for a layout with a pipeline that comes without.

    Raises `OptionError` where there is no such row, `DistributeError` where it is for other ranks
    or is not run on a mesh, and as `files.load` does.
    """
    row = _row(plan, ranks, strategy)
    row = row if stages is None else replace(row, stages=stages)
    layout = row.layout
    if layout.devices != ranks:
        raise DistributeError(
            f"the plan is for {layout.devices} ranks ({layout}), and there are {ranks}: start as "
            f"many (torchrun --nproc-per-node {layout.devices}), or take a plan for {ranks}"
        )
    _refuse_not_executed(row)
    return row


def _row(plan: Plan, ranks: int, strategy: str | None) -> RanksRow:
    match plan:
        case Layout():
            return RanksRow(plan)
        case StagePlan():
            return RanksRow(Layout(pipeline=ranks), plan)
        case Mapping():
            return RanksRow(_layout_of(plan))
    match files.kind_of(plan):
        case "layout":
            return RanksRow(files.load(plan, Layout))
        case "stageplan":
            return RanksRow(Layout(pipeline=ranks), files.load(plan, StagePlan))
        case _:
            return _row_of(files.load(plan, Answer), str(plan), strategy)


def _layout_of(sizes: Mapping[str, int]) -> Layout:
    unknown = sorted(set(sizes) - set(DIMENSIONS))
    if unknown:
        raise OptionError(
            f"a mesh has no dimension {unknown[0]!r}; known are {', '.join(DIMENSIONS)}"
        )
    by_name: dict[str, Any] = dict(sizes)
    return Layout(**by_name)


def _row_of(answer: Answer, where: str, strategy: str | None) -> RanksRow:
    known = {one.name: one for one in answer.strategies if one.step_s is not None}
    if not known:
        raise OptionError(f"{where} has no strategy that could be judged")
    name = next(iter(known)) if strategy is None else strategy
    if name not in known:
        raise OptionError(f"{where} has no strategy {name!r}; it has {', '.join(known)}")
    return _row_of_strategy(known[name])


def _row_of_strategy(found: RankedStrategy) -> RanksRow:
    if found.layout is not None:
        by_layer = found.name == "harmony-dp" and found.layout.micro_batches > 1
        return RanksRow(found.layout, found.stages, by_layer)
    if found.stages is not None:
        return RanksRow(Layout(pipeline=found.devices), found.stages)
    if found.name in _DATA_PARALLEL:
        return RanksRow(_layout_of({found.name: found.devices}))
    how = _ELSEWHERE.get(found.name, "docs/which_way.md says what")
    raise DistributeError(f"{found.name} is not on a mesh of ranks; what runs it: {how}")


def _refuse_not_executed(row: RanksRow) -> None:
    layout = row.layout
    if layout.not_executed:
        raise DistributeError(
            f"{layout.not_executed} are planned and not executed yet ({layout}); take another row, "
            "or sizes without"
        )
    if layout.pipeline > 1 and row.stages is None:
        raise OptionError(
            "the plan has a pipeline, and says not where stages begin; pass "
            "stages=StagePlan(schedule, split_points, micro_batches, micro_batch)"
        )
