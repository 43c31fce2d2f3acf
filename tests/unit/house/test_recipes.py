"""Recipes: pages of at most 40 lines whose paths are there and whose steps, followed, work."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cotrain_compile.dataflow import Dataflow
from cotrain_compile.machine import MEMORIES, Tier
from cotrain_compile.placement import policies
from cotrain_compile.placement.check.check import check
from cotrain_compile.placement.problem import formulate
from cotrain_compile.placement.search.solve import SolveSettings, solve
from cotrain_compile.plan import Placement, UpdateMode
from cotrain_compile.presets import find
from tests.support.dataflows import chain

ROOT = Path(__file__).parents[3]
RECIPES = sorted(path for path in (ROOT / "docs" / "recipes").glob("*.md") if path.stem != "README")
FOLDERS = (ROOT, ROOT / "cotrain_compile")


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_short_and_names_what_is_there(recipe: Path) -> None:
    text = recipe.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 40
    named = re.findall(r"`((?:\w+/)*\w+\.(?:py|md))`|`((?:\w+/)+)`", text)
    assert [n for n in map("".join, named) if not any((f / n).exists() for f in FOLDERS)] == []
    assert recipe.name in (ROOT / "docs" / "recipes" / "README.md").read_text(encoding="utf-8")


def test_a_policy_in_the_table_is_solved_for_and_tried_by_auto(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The recipe's second step: one entry, and the rest follows."""

    def last_on_host(dataflow: Dataflow) -> Placement:
        """As resident, but the last parameter is updated on the host."""
        base, group = policies.resident(dataflow), dataflow.updates[-1]
        homes = {**base.homes, **dict.fromkeys(group.states, Tier.HOST)}
        updates = {**base.updates, group.param: UpdateMode.HOST}
        return replace(base, policy="last-on-host", homes=homes, updates=updates)

    monkeypatch.setitem(policies.RULES, "last-on-host", last_on_host)
    dataflow = chain(3)
    machine = find("rtx4090")
    plenty = formulate(dataflow, machine, dict.fromkeys(MEMORIES, 1 << 40))
    needed = solve(plenty, SolveSettings(policy="resident")).predicted.peak_bytes[Tier.DEVICE]
    problem = formulate(dataflow, machine, {**plenty.budgets, Tier.DEVICE: needed - 1})
    plan = solve(problem, SolveSettings(policy="last-on-host"))
    check(problem, plan)
    assert plan.placement.updates[dataflow.updates[-1].param] is UpdateMode.HOST
    report = solve(problem).report
    assert report is not None
    assert report.simulated_s["last-on-host"] == plan.predicted.makespan_s


def test_the_link_of_the_recipe_is_a_lane_with_its_time_and_what_it_shares() -> None:
    """The page's own lines, run; then what its steps promise."""
    page = (ROOT / "docs" / "recipes" / "link.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    made: dict[str, Any] = {}
    exec(code, made)
    machine = made["machine"]
    assert made["seconds"] == pytest.approx(1e-5 + (1 << 30) / 20e9)
    assert "peer" in machine.lanes
    assert machine.slowdown("peer", ("h2d1",)) == machine.slowdown("h2d1", ("peer",)) == 2.0
    assert machine.slowdown("peer", ("h2d0",)) == 1.0
