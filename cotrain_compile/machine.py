"""Machine: what a step runs on, as numbers: memory tiers, links, the host's update rate.

A machine comes from a preset, from a JSON file, or from `cotrain-compile calibrate`. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

FORMAT_VERSION = 1

# No bytes, seconds, flops or rates of anything real are more, and their products are still floats.
LARGEST = 10**30
# About thirty years: no latency is longer.
LONGEST_S = 1e9

# Where it is not measured: an op takes for an element as long as a fused loop for so many bytes,
# and the system clears and maps a page of 4 KiB in two microseconds.
ASSUMED_BYTES_AN_ELEMENT = 6.5
ASSUMED_FRESH_BYTES_PER_S = 2e9


class Tier(StrEnum):
    """A memory space and the processor beside it."""

    DEVICE = "device"
    HOST = "host"


@dataclass(frozen=True)
class TierSpec:
    """One tier: its capacity and the roofline of the processor that works on it.

    `flops_per_s` is the achieved (not the advertised) matrix rate by dtype name ("float32",
    "bfloat16"); a dtype that is absent runs at the lowest rate given. `launch_s` is the least time
    an op takes however little it does.
    """

    capacity_bytes: int
    bytes_per_s: float
    flops_per_s: Mapping[str, float]
    launch_s: float = 0.0

    def __post_init__(self) -> None:
        if self.capacity_bytes <= 0 or self.bytes_per_s <= 0 or self.launch_s < 0:
            raise ValueError(
                "capacity_bytes and bytes_per_s must be positive, launch_s not negative"
            )
        if not self.flops_per_s or min(self.flops_per_s.values()) <= 0:
            raise ValueError("flops_per_s needs at least one dtype, every rate positive")
        _refuse_absurd("capacity_bytes", self.capacity_bytes)
        _refuse_absurd("bytes_per_s", self.bytes_per_s)
        for dtype, rate in self.flops_per_s.items():
            _refuse_absurd(f"flops_per_s of {dtype}", rate)
        _refuse_long("launch_s", self.launch_s)

    def flops_per_s_of(self, dtype: str) -> float:
        """The rate for `dtype`, or the lowest known one."""
        return self.flops_per_s.get(dtype, min(self.flops_per_s.values()))


@dataclass(frozen=True)
class Link:
    """One direction between two tiers."""

    bytes_per_s: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        if self.bytes_per_s <= 0 or self.latency_s < 0:
            raise ValueError("bytes_per_s must be positive, latency_s not negative")
        _refuse_absurd("bytes_per_s", self.bytes_per_s)
        _refuse_long("latency_s", self.latency_s)

    def seconds(self, nbytes: int) -> float:
        """Time of one copy of `nbytes` that has the link to itself."""
        return self.latency_s + nbytes / self.bytes_per_s


@dataclass(frozen=True)
class HostUpdate:
    """How fast the host runs optimizer updates.

    `bytes_per_s` counts every byte a fused update reads or writes. `slowdown_while_copying` is the
    factor (at least 1) by which an update slows down while a link is busy: both share the host's
    memory bandwidth. Where ops run one by one, `elements_per_s` of any dtype are read or written in
    parts that stay in the cache, and large results are made in memory that the system hands out at
    `fresh_bytes_per_s`; 0 where nobody has measured it.
    """

    bytes_per_s: float
    workers: int = 1
    slowdown_while_copying: float = 1.0
    elements_per_s: float = 0.0
    fresh_bytes_per_s: float = 0.0

    @property
    def seconds_per_element(self) -> float:
        """Of what an op reads or writes."""
        return 1.0 / (self.elements_per_s or self.bytes_per_s / ASSUMED_BYTES_AN_ELEMENT)

    @property
    def seconds_per_fresh_byte(self) -> float:
        """Of a large result."""
        return 1.0 / (self.fresh_bytes_per_s or min(self.bytes_per_s, ASSUMED_FRESH_BYTES_PER_S))

    def __post_init__(self) -> None:
        if self.bytes_per_s <= 0 or self.workers < 1 or self.slowdown_while_copying < 1:
            raise ValueError(
                "bytes_per_s must be positive, workers and slowdown_while_copying at least 1"
            )
        for name in ("bytes_per_s", "workers", "slowdown_while_copying"):
            _refuse_absurd(name, getattr(self, name))
        for name in ("elements_per_s", "fresh_bytes_per_s"):
            _refuse_absurd(name, getattr(self, name) or 1.0)


@dataclass(frozen=True)
class Machine:
    """A device with its host.

    `duplex` is what both link directions together reach, as a multiple of the faster one: 2.0 when
    they do not disturb each other, 1.0 when they share one path. `issue_s` is how long the device
    stands still for each copy or host update that it starts and waits for: 0 where that is
    asynchronous. `fuses_updates` says whether the device updates a parameter in one loop, as
    compiled code does, or op by op. `source` says where the figures come from.
    """

    name: str
    device: TierSpec
    host: TierSpec
    h2d: Link
    d2h: Link
    host_update: HostUpdate
    duplex: float = 2.0
    source: str = ""
    issue_s: float = 0.0
    fuses_updates: bool = False

    def __post_init__(self) -> None:
        if not 1.0 <= self.duplex <= 2.0:
            raise ValueError("duplex must lie between 1.0 (shared) and 2.0 (independent)")
        if self.issue_s < 0:
            raise ValueError("issue_s must not be negative")
        _refuse_long("issue_s", self.issue_s)

    def tier(self, tier: Tier) -> TierSpec:
        return self.device if tier is Tier.DEVICE else self.host


def _refuse_absurd(name: str, figure: float) -> None:
    """At one byte a second all bytes that there are take a time that can still be added up."""
    if not 1 <= figure <= LARGEST:
        # Not as a float: a whole number in a file may be more than one can hold.
        raise ValueError(f"{name}: no computer has {figure}; figures go from 1 to 1e30")


def _refuse_long(name: str, seconds: float) -> None:
    if not seconds <= LONGEST_S:
        raise ValueError(f"{name}: no computer takes {seconds} s; seconds go from 0 to 1e9")
