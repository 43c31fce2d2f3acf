"""Figures that sentences of the documentation quote, each tied to the JSON it comes from.

In: a page. Out: the same page with the figures of `bench/results`. A sentence is found by its words
(`{}` stands for a number), so that only the numbers in it are ever changed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench.results_page import pages, readme
from bench.results_page.figure import Figure

RESULTS = Path(__file__).parents[1] / "results"
FIGURES: tuple[Figure, ...] = (*readme.FIGURES, *pages.FIGURES)


def refreshed(text: str, page: str) -> str:
    """`text` of `page` with the figures of the JSONs.

    Raises `ValueError` where a sentence is not in the page, or there more than once.
    """
    for figure in FIGURES:
        if figure.page == page:
            text = _refresh(text, figure)
    return text


def _refresh(text: str, figure: Figure) -> str:
    found = list(figure.pattern.finditer(text))
    if len(found) != 1:
        raise ValueError(
            f'{figure.page} has the sentence "{figure.sentence}" {len(found)} times, not once; '
            "when you change such a sentence, change it in bench/results_page, pages.py or "
            "readme.py, too"
        )
    (match,) = found
    values = figure.values(result_of(figure.json))
    for group in range(len(values), 0, -1):
        text = text[: match.start(group)] + values[group - 1] + text[match.end(group) :]
    return text


def result_of(pattern: str) -> dict[str, Any]:
    """The results of all JSONs whose names match `pattern`, as one."""
    paths = sorted(RESULTS.glob(f"{pattern}.json"))
    return {k: v for path in paths for k, v in json.loads(path.read_text())["result"].items()}
