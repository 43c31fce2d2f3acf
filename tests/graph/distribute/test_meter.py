"""What the thread of a process group still holds when a wait returns is not counted for long."""

from __future__ import annotations

import threading

import pytest
import torch

from cotrain_compile.errors import OutOfDeviceMemory
from cotrain_compile.machine import Tier
from cotrain_compile.runtime.meter import MemoryMeter


def test_what_a_collective_lets_go_late_is_waited_for(rank_of_two: None) -> None:
    meter = MemoryMeter({Tier.DEVICE: 1000, Tier.HOST: 0})
    held = [torch.empty(800, dtype=torch.uint8)]
    meter.track(held[0], Tier.DEVICE, "all_reduce")
    other = threading.Timer(0.05, held.clear)
    other.start()
    more = torch.empty(900, dtype=torch.uint8)
    meter.track(more, Tier.DEVICE, "mm")
    other.join()
    assert meter.peak_bytes[Tier.DEVICE] == 900
    with pytest.raises(OutOfDeviceMemory, match="at mm_2"):
        meter.track(torch.empty(200, dtype=torch.uint8), Tier.DEVICE, "mm_2")
