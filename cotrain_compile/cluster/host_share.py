"""Host share: what a rank has of its machine's host, while all devices of the machine are busy.

In: a `Cluster`. Out: a `HostShare` for each kind of device: an equal part of the host's memory, of
its memory's rate and of its updates, and what is left of the way to it. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from cotrain_compile.cluster.description import Cluster, MachineGroup, rank_machine
from cotrain_compile.machine import Link

# Adding to what rests on the host reads both and writes one of them.
_ADD_TOUCHES = 3


@dataclass(frozen=True)
class HostShare:
    """Memory, ways and rates of one rank; updates are those beside copies, the slower ones."""

    capacity_bytes: int
    down: Link
    up: Link
    bytes_per_s: float
    update_bytes_per_s: float

    def down_s(self, nbytes: float) -> float:
        """From the device to the host."""
        return _copy_s(self.down, nbytes)

    def up_s(self, nbytes: float) -> float:
        return _copy_s(self.up, nbytes)

    def add_s(self, nbytes: float) -> float:
        """To add so many bytes to as many that rest there."""
        return _ADD_TOUCHES * nbytes / self.bytes_per_s

    def update_s(self, touched_bytes: float) -> float:
        """An update that reads and writes so many bytes."""
        return touched_bytes / self.update_bytes_per_s

    def slower_of(self, other: HostShare) -> HostShare:
        """The less of both, figure by figure."""
        return HostShare(
            min(self.capacity_bytes, other.capacity_bytes),
            _slower(self.down, other.down),
            _slower(self.up, other.up),
            min(self.bytes_per_s, other.bytes_per_s),
            min(self.update_bytes_per_s, other.update_bytes_per_s),
        )


def host_share(group: MachineGroup, device: int) -> HostShare:
    """That of the rank on a device of `group`."""
    own = rank_machine(group, device)
    update = own.host_update
    return HostShare(
        own.host.capacity_bytes,
        own.d2h,
        own.h2d,
        own.host.bytes_per_s,
        update.bytes_per_s / update.slowdown_while_copying,
    )


def host_shares(cluster: Cluster) -> dict[str, HostShare]:
    """By the name of each kind's machine; where a kind is in several groups, the slowest."""
    shares: dict[str, HostShare] = {}
    for group in cluster.groups:
        for device, kind in enumerate(group.kinds):
            own = host_share(group, device)
            shares[kind] = own.slower_of(shares.get(kind, own))
    return shares


def _copy_s(link: Link, nbytes: float) -> float:
    return nbytes / link.bytes_per_s + link.latency_s if nbytes else 0.0


def _slower(one: Link, other: Link) -> Link:
    return Link(
        min(one.bytes_per_s, other.bytes_per_s),
        max(one.latency_s, other.latency_s),
        source=one.source,
        target=one.target,
    )
