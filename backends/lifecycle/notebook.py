"""Notebook: a plan in a few facts, as a notebook shows what its cell ends with."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from cotrain_compile.plan import Plan
from cotrain_compile.support.plan_words import named_plan
from cotrain_compile.support.units import format_bytes, format_seconds


def facts_of(plan: Plan) -> list[tuple[str, str]]:
    """Name and value of each fact."""
    predicted, budgets = plan.predicted.peak_bytes, plan.budgets
    peaks = [
        (t.value, f"{format_bytes(predicted[t])} of {format_bytes(budgets[t])}") for t in plan.tiers
    ]
    down, up = plan.bytes_moved("offload"), plan.bytes_moved("prefetch")
    return [
        ("plan", f"{named_plan(plan.placement.policy)} on {plan.on_machine}"),
        ("a step", f"{format_seconds(plan.predicted.makespan_s)} {plan.foreseen}"),
        *peaks,
        ("moves", f"{format_bytes(down)} down, {format_bytes(up)} up"),
    ]


def html_table(facts: Iterable[tuple[str, str]]) -> str:
    """The same as a table."""
    rows = "".join(
        f"<tr><th style='text-align:left'>{escape(name)}</th>"
        f"<td style='text-align:left'>{escape(value)}</td></tr>"
        for name, value in facts
    )
    return f"<table>{rows}</table>"
