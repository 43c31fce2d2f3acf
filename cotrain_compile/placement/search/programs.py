"""Programs: the integer programs of a search, each built for a space and solved with its work.

In: a space of decisions, and what each tier may take. Out: what the solver came back with. A space
whose conservative program has no solution is not tried again with less memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial

from cotrain_compile.machine import Tier
from cotrain_compile.placement.decisions.decisions import DecisionSpace
from cotrain_compile.placement.milp.model import MIB
from cotrain_compile.placement.milp.program import Program
from cotrain_compile.placement.milp.solvers import WORK_LIMIT, Solution, solve_program
from cotrain_compile.placement.search.greedy import least_bytes
from cotrain_compile.placement.search.settings import SolveSettings
from cotrain_compile.placement.work import PER_ENTRY_OF_PROGRAM, Allowance, Meter

# What takes more than this part of the device is not split and rounded: it would not fit.
LARGE = 1 / 100
# So much more than its buckets need at the least a loose program has: step counters, and whole
# tensors where it would have parts. What then does not fit is repaired.
NEED = 1.003
# What becomes of a program for which no work is left.
NO_WORK = Solution(WORK_LIMIT, None, math.inf, math.inf, 0.0, 0.0)


class Programs:
    """Solves programs as `settings` say, each with the work that `begin` has for it.

    `has_solutions` says whether the conservative
    program of some level may have one: where that of all levels has none, it takes longer to find
    that out for each of them than the greedy takes. `was_cut_short` says whether some program was
    not solved for want of work. One that is sure to be, as less is left than the quickest of those
    before took, is not even built.
    """

    def __init__(
        self, settings: SolveSettings, begin: Callable[[], Allowance], meter: Meter
    ) -> None:
        self.settings, self.begin, self.meter = settings, begin, meter
        self.has_solutions = True
        self.was_cut_short = False
        self.least_units = 0.0  # of those that were solved
        # Spaces whose conservative programs have no solution, each with the device budget of that.
        self.too_tight: list[tuple[DecisionSpace, float]] = []

    def solve(
        self,
        space: DecisionSpace,
        targets: Mapping[Tier, float],
        *,
        conservative: bool = True,
        whole: bool = False,
        cyclic: bool = False,
        known_s: float = math.inf,
        never_loose: bool = False,
    ) -> Solution:
        """What a program comes back with: a conservative one is loose where it has no solution.

        The price of what is beyond the budget is not in the time of a step, and so a loose one is
        rounded whatever is known.
        """
        build = partial(
            Program,
            space,
            *(targets[tier] / MIB for tier in (Tier.DEVICE, Tier.HOST)),
            relaxed=not conservative,
            whole=whole,
            cyclic=cyclic,
            large_bytes=LARGE * targets[Tier.DEVICE],
        )
        target, may_be_loose = targets[Tier.DEVICE], conservative and not (cyclic or never_loose)
        known = any(each is space and target <= most for each, most in self.too_tight)
        known = known or not self.has_solutions
        if not (may_be_loose and known):
            solution = self._run(build, known_s)
            if not (may_be_loose and solution.is_infeasible):
                return solution
            self.too_tight.append((space, target))
        need_bytes = max(target, NEED * least_bytes(space))
        return self._run(partial(build, need_mib=need_bytes / MIB), math.inf)

    def _run(self, build: Callable[[], Program], known_s: float) -> Solution:
        """Build a program and solve it with its work; note where that was too little."""
        solution = self._run_within(build, known_s)
        self.was_cut_short |= solution.is_cut_short or "limit" in solution.status
        return solution

    def _run_within(self, build: Callable[[], Program], known_s: float) -> Solution:
        work, before = self.begin(), self.meter.spent
        if work.left <= self.least_units:
            return NO_WORK
        program = build()
        work.meter.charge(PER_ENTRY_OF_PROGRAM * program.linear.entries)
        if not work.left:
            return NO_WORK
        solution = solve_program(
            program,
            self.settings.solver,
            work=work,
            gap=self.settings.gap,
            seed=self.settings.seed,
            known_s=known_s,
        )
        if not (solution.is_cut_short or solution.is_infeasible or "limit" in solution.status):
            spent = self.meter.spent - before
            self.least_units = min(spent, self.least_units or spent)
        return solution
