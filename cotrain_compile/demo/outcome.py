"""Outcome: what a finished demo has found, and what its prediction is held to."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from cotrain_compile.analysis.costs import measured_costs
from cotrain_compile.backends.lifecycle.compiled_step import CompiledStep
from cotrain_compile.demo.train import StepResult
from cotrain_compile.placement.placed import place_plan
from cotrain_compile.placement.problem import formulate
from cotrain_compile.placement.simulate.predict import predict
from cotrain_compile.plan import Timeline


@dataclass(frozen=True)
class Outcome:
    """All steps with and without the budget.

    `timelines` are those of the last steps, by the plan of `placed`, without its first, which holds
    the tracing.
    """

    placed: CompiledStep
    results: Sequence[StepResult]
    timelines: Sequence[Timeline]
    eager: Sequence[StepResult] = ()

    @property
    def seconds(self) -> list[float]:
        """What each of the last steps took."""
        return [result.seconds for result in self.results[-len(self.timelines) :]]

    @property
    def error(self) -> float:
        """How far the prediction is from the median of the last steps: 0.1 is 10 % above it."""
        return self._off(self.placed.predicted.makespan_s)

    @cached_property
    def error_at_own_times(self) -> float:
        """The same had the ops been known to take what they took in these very steps."""
        problem, plan = self.placed.problem, self.placed.plan
        costs = measured_costs(self.timelines, plan)
        again = formulate(problem.dataflow, problem.machine, problem.budgets, costs)
        return self._off(predict(place_plan(again, plan)).makespan_s)

    @property
    def typical(self) -> Timeline:
        """The step that half of the others are faster than."""
        by_time = sorted(self.timelines, key=lambda timeline: timeline.makespan_s)
        return by_time[len(by_time) // 2]

    @property
    def figures(self) -> dict[str, object]:
        """What the demo has found, as plain data."""
        placed = self.placed
        eager_s = [result.seconds for result in self.eager[1:]]
        return {
            "policy": placed.plan.placement.policy,
            "budget_bytes": placed.plan.budgets,
            "predicted_s": placed.predicted.makespan_s,
            "measured_s": statistics.median(self.seconds),
            "error": self.error,
            "error_at_own_times": self.error_at_own_times,
            "eager_s": statistics.median(eager_s) if eager_s else None,
            "predicted_peak_bytes": placed.predicted.peak_bytes,
            "measured_peak_bytes": self.typical.peak_bytes,
            "recomputed_values": len(placed.plan.placement.recomputed),
            "host_updates": len(placed.plan.host_updates),
            "losses": [result.loss for result in self.results],
            "eager_losses": [result.loss for result in self.eager],
        }

    def _off(self, predicted_s: float) -> float:
        return predicted_s / statistics.median(self.seconds) - 1
