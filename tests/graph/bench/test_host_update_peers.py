"""Kernels that are compared do the same work, and the report has what its table needs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from bench.results_page import tables
from bench.runtime import host_update_peers
from bench.runtime.host_update_peers import QUICK_ROWS, kernels, measure, one_tensor, quiet_median

ROWS = QUICK_ROWS[0]


@pytest.mark.parametrize("low_precision", [pytest.param(False, marks=pytest.mark.long), True])
def test_every_kernel_makes_the_same_update(low_precision: bool) -> None:
    update = one_tensor(ROWS, low_precision)
    update.gradient.copy_(torch.randn(update.gradient.shape))
    tensors = (update.param, *update.states)
    start = [tensor.clone() for tensor in tensors]
    found: dict[str, list[torch.Tensor]] = {}
    for name, work in kernels(update).items():
        for tensor, value in zip(tensors, start, strict=True):
            tensor.copy_(value)
        work()
        found[name] = [update.param.clone(), *(state.clone() for state in update.states[1:])]
    ours = found.pop("ours")
    assert not torch.equal(ours[0], start[0])
    same = {name: values for name, values in found.items() if "8-bit" not in name}
    assert {"torch fused", "torch foreach"} <= same.keys()
    for values in same.values():
        for value, own in zip(values, ours, strict=True):
            torch.testing.assert_close(value, own, rtol=1e-5, atol=1e-8)


def test_the_median_of_the_fastest_fifth_ignores_what_was_disturbed() -> None:
    assert quiet_median([5.0, 1.0, 9.0, 3.0, 2.0, *[100.0] * 10]) == 2.0
    assert quiet_median([4.0]) == 4.0


def test_the_report_becomes_a_table(tmp_path: Path) -> None:
    def in_this_process(threads: int, quick: bool) -> list[dict[str, Any]]:
        return [{"threads": threads, **measure(ROWS, low, 5)} for low in (False, True)]

    output = tmp_path / "report.json"
    with (
        mock.patch.object(host_update_peers, "records_in_process", in_this_process),
        mock.patch.object(host_update_peers, "installed", dict),
    ):
        host_update_peers.main(["--quick", "--threads", "1", "-o", str(output)])
    result = json.loads(output.read_text())["result"]
    assert [record["gradient"] for record in result["records"]] == ["float32", "bfloat16"]
    for record in result["records"]:
        assert record["ours_against"].keys() == record["seconds"].keys() - {"ours"}
        for spread in record["seconds"].values():
            assert 0 < spread["min"] <= spread["quiet_median"] <= spread["median"] <= spread["max"]
    assert "Peers: none installed." in tables.host_update_peers(result)
