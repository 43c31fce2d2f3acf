"""Measured: what a finished step has left to measure it by, made a `Timeline` when somebody asks.

Making one takes as long as a small op for every op of the step. What is kept for it holds numbers
and names, and no tensor.
"""

from __future__ import annotations

import time
from functools import cached_property

from cotrain_compile.backends.eager.program import EagerProgram
from cotrain_compile.machine import Tier
from cotrain_compile.plan import Timeline
from cotrain_compile.runtime.device import Device


class Measurement:
    """The step that `program` has just ended on `device`, as `rank` of several."""

    def __init__(self, program: EagerProgram, device: Device, rank: int | None = None) -> None:
        self._rank = rank
        self._began_at = time.time() - (time.perf_counter() - device.origin_s)
        self.peak_bytes = device.peak_bytes()
        self._op_spans, self._task_spans = program.timing(), device.timing()
        self._origin_s = device.origin_s
        # Copied: what the user frees between two steps is no part of the first one.
        self._curve = {
            tier: samples.copy()
            for tier, samples in device.meter.curve.items()
            if device.counts_device or tier is Tier.HOST
        }

    @cached_property
    def timeline(self) -> Timeline:
        """What the step did."""
        return Timeline(
            source="measured",
            spans=(*self._op_spans(), *self._task_spans()),
            peak_bytes=self.peak_bytes,
            memory={
                tier: tuple((at_s - self._origin_s, used_bytes) for at_s, used_bytes in samples)
                for tier, samples in self._curve.items()
            },
            rank=self._rank,
            began_at=self._began_at,
        )
