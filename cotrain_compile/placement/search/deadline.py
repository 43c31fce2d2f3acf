"""Deadline: the moment by which a plan is to be there, and what is left until then.

One is made when a search begins, and handed to its parts: each asks what is left, and gives a part
of that to what it does itself.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Deadline:
    """`seconds` after it `began`, on the monotonic clock: from now on, where nothing is said."""

    seconds: float
    began: float = field(default_factory=lambda: time.monotonic())

    @property
    def elapsed_s(self) -> float:
        """Since it began."""
        return time.monotonic() - self.began

    @property
    def left_s(self) -> float:
        """Until then; 0 when it has passed."""
        return max(0.0, self.seconds - self.elapsed_s)

    def part(self, share: float) -> Deadline:
        """One that begins now, and ends after `share` of what is left."""
        return Deadline(share * self.left_s)
