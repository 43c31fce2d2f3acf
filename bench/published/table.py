"""What `bench.published.fit` and `bench.published.rivals` have found, as tables and a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.results_page.tables import markdown

PICTURE = Path("docs/images/published-steps.png")
_HELD = "a family left out"
_COLOURS = 10  # that matplotlib has in turn; the next ten families have another shape


def table(result: Mapping[str, Any]) -> str:
    """Of the fit: how far off by which check, the constants, then every row."""
    constants = markdown(("times its roofline", "fitted"), result["constants"].items())
    rows = markdown(
        ("step", "card", "runs", "published", "predicted, its family left out", "off by"),
        [_row(row) for row in result["rows"]],
    )
    kernels = markdown(
        ("kernels of", "runs", "measured", "predicted", "off by", "predicted, its family left out"),
        [_kernels(row) for row in result["kernels"]],
    )
    picture = f"![Predicted against published step times](images/{PICTURE.name})"
    return "\n\n".join(
        (
            _INTRODUCTION,
            _off(result["off"]),
            constants,
            _OWN,
            _off(result["off, own steps"]),
            _KERNELS,
            _off(result["off, own kernels"]),
            kernels,
            picture,
            rows,
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
same steps, traced here. Each step is predicted by constants that were fitted without any row of its
family of models, or of its card. Of two outliers the step is not the one that is traced: a BERT
that skips its padding, and an optimizer whose states are paged over PCIe."""


_OWN = """Steps of an H200 that were measured here are not among these. What they take as a whole
is not fitted, since a card that waits for its host says nothing of itself: `torch.compile` of a
ResNet-50 took 29 ms, its kernels 19 ms."""

_KERNELS = """The seconds of their kernels are fitted, by kind: they tell products from attention
and from what memory limits."""


def _percents(off: Mapping[str, float]) -> list[str]:
    return [f"{100 * off[key]:.1f} %" for key in ("median", "nine of ten", "worst")]


def _row(row: Mapping[str, Any]) -> Sequence[str]:
    ratio, published = row["predicted over published"][_HELD], row["published_ms"]
    runs = "compiled" if row["compiled"] else "eager"
    return (
        row["id"],
        row["card"],
        runs,
        f"{published:,.0f} ms",
        f"{ratio * published:,.0f} ms",
        f"{100 * (ratio - 1):+.0f} %",
    )


def _kernels(row: Mapping[str, Any]) -> Sequence[str]:
    ratios, measured = row["predicted over published"], row["published_ms"]
    ratio = ratios["the product's constants"]
    return (
        row["id"],
        "compiled" if row["compiled"] else "eager",
        f"{measured:.1f} ms",
        f"{ratio * measured:.1f} ms",
        f"{100 * (ratio - 1):+.0f} %",
        f"{ratios[_HELD] * measured:.1f} ms",
    )


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
