"""The benchmarks of the runtime still run, and write what they are asked for."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.plans import coarse as coarse_against_zero_offload
from bench.runtime import host_update, host_update_parts
from tests.support.calibrations import without_constants


@pytest.fixture(autouse=True)
def same_threads() -> Any:
    """Both set the number of threads while they run."""
    before = torch.get_num_threads()
    yield
    assert torch.get_num_threads() == before


def quick(main: Callable[[Sequence[str]], None], output: Path) -> dict[str, Any]:
    main(["--quick", "-o", str(output)])
    result: dict[str, Any] = json.loads(output.read_text())["result"]
    return result


@pytest.mark.long  # updates in parts are compared in every run, and kernels with their peers
def test_host_updates_are_compared_in_every_case(tmp_path: Path) -> None:
    result = quick(host_update.main, tmp_path / "report.json")
    cases = [record["case"] for record in result["records"]]
    assert len(set(cases)) == len(cases) == 4
    for record in result["records"]:
        assert record["seconds"].keys() == {"copy", "update alone", "op by op", "ours"}
        assert record["gap_s"].keys() == {"nothing", *record["seconds"]}
        spread = record["of_op_by_op"]
        assert 0 < spread["min"] <= spread["median"] <= spread["max"]
    summary = result["summary"]
    assert summary["ratio_met"] == (summary["of_op_by_op_worst"] >= host_update.RATIO)
    assert summary["gap_met"] == (summary["gap_worst_s"] <= host_update.GAP_S)


def test_updates_in_parts_are_compared_with_what_there_is(tmp_path: Path) -> None:
    result = quick(host_update_parts.main, tmp_path / "report.json")
    kinds = {record["dtype"]: set(record["seconds"]) for record in result["records"]}
    assert kinds == {
        "float32": {"whole", "in parts", "fused"},
        "bfloat16": {"whole", "in parts", "fused"},
    }
    assert all(r["predicted"].keys() == r["seconds"].keys() for r in result["records"])


def test_both_plans_are_predicted_and_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_constants(monkeypatch)
    monkeypatch.setattr(coarse_against_zero_offload, "LAYERS", 2)
    result = quick(coarse_against_zero_offload.main, tmp_path / "report.json")
    zero, coarse = (result["plans"][plan] for plan in coarse_against_zero_offload.PLANS)
    assert coarse["predicted_s"] <= zero["predicted_s"]
    ratio = result["measured_ratio"]
    assert 0 < ratio["min"] <= ratio["median"] <= ratio["max"]
    error = ratio["median"] * zero["predicted_s"] / coarse["predicted_s"] - 1
    assert result["ratio_error"] == pytest.approx(error)
    assert result["backward_s"] > 0
    assert result["updates_s"] > 0
