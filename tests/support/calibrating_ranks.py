"""Calibration on one of several ranks, as torchrun starts them; run in processes of their own."""

from __future__ import annotations

import os
from unittest import mock

import torch

from cotrain_compile.machine import Network
from cotrain_compile.runtime.calibrate.environment import read_environment
from cotrain_compile.runtime.calibrate.link_bench import CpuBench, Sizes
from cotrain_compile.runtime.calibrate.network_bench import (
    measured_network,
    network_remark,
    ranks_here,
    ranks_of_torchrun,
)


def calibrated(rank: int) -> tuple[Network | None, str, int, int]:
    """The network, what is said of it, and this rank's share of the memory, beside all of it."""
    sizes = Sizes(small_copy_bytes=64, exchange_bytes=1 << 20, repeats=3)
    as_torchrun = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    with mock.patch.dict(os.environ, as_torchrun), ranks_of_torchrun("cpu") as found:
        assert found == rank
        network = measured_network(CpuBench(1 << 30), torch.device("cpu"), sizes)
        whole = read_environment()
        shared = whole.shared_by(ranks_here())
        told = network_remark(network)
    return network, told, shared.usable_memory_bytes, whole.usable_memory_bytes
