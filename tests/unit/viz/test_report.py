"""The report: every number on it is one of the plan, its timelines or a simulation of it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cotrain_compile import files
from cotrain_compile.analysis.reuse import reuse_distances
from cotrain_compile.cli.main import app
from cotrain_compile.dataflow import Dataflow
from cotrain_compile.errors import FormatError, OptionError
from cotrain_compile.machine import MEMORIES, Tier
from cotrain_compile.placement.explain.sensitivity import slacks
from cotrain_compile.placement.explain.sweep import Point, Sweep
from cotrain_compile.placement.placed import place_plan
from cotrain_compile.placement.problem import formulate
from cotrain_compile.placement.search.solve import SolveSettings, solve
from cotrain_compile.placement.simulate.reserved import reserved
from cotrain_compile.plan import Lane, Timeline
from cotrain_compile.presets import find
from cotrain_compile.support.units import format_bytes, format_seconds
from cotrain_compile.viz.kinds import COLOURS, DARK
from cotrain_compile.viz.names import folded, layer, layers, names, operation
from cotrain_compile.viz.report import charts, facts
from cotrain_compile.viz.report.charts import merged
from cotrain_compile.viz.report.facts import parameter_rows
from cotrain_compile.viz.report.page import report_html
from cotrain_compile.viz.specification import bars_of, memory_kinds, planned_curve
from cotrain_compile.viz.text.summary import summary
from cotrain_compile.viz.text.verdict import verdict
from tests.support.dataflows import chain, mixed_precision_step

KIB = 1024
STEP = chain(4, width=256)
PROBLEM = formulate(STEP, find("rtx4090"), {Tier.DEVICE: 1500 * KIB, Tier.HOST: 1 << 30})
# Each worker makes it, when it collects tests.
PLAN = solve(PROBLEM, SolveSettings(work_limit=0.2))
MEASURED = replace(
    PLAN.predicted,
    source="measured",
    spans=tuple(
        replace(span, start_s=1 + 3 * span.start_s, end_s=1 + 3 * span.end_s)
        for span in PLAN.predicted.spans
    ),
)


class Cells(HTMLParser):
    """The table of parameters: for each row the text of its cells."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.feed(page[page.index('<table id="parameters">') :].partition("</table>")[0])

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_data(self, data: str) -> None:
        if self.rows and self.rows[-1]:
            self.rows[-1][-1] += data.strip()


@pytest.fixture(scope="module")
def page() -> str:
    return report_html(PROBLEM, PLAN, [MEASURED])


def test_the_page_loads_nothing(page: str) -> None:
    own = re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
    assert not re.findall(r"(?:src|href)\s*=|@import|url\(", own)
    assert "<script src" not in page


def test_the_first_screen_answers_four_questions_with_numbers_of_the_plan(page: str) -> None:
    header = unescape(page[page.index("<header>") : page.index("</header>")])
    questions = re.findall(r"<h2>(.*?)</h2>", header)
    assert questions == ["Does it fit?", "How fast?", "Why?", "What would help?"]
    first = verdict(PROBLEM, PLAN, [MEASURED])
    assert PLAN.report is not None
    least = f"no plan in this memory takes less than {format_seconds(PLAN.report.lower_bound_s)}"
    assert least in first.rates
    device, host = first.memories
    assert device.used_bytes == PLAN.predicted.peak_bytes[Tier.DEVICE]
    assert (host.name, host.budget_bytes) == ("host", 1 << 30)
    said = (first.headline, first.fits, first.remark, device.words, host.words, *first.rates)
    for told in (*said, *(one.change[1:] for one in first.helps)):
        assert told in header
    assert PLAN.placement.policy not in header.replace("ZeRO-Offload", "")


def test_the_table_has_every_parameter_with_numbers_of_its_own(page: str) -> None:
    rows = {row[0]: row for row in Cells(page).rows[1:]}
    assert list(rows) == ["w0", "w1", "w2", "w3"]
    distance = reuse_distances(STEP, PROBLEM.costs.device_s)
    slack_s = slacks(STEP, PLAN)
    for name, row in rows.items():
        assert row[1:3] == ["256.0 KiB", "256.0 KiB"]
        assert row[4] == PLAN.placement.homes[name].value
        assert row[5] == format_seconds(distance[name].seconds)
        assert row[6] == (format_seconds(slack_s[name]) if name in slack_s else "")


