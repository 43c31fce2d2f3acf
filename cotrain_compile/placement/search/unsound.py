"""Unsound: what the search has found and the check refuses. It is never the answer.

In: the Problem and a finished plan. Out: whether the check takes it. Where it does not, that is a
fault of this package, however the search goes on: `UNSOUND` has the words of all of this process,
so that tests and campaigns fail on it, and the logger `cotrain_compile` tells it at debug level.
"""

from __future__ import annotations

import logging

from cotrain_compile.errors import PlanError
from cotrain_compile.placement.check.check import check
from cotrain_compile.placement.problem import Problem
from cotrain_compile.plan import Plan

UNSOUND: list[str] = []


def is_sound(problem: Problem, plan: Plan, name: str) -> bool:
    """Whether `plan`, found by the way called `name`, passes the check; noted where it does not."""
    try:
        check(problem, plan)
    except PlanError as error:
        UNSOUND.append(f"{name}: {error}")
        logging.getLogger("cotrain_compile").debug("dropped the plan of %s: %s", name, error)
        return False
    return True
