"""Work: what a search has spent, counted in what it has done, and not by a clock.

Each part of a search says what it has done: a draft of so many ops and tasks, so many pivots of a
program of so many entries. That is the same on every computer and beside any load, and so is what
the search does next, and with it the plan. One unit was about a second of one core of the computer
that the prices below were measured on (a Xeon of 2.1 GHz); there a search of folded steps takes two
to three, since much that is made for a schedule has no price. A clock guards all of it: when
`time_limit_s` has passed nothing more begins, and the plan says so.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

# Units for each of what there is so much of, measured with ResNet-50, BERT-large and Llama 7B.
PER_OP_OF_SPACE = 1e-5  # what can be decided
PER_OP_OF_LEAST = 2e-5  # and what needs least of the device
PER_OP_OF_MOVES = 3.5e-6
PER_OP_OF_KINDS = 1.3e-5  # which values are alike
PER_OP_OF_DRAFT, PER_TASK_OF_DRAFT = 6e-6, 2.5e-5
PER_CELL_OF_GREEDY = 4e-7  # a cell is a strategy at a moment at which memory is checked
PER_ENTRY_OF_PROGRAM = 1.6e-6  # building it, and its way to the solver
# An entry is a coefficient of a program; there are a few of each row. A check of a tree comes after
# a round of cuts, a heuristic or a node.
PER_ENTRY_AND_PIVOT = 1.75e-9
PER_ENTRY_AND_BARRIER_STEP = 1.55e-7
PER_ENTRY_AND_CHECK = 3.5e-6
# HiGHS counts in 32 bits.
MOST = 2**31 - 1
UNLIMITED: Mapping[str, int] = MappingProxyType(
    dict.fromkeys(("pivots", "barrier_steps", "checks"), MOST)
)


class Meter:
    """Counts the units that are spent; `guard_hit` says that the clock has ended it before."""

    def __init__(self, time_limit_s: float = math.inf) -> None:
        self.spent = 0.0
        self.guard_hit = False
        self._began_s, self._time_limit_s = time.monotonic(), time_limit_s

    def charge(self, units: float) -> None:
        """So much was done."""
        self.spent += units

    @property
    def elapsed_s(self) -> float:
        """Seconds by the clock since it began."""
        return time.monotonic() - self._began_s

    @property
    def guard_s(self) -> float:
        """Seconds by the clock until nothing more may begin; 0 when they have passed."""
        left_s = max(0.0, self._time_limit_s - self.elapsed_s)
        self.guard_hit |= not left_s
        return left_s


@dataclass(frozen=True)
class Allowance:
    """`units` to spend of a `meter`, from where it stood at `since` on."""

    meter: Meter
    units: float
    since: float = 0.0

    @property
    def left(self) -> float:
        """Units that are left; 0 where they are spent, or time is up."""
        if not self.meter.guard_s:
            return 0.0
        return max(0.0, self.units - (self.meter.spent - self.since))

    def part(self, share: float) -> Allowance:
        """`share` of what is left, from now on."""
        return Allowance(self.meter, share * self.left, self.meter.spent)


@dataclass(frozen=True)
class SolverWork:
    """What a program of so many `entries` takes of a solver."""

    entries: int

    def limits(self, units: float) -> dict[str, int]:
        """How many pivots, steps of a barrier or checks of a tree `units` are worth."""
        of_each = units / max(1, self.entries)
        prices = {
            "pivots": PER_ENTRY_AND_PIVOT,
            "barrier_steps": PER_ENTRY_AND_BARRIER_STEP,
            "checks": PER_ENTRY_AND_CHECK,
        }
        return {name: int(min(of_each / price, MOST)) for name, price in prices.items()}

    def units(self, done: Mapping[str, int]) -> float:
        """What it has taken."""
        return self.entries * (
            PER_ENTRY_AND_PIVOT * done["pivots"]
            + PER_ENTRY_AND_BARRIER_STEP * done["barrier_steps"]
            + PER_ENTRY_AND_CHECK * done["checks"]
        )
