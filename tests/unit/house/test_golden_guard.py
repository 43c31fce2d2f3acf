"""Golden texts are many, and are renewed by a person: never by CI, never without a trace."""

from __future__ import annotations

import pytest

from tests.conftest import pytest_configure
from tests.support.golden_cases import CASES, read


def test_ci_renews_no_golden_text(monkeypatch: pytest.MonkeyPatch) -> None:
    class Asked:
        def getoption(self, name: str) -> bool:
            return name == "--update-golden"

    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.UsageError, match="CI refuses it"):
        pytest_configure(Asked())  # type: ignore[arg-type]


def test_there_are_many_cases_and_each_says_what_it_shows() -> None:
    paths = list(CASES.rglob("*.txt"))
    assert len(paths) >= 75
    for path in paths:
        story = read(path).story
        assert all(line.startswith("# ") for line in story.splitlines()), path
        assert story.endswith((".", "?")), path