def test_predicted_and_measured_are_side_by_side() -> None:
    rows = {row[0]: row[1:] for row in facts.comparison(PROBLEM, PLAN, [MEASURED])}
    step_s = PLAN.predicted.makespan_s
    assert rows["a step"] == (format_seconds(step_s), format_seconds(3 * step_s), "")
    busy_s = PLAN.predicted.busy_s(Lane.DEVICE)
    assert rows["device busy"][0] == f"{format_seconds(busy_s)} ({busy_s / step_s:.0%})"
    assert rows["device busy"][1] == f"{format_seconds(3 * busy_s)} ({busy_s / step_s:.0%})"
    assert [len(row) for row in facts.comparison(PROBLEM, PLAN, ())] == [3] * 7


def test_what_a_card_reserves_stands_beside_the_peak_in_the_words_of_the_summary() -> None:
    step = chain(4, width=8192)
    problem = formulate(step, find("rtx4090"), dict.fromkeys(MEMORIES, 1 << 40))
    plan = solve(problem)
    rows = {row[0]: row[1:] for row in facts.comparison(problem, plan, [plan.predicted])}
    held = format_bytes(reserved(place_plan(problem, plan)).reserved_bytes)
    assert rows["reserved on a card"] == (held, "", "")
    (told,) = [line.strip() for line in summary(plan, step).splitlines() if "reserved" in line]
    assert f"{told}." in list(facts.sentences(problem, plan))
    assert told in report_html(problem, plan).replace("&#39;", "'")


def test_the_peak_adds_up() -> None:
    found = facts.peak(PROBLEM, PLAN)
    placed = place_plan(PROBLEM, PLAN)
    used = placed.device_bytes
    assert found.nbytes == max(used) == PLAN.predicted.peak_bytes[Tier.DEVICE]
    assert sum(nbytes for _, nbytes in found.by_kind) == found.nbytes
    assert sum(held.nbytes * held.count for held in found.largest) <= found.nbytes
    assert placed.program.ops[used.index(max(used))].target in found.where


def test_candidates_are_those_of_the_solver_and_rules_that_do_not_fit() -> None:
    assert PLAN.report is not None
    found = {pace.policy: pace.step_s for pace in facts.paces(PLAN)}
    assert {policy: s for policy, s in found.items() if s is not None} == PLAN.report.simulated_s
    assert found["resident"] is None


def test_candidates_are_told_also_where_no_program_was_needed() -> None:
    assert PLAN.report is not None
    by_rule = replace(PLAN, report=replace(PLAN.report, solver="rules", status="not needed"))
    assert facts.paces(by_rule) == facts.paces(PLAN) != ()


def test_where_everything_fits_the_page_says_so() -> None:
    roomy = replace(PROBLEM, budgets={Tier.DEVICE: 1 << 30, Tier.HOST: 1 << 30})
    plan = solve(roomy)
    assert facts.paces(plan) == ()
    assert {row.why for row in parameter_rows(roomy, plan)} == {"everything fits"}
    assert "Everything is on the device, nothing moves" in report_html(roomy, plan)


def test_bars_are_the_spans_from_the_start_of_the_step() -> None:
    bars = bars_of(MEASURED, PLAN, STEP)
    assert len(bars) == len(MEASURED.spans)
    assert min(bar.start_s for bar in bars) == 0
    assert max(bar.end_s for bar in bars) == pytest.approx(MEASURED.makespan_s)
    (bar,) = (bar for bar in bars if bar.span == "forward_2")
    told = (bar.lane, bar.kind, bar.name, bar.what)
    assert told == ("device", "forward", "w2: forward", "test.forward")


def test_merged_bars_keep_the_work_and_the_ends() -> None:
    bars = bars_of(PLAN.predicted, PLAN, STEP)
    few = merged(bars)
    assert len(few) < len(bars)
    assert sum(bar.count for bar in few) == len(bars)
    assert sum(bar.busy_s for bar in few) == pytest.approx(sum(bar.busy_s for bar in bars))
    assert {bar.lane for bar in few} == {bar.lane for bar in bars}
    for lane in {bar.lane for bar in bars}:
        ends = [max(b.end_s for b in some if b.lane == lane) for some in (few, bars)]
        assert ends[0] == ends[1]


def test_a_layer_is_a_module_up_to_its_number() -> None:
    assert layer("model.layers.17.mlp.down_proj") == "model.layers.17"
    assert layer("lm_head") == "lm_head"


