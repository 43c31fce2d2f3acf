"""Habits that a machine can hold: subjects of commits, titles of decisions, hooks, hosted CI."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
DECISIONS = sorted((ROOT / "docs" / "decisions").glob("*.md"))


@pytest.mark.parametrize("page", DECISIONS, ids=lambda page: page.stem)
def test_a_decision_is_called_by_its_number(page: Path) -> None:
    title = page.read_text(encoding="utf-8").splitlines()[0]
    assert re.fullmatch(rf"# {page.name[:4]}: \S.*[^.]", title)


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        ("search: try the greedy first\n\nIt is faster.\n", ""),
        ("cluster/steps: one maker a strategy\n# a comment of git\n", ""),
        ("Merge branch 'a' into b\n", ""),
        ("Try the greedy first\n", "begins with an area"),
        ("search:try the greedy first\n", "begins with an area"),
        (f"search: {'long ' * 14}\n", "72 are the most"),
        ("search: try the greedy first\nIt is faster.\n", "leave the line"),
        ("\n", "begins with an area"),
    ],
)
def test_a_subject_has_an_area_and_is_short(message: str, complaint: str, tmp_path: Path) -> None:
    (tmp_path / "message").write_text(message, encoding="utf-8")
    done = subprocess.run(
        [ROOT / ".ci" / "commit-subject", tmp_path / "message"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode == 0) == (not complaint)
    assert complaint in done.stderr


def test_hooks_and_ci_call_what_is_there() -> None:
    hooks = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    assert set(re.findall(r"repo: (\S+)", hooks)) == {"local"}
    tools = re.findall(r"entry: (\S+)", hooks)
    assert {".venv/bin/ruff", ".ci/commit-subject"} <= set(tools)
    assert [t for t in tools if not t.startswith(".venv/bin/") and not (ROOT / t).exists()] == []
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    assert "- run: .ci/run\n" in workflow
    assert (ROOT / ".ci" / "run").exists()


@pytest.mark.parametrize("page", DECISIONS, ids=lambda page: page.stem)
def test_a_decision_is_no_diary(page: Path) -> None:
    """Question, decision and reasons fit 250 words."""
    assert len(page.read_text(encoding="utf-8").split()) <= 250
