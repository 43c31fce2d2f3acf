"""Unsound: what the search has found and the check refuses. It is never the answer.

In: the Problem and how a plan for it is made. Out: the plan, which the check takes. Where it does
not, or nothing can be made, that is a fault of this package, however the search goes on: `UNSOUND`
has the words of all of this process, so that tests and campaigns fail on it, and the logger
`cotrain_compile` tells it at debug level.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from cotrain_compile.errors import PlanError
from cotrain_compile.placement.check.check import check
from cotrain_compile.placement.problem import Problem
from cotrain_compile.plan import Plan

UNSOUND: list[str] = []


def sound(problem: Problem, name: str, make: Callable[[], Plan]) -> Plan:
    """What `make` makes of what was found by the way called `name`: it passes the check.

    Raises `PlanError`, which is noted, where it does not, or where it contradicts the step so much
    that no plan can be made of it.
    """
    try:
        plan = make()
        check(problem, plan)
    except PlanError as error:
        note(name, error)
        raise
    return plan


def note(name: str, error: PlanError) -> None:
    """Count what was found by the way called `name` as a fault, because of `error`."""
    UNSOUND.append(f"{name}: {error}")
    logging.getLogger("cotrain_compile").debug("dropped the plan of %s: %s", name, error)
