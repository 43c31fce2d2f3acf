"""Variants: the step as it is, and with one of its levels of values made again in every layer.

Where checkpoints of the user's were dissolved, what they would make again is one more.

In: the Problem of the step. Out: `Variant`s, each with what can be decided about it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from cotrain_compile.placement.decisions.decisions import DecisionSpace
from cotrain_compile.placement.decisions.find_decisions import decision_space
from cotrain_compile.placement.policies import rule
from cotrain_compile.placement.problem import Problem
from cotrain_compile.placement.recompute.levels import find_levels
from cotrain_compile.placement.recompute.rewrite import recomputable
from cotrain_compile.plan import Placement

# A program that claims so much more than a plan takes has no plan that is faster.
HOPELESS = 1.1


@dataclass(eq=False)
class Variant:
    """A step in which some values are made again.

    `problem` is of that step, `suffix` follows the name of a policy that is tried on it; both say
    nothing of recomputation for the step as it is. A `given` space is used in place of a new one,
    and `progress` told where that is looked for. `claim_s` is the least that a solution of the
    program claims, None where nobody has looked.
    """

    problem: Problem
    suffix: str = ""
    given: DecisionSpace | None = None
    progress: Callable[[str], None] = lambda stage: None
    claim_s: float | None = None

    @property
    def recomputed(self) -> tuple[str, ...]:
        """What is made again."""
        return self.problem.recomputed

    @cached_property
    def space(self) -> DecisionSpace:
        """What can be decided; the budgets of this problem."""
        if self.given is not None:
            return replace(self.given, problem=self.problem)
        self.progress("looking for what can be decided")
        return decision_space(self.problem)

    @cached_property
    def peak_space(self) -> DecisionSpace:
        """The same with memory known exactly at the peaks, for the relaxed program."""
        return decision_space(self.problem, at_peaks=True)

    def by_rule(self, name: str) -> Placement:
        """What the simple rule `name` decides about this step."""
        placement = rule(name)(self.problem.dataflow)
        return replace(placement, recomputed=self.recomputed)


def promising(
    variants: Sequence[Variant], fastest_s: Callable[[tuple[str, ...]], float]
) -> list[Variant]:
    """The variants for the integer program: the fastest so far, and the step as it is, the first.

    Only one of them where the step as it is has no chance, or is the fastest.
    """
    step, best = variants[0], min(variants, key=lambda variant: fastest_s(variant.recomputed))
    hopeless = (step.claim_s or 0.0) > HOPELESS * fastest_s(best.recomputed)
    return [best] if hopeless or best is step else [best, step]


class Levels:
    """The levels of a step by number; 0 is the step as it is. Each contains the one before it."""

    def __init__(self, problem: Problem) -> None:
        self._problem, dataflow = problem, problem.dataflow
        self._may = recomputable(dataflow)
        self._levels = [*find_levels(dataflow, problem.costs.device_s, self._may).uniform]

    def variant(self, number: int) -> Variant:
        """The step at a level above 0."""
        return self._variant(self._levels[number - 1].recomputed, str(number))

    def dissolved(self) -> Iterator[Variant]:
        """The step that makes again what the user's checkpoints would, where they are dissolved."""
        checkpoints = self._problem.dataflow.checkpoints
        values = self._may.intersection(checkpoints.values)
        if checkpoints.dissolved and values:
            yield self._variant(values, "checkpoints")

    def _variant(self, recomputed: Collection[str], name: str) -> Variant:
        names = tuple(b.name for b in self._problem.dataflow.buffers if b.name in recomputed)
        return Variant(self._problem.recomputing(names), f"+recompute:{name}")

    def guess(self) -> int | None:
        """The level that makes again what takes less time than its way over the link and back.

        At least the first one; None where there is none.
        """
        machine = self._problem.machine
        link_s = 1.0 / machine.d2h.bytes_per_s + 1.0 / machine.h2d.bytes_per_s
        number, saved_bytes, spent_s = 0, 0, 0.0
        for level in self._levels:
            more_bytes, more_s = level.saved_bytes - saved_bytes, level.seconds - spent_s
            if number and more_s > link_s * more_bytes:
                break
            number, saved_bytes, spent_s = number + 1, level.saved_bytes, level.seconds
        return number or None

    def drop_above(self, number: int) -> None:
        """Forget the levels above this one."""
        del self._levels[number:]

    def next_to_best(self, found_s: Mapping[int, float]) -> int | None:
        """The next level to try: one beside the fastest in `found_s`; None when these are there.

        Where nothing has fit so far, the one above all that were tried.
        """
        last = len(self._levels)
        best = min(found_s, key=found_s.__getitem__)
        if math.isinf(found_s[best]):
            best = max(found_s)
        beside = (number for number in (best - 1, best + 1) if 0 < number <= last)
        return next((number for number in beside if number not in found_s), None)
