"""The comparison with the simple rules still runs, and its page says who is faster."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import bench.plans.plans
from bench.plans.jobs import SHAPES, Shape, with_batch
from bench.plans.page import draw, table
from bench.plans.plans import budgets_of, main
from cotrain_compile.files import save
from tests.support.dataflows import chain

TINY = Shape("Chain", "chain.py:chain", 8, 1)


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small step, and what the script has found out about it on one machine."""
    folder = tmp_path_factory.mktemp("plans")
    save(chain(6, width=4096, batch=2048), folder / TINY.file_name)
    where = ["--steps", str(folder), "-o", str(folder / "plans.json")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench.plans.plans, "SHAPES", (TINY,))
        main([*where, "--machine", "rtx4090", "--work-limit", "2", "--pictures", str(folder)])
    return folder


@pytest.fixture
def result(compared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What is in a copy of that folder."""
    shutil.copytree(compared, tmp_path, dirs_exist_ok=True)
    monkeypatch.setattr(bench.plans.plans, "SHAPES", (TINY,))
    assert (tmp_path / "plans-rtx4090.png").read_bytes().startswith(b"\x89PNG")
    found: dict[str, Any] = json.loads((tmp_path / "plans.json").read_text())["result"]
    return found


def test_from_just_feasible_to_everything_fits_no_rule_beats_a_plan_that_moves(
    result: dict[str, Any],
) -> None:
    *moving, fits = result["rows"]
    assert len(moving) == 2
    assert fits["policy"] == "resident"
    assert all(isinstance(fits["rules_s"][name], float) for name in fits["rules_s"])
    steps_s = [row["step_s"] for row in moving]
    assert steps_s == sorted(steps_s, reverse=True)
    for row in moving:
        rules_s = [value for value in row["rules_s"].values() if isinstance(value, float)]
        assert row["bound_s"] <= row["step_s"] <= min(rules_s, default=row["step_s"])
    assert any(isinstance(value, float) for value in moving[-1]["rules_s"].values())
    assert [set(entry["models"].values()) for entry in result["largest"]] == [{"Chain"}] * 2
    assert table(result).startswith("3 plans, ")


def test_merging_renews_the_rows_of_a_step_and_keeps_the_others(
    result: dict[str, Any], tmp_path: Path
) -> None:
    output = tmp_path / "plans.json"
    document = json.loads(output.read_text())
    other = result["rows"][0] | {"model": "Other"}
    rows = [row | {"step_s": 99.0} for row in result["rows"]]
    others = dict.fromkeys(result["largest"][0]["models"], "Other")
    largest = [entry | {"models": others} for entry in result["largest"]]
    kept = result | {"rows": [*rows, other], "largest": largest}
    output.write_text(json.dumps(document | {"result": kept}))
    where = ["--steps", str(tmp_path), "-o", str(output), "--machine", "rtx4090"]
    main([*where, "--work-limit", "2", "--merge", "--model", TINY.model])
    found = json.loads(output.read_text())["result"]
    steps_s = [row["step_s"] for row in found["rows"]]
    assert steps_s == [row["step_s"] for row in [*result["rows"], other]]
    # Which of one model is the largest is no news of all.
    assert found["largest"] == largest
    assert [run["command"] for run in found["others"]] == [document["command"]]


def test_a_step_that_fits_nowhere_leaves_what_is_kept(
    result: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench.plans.plans, "budgets_of", lambda *needs: ())
    output = tmp_path / "plans.json"
    where = ["--steps", str(tmp_path), "-o", str(output), "--machine", "rtx4090"]
    main([*where, "--merge", "--model", TINY.model])
    assert json.loads(output.read_text())["result"]["rows"] == result["rows"]


def test_the_page_says_who_is_faster_and_names_what_is_too_large(tmp_path: Path) -> None:
    row = {
        "model": "A, 1 × 1",
        "machine": "m",
        "budget_bytes": 1 << 30,
        "policy": "ilp",
        "step_s": 2.0,
        "bound_s": None,
        "gap": None,
        "seconds": 3.0,
        "rules_s": {"resident": "does not fit", "zero-offload": 3.0, "streamed": 1.5},
    }
    models = {"auto": "A", "resident": None}
    policies = ("zero-offload", "coarse", "fraction:auto", "streamed")
    entry = {"machine": "m", "host_bytes": 1 << 30, "models": dict.fromkeys(policies) | models}
    result = {"host_budget": "1TiB", "rows": [row], "largest": [entry]}
    page = table(result)
    assert "| m | 1.0 GiB | A | none | none | none | none | none |" in page.splitlines()
    assert "takes 0.75 times as long as our plan in the median" in page
    assert [path.name for path in draw(result, tmp_path)] == ["plans-m.png"]


@pytest.mark.parametrize(
    ("needs", "budgets"),
    [
        ((100, 500, 1000, 4000), (105, 510, 1000)),
        ((100, 500, 1000, 700), (105, 510, 700)),
        ((100, 500, 1000, 420), (105, 210, 420)),
        ((100, 500, 1000, 99), ()),
    ],
)
def test_budgets_are_where_something_begins_to_fit(
    needs: tuple[int, int, int, int], budgets: tuple[int, ...]
) -> None:
    assert budgets_of(*needs) == budgets


def test_a_job_takes_another_batch() -> None:
    def build() -> tuple[Any, tuple[torch.Tensor]]:
        return torch.sum, (torch.randint(0, 9, (2, 5)),)

    _, (tokens,) = with_batch(build, 7)()
    assert tokens.shape == (7, 5)
    assert tokens.dtype == torch.int64


def test_one_shape_of_every_model_is_its_smallest() -> None:
    smallest = [shape.model for shape in SHAPES if shape.is_smallest]
    assert sorted(smallest) == sorted({shape.model for shape in SHAPES})
