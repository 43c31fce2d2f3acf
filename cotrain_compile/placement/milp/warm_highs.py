"""HiGHS with a start, in a process of its own: pulp's solver, but for how it is built and run.

Apart from `solvers`, which is there without pulp, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import inf
from typing import Any

from cotrain_compile.placement.milp.highs_process import solve_elsewhere
from cotrain_compile.placement.milp.linear import pulp
from cotrain_compile.placement.work import Allowance, Meter, SolverWork


class WarmHighs(pulp.HiGHS):  # type: ignore[misc]
    """pulp has no way to pass a start: the values of some columns, by index.

    The program becomes a `HighsLp`, and no HiGHS is made in this process: from 1.16 on one says on
    standard output that it runs, before it can be told to be silent.
    """

    start: Sequence[tuple[int, float]] = ()
    work: Allowance | None = None  # as much as there is time for

    def createAndConfigureSolver(self, lp: Any) -> None:  # noqa: N802 (pulp's name)
        """Nothing: the options go to the process with the program."""

    def buildSolverModel(self, lp: Any) -> None:  # noqa: N802 (pulp's name)
        """The program by rows. As pulp reads the answer: each row and column gets its index."""
        import highspy

        infinite = highspy.kHighsInf
        model = highspy.HighsLp()
        variables, constraints = lp.variables(), list(lp._constraints.values())
        sign = -1.0 if lp.sense == pulp.LpMaximize else 1.0
        for index, variable in enumerate(variables):
            variable.index = index
        for index, constraint in enumerate(constraints):
            constraint.index = index
        model.num_col_, model.num_row_ = len(variables), len(constraints)
        model.col_cost_ = [sign * lp.objective.get(variable, 0.0) for variable in variables]
        model.col_lower_ = [-infinite if v.lowBound is None else v.lowBound for v in variables]
        model.col_upper_ = [infinite if v.upBound is None else v.upBound for v in variables]
        if self.mip and any(variable.cat == pulp.LpInteger for variable in variables):
            kinds = highspy.HighsVarType
            model.integrality_ = [
                kinds.kInteger if variable.cat == pulp.LpInteger else kinds.kContinuous
                for variable in variables
            ]
        bounds = [(constraint.getLb(), constraint.getUb()) for constraint in constraints]
        model.row_lower_ = [-infinite if low is None else low for low, _ in bounds]
        model.row_upper_ = [infinite if high is None else high for _, high in bounds]
        rows = [[(v.index, share) for v, share in c.items() if share != 0] for c in constraints]
        matrix = model.a_matrix_
        matrix.format_ = highspy.MatrixFormat.kRowwise
        matrix.num_col_, matrix.num_row_ = model.num_col_, model.num_row_
        matrix.start_ = [0, *accumulate(len(row) for row in rows)]
        matrix.index_ = [index for row in rows for index, _ in row]
        matrix.value_ = [share for row in rows for _, share in row]
        lp.solverModel = model

    def callSolver(self, lp: Any) -> None:  # noqa: N802 (pulp's name)
        limit_s = inf if self.timeLimit is None else self.timeLimit
        work = self.work or Allowance(Meter(limit_s), inf)
        model, meter = lp.solverModel, work.meter
        options = {
            "mip_rel_gap": self.gapRel,
            "threads": self.threads,
            "time_limit": meter.guard_s,
            **self.optionsDict,
        }
        sizes = SolverWork(len(model.a_matrix_.value_))
        lp.solverModel = solve_elsewhere(
            model,
            {name: value for name, value in options.items() if value is not None},
            sizes.limits(work.left),
            self.start,
        )
        meter.charge(sizes.units(lp.solverModel.done))
