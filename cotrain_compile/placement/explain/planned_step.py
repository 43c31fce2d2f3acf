"""PlannedStep: what a plan says of its step, whether anything runs it or not.

In: a Problem and a plan of it. Out: predictions, and explanations of where parameters are.
"""

from __future__ import annotations

from cotrain_compile.placement.explain.explain import Explanation, explain
from cotrain_compile.placement.placed import place_plan
from cotrain_compile.placement.problem import Problem
from cotrain_compile.placement.simulate.engine import Periodic
from cotrain_compile.placement.simulate.predict import predict_steady_state
from cotrain_compile.placement.simulate.reserved import Reserved, reserved
from cotrain_compile.plan import Plan, Timeline


class PlannedStep:
    """`problem` is what had to be decided, `plan` what was."""

    def __init__(self, problem: Problem, plan: Plan) -> None:
        self.problem = problem
        self.plan = plan

    @property
    def predicted(self) -> Timeline:
        """The simulator's timeline of one step."""
        return self.plan.predicted

    @property
    def predicted_reserved(self) -> Reserved:
        """What torch's caching allocator takes from a card for the plan, op by op, and uses."""
        return reserved(place_plan(self.problem, self.plan))

    def predict_steps(self, count: int = 8) -> Periodic:
        """The step repeated: predicted seconds of the first one, and from one to the next."""
        return predict_steady_state(place_plan(self.problem, self.plan), steps=count)

    def explain(self, param: str) -> Explanation:
        """Why a parameter is where it is, and what the step would take with it kept otherwise.

        Raises `PlanError` when the step has no such parameter.
        """
        return explain(self.problem, self.plan, param)