def test_the_backward_and_the_update_belong_to_the_layer_of_their_parameter() -> None:
    step = mixed_precision_step(2)
    ops = tuple(
        replace(op, module=f"net.{op.name[-1]}" if op.name.startswith("forward") else "")
        for op in step.ops
    )
    renamed = {"p32_0": "net.0.weight", "p32_1": "net.1.weight"}
    text = files.to_json(replace(step, ops=ops))
    for old, new in renamed.items():
        text = text.replace(f'"{old}"', f'"{new}"')
    found = layers(files.from_json(text, Dataflow))
    assert found.of_op["backward_1"] == found.of_op["update_1"] == "net.1"
    assert found.of_op["cast_p_0"] == found.of_op["cast_g_0"] == "net.0"
    assert found.of_buffer["h1"] == "net.1"


def test_show_writes_the_report(tmp_path: Path) -> None:
    files.save(STEP, tmp_path / "step.json")
    files.save(PLAN, tmp_path / "plan.json")
    files.save(MEASURED, tmp_path / "timeline.json")
    plan, out, timeline = (str(tmp_path / n) for n in ("plan.json", "report.html", "timeline.json"))
    result = CliRunner().invoke(app, ["show", plan, "--html", out, "--measured", timeline])
    assert result.exception is None, result.exception
    written = Path(out).read_text(encoding="utf-8")
    assert f"{format_seconds(MEASURED.makespan_s)} a step</p>" in written
    assert Cells(written).rows == Cells(report_html(PROBLEM, PLAN)).rows


def of_rank(rank: int, began_at: float) -> Timeline:
    return replace(MEASURED, rank=rank, began_at=began_at)


def test_show_says_what_a_sweep_of_the_same_step_has_found(tmp_path: Path) -> None:
    files.save(STEP, tmp_path / "step.json")
    files.save(PLAN, tmp_path / "plan.json")
    point = Point(PLAN.machine, 2 << 20, PLAN.budgets[Tier.HOST], {}, step_s=1e-4)
    plan, out, found = (str(tmp_path / n) for n in ("plan.json", "report.html", "sweep.json"))
    arguments = ["show", plan, "--html", out, "--sweep", found]
    files.save(Sweep(PLAN.fingerprint, (point,)), Path(found))
    result = CliRunner().invoke(app, arguments)
    assert result.exception is None, result.exception
    assert "548.0 KiB more device memory (2.0 MiB)" in Path(out).read_text(encoding="utf-8")
    files.save(Sweep("another", (point,)), Path(found))
    assert isinstance(CliRunner().invoke(app, arguments).exception, OptionError)


def test_ranks_are_on_one_page_from_the_beginning_of_the_first(tmp_path: Path) -> None:
    files.save(STEP, tmp_path / "step.json")
    files.save(PLAN, tmp_path / "plan.json")
    late_s = 0.25
    for rank, began_at in ((1, 1e9), (0, 1e9 + late_s)):
        files.save(of_rank(rank, began_at), tmp_path / f"{rank}.json")
    plan, out, trace = (str(tmp_path / name) for name in ("plan.json", "report.html", "trace.json"))
    measured = [arg for rank in (1, 0) for arg in ("--measured", str(tmp_path / f"{rank}.json"))]
    run = CliRunner().invoke(app, ["show", plan, "--html", out, "--perfetto", trace, *measured])
    assert run.exception is None, run.exception
    written = Path(out).read_text(encoding="utf-8")
    headings = re.findall(r"<h3>(measured[^<]*)</h3>", written)
    assert headings == ["measured on rank 0", "measured on rank 1"]
    assert "measured on the slowest of 2 ranks" in written
    events = json.loads(Path(trace).read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e.get("name") == "process_name"}
    assert list(names.values())[1:] == ["measured step on rank 0", "measured step on rank 1"]
    first = {pid: min(e["ts"] for e in events if e["pid"] == pid and "dur" in e) for pid in names}
    _, late_us, early_us = first.values()
    assert late_us - early_us == pytest.approx(1e6 * late_s, rel=1e-4)


