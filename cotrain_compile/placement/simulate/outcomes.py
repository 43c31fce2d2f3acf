"""Outcomes: what a step with updates on guesses takes, by how the guesses turn out.

In: a Problem and a Plan. Out: seconds of the step where they are right, where they are wrong, and
where nothing is guessed; and with that the share of wrong guesses up to which guessing pays.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cotrain_compile.placement.placed import place_plan
from cotrain_compile.placement.problem import Problem
from cotrain_compile.placement.simulate.predict import timeline_of
from cotrain_compile.placement.simulate.works import joined_works_of, task_s
from cotrain_compile.plan import HostRegion, Plan, Task


@dataclass(frozen=True)
class Outcomes:
    """Seconds of a step: with `right` guesses, with `wrong` ones, with all of them `held_back`."""

    right_s: float
    wrong_s: float
    held_back_s: float

    @property
    def pays_below(self) -> float:
        """The share of steps with wrong guesses below which guessing takes less time."""
        gained_s, lost_s = self.held_back_s - self.right_s, self.wrong_s - self.held_back_s
        return (
            gained_s / (gained_s + lost_s) if gained_s > 0 and lost_s > 0 else float(gained_s > 0)
        )


def outcomes(problem: Problem, plan: Plan) -> Outcomes:
    """The outcomes of `plan`, which schedules updates on guesses of `problem`."""
    placed = place_plan(problem, plan)
    problem = placed.problem
    guessed = {task.name for task in plan.speculations}

    def step_s(seconds: Callable[[HostRegion], float]) -> float:
        def of(problem: Problem, task: Task) -> float:
            takes_part = isinstance(task, HostRegion) and (task.guesses or task.confirms in guessed)
            return seconds(task) if takes_part else task_s(problem, task)  # type: ignore[arg-type]

        return timeline_of(placed, joined_works_of(placed, of)).makespan_s

    def wrong(task: HostRegion) -> float:
        update_s, saving_s = problem.costs.host_update_s[task.param], problem.saving_s(task.param)
        return update_s + saving_s  # save and update; put back and update

    def held_back(task: HostRegion) -> float:
        return 0.0 if task.guesses else problem.costs.host_update_s[task.param]

    return Outcomes(step_s(lambda task: task_s(problem, task)), step_s(wrong), step_s(held_back))
