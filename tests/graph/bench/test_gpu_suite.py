"""The GPU suite on the emulated device: every row is filled, a failing one says why."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from bench.gpu import suite as gpu_suite
from bench.gpu.model import SIZES
from bench.gpu.placer import Placer
from cotrain_compile.backends.lifecycle.dry_run import AfterDryRun
from cotrain_compile.runtime.calibrate.calibrate import calibrate
from tests.support.calibrations import without_constants

CALIBRATED = functools.cache(calibrate)


@pytest.fixture
def output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the suite writes; its tiny model has a single layer here, and it calibrates once."""
    without_constants(monkeypatch)
    monkeypatch.setattr(gpu_suite, "calibrate", CALIBRATED)
    shape = SIZES["tiny"].shape
    monkeypatch.setitem(SIZES, "tiny", replace(SIZES["tiny"], shape=replace(shape, layers=1)))
    return tmp_path / "suite.json"


def run(output: Path, *more: str) -> dict[str, list[dict[str, object]]]:
    own = ("--only", "correctness", "performance")
    given = ["--device", "cpu", "--size", "tiny", "--quick", "-o", str(output), *own]
    given += ["--minutes", "60", *more]
    gpu_suite.main(given)
    result: dict[str, list[dict[str, object]]] = json.loads(output.read_text())["result"]
    return result


def test_a_row_that_fails_has_its_error_and_the_others_run(
    output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = Placer.compiled

    def fail_on_coarse(self: Placer, **options: Any) -> AfterDryRun:
        if options["policy"] == "coarse":
            raise RuntimeError("no such luck")
        return place(self, **options)

    with (
        mock.patch.object(Placer, "compiled", fail_on_coarse),
        mock.patch.object(gpu_suite, "_correctness"),
        mock.patch.object(gpu_suite, "HAS_PULP", new=False),
    ):
        rows = {row["name"]: row for row in run(output)["performance"]}
    assert rows["coarse"]["error"] == "RuntimeError: no such luck"
    placed = [row for name, row in rows.items() if name not in ("coarse", "capture")]
    assert len(placed) == 4
    for row in placed:
        assert row["measured_s"] > 0  # type: ignore[operator]
        assert row["measured_peak_bytes"] == row["predicted_peak_bytes"]
    assert rows["streamed"]["fetched_bytes"] > 0  # type: ignore[operator]
    printed = capsys.readouterr().out
    assert "rows of auto are left out" in printed
    assert "ERROR RuntimeError: no such luck" in printed
    assert "1 of 6 rows have errors" in printed


def test_without_time_the_rows_say_so_and_the_file_is_whole(output: Path) -> None:
    result = run(output, "--minutes", "0.000001")
    errors = {row.get("error") for row in [*result["correctness"], *result["performance"]]}
    assert errors == {"no time left"}
