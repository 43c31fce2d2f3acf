"""The report in a browser, opened from the disk: no errors; hover, search, sort and zoom work."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cotrain_compile import files
from cotrain_compile.dataflow import Dataflow
from cotrain_compile.machine import Tier
from cotrain_compile.placement.problem import Problem, formulate
from cotrain_compile.placement.search.solve import SolveSettings, solve
from cotrain_compile.plan import Lane
from cotrain_compile.presets import find
from cotrain_compile.support.units import format_seconds
from cotrain_compile.viz.report.charts import time_axis
from cotrain_compile.viz.report.page import write_report
from cotrain_compile.viz.specification import bars_of
from tests.support.dataflows import chain
from tests.support.fuzz.fuzz_files import MARKUP
from tests.unit.viz.test_report import MEASURED, PLAN, PROBLEM, STEP

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
EXECUTABLE = next(filter(None, map(shutil.which, BROWSERS)), None)

pytestmark = pytest.mark.skipif(EXECUTABLE is None, reason="needs Chromium (apt install chromium)")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    write_report(path, PROBLEM, PLAN, [MEASURED])
    return path


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        # The page is our own; in a container the sandbox has no user namespaces.
        browser = driver.chromium.launch(executable_path=EXECUTABLE, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(params=["light", "dark"])
def page(request: pytest.FixtureRequest, browser: Any, report: Path) -> Iterator[Any]:
    """The open page, offline; whatever it complains of or asks the network for is an error."""
    page = browser.new_page(
        viewport={"width": 1280, "height": 900}, color_scheme=request.param, offline=True
    )
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))

    def console(message: Any) -> None:
        if message.type in ("error", "warning"):
            complaints.append(message.text)

    def request_to(request: Any) -> None:
        if request.url.startswith("http"):
            complaints.append(request.url)

    page.on("console", console)
    page.on("request", request_to)
    page.goto(report.as_uri())
    page.wait_for_function("Bokeh.documents.length && Bokeh.documents[0].is_idle")
    yield page
    assert complaints == []
    page.close()


def shown_names(page: Any) -> list[str]:
    rows = page.locator("#parameters tbody tr:visible th")
    return [str(text) for text in rows.all_text_contents()]


def time_range(page: Any) -> tuple[float, float]:
    axis = "Bokeh.documents[0].get_model_by_name('time')"
    return page.evaluate(f"{axis}.start"), page.evaluate(f"{axis}.end")


def test_search_leaves_the_rows_that_hold_every_word(page: Any) -> None:
    assert shown_names(page) == ["w0", "w1", "w2", "w3"]
    page.fill("#search", "w2")
    assert shown_names(page) == ["w2"]
    assert page.text_content("#found") == "1 of 4"
    page.fill("#search", "w2 nowhere")
    assert shown_names(page) == []
    page.fill("#search", "")
    assert len(shown_names(page)) == 4


def test_a_click_on_a_heading_sorts_by_number(page: Any) -> None:
    heading = page.locator("#parameters button", has_text="reuse distance")
    heading.click()
    up = shown_names(page)
    assert up == ["w0", "w1", "w2", "w3"]  # the first layers have the shortest
    heading.click()
    assert shown_names(page) == up[::-1]


def test_dragging_zooms_every_chart_and_reset_goes_back(page: Any) -> None:
    whole = time_range(page)
    chart = page.locator(".bk-Figure").first
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    middle, height = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    page.mouse.move(middle, height)
    page.mouse.down()
    page.mouse.move(middle + 100, height, steps=5)
    page.mouse.up()
    page.wait_for_function(
        f"Bokeh.documents[0].get_model_by_name('time').end < {whole[1] * 0.9}", timeout=5000
    )
    start, end = time_range(page)
    assert whole[0] < start < end < whole[1]
    assert end - start < (whole[1] - whole[0]) / 4
    page.locator(".bk-tool-icon-reset").first.click()
    page.wait_for_function(
        f"Bokeh.documents[0].get_model_by_name('time').end >= {whole[1] * 0.999}", timeout=5000
    )


def test_a_bar_says_what_it_is(page: Any) -> None:
    """Pointed at is the middle of the longest op, on the device's lane."""
    span = max(PLAN.predicted.lane(Lane.DEVICE), key=lambda span: span.end_s - span.start_s)
    chart = page.locator(".bk-Figure").first
    chart.scroll_into_view_if_needed()
    x, y = page.evaluate(
        """(seconds) => {
            const view = [...Bokeh.index.roots].find((v) => v.model.name === "predicted");
            const at = view.frame.x_scale.compute(seconds), up = view.frame.y_scale.compute(3);
            const box = view.el.getBoundingClientRect();
            return [box.x + at, box.y + up];
        }""",
        (span.start_s + span.end_s) / 2 / time_axis(MEASURED.makespan_s).unit_s,
    )
    page.mouse.move(x - 3, y)
    page.mouse.move(x, y)
    tooltip = page.locator(".bk-Tooltip").first
    tooltip.wait_for(state="visible", timeout=5000)
    said = tooltip.locator(".bk-tooltip-row-value").all_text_contents()
    (bar,) = (bar for bar in bars_of(PLAN.predicted, PLAN, STEP) if bar.span == span.name)
    assert said[0].strip() == bar.name
    assert said[3].strip() == format_seconds(span.end_s - span.start_s)


