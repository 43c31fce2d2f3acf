"""CBC in a process that can be ended at any moment: pulp's solver, but for how it is run.

pulp waits for CBC in a way that leaves it running where Ctrl-C or a signal ends the wait. Apart
from `solvers`, which is there without pulp, too.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from math import isfinite
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pulp

from cotrain_compile.placement.milp import cbc_guard
from cotrain_compile.placement.milp.highs_process import current_stop
from cotrain_compile.placement.milp.linear import Floats, LinearProgram


def is_available() -> bool:
    """Whether CBC is there."""
    return bool(_solver(pulp.PULP_CBC_CMD).available())


def solve_by_cbc(
    program: LinearProgram, *, limit_s: float, gap: float, seed: int, threads: int
) -> tuple[str, bool, Floats | None]:
    """CBC's status, whether its time ended before it was done, and what it has for the columns.

    Raises RuntimeError where CBC fails, or is ended by a `Stop`.
    """
    model, variables = _as_pulp(program)
    options = [f"randomCbcSeed {seed}"]
    model.solve(_solver(Cbc, threads=threads, timeLimit=limit_s, gapRel=gap, options=options))
    is_stopped = model.sol_status == pulp.LpSolutionIntegerFeasible
    status = "time limit reached" if is_stopped else str(pulp.LpStatus[model.status]).lower()
    if not is_stopped and model.sol_status != pulp.LpSolutionOptimal:
        return status, is_stopped, None
    # A column that is in no row has no value there.
    values = np.array([variable.value() or 0.0 for variable in variables], dtype=np.float64)
    return status, is_stopped, values


def _as_pulp(program: LinearProgram) -> tuple[Any, list[Any]]:
    """The same as a model of pulp's, with its variables."""
    model = pulp.LpProblem("placement", pulp.LpMinimize)
    variables = [
        model.add_variable(
            f"c{column.number}",
            column.low if isfinite(column.low) else None,
            column.high if isfinite(column.high) else None,
            pulp.LpInteger if column.is_whole else pulp.LpContinuous,
        )
        for column in program.columns
    ]

    def affine(terms: dict[int, float]) -> Any:
        return pulp.LpAffineExpression([(variables[n], share) for n, share in terms.items()])

    for row in program.rows:
        total = affine(row.terms)
        if row.low == row.high:
            model += total == row.low
        elif isfinite(row.high):
            model += total <= row.high
        else:
            model += total >= row.low
    model += affine(program.objective.terms) + program.objective.constant
    return model, variables


def _solver(kind: type[Any], **settings: Any) -> Any:
    with warnings.catch_warnings():
        # pulp 3.3 announces that its bundled CBC will become a package of its own.
        warnings.simplefilter("ignore", DeprecationWarning)
        return kind(msg=False, **settings)


class Cbc(pulp.PULP_CBC_CMD):  # type: ignore[misc]
    """`PULP_CBC_CMD` whose program ends with the wait for it, and with this process."""

    def actualSolve(self, lp: Any, **_: Any) -> int:  # noqa: N802 (pulp's name)
        with TemporaryDirectory(prefix="cotrain-cbc-") as folder:
            program, found = Path(folder, "program.mps"), Path(folder, "found.sol")
            variables, names, constraints, _ = lp.writeMPS(str(program), rename=1)
            options = [f"sec {self.timeLimit}", *self.options, *self.getOptions(), "solve"]
            told = " ".join(f"-{option}" for option in [*options, "printingOptions all"])
            _run([self.path, str(program), *told.split(), "-solution", str(found)])
            if not found.exists():
                raise RuntimeError("CBC ended without an answer")
            status, values, costs, prices, slacks, solution = self.readsol_MPS(
                str(found), lp, variables, names, constraints
            )
        lp.assignVarsVals(values)
        lp.assignVarsDj(costs)
        lp.assignConsPi(prices)
        lp.assignConsSlack(slacks, activity=True)
        lp.assignStatus(status, solution)
        return int(status)


class _Group(subprocess.Popen[bytes]):
    """A process with those that it has started, which end together."""

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


def _run(command: Sequence[str]) -> None:
    """Run `command` to its end. Whatever is raised here ends it; so does the end of this process.

    In a session of its own, it does not see the Ctrl-C of our terminal.
    """
    if not sys.executable:
        raise RuntimeError("CBC needs a process that watches it, but Python's path is not known")
    process = _Group(
        [sys.executable, "-I", "-S", cbc_guard.__file__, *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        with current_stop().watching(process):
            status = process.wait()
    finally:
        process.kill()
        process.wait()
        assert process.stdin
        process.stdin.close()
    if status != 0:
        raise RuntimeError(f"CBC's process ended with status {status}")
