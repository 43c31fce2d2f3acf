"""What `bench.published.fit` and `bench.published.rivals` have found, as tables and a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.results_page.tables import markdown

PICTURE = Path("docs/images/published-steps.png")
_HELD, _PRODUCT = "a family left out", "the product's constants"
_COLOURS = 10  # that matplotlib has in turn; the next ten families have another shape


def table(result: Mapping[str, Any]) -> str:
    """Of the fit: how far off by which check; every row is in the picture and in the JSON."""
    own, kernels = (result[f"off, own {what}"][_PRODUCT] for what in ("steps", "kernels"))
    return "\n\n".join(
        (
            _INTRODUCTION,
            _off(result["off"]),
            _OWN.format(*_percents(kernels), *_percents(own)),
            f"![Predicted against published step times](images/{PICTURE.name})\n",
        )
    )


def _off(checks: Mapping[str, Mapping[str, float]]) -> str:
    return markdown(
        ("constants", "rows", "off, median", "nine of ten within", "worst", "within 20 %"),
        [
            (name, o["rows"], *_percents(o), f"{o['within 20 %']} of {o['rows']}")
            for name, o in checks.items()
        ],
    )


_INTRODUCTION = """Training steps that others have published, against what presets predict of the
same steps, traced here. *A family left out*: by constants that were fitted without any row of its
family of models."""

_OWN = """Of an H200 that was measured here, seconds of kernels by kind are off by {} in the median
({} for nine of ten, {} at worst), whole steps by {} ({}, {}): between kernels a card waits for its
host, which is not predicted."""


def _percents(off: Mapping[str, float]) -> list[str]:
    return [f"{100 * off[key]:.1f} %" for key in ("median", "nine of ten", "worst")]


def draw(result: Mapping[str, Any], path: Path = PICTURE) -> None:
    """Predicted over published milliseconds, a mark for each family; within 20 % is shaded."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 5), dpi=110)
    axes = figure.add_subplot()
    families = list(dict.fromkeys(row["family"] for row in result["rows"]))
    for number, family in enumerate(families):
        rows = [row for row in result["rows"] if row["family"] == family]
        axes.plot(
            [row["published_ms"] for row in rows],
            [row["published_ms"] * row["predicted over published"][_HELD] for row in rows],
            "os^"[number // _COLOURS],
            label=family,
        )
    ends = [15.0, 3000.0]
    axes.plot(ends, ends, color="gray", linewidth=1)
    axes.fill_between(ends, [0.8 * e for e in ends], [1.2 * e for e in ends], alpha=0.15)
    axes.set(
        xscale="log", yscale="log", xlabel="published ms", ylabel="predicted ms, family left out"
    )
    axes.legend(fontsize=7)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
