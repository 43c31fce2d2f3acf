"""CBC in a process that can be ended at any moment: pulp's solver, but for how it is run.

pulp waits for CBC in a way that leaves it running where Ctrl-C or a signal ends the wait. Apart
from `solvers`, which is there without pulp, too.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from cotrain_compile.placement.milp import cbc_guard
from cotrain_compile.placement.milp.highs_process import current_stop
from cotrain_compile.placement.milp.linear import pulp


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
