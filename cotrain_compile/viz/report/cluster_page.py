"""Cluster page: the answer for a cluster as one HTML page that loads nothing else.

In: an `Answer` and the `LayerProfile` it is of. Out: the ranked table, where pipelines are cut and
which widths layers have, drawn over the layers of the model, and a timeline of each strategy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path

from bokeh.embed import components
from bokeh.model import Model
from bokeh.resources import Resources
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from cotrain_compile.cluster.model.profiles import LayerProfile
from cotrain_compile.cluster.model.strategy import Answer, RankedStrategy
from cotrain_compile.files import write_whole
from cotrain_compile.support.units import format_bytes, format_seconds
from cotrain_compile.viz.kinds import COLOURS, css_property, palettes_css
from cotrain_compile.viz.report.charts import lanes_chart, time_axis
from cotrain_compile.viz.strategies import (
    HOW_TO_READ,
    cells,
    details,
    headings,
    specify_strategies,
    verdict,
)


@dataclass(frozen=True)
class PictureRow:
    """A row of a picture over the layers: stretches from one share of them to another, in percent.

    `used` is the peak's share of what the device has, in percent, None where that is not drawn.
    """

    name: str
    stretches: tuple[tuple[float, float, str], ...]
    says: str
    used: float | None = None


def write_cluster_page(path: Path, found: Answer, profile: LayerProfile) -> None:
    """Write the page of `found`, the answer for `profile`; OSError where `path` is unwritable."""
    write_whole(path, cluster_html(found, profile))


def cluster_html(found: Answer, profile: LayerProfile) -> str:
    """The page as text."""
    environment = Environment(
        loader=PackageLoader("cotrain_compile.viz.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"seconds": format_seconds, "property": css_property}
    drawn = specify_strategies(found)
    axis = time_axis(drawn.end_s)
    figures: dict[str, Model] = {panel.title: lanes_chart(panel, axis) for panel in drawn.panels}
    script, places = components(figures) if figures else ("", {})
    library = Resources(mode="inline", components=["bokeh"], minified=True)
    layers = [layer.name for layer in profile.layers]
    return environment.get_template("cluster.html").render(
        found=found,
        heading=drawn.heading,
        headings=headings(found),
        rows=[tuple(cells(one)) for one in found.strategies],
        how_to_read=HOW_TO_READ,
        said={one.name: (verdict(one, found), *details(one)) for one in found.strategies},
        pictures=_pictures(found, layers),
        layers=layers,
        panels=drawn.panels,
        charts={name: Markup(place) for name, place in places.items()},
        kinds=[kind for kind in COLOURS if any(kind in panel.kinds for panel in drawn.panels)],
        palettes=palettes_css(),
        library=Markup(library.render_js()),
        script=Markup(script),
    )


def _pictures(found: Answer, layers: Sequence[str]) -> Mapping[str, tuple[PictureRow, ...]]:
    """Cuts and widths, by strategy."""
    drawn = {one.name: (*cuts(one, layers), *widths(one, layers)) for one in found.strategies}
    return {name: rows for name, rows in drawn.items() if rows}


def cuts(strategy: RankedStrategy, layers: Sequence[str]) -> Iterator[PictureRow]:
    """A row for each stage: its layers, and its peak against what its device has."""
    if strategy.stages is None or strategy.peak_bytes is None:
        return
    bounds = [0, *map(layers.index, strategy.stages.split_points), len(layers)]
    peaks = zip(strategy.peak_bytes, strategy.capacities_bytes, strict=True)
    for stage, ((first, end), (peak, capacity)) in enumerate(
        zip(pairwise(bounds), peaks, strict=True)
    ):
        says = f"{format_bytes(peak)} of {format_bytes(capacity)}"
        drawn = (_stretch(layers, first, end),)
        yield PictureRow(f"stage {stage}", drawn, says, 100 * peak / capacity)


def widths(strategy: RankedStrategy, layers: Sequence[str]) -> Iterator[PictureRow]:
    """A row for each width that occurs, the widest first: the layers that have it."""
    if not strategy.widths:
        return
    runs: dict[int, list[tuple[int, int]]] = {}
    for width, run in groupby(range(len(layers)), key=lambda i: strategy.widths[layers[i]]):
        own = list(run)
        runs.setdefault(width, []).append((own[0], own[-1] + 1))
    for width in sorted(runs, reverse=True):
        drawn = tuple(_stretch(layers, first, end) for first, end in runs[width])
        count = sum(end - first for first, end in runs[width])
        name = "1 device" if width == 1 else f"{width} devices"
        yield PictureRow(name, drawn, f"{count} layer{'s' * (count > 1)}")


def _stretch(layers: Sequence[str], first: int, end: int) -> tuple[float, float, str]:
    """Where layers begin, how many they are, and which, for the reader who points there."""
    share = 100 / len(layers)
    last = f" to {layers[end - 1]}" if end - first > 1 else ""
    return first * share, (end - first) * share, f"{layers[first]}{last}"
