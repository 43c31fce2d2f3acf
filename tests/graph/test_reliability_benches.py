"""Short runs of what the reliability scripts measure, and the page made from their figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.fuzz import campaign
from bench.reliability import FOUND, page
from bench.soak import slope, soak

ROOT = Path(__file__).parents[2]


@pytest.mark.usefixtures("one_thread")
def test_a_short_soak_is_flat_and_equal_to_eager() -> None:
    result = soak(410)
    assert result["graphs"] == 2
    assert (result["evaluations"], result["checkpoints"]) == (8, 2)
    assert result["largest_difference_of_losses"] == 0
    assert result["largest_difference_of_parameters"] == 0
    growth = result["growth_of_second_half"]
    assert (growth["device_bytes"], growth["live_tensors"]) == (0, 0)


def test_a_slope_that_scatter_explains_is_flat_and_a_steady_one_is_not() -> None:
    assert slope([5, 7, 4, 6, 5, 7, 4, 6]).is_flat
    steady = slope([0, 10, 20, 31, 40, 50], steps_apart=10)
    assert not steady.is_flat
    assert steady.per_step == pytest.approx(1.0, abs=0.05)


def test_a_campaign_runs_cases_by_the_clock_in_a_process_of_its_own() -> None:
    seed, status, message = next(campaign("files", 7, float("inf")))
    assert seed == 7
    assert status in ("answered", "refused")
    assert message == ""


def test_the_page_has_every_campaign_and_what_it_broke() -> None:
    result = {"campaign": "damaged files", "minutes": 2, "cases": 9, "held": 3, "refused": 5}
    result |= {"faults": 0, "broken": [{"seed": 4, "what": "KeyError: 'w'", "since": "mended"}]}
    text = page({"reliability_files.json": result}, None)
    assert (
        "damaged files](../bench/results/reliability_files.json) | 2 | 9 | 3 | 5 | 0 | 1 |" in text
    )
    assert "- broke in reliability_files.json, seed 4: KeyError: 'w'; mended" in text


def test_the_committed_page_is_the_one_of_the_committed_figures() -> None:
    results = ROOT / "bench" / "results"
    read = {path.name: json.loads(path.read_text())["result"] for path in results.glob("*.json")}
    campaigns = {name: read[name] for name in sorted(read) if name.startswith("reliability_")}
    assert (ROOT / "docs" / "reliability.md").read_text() == page(campaigns, read["soak.json"])


def test_what_was_found_has_a_test_that_is_there() -> None:
    assert all((ROOT / found.test).is_file() for found in FOUND)
