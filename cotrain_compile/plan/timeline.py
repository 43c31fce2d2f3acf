"""Timeline: what happens in a step, predicted by the simulator or measured by a runtime.

One type for both, so that they can be compared span by span.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from cotrain_compile.machine import Tier

FORMAT_VERSION = 3

# What a running step is called in a trace of torch.profiler, right before its zero.
STEP_BEGINS = "cotrain: step begins"


@dataclass(frozen=True)
class Span:
    """One stretch of work on a lane, in seconds from the start of the step."""

    lane: str
    name: str
    start_s: float
    end_s: float


def exchange_of(op: str) -> str:
    """What the span of the exchange is called that an op begins."""
    return f"exchange.{op}"


@dataclass(frozen=True)
class Timeline:
    """What a step did, or is predicted to do.

    Where steps overlap it is one step of many: what the step before has left to do comes at its
    start, what is left to the next one is cut at its end. `source` is "predicted" or "measured".
    `peak_bytes` has the largest number of bytes alive on each tier; `memory` samples the bytes
    alive on each tier as (seconds, bytes) steps. `rank` is that of the process that measured it,
    None where it trains alone; `began_at` when the step began by the clock of its computer, in
    seconds since 1970.
    """

    source: Literal["predicted", "measured"]
    spans: tuple[Span, ...]
    peak_bytes: Mapping[Tier, int]
    memory: Mapping[Tier, tuple[tuple[float, int], ...]] = field(default_factory=dict)
    rank: int | None = None
    began_at: float | None = None

    @property
    def title(self) -> str:
        """Whose it is, where it is shown beside others."""
        return self.source if self.rank is None else f"{self.source} on rank {self.rank}"

    @property
    def makespan_s(self) -> float:
        """End of the last span minus the start of the first; 0 for an empty timeline."""
        if not self.spans:
            return 0.0
        return max(span.end_s for span in self.spans) - min(span.start_s for span in self.spans)

    def lane(self, lane: str) -> tuple[Span, ...]:
        """The spans of one lane, in order of their start."""
        return tuple(
            sorted((span for span in self.spans if span.lane == lane), key=lambda s: s.start_s)
        )

    def busy_s(self, lane: str) -> float:
        """Seconds of work on one lane."""
        return sum(span.end_s - span.start_s for span in self.spans if span.lane == lane)
