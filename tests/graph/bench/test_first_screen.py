"""The README's steps that do not fit: a change of the search is not to lose their plans."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.plans.first_screen import CASES, Case, case
from bench.plans.jobs import SHAPES

RESULTS = Path("bench/results/first_screen.json")
# As much slower than what is published a plan may be found.
AS_FAST = 1.03


@pytest.mark.long
@pytest.mark.parametrize("at", range(len(CASES)), ids=lambda at: "-".join(CASES[at][:2]))
def test_published_plans_are_found_again(at: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Within the budgets of the row and, by `case`, past the check."""
    name, machine, device, host = CASES[at]
    published = {
        (row["model"], row["machine"]): Case(**row)
        for row in json.loads(RESULTS.read_text())["result"]["cases"]
    }[name, machine]
    shape = next(shape for shape in SHAPES if shape.name == name)
    steps = tmp_path_factory.getbasetemp() / "steps"  # two rows are of one step
    found = case(shape, machine, device, host, steps)
    assert found.device_budget_bytes == published.device_budget_bytes
    assert found.refusal is None
    assert found.step_s is not None
    assert published.step_s is not None
    assert found.step_s <= AS_FAST * published.step_s