def test_two_timelines_of_one_process_are_refused(tmp_path: Path) -> None:
    files.save(PLAN, tmp_path / "plan.json")
    files.save(MEASURED, tmp_path / "timeline.json")
    timeline = str(tmp_path / "timeline.json")
    given = ["--measured", timeline, "--measured", timeline]
    trace = str(tmp_path / "trace.json")
    run = CliRunner().invoke(
        app, ["show", str(tmp_path / "plan.json"), "--perfetto", trace, *given]
    )
    assert isinstance(run.exception, FormatError)
    assert "is of a process alone" in str(run.exception)


def test_only_a_plan_has_a_report(tmp_path: Path) -> None:
    files.save(STEP, tmp_path / "step.json")
    out = str(tmp_path / "report.html")
    result = CliRunner().invoke(app, ["show", str(tmp_path / "step.json"), "--html", out])
    assert isinstance(result.exception, OptionError)


def test_a_measured_step_below_the_bound_refutes_the_rates_and_no_bound_is_shown() -> None:
    assert PLAN.report is not None
    bound_s = PLAN.report.lower_bound_s
    scale = 0.5 * bound_s / PLAN.predicted.makespan_s
    spans = tuple(
        replace(span, start_s=scale * span.start_s, end_s=scale * span.end_s)
        for span in PLAN.predicted.spans
    )
    fast = replace(PLAN.predicted, source="measured", spans=spans)
    page = report_html(PROBLEM, PLAN, [fast])
    assert "certified bound" not in page
    assert "no plan below" not in page
    assert "faster than the rates of rtx4090 allow" in page


def test_memory_by_kind_adds_up_to_what_is_planned() -> None:
    for tier in MEMORIES:
        curve = planned_curve(STEP, PLAN, tier, 0.0)
        assert tuple(map(sum, zip(*curve.by_kind.values(), strict=True))) == curve.total
        assert max(curve.total) == PLAN.predicted.peak_bytes[tier]
    points = dict(PLAN.predicted.memory[Tier.DEVICE])
    curve = planned_curve(STEP, PLAN, Tier.DEVICE, 0.0)
    totals = dict(zip(curve.times_s, curve.total, strict=True))
    assert points.items() <= totals.items()


def test_what_the_backward_reads_of_the_forward_is_an_activation() -> None:
    kinds = memory_kinds(STEP)
    told = [kinds[name] for name in ("w0", "m0", "g0", "h0", "d2", "x")]
    states = ["parameters", "optimizer states", "gradients", "activations", "temporaries"]
    assert told == [*states, "batch and other inputs"]


def test_names_are_of_modules_and_operations() -> None:
    assert operation("aten.mm.default") == "mm"
    assert operation("<built-in function getitem>") == "getitem"
    assert operation("a <b>") == "a <b>"
    assert folded("model.layers.3.mlp.gate_proj: mm") == "model.layers.*.mlp.gate_proj: mm"
    step = replace(STEP, ops=(replace(STEP.ops[0], module="net.0", line="m.py:5"), *STEP.ops[1:]))
    found = names(step)
    assert found.of_op["forward_0"] == found.of_buffer["h0"] == "net.0: forward"
    assert found.what["forward_0"] == "test.forward at m.py:5"
    assert found.of_buffer["g0"] == "gradient of w0"


def contrast(one: str, other: str) -> float:
    """By WCAG 2.2: of relative luminances, each at least 0.05."""

    def luminance(colour: str) -> float:
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        red, green, blue = (
            c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts
        )
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_all_is_legible_in_light_and_dark(page: str) -> None:
    """Text and lines 4.5:1 on cards and paper; bars 3:1 in light as WCAG asks, 4.5:1 in dark."""
    css = (Path(charts.__file__).parent / "page.css").read_text()
    blocks = re.findall(r":root \{(.*?)\}", css, re.DOTALL)
    light, dark = (dict(re.findall(r"--(\w+): (#\w{6})\b", block)) for block in blocks)
    assert light.keys() == dark.keys()
    for shown, bars, least in ((light, COLOURS, 3), (dark, DARK, 4.5)):
        for ground in (shown["card"], shown["paper"]):
            for ink in ("ink", "quiet", "accent", "own", "predicted", "measured", "budget"):
                assert contrast(shown[ink], ground) >= 4.5, (ink, ground)
            for kind, colour in bars.items():
                assert contrast(colour, ground) >= least, (kind, ground)
    assert COLOURS.keys() == DARK.keys()
    for line in ("predicted", "measured", "budget"):
        of_chart = getattr(charts, line.upper())
        assert tuple(ink.lower() for ink in of_chart) == (light[line], dark[line])
