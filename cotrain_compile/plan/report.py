"""Report: how a plan was found, and how near it is to the best."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Milestone:
    """What a search had found when it had spent `work` units: a step of `seconds`, by `name`."""

    work: float
    name: str
    seconds: float


@dataclass(frozen=True)
class SolveReport:
    """How a plan was found and how good it is.

    `status` is the solver's word ("optimal", "time limit", "not needed"); `objective_s` the step
    time that its program claims; `bound_s` the least that any solution of that program can have,
    with its small price on bytes moved; `lower_bound_s` is the certified bound: no plan within
    these budgets takes less; 0 where there is none, as at guessed rates. `gap` is how far the
    plan's simulated time lies above it, as a fraction. `simulated_s` has the simulated step time of
    every candidate that fits, by policy; `seconds` is what solving took. `unknown_ops` counts the
    ops whose cost nobody knows. They move `unknown_bytes`; plans and bound count no more of them
    than that, so that no gap is certified. The search has spent `work` units and its
    bound `bound_work` beside them, `course` has what was the fastest when it was found, and `ended`
    says why it went no further.
    """

    solver: str
    status: str
    seed: int
    seconds: float
    objective_s: float | None
    bound_s: float | None
    lower_bound_s: float
    gap: float
    rounds: int = 0
    simulated_s: Mapping[str, float] = field(default_factory=dict)
    unknown_ops: int = 0
    unknown_bytes: int = 0
    work: float = 0.0
    bound_work: float = 0.0
    course: tuple[Milestone, ...] = ()
    ended: str = ""

    @property
    def bound_name(self) -> str:
        """What `lower_bound_s` may be called: certified only where all of the step is counted."""
        if not self.unknown_ops:
            return "certified bound"
        return f"bound without the cost of {self.unknown_ops} ops, which is unknown"