def test_a_long_step_is_merged_until_zoomed_in(browser: Any, tmp_path: Path) -> None:
    """16,000 ops: the page stays small, and draws each op only where few are in view."""
    step = chain(4000, width=8)
    problem = formulate(step, find("rtx4090"), {Tier.DEVICE: 1 << 40, Tier.HOST: 1 << 40})
    path = tmp_path / "long.html"
    write_report(path, problem, solve(problem, SolveSettings("resident")))
    assert path.stat().st_size < 5_000_000
    page = browser.new_page()
    page.goto(path.as_uri())
    page.wait_for_function("Bokeh.documents.length && Bokeh.documents[0].is_idle")
    document = "Bokeh.documents[0]"
    shown = f"['each', 'merged'].map((name) => {document}.get_model_by_name(name).visible)"
    assert page.evaluate(shown) == [False, True]
    end = time_range(page)[1]
    page.evaluate(
        f"{document}.get_model_by_name('time').setv({{start: {end / 2}, end: {end * 0.51}}})"
    )
    assert page.evaluate(shown) == [True, False]
    page.evaluate(f"{document}.get_model_by_name('time').setv({{start: 0, end: {end}}})")
    assert page.evaluate(shown) == [False, True]
    page.close()


def test_the_keyboard_goes_from_bar_to_bar_and_from_row_to_row(browser: Any, report: Path) -> None:
    page = browser.new_page()
    page.goto(report.as_uri())
    page.wait_for_function("Bokeh.documents.length && Bokeh.documents[0].is_idle")
    chart = page.locator(".chart.lanes").first
    chart.focus()
    bars = [bar for bar in bars_of(PLAN.predicted, PLAN, STEP) if bar.lane == Lane.DEVICE]
    for bar in bars[:3]:
        page.keyboard.press("ArrowRight")
        assert str(chart.locator("output").text_content()).startswith(f"{bar.name}: {bar.what}")
    page.keyboard.press("+")
    assert page.evaluate("Bokeh.documents[0].get_model_by_name('time').start") > 0
    page.locator("#parameters tbody tr").first.focus()
    page.keyboard.press("ArrowDown")
    assert page.evaluate("document.activeElement.textContent").strip().startswith("w1")
    page.close()


def in_layers(count: int) -> Problem:
    """A step whose parameters are `net.0.weight`, `net.1.weight`, ..., all alike but the first."""
    step = chain(count, width=256)
    text = files.to_json(step)
    for number in range(count):
        text = text.replace(f'"w{number}"', f'"net.{number}.weight"')
    budgets = {Tier.DEVICE: 1 << 30, Tier.HOST: 1 << 30}
    return formulate(files.from_json(text, Dataflow), find("rtx4090"), budgets)


def test_equal_layers_are_one_row_that_opens(browser: Any, tmp_path: Path) -> None:
    problem = in_layers(3)
    write_report(tmp_path / "report.html", problem, solve(problem))
    page = browser.new_page()
    page.goto((tmp_path / "report.html").as_uri())
    assert [name.split() for name in shown_names(page)] == [["3", "alike", "net.*.weight"]]
    page.locator("#parameters tbody button").click()
    assert shown_names(page)[1:] == [f"net.{n}.weight" for n in range(3)]
    page.fill("#search", "net.2")
    assert shown_names(page) == ["net.2.weight"]
    page.close()


@pytest.mark.parametrize("width", [420, 900, 1400])
def test_nothing_is_wider_than_the_screen(browser: Any, tmp_path: Path, width: int) -> None:
    """Not the name of a setting either."""
    path = tmp_path / "report.html"
    write_report(
        path, PROBLEM, replace(PLAN, notes=("set " + 20 * "MUCH_IN_ONE_WORD",)), [MEASURED]
    )
    page = browser.new_page(viewport={"width": width, "height": 900})
    page.goto(path.as_uri())
    page.wait_for_function("Bokeh.documents.length && Bokeh.documents[0].is_idle")
    assert page.get_by_text("MUCH_IN_ONE_WORD").first.is_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.close()


def named(problem: Problem, name: str) -> Problem:
    """`problem` with every op, its operation and its module called as `name` says."""
    ops = tuple(
        replace(op, name=f"{name}{op.name}", target=name, module=name)
        for op in problem.dataflow.ops
    )
    of_update = tuple(
        replace(group, ops=tuple(name + op for op in group.ops))
        for group in problem.dataflow.updates
    )
    step = replace(problem.dataflow, ops=ops, updates=of_update)
    return formulate(step, problem.machine, problem.budgets)


@pytest.mark.parametrize("name", MARKUP)
def test_a_name_that_is_markup_is_shown_and_not_obeyed(
    browser: Any, tmp_path: Path, name: str
) -> None:
    problem = named(PROBLEM, name)
    write_report(tmp_path / "report.html", problem, solve(problem))
    page = browser.new_page()
    ran: list[str] = []

    def dismiss(dialog: Any) -> None:
        ran.append(dialog.message)
        dialog.dismiss()

    page.on("dialog", dismiss)
    page.on("pageerror", lambda error: ran.append(str(error)))
    page.goto((tmp_path / "report.html").as_uri())
    page.wait_for_function("Bokeh.documents.length && Bokeh.documents[0].is_idle")
    chart = page.locator(".bk-Figure").first
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    tooltip = page.locator(".bk-tooltip-row-value").first
    for part in range(1, 40):
        page.mouse.move(box["x"] + box["width"] * part / 40, box["y"] + 70)
        if tooltip.is_visible():
            break
    said = page.locator(".bk-tooltip-row-value").all_text_contents()
    assert said[0].strip().startswith(name)
    assert said[1].strip().startswith(f"{name} ({name}")
    assert ran == []
    page.close()
