"""How large is the report of a step, and how soon does Chromium paint it?

python -m bench.compiler.report_page step.json plan.json -o bench/results/report_page.json
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, sync_playwright

from bench.report import write_report
from cotrain_compile import files, presets
from cotrain_compile.dataflow import Dataflow
from cotrain_compile.placement.explain.explain import explain
from cotrain_compile.placement.problem import formulate
from cotrain_compile.plan import Plan
from cotrain_compile.viz.report import page

PAINT = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
IDLE = "Bokeh.documents.length && Bokeh.documents[0].is_idle"
TIMES = 5


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the page, open it several times from the disk, zoom in; explain one parameter."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("step", type=Path)
    parser.add_argument("plan", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    asked = parser.parse_args(arguments)
    dataflow, plan = files.load(asked.step, Dataflow), files.load(asked.plan, Plan)
    problem = formulate(dataflow, presets.find(plan.machine), plan.budgets)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.html"
        began = time.perf_counter()
        page.write_report(path, problem, plan)
        written_s = time.perf_counter() - began
        opened = [_open(path) for _ in range(TIMES)]
        nbytes = path.stat().st_size
    began = time.perf_counter()
    said = explain(problem, plan, next(iter(plan.placement.updates)))
    explained_s = time.perf_counter() - began
    result = {
        "step": {"fingerprint": plan.fingerprint, "ops": len(dataflow.ops)},
        "spans": len(plan.predicted.spans),
        "page_bytes": nbytes,
        "written_s": round(written_s, 3),
        **{key: _spread([found[key] for found in opened]) for key in opened[0]},
        "explain_s": round(explained_s, 3),
        "explain_alternatives": len(said.alternatives),
    }
    write_report(asked.output, (__doc__ or "").splitlines()[0], result)
    print(result)


def _open(path: Path) -> dict[str, float]:
    """Seconds to the first paint, until all charts are drawn, and for one zoom."""
    with sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        shown = browser.new_page(viewport={"width": 1280, "height": 900})
        began = time.perf_counter()
        shown.goto(path.as_uri())
        shown.wait_for_function(IDLE)
        drawn_s = time.perf_counter() - began
        painted_s = float(shown.evaluate(PAINT)) / 1e3
        zoomed_s = _zoom(shown)
        browser.close()
    return {"first_paint_s": painted_s, "drawn_s": drawn_s, "zoom_s": zoomed_s}


def _zoom(shown: Page) -> float:
    """Seconds from setting a hundredth of the step as the range to the frame after it."""
    milliseconds: Any = shown.evaluate(
        """async () => {
            const axis = Bokeh.documents[0].get_model_by_name("time");
            const began = performance.now();
            axis.setv({start: axis.end * 0.5, end: axis.end * 0.51});
            await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
            return performance.now() - began;
        }"""
    )
    return float(milliseconds) / 1e3


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(values), 3),
        "max": round(max(values), 3),
    }


if __name__ == "__main__":
    main()
