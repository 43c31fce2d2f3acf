"""HiGHS with a start: pulp's solver, given values that some columns can take together.

Apart from `solvers`, which is there without pulp, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cotrain_compile.placement.linear import pulp


class WarmHighs(pulp.HiGHS):  # type: ignore[misc]
    """pulp has no way to pass a start: the values of some columns, by index."""

    start: Sequence[tuple[int, float]] = ()

    def callSolver(self, lp: Any) -> None:  # noqa: N802 (pulp's name)
        if self.start:
            columns = np.array([index for index, _ in self.start], dtype=np.int32)
            values = np.array([value for _, value in self.start], dtype=np.float64)
            lp.solverModel.setSolution(len(columns), columns, values)
        super().callSolver(lp)
