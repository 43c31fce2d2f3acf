"""Seconds at guessed rates are called guesses wherever they are shown, and no bound is stated."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

import pytest

from cotrain_compile.backends.lifecycle.notebook import facts_of
from cotrain_compile.machine import Rates, Tier
from cotrain_compile.placement.explain.sweep import Case, Sweep, point_of
from cotrain_compile.placement.problem import Problem, formulate
from cotrain_compile.placement.search.solve import solve
from cotrain_compile.plan import Plan
from cotrain_compile.presets import find
from cotrain_compile.viz.report.page import report_html
from cotrain_compile.viz.sweep import title
from cotrain_compile.viz.text.analysis import describe_analysis
from cotrain_compile.viz.text.diff import describe_diff
from cotrain_compile.viz.text.live import LiveLine
from cotrain_compile.viz.text.narrate import summary_rows
from cotrain_compile.viz.text.summary import comparison, summary
from tests.support.dataflows import chain

STEP = chain(3, width=256)
SCRIPTS = re.compile("<(script|style).*?</(script|style)>", re.DOTALL)
BUDGETS = {Tier.DEVICE: 1100 << 10, Tier.HOST: 1 << 30}


@cache
def planned(rates: Rates) -> tuple[Problem, Plan]:
    problem = formulate(STEP, find("rtx4090").but(rates=rates), BUDGETS)
    return problem, solve(problem)


def lines_of(plan: Plan, capsys: pytest.CaptureFixture[str]) -> str:
    """What the live line says of two steps."""
    ended = LiveLine(interval_s=0.0).watch(plan)
    for _ in range(2):
        ended(plan.predicted.peak_bytes)
    return capsys.readouterr().err


def told(rates: Rates, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """All that shows seconds of a step, by what shows it."""
    problem, plan = planned(rates)
    late = tuple(replace(span, end_s=span.end_s + 1.0) for span in plan.predicted.spans)
    slower = replace(plan, predicted=replace(plan.predicted, spans=late))
    return {
        "summary": summary(plan, STEP),
        "log": "\n".join(" ".join(row) for row in summary_rows(plan, STEP, bars=False)),
        "live": lines_of(plan, capsys),
        "repr": repr(facts_of(plan)),
        "solve": repr(list(comparison([plan]))),
        "page": SCRIPTS.sub("", report_html(problem, plan)),
        "sweep": title(Sweep("", (point_of(Case(problem.machine, BUDGETS), problem, plan),))),
        "analyze": describe_analysis(STEP, problem.machine, BUDGETS[Tier.DEVICE]),
        "diff": describe_diff(slower, plan),
    }


def test_guessed_seconds_are_called_guesses(capsys: pytest.CaptureFixture[str]) -> None:
    for where, text in told(Rates.GUESSED, capsys).items():
        assert "guessed" in text, where
        assert not any(word in text for word in ("certified", "no plan")), where


def test_seconds_of_a_measured_machine_are_predicted(capsys: pytest.CaptureFixture[str]) -> None:
    for where, text in told(Rates.MEASURED, capsys).items():
        assert not any(word in text for word in ("guess", "not measured")), where
    assert "from the best possible" in told(Rates.MEASURED, capsys)["log"]
