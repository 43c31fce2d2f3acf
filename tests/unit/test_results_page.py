"""What the documentation says was measured is what the committed JSONs say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from bench import compare, figures
from bench.compare import PAGE, RESULTS, SECTIONS, page
from bench.figures import FIGURES, Figure, refreshed

ROOT = Path(__file__).parents[2]
GO_ON = "run `make results`, or `python -m bench.compare --write`, and read the diff"


def test_the_results_page_is_made_from_the_results() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), GO_ON


@pytest.mark.parametrize("name", sorted({figure.page for figure in FIGURES}))
def test_the_sentences_of_a_page_quote_the_results(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    assert text == refreshed(text, name), GO_ON


def test_every_result_has_a_section() -> None:
    shown = {path for section in SECTIONS for path in RESULTS.glob(f"{section.pattern}.json")}
    assert sorted(RESULTS.glob("*.json")) == sorted(shown)


QUOTED = Figure("page.md", "a step takes {} ms and {} bytes", "step", lambda r: [r["ms"], r["nb"]])


@pytest.fixture
def one_figure(tmp_path: Path) -> Iterator[None]:
    (tmp_path / "step.json").write_text(json.dumps({"result": {"ms": "7.5", "nb": "1,024"}}))
    with (
        mock.patch.object(figures, "RESULTS", tmp_path),
        mock.patch.object(figures, "FIGURES", (QUOTED,)),
    ):
        yield


@pytest.mark.usefixtures("one_figure")
def test_only_the_numbers_of_a_sentence_change_not_its_line_breaks() -> None:
    text = "Here 12 tests: a step\ntakes 123.4 ms and 99 bytes. A step takes long.\n"
    found = refreshed(text, "page.md")
    assert found == "Here 12 tests: a step\ntakes 7.5 ms and 1,024 bytes. A step takes long.\n"
    assert refreshed(found, "page.md") == found


@pytest.mark.usefixtures("one_figure")
@pytest.mark.parametrize("count", [0, 2])
def test_a_sentence_that_cannot_be_told_from_others_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match=f"{count} times, not once; when you change"):
        refreshed("a step takes 1 ms and 2 bytes\n" * count, "page.md")


def test_a_page_without_results_has_only_its_head(tmp_path: Path) -> None:
    with mock.patch.object(compare, "RESULTS", tmp_path):
        assert page() == compare.HEAD
