"""Short runs of what the reliability scripts measure, and the page made from their figures."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

from bench.reliability.found import FOUND
from bench.reliability.fuzz import campaign
from bench.reliability.killed_training import Job, digest
from bench.reliability.long_tests import counts
from bench.reliability.page import MUTANTS, campaigns_in, long_tests_in, page
from bench.reliability.processes import (
    KILLS,
    Broken,
    Figures,
    check_checkpoint,
    kill_once,
    undisturbed,
)
from bench.reliability.soak import slope, soak

ROOT = Path(__file__).parents[3]


@pytest.mark.long
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
    case = next(campaign("files", 7, float("inf")))
    assert case.seed == 7
    assert case.status in ("answered", "refused")
    assert case.message == ""


def test_the_page_adds_up_campaigns_and_has_what_nobody_has_mended() -> None:
    result = {"campaign": "damaged files", "minutes": 2, "cases": 9, "held": 3, "refused": 5}
    result |= {"faults": 0, "broken": [{"seed": 4, "what": "KeyError: 'w'"}]}
    later = {**result, "campaign": "damaged files (after that fix)", "held": 4}
    mended = {**later, "broken": [{"seed": 5, "what": "KeyError: 'v'", "since": "fixed"}]}
    text = page({"reliability_files.json": result, "reliability_files_2.json": mended}, None)
    assert "| damaged files | 18 | 7 | 10 | 2 | 1 |" in text
    assert "- broke in reliability_files.json, seed 4: KeyError: 'w'" in text
    assert "seed 5" not in text


def test_the_committed_page_is_the_one_of_the_committed_figures() -> None:
    results = ROOT / "bench" / "results"
    run = json.loads((results / "soak.json").read_text())["result"]
    mutants = json.loads((results / MUTANTS).read_text())["result"]
    expected = page(campaigns_in(results), run, long_tests_in(results), mutants)
    assert (ROOT / "docs" / "reliability.md").read_text() == expected


def test_what_was_found_has_a_test_that_is_there() -> None:
    assert all((ROOT / found.test).is_file() for found in FOUND)


# Killed processes.


@pytest.mark.long
def test_a_killed_training_goes_on_from_a_state_of_the_undisturbed_run(tmp_path: Path) -> None:
    states = undisturbed(Job(tmp_path / "whole.pt", 40, "overlapping steps"))
    job = Job(tmp_path / "run.pt", 40, "overlapping steps")
    for seed, kill in enumerate(KILLS):
        if kill_once(job, kill, random.Random(seed), states, Figures()):
            job.checkpoint.unlink()  # the signal came too late: the next training is a new one


def test_a_checkpoint_of_another_run_is_noticed(tmp_path: Path) -> None:
    saved = {"model": {"weight": torch.ones(2)}, "optimizer": {}}
    torch.save({**saved, "done": 1}, tmp_path / "run.pt")
    job = Job(tmp_path / "run.pt", 2, "streamed")
    check_checkpoint(job, ["", digest(saved)])
    with pytest.raises(Broken, match="not the state after 1 steps"):
        check_checkpoint(job, ["", digest({**saved, "model": {"weight": torch.zeros(2)}})])


# Tests in full.


def test_a_run_of_a_file_is_counted_with_what_hypothesis_has_tried() -> None:
    junit = """<testsuites><testsuite tests="4" skipped="1" time="90.0">
        <testcase name="one"/><testcase name="two"/><testcase name="three"><skipped/></testcase>
        <testcase name="breaks"><failure/></testcase></testsuite></testsuites>"""
    told = """
      - during generate phase (0.50 seconds):
        - Typical runtimes: < 1ms, of which < 1ms in data generation
        - 1900 passing, 0 failing, and 3 invalid test cases
      - during reuse phase (0.50 seconds):
        - 100 passing examples, 0 failing examples, 0 invalid examples"""
    figures = {"tests": 3, "skipped": 1, "failed": ["breaks"], "examples": 2000, "minutes": 1.5}
    assert counts(junit, told) == figures
    text = page({}, None, {"tests/unit/data/test_files.py": figures})
    assert "1 files of tests" in text
    assert "3 tests, 2,000 examples" in text
    assert "- failed in `tests/unit/data/test_files.py`: breaks" in text
