"""Problem: what a placement has to decide about, as numbers: the step, the machine, the budgets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cotrain_compile.analysis.costs import CostTable, roofline
from cotrain_compile.dataflow import Dataflow
from cotrain_compile.machine import Machine, Tier

FORMAT_VERSION = 1


@dataclass(frozen=True)
class Problem:
    """A step to be placed: `budgets` are the bytes allowed on each tier."""

    dataflow: Dataflow
    machine: Machine
    costs: CostTable
    budgets: Mapping[Tier, int]


def formulate(dataflow: Dataflow, machine: Machine, budgets: Mapping[Tier, int]) -> Problem:
    """The problem of `dataflow` on `machine`, with costs from its roofline."""
    return Problem(dataflow, machine, roofline(dataflow, machine), dict(budgets))
