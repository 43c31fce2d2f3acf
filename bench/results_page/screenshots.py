"""The pictures of a plan in the documentation: its report in a browser, and its graph.

Each plan is in a folder as the demo or the option `dump` leaves it: its report is opened in
Chromium, by day, by night and on a phone, and its graph is laid out by Graphviz; both are needed.
PNGs with few colours go to docs/images.

    python -m bench.results_page.screenshots --demo demo-output --llama-7b dump
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from cotrain_compile import files
from cotrain_compile.dataflow import Dataflow
from cotrain_compile.plan import Plan
from cotrain_compile.viz.graph.drawing import as_svg
from cotrain_compile.viz.graph.picture import picture

IMAGES = Path(__file__).parents[2] / "docs" / "images"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
DRAWING_MS = 10_000  # virtual time: until the page has drawn its charts
COLOURS = 256  # more than such a page has, but for the edges of its letters


@dataclass(frozen=True)
class Shot:
    """A picture of a page: pixels, and whether the reader prefers dark pages."""

    width: int = 1400
    height: int = 1250
    dark: bool = False


def photograph(page: Path, shot: Shot, image: Path) -> None:
    """Open `page` in a browser without a window and write what it shows to `image`."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise SystemExit(f"a screenshot needs one of {', '.join(BROWSERS)}; install chromium")
    command = [
        *(browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
        f"--virtual-time-budget={DRAWING_MS}",
        # 0 is what the browser calls dark, 1 light.
        f"--blink-settings=preferredColorScheme={0 if shot.dark else 1}",
        f"--window-size={shot.width},{shot.height}",
        f"--screenshot={image}",
        page.resolve().as_uri(),
    ]
    subprocess.run(command, check=True, capture_output=True)
    keep_few_colours(image)


def keep_few_colours(image: Path) -> None:
    """Write `image` again in a third of its bytes."""
    with Image.open(image) as opened:
        few = opened.convert("RGB").quantize(
            COLOURS, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE
        )
    few.save(image, optimize=True)


def photograph_graph(folder: Path, image: Path) -> None:
    """The graph of the plan in `folder`, as the command `graph` draws it."""
    step, plan = files.load(folder / "step.json", Dataflow), files.load(folder / "plan.json", Plan)
    with tempfile.TemporaryDirectory() as own:
        drawn = Path(own) / "graph.svg"
        drawn.write_text(as_svg(picture(step, plan)), encoding="utf-8")
        width, height = _size(drawn.read_text(encoding="utf-8"))
        photograph(drawn, Shot(width, height), image)


def _size(svg: str) -> tuple[int, int]:
    """Of a drawing of Graphviz', which is in points: 4/3 pixels each, and a margin."""
    points = (float(svg.split(f'{side}="', 1)[1].split("pt", 1)[0]) for side in ("width", "height"))
    width, height = (round(side * 4 / 3) + 20 for side in points)
    return width, height


def main(arguments: Sequence[str] | None = None) -> None:
    """Take all pictures of the plans that are named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--demo", type=Path, required=True)
    parser.add_argument("--llama-7b", type=Path, required=True)
    chosen = parser.parse_args(arguments)
    photograph(chosen.llama_7b / "report.html", Shot(), IMAGES / "report-llama-7b.png")
    report = chosen.demo / "report.html"
    photograph(report, Shot(), IMAGES / "report-demo.png")
    photograph(report, Shot(dark=True), IMAGES / "report-demo-dark.png")
    photograph(report, Shot(width=420, height=1400), IMAGES / "report-demo-narrow.png")
    photograph_graph(chosen.demo / "step", IMAGES / "graph-demo.png")


if __name__ == "__main__":
    main()
