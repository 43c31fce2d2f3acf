"""Variants: the step as it is, and with one of its levels of values made again in every layer.

In: the Problem of the step. Out: `Variant`s, each with what can be decided about it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from cotrain_compile.placement.decisions.decisions import DecisionSpace
from cotrain_compile.placement.decisions.find_decisions import decision_space
from cotrain_compile.placement.policies import rule
from cotrain_compile.placement.problem import Problem
from cotrain_compile.placement.recompute.levels import find_levels
from cotrain_compile.placement.recompute.rewrite import recomputable
from cotrain_compile.plan import Placement


@dataclass(eq=False)
class Variant:
    """A step in which some values are made again.

    `problem` is of that step, `suffix` follows the name of a policy that is tried on it; both say
    nothing of recomputation for the step as it is. A `given` space is used in place of a new one.
    """

    problem: Problem
    suffix: str = ""
    given: DecisionSpace | None = None

    @property
    def recomputed(self) -> tuple[str, ...]:
        """What is made again."""
        return self.problem.recomputed

    @cached_property
    def space(self) -> DecisionSpace:
        """What can be decided; the budgets of this problem."""
        if self.given is not None:
            return replace(self.given, problem=self.problem)
        return decision_space(self.problem)

    @cached_property
    def peak_space(self) -> DecisionSpace:
        """The same with memory known exactly at the peaks, for the relaxed program."""
        return decision_space(self.problem, at_peaks=True)

    def by_rule(self, name: str) -> Placement:
        """What the simple rule `name` decides about this step."""
        placement = rule(name)(self.problem.dataflow)
        return replace(placement, recomputed=self.recomputed)


def levels_of(problem: Problem) -> Iterator[Variant]:
    """The step with more and more made again, first what costs least for its bytes."""
    dataflow = problem.dataflow
    levels = find_levels(dataflow, problem.costs.device_s, recomputable(dataflow))
    for number, level in enumerate(levels.uniform, start=1):
        names = tuple(b.name for b in dataflow.buffers if b.name in level.recomputed)
        yield Variant(problem.recomputing(names), f"+recompute:{number}")
