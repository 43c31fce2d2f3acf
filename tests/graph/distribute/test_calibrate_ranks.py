"""Ranks that calibrate together find one network, which their machine then has."""

from __future__ import annotations

from tests.support.calibrating_ranks import calibrated
from tests.support.ranks import Ranks


def test_ranks_measure_the_network_between_them(two_ranks: Ranks) -> None:
    (network, told, half, whole), (other, *_) = two_ranks.run(calibrated)
    assert network is not None
    assert network == other
    assert network.latency_s > 0
    assert network.scatter >= 1
    assert f"{network.bytes_per_s / 1e9:.2f} GB/s" in told
    assert half == whole // 2
