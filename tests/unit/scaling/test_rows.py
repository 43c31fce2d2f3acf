"""Rows: of a plan the one that so many ranks run, or why they cannot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cotrain_compile import files
from cotrain_compile.cluster.model.layout import Layout, StagePlan
from cotrain_compile.cluster.model.strategy import Answer, RankedStrategy
from cotrain_compile.errors import CotrainError
from cotrain_compile.scaling.rows import RanksRow, read_row

STAGES = StagePlan("1F1B", ("layers.1",), 2, 2)


def test_a_row_of_an_answer_is_taken_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    rows = (
        RankedStrategy("hsdp", 1.0, devices=4, layout=Layout(replicate=2, shard=2)),
        RankedStrategy("pipeline-data", 2.0, devices=4, layout=Layout(2, 2), stages=STAGES),
        RankedStrategy("pipeline-1f1b", 3.0, devices=2, stages=STAGES),
        RankedStrategy("shard", 4.0, devices=8),
        RankedStrategy("harmony-dp", 4.5, devices=4, layout=Layout(replicate=4, micro_batches=2)),
        RankedStrategy("burst", 5.0, devices=4, widths={"layers.1": 4}),
        RankedStrategy("replicate", reason="too large"),
    )
    files.save(Answer("net", "4xa100", 8, rows), path)
    assert read_row(path, 4) == RanksRow(Layout(replicate=2, shard=2))
    assert read_row(path, 4, "pipeline-data") == RanksRow(Layout(2, 2), STAGES)
    assert read_row(path, 2, "pipeline-1f1b") == RanksRow(Layout(2), STAGES)
    assert read_row(path, 8, "shard") == RanksRow(Layout(shard=8))
    by_layer = RanksRow(Layout(replicate=4, micro_batches=2), by_layer=True)
    assert read_row(path, 4, "harmony-dp") == by_layer
    for name, told in (
        ("shard", r"for 8 ranks \(shard 8\), and there are 4: .*--nproc-per-node 8"),
        ("burst", r"what runs it: cotrain_compile\.burst"),
        ("replicate", "no strategy 'replicate'; it has hsdp, pipeline-data, "),
    ):
        with pytest.raises(CotrainError, match=told):
            read_row(path, 4, name)


def test_layouts_and_stages_are_plans_too(tmp_path: Path) -> None:
    layout = Layout(shard=2, tensor=2)
    for value, row in ((layout, RanksRow(layout)), (STAGES, RanksRow(Layout(pipeline=4), STAGES))):
        files.save(value, tmp_path / "plan.json")
        assert read_row(tmp_path / "plan.json", 4) == read_row(value, 4) == row
    assert read_row({"shard": 2, "tensor": 2}, 4) == RanksRow(layout)
    assert read_row({"pipeline": 4}, 4, stages=STAGES) == RanksRow(Layout(4), STAGES)


@pytest.mark.parametrize(
    ("plan", "told"),
    [
        ({"data": 4}, "no dimension 'data'; known are pipeline, "),
        ({"shard": 8}, r"for 8 ranks \(shard 8\), and there are 4"),
        (
            Layout(experts=4, samples=(3, 1, 2, 2)),
            "experts with unequal samples are planned and not executed yet",
        ),
        ({"pipeline": 4}, "has a pipeline, and says not where stages begin; pass stages="),
        (Layout(2, 2, samples=(3, 1)), "replicas of a pipeline with unequal samples are planned"),
    ],
)
def test_what_is_not_executed_is_refused_in_words(plan: Any, told: str) -> None:
    with pytest.raises(CotrainError, match=told):
        read_row(plan, plan.devices if isinstance(plan, Layout) else 4)
