"""HiGHS with a start, in a process of its own: pulp's solver, but for how it is run.

Apart from `solvers`, which is there without pulp, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cotrain_compile.placement.milp.highs_process import solve_elsewhere
from cotrain_compile.placement.milp.linear import pulp


class WarmHighs(pulp.HiGHS):  # type: ignore[misc]
    """pulp has no way to pass a start: the values of some columns, by index."""

    start: Sequence[tuple[int, float]] = ()

    def callSolver(self, lp: Any) -> None:  # noqa: N802 (pulp's name)
        options = {
            "mip_rel_gap": self.gapRel,
            "threads": self.threads,
            "time_limit": self.timeLimit,
            **self.optionsDict,
        }
        lp.solverModel = solve_elsewhere(
            lp.solverModel.getLp(),
            {name: value for name, value in options.items() if value is not None},
            self.start,
        )
