"""The placement benchmark still runs, and its summary tells a met target from a missed one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench.plans.placement import main
from bench.plans.targets import Row, summary
from cotrain_compile.files import save
from tests.support.dataflows import chain

ROW = Row(
    model="gpt2",
    machine="h100",
    ops=5_000,
    budget_bytes=8 << 30,
    choices_s=1.0,
    solve_s=4.0,
    policy="ilp",
    status="optimal",
    step_s=1.0,
    bound_s=0.99,
    gap=0.0101,
    claimed_s=0.995,
    claim_difference=0.005,
    rules_s={"resident": "does not fit", "zero-offload": 2.0, "coarse": 1.5},
    peak_bytes=8 << 30,
)


def test_the_quick_run_reports_plans_that_no_rule_beats(tmp_path: Path) -> None:
    step, output = tmp_path / "chain.json", tmp_path / "report.json"
    save(chain(6, width=4096, batch=2048), step)
    main(["--quick", "-o", str(output), str(step)])
    result = json.loads(output.read_text())["result"]
    rows = result["rows"]
    assert [row["model"] for row in rows] == ["chain", "chain"]
    assert rows[0]["budget_bytes"] < rows[1]["budget_bytes"]
    for row in rows:
        assert row["peak_bytes"] <= row["budget_bytes"]
        assert row["rules_s"]["resident"] == "does not fit"
        fitting = [value for value in row["rules_s"].values() if isinstance(value, float)]
        assert row["step_s"] <= min(fitting, default=row["step_s"])
    assert result["summary"]["refused"] == result["summary"]["bounds_beaten"] == 0


def test_a_row_within_every_limit_meets_the_targets() -> None:
    found = summary([ROW])
    assert all(target["met"] for target in found["targets"].values())
    assert found["speedup_best"] == 1.5


@pytest.mark.parametrize(
    ("row", "missed"),
    [
        (replace(ROW, gap=0.2), "gap_to_bound"),
        (replace(ROW, bound_s=None, gap=None), "gap_to_bound"),
        (replace(ROW, claim_difference=-0.06), "claim_difference"),
        (replace(ROW, solve_s=21.0), "solve_s"),
        (replace(ROW, ops=39_000, solve_s=91.0), "large_solve_s"),
    ],
)
def test_one_bad_row_among_good_ones_misses_its_target(row: Row, missed: str) -> None:
    targets = summary([ROW, ROW, row])["targets"]
    assert [name for name, target in targets.items() if not target["met"]] == [missed]


def test_a_plan_faster_than_its_certified_bound_is_counted() -> None:
    assert summary([ROW, replace(ROW, gap=-0.01)])["bounds_beaten"] == 1
