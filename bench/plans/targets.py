"""Rows of the placement benchmark, and whether together they reach its targets.

In: one `Row` for each step, machine and budget. Out: medians and worst cases beside their limits.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

GAP_MEDIAN, GAP_WORST = 0.03, 0.10
CLAIM_MEDIAN, CLAIM_WORST = 0.02, 0.05
SOLVE_S, LARGE_SOLVE_S = 20.0, 90.0
# A step of 70 billion parameters has 39,000 ops, one of 7 billion 15,000.
LARGE_OPS = 30_000
# A plan this much faster than its certified bound is no rounding: the certificate is wrong.
ROUNDING = 1e-5


@dataclass(frozen=True)
class Row:
    """One budget. None stands for what there is not: a bound, a claim of the program, a plan.

    `gap` is how far the simulated step lies above the bound, `claim_difference` how far that of
    the program's own plan lies above what the program claims, both as fractions. `processor_s` is
    what solving took of all processors, by their own time. `rules_s` has the
    simulated step of each simple rule, or that it does not fit.
    """

    model: str
    machine: str
    ops: int
    budget_bytes: int
    choices_s: float
    solve_s: float
    policy: str
    status: str
    step_s: float | None = None
    bound_s: float | None = None
    gap: float | None = None
    claimed_s: float | None = None
    claim_difference: float | None = None
    rules_s: Mapping[str, float | str] = field(default_factory=dict)
    peak_bytes: int | None = None
    processor_s: float | None = None

    @property
    def seconds(self) -> float:
        """What a plan takes from the dataflow on: of processors, where that was measured."""
        return self.choices_s + (self.processor_s or self.solve_s)

    @property
    def best_rule(self) -> tuple[str, float] | None:
        """The fastest simple rule that fits, with its step in seconds."""
        fitting = [(n, value) for n, value in self.rules_s.items() if isinstance(value, float)]
        return min(fitting, key=lambda rule: rule[1], default=None)

    @property
    def speedup(self) -> float | None:
        """Against the fastest simple rule; None where none fits."""
        return self.best_rule[1] / self.step_s if self.best_rule and self.step_s else None


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Targets with their medians and worst cases, and what else can be counted."""
    small = [row.seconds for row in rows if row.ops <= LARGE_OPS]
    large = [row.seconds for row in rows if row.ops > LARGE_OPS]
    differences = [_size(row.claim_difference) for row in rows]
    targets = {
        "gap_to_bound": _target([row.gap for row in rows], GAP_MEDIAN, GAP_WORST),
        "claim_difference": _target(differences, CLAIM_MEDIAN, CLAIM_WORST),
        "solve_s": _target(small, None, SOLVE_S),
        "large_solve_s": _target(large, None, LARGE_SOLVE_S),
    }
    speedups = [row.speedup for row in rows if row.speedup is not None]
    return {
        "targets": {name: target for name, target in targets.items() if target["rows"]},
        "refused": sum(row.step_s is None for row in rows),
        "bounds_beaten": sum(row.gap is not None and row.gap < -ROUNDING for row in rows),
        "no_rule_fits": sum(row.speedup is None for row in rows),
        "speedup_median": statistics.median(speedups) if speedups else None,
        "speedup_best": max(speedups, default=None),
    }


def _target(
    values: Sequence[float | None], median_limit: float | None, worst_limit: float
) -> dict[str, Any]:
    """A row without a value misses the target."""
    known = [value for value in values if value is not None]
    median = statistics.median(known) if known else None
    worst = max(known, default=None)
    missing = len(values) - len(known)
    within = [median_limit is None or (median or 0.0) < median_limit, (worst or 0.0) < worst_limit]
    return {
        "rows": len(values),
        "missing": missing,
        "median": median,
        "median_limit": median_limit,
        "worst": worst,
        "worst_limit": worst_limit,
        "met": not missing and all(within),
    }


def _size(value: float | None) -> float | None:
    return None if value is None else abs(value)
