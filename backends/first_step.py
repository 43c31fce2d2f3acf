"""First step: before a plan's first step everything runs once without writing anything.

Where that runs out of device memory, no parameter or state has changed, and the step is planned
again with the measured overshoot taken off its budget, as AutoTM does (Hildebrand et al., ASPLOS
2020, section 4.3), then rehearsed again.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from cotrain_compile.backends.compiled_step import CompiledStep
from cotrain_compile.errors import OutOfDeviceMemory
from cotrain_compile.machine import Tier
from cotrain_compile.units import format_bytes

ROUNDS = 3
# The least part of a budget that a new round takes off: where a card's memory is in pieces, an
# allocation fails though the sum of all is below the budget.
LEAST_STEP = 0.05


class Rehearsed:
    """Runs a `CompiledStep`, the first time after a rehearsal.

    `compile_within(device_bytes)` compiles it for that budget, None: for the user's. Where
    `replans` is false a rehearsal that fails is the end.
    """

    def __init__(
        self, compile_within: Callable[[int | None], CompiledStep], *, replans: bool = True
    ) -> None:
        self._compile_within = compile_within
        self._rounds = ROUNDS if replans else 0
        self._rehearsed = False
        self.compiled = compile_within(None)

    def __call__(self, inputs: list[Any]) -> Any:
        if not self._rehearsed:
            self._rehearse(inputs)
        return self.compiled(inputs)

    def _rehearse(self, inputs: Sequence[Any]) -> None:
        for left in range(self._rounds, -1, -1):
            over_bytes = self._overshoot_bytes(inputs, is_last=left == 0)
            if over_bytes == 0 or left == 0:
                break
            self._plan_again(over_bytes)
        self._rehearsed = True

    def _overshoot_bytes(self, inputs: Sequence[Any], *, is_last: bool) -> int:
        """Device bytes above the budget in a rehearsal; 0 where it fits.

        Raises the out-of-memory error when it `is_last`, and every other error.
        """
        compiled = self.compiled
        try:
            compiled.rehearse(inputs)
        except (OutOfDeviceMemory, torch.OutOfMemoryError) as error:
            on_host = isinstance(error, OutOfDeviceMemory) and error.tier != Tier.DEVICE
            if is_last or on_host:
                error.add_note("No parameter or optimizer state was changed by this step.")
                raise
            over_bytes = compiled.peak_bytes[Tier.DEVICE] - self._planned_bytes()
            return max(over_bytes, int(LEAST_STEP * self._planned_bytes()), 1)
        return max(0, compiled.peak_bytes[Tier.DEVICE] - compiled.allowed_bytes)

    def _plan_again(self, over_bytes: int) -> None:
        budget_bytes = self._planned_bytes() - over_bytes
        warnings.warn(
            f"cotrain: the step took {format_bytes(over_bytes)} more on the device than planned; "
            f"nothing was changed, and it is planned again for {format_bytes(budget_bytes)}",
            stacklevel=2,
        )
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        self.compiled = self._compile_within(budget_bytes)

    def _planned_bytes(self) -> int:
        """What the plan needs, which is at most what it was allowed."""
        return self.compiled.plan.predicted.peak_bytes[Tier.DEVICE]
