"""Machine files: machines as earlier versions of the program have saved them, read and made new.

Version 1 knew one device and its host, and named their parts as `two_tier` does. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from cotrain_compile.machine import Machine, two_tier
from cotrain_compile.machine.parts import HostUpdate, Link, TierSpec


@dataclass(frozen=True)
class _Link1:
    bytes_per_s: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        self.upgraded()

    def upgraded(self) -> Link:
        return Link(self.bytes_per_s, self.latency_s)


@dataclass(frozen=True)
class Machine1:
    """A machine as format version 1 has it."""

    name: str
    device: TierSpec
    host: TierSpec
    h2d: _Link1
    d2h: _Link1
    host_update: HostUpdate
    duplex: float = 2.0
    source: str = ""
    issue_s: float = 0.0
    fuses_updates: bool = False

    def __post_init__(self) -> None:
        self.upgraded()

    def upgraded(self) -> Machine:
        """The same machine today."""
        return two_tier(
            name=self.name,
            device=self.device,
            host=self.host,
            h2d=self.h2d.upgraded(),
            d2h=self.d2h.upgraded(),
            host_update=self.host_update,
            duplex=self.duplex,
            source=self.source,
            issue_s=self.issue_s,
            fuses_updates=self.fuses_updates,
        )
