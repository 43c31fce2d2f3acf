"""Settings: how to look for a plan."""

from __future__ import annotations

import math
from dataclasses import dataclass

# What the bound may take, beside all that the search itself does.
BOUND_SHARE = 0.3


@dataclass(frozen=True)
class SolveSettings:
    """How to look for a plan.

    `work_limit` is for the whole search, in units of two to three seconds of one core: what it
    leads to is the same on every computer. `time_limit_s` by the clock only guards it: what has
    begun when it ends is finished, nothing else.
    `gap` is the relative gap at which a program counts as solved. With `overlap_steps` each
    placement is also tried with updates on the host that go on in the next step, with `speculate`
    with updates there that begin on guesses: while the search goes on, so that the plan counts on
    them, or `hedged`, in the end, so that without them it takes no longer than one that waits. With
    `recompute` the policy `auto` also tries to make values again. Where the device runs `compiled`
    code (None: if the machine's does) tasks are settled, as `bundles.settled` says.
    `micro_batch_order` is "auto", "as-written" or "by-layer"; "auto" lets the policy `auto` try
    both. With `split` it also tries regions of the step in parts. A plan of the same step in
    another form takes `known_s`: only one that is faster is looked for. The bound may take
    `bound_limit` units beside the search, else a share of its work.
    """

    policy: str = "auto"
    solver: str = "highs"
    work_limit: float = 7.0
    time_limit_s: float = 300.0
    gap: float = 0.005
    seed: int = 0
    overlap_steps: bool = False
    speculate: bool = False
    hedged: bool = False
    compiled: bool | None = False
    recompute: bool = True
    micro_batch_order: str = "auto"
    split: bool = True
    known_s: float = math.inf
    bound_limit: float | None = None

    @property
    def bound_units(self) -> float:
        """What the bound may take of the solver's work."""
        limit = self.bound_limit
        return BOUND_SHARE * self.work_limit if limit is None else limit
