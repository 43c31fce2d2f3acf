"""What a step measured is that step's, however late somebody asks for it."""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import pytest

from cotrain_compile.errors import StepFailed
from cotrain_compile.machine import MEMORIES
from cotrain_compile.plan import Lane
from tests.support.faults import failing_call, trial_of

pytestmark = pytest.mark.usefixtures("watchdog", "one_thread")


def test_what_a_step_measured_outlives_a_later_one_that_fails() -> None:
    trial, compiled = trial_of("all")
    began_s = time.perf_counter()
    trial.take_step()
    took_s = time.perf_counter() - began_s
    device: Any = compiled._device
    with (
        mock.patch.object(device, "_copy", failing_call(device._copy, 1)),
        pytest.raises(StepFailed),
    ):
        trial.take_step()
    measured = compiled.measured
    assert measured is not None
    assert {task.name for task in compiled.plan.tasks} <= {span.name for span in measured.spans}
    told = {span.name for span in measured.lane(Lane.DEVICE)}
    assert len(told) > 50
    # A profile is of the step's ops: nothing else knows the views that passes have made.
    assert told <= {op.name for op in compiled.problem.dataflow.ops}
    for tier in MEMORIES:
        assert max(used for _, used in measured.memory[tier]) == measured.peak_bytes[tier]
    times = [(span.start_s, span.end_s) for span in measured.spans]
    assert all(0 <= start_s <= end_s <= took_s for start_s, end_s in times)
    assert compiled.measured is measured
