"""Renamed plans: the same plan with other names for its tasks, which nothing may be read out of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from cotrain_compile.plan import Plan


def renamed(plan: Plan, names: Mapping[str, str]) -> Plan:
    """`plan` with the new name of each task in `names`, wherever it is said."""

    def new(old: Iterable[str]) -> tuple[str, ...]:
        return tuple(names[name] for name in old)

    tasks = tuple(
        replace(
            task,
            name=names[task.name],
            after=new(task.after),
            after_previous=new(task.after_previous),
        )
        for task in plan.tasks
    )
    spans = [replace(span, name=names.get(span.name, span.name)) for span in plan.predicted.spans]
    return replace(plan, tasks=tasks, predicted=replace(plan.predicted, spans=tuple(spans)))
