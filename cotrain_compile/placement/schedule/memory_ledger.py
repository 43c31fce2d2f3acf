"""Memory ledger: device bytes reserved by the list scheduler, at each op and between ops.

In: the least bytes of `Moves` and a budget. What is planned is known for a whole range of slots;
what is `held` lingers until a copy is waited for or an update has run, which can be forced at any
moment. Every move that cannot be undone is made only where it fits in all the slots it covers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class DoesNotFit(Exception):
    """The moves need `nbytes` more than the budget, at the least."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(nbytes)
        self.nbytes = nbytes


class MemoryLedger:
    """Bytes on the device: planned per slot and gap (gap k is before op k), and held now.

    What is reserved is kept free in the gaps in which an update is sure to fit, so that no copy
    made early takes its room.
    """

    def __init__(
        self, budget_bytes: int, slot_bytes: Sequence[int], gap_bytes: Sequence[int]
    ) -> None:
        self.budget_bytes = budget_bytes
        self._slot_bytes = np.array(slot_bytes, dtype=np.int64)
        self._gap_bytes = np.array(gap_bytes, dtype=np.int64)
        self._reserve_bytes = np.zeros_like(self._gap_bytes)
        self._held_bytes = 0

    def plan(self, nbytes: int, first_gap: int, last_gap: int) -> None:
        """`nbytes` more from gap to gap."""
        self._slot_bytes[first_gap:last_gap] += nbytes
        self._gap_bytes[first_gap : last_gap + 1] += nbytes

    def hold(self, nbytes: int, *, planned_in: int | None = None) -> None:
        """`nbytes` more from now on until they are released; no longer as planned in a gap."""
        self._held_bytes += nbytes
        if planned_in is not None:
            self._gap_bytes[planned_in] -= nbytes

    def release(self, nbytes: int) -> None:
        """`nbytes` that were held have gone."""
        self._held_bytes -= nbytes

    def reserve(self, nbytes: int, gap: int) -> None:
        """Keep at least `nbytes` free in `gap`."""
        self._reserve_bytes[gap] = max(int(self._reserve_bytes[gap]), nbytes)

    def plan_reserved(self, nbytes: int, first_gap: int, last_gap: int) -> None:
        """`nbytes` more from gap to gap, in the last one out of what is reserved there."""
        self.plan(nbytes, first_gap, last_gap)
        self._reserve_bytes[last_gap] = max(0, int(self._reserve_bytes[last_gap]) - nbytes)

    def require_all_to_fit(self) -> None:
        """Raise `DoesNotFit` where more is planned than the budget."""
        short = int(max(self._slot_bytes.max(), self._gap_bytes.max())) - self.budget_bytes
        if short > 0:
            raise DoesNotFit(short)

    def short_of(self, gap: int, nbytes: int) -> int:
        """How much of `nbytes` more would not fit in `gap`; negative where there is room left."""
        return int(self._gap_bytes[gap]) + self._held_bytes + nbytes - self.budget_bytes

    def op_fits(self, slot: int) -> bool:
        """Whether the op in `slot` may run with all that is held."""
        return int(self._slot_bytes[slot]) + self._held_bytes <= self.budget_bytes

    def free_now(self, gap: int, reserved_bytes: int) -> int:
        """How much more fits around the op after `gap`, with `reserved_bytes` in gaps."""
        gaps: int = max(self._gap_bytes[gap : gap + 2].tolist()) + reserved_bytes
        return self.budget_bytes - self._held_bytes - max(int(self._slot_bytes[gap]), gaps)

    def fits_before(self, gap: int, last_gap: int, nbytes: int) -> bool:
        """Whether `nbytes` more fit from `gap` to the op before `last_gap`, as planned."""
        room = self.budget_bytes - nbytes
        between = slice(gap, last_gap)
        planned = self._gap_bytes[between] + self._reserve_bytes[between]
        return bool((self._slot_bytes[between] <= room).all() and (planned <= room).all())

    def fits_in(self, gap: int, nbytes: int) -> bool:
        """Whether `nbytes` more fit in the one `gap`, as planned and beside what is reserved."""
        return self.fits_in_reserve(gap, nbytes + int(self._reserve_bytes[gap]))

    def fits_in_reserve(self, gap: int, nbytes: int) -> bool:
        """Whether `nbytes` more fit in `gap` that may take what is reserved there."""
        return int(self._gap_bytes[gap]) + nbytes <= self.budget_bytes
