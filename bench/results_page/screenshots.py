"""The pictures of a plan in the documentation: its report in a browser, and its layers.

The plan is in a folder as the option `dump` leaves it: its report is opened in Chromium, by day, by
night and on a phone. PNGs with few colours go to docs/images.

    python -m bench.results_page.screenshots dump
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from cotrain_compile import files
from cotrain_compile.dataflow import Dataflow
from cotrain_compile.placement.saved import load_plan
from cotrain_compile.viz.graph.rows import rows, write_rows

IMAGES = Path(__file__).parents[2] / "docs" / "images"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
DRAWING_MS = 10_000  # virtual time: until the page has drawn its charts
COLOURS = 256  # more than such a page has, but for the edges of its letters


@dataclass(frozen=True)
class Shot:
    """A picture of a page: pixels, and whether the reader prefers dark pages."""

    width: int = 1280
    height: int = 690
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


def main(arguments: Sequence[str] | None = None) -> None:
    """Take all pictures of the plan in a folder, with its step and its report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args(arguments).folder
    report = folder / "report.html"
    photograph(report, Shot(), IMAGES / "report-llama-7b.png")
    photograph(report, Shot(dark=True), IMAGES / "report-llama-7b-dark.png")
    photograph(report, Shot(width=400, height=1500), IMAGES / "report-llama-7b-narrow.png")
    step, plan = files.load(folder / "step.json", Dataflow), load_plan(folder / "plan.json")
    write_rows(rows(step, plan), IMAGES / "layers-llama-7b.svg")


if __name__ == "__main__":
    main()
