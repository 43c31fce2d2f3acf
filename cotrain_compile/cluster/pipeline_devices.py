"""Pipeline devices: what a pipeline knows of the devices of a cluster, one behind the other.

In: a `Cluster`. Out: `PipelineDevices`: memory and its rate of each device, what joins it to the
next one, of which kind it is, and its share of the host. No torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from cotrain_compile.cluster.description import Cluster
from cotrain_compile.cluster.host_share import HostShare, host_share
from cotrain_compile.cluster.profiles import LayerProfile
from cotrain_compile.errors import OptionError
from cotrain_compile.machine import Network


@dataclass(frozen=True)
class PipelineDevices:
    """Devices in order: their memory, its rate, and what the d-th sends to the next one over.

    `kinds` are the names of their machines, for a profile that knows several. `hosts` has each
    one's share of its host, and `machines` which host that is; without, nothing can rest there.
    """

    capacity_bytes: tuple[int, ...]
    memory_bytes_per_s: tuple[float, ...]
    hops: tuple[Network, ...]
    kinds: tuple[str, ...] = ()
    hosts: tuple[HostShare, ...] = ()
    machines: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        count = len(self.capacity_bytes)
        if not count or len(self.memory_bytes_per_s) != count or len(self.hops) != count - 1:
            raise OptionError(
                f"{count} devices in a row have {count} memory rates and one hop fewer, not "
                f"{len(self.memory_bytes_per_s)} and {len(self.hops)}"
            )

    def slowness(self, profile: LayerProfile) -> tuple[float, ...]:
        """How many times as long as the profile says each device takes."""
        kinds = self.kinds or ("",) * len(self.capacity_bytes)
        return tuple(profile.times_slower([kind]) for kind in kinds)

    def missing_on_hosts(self, nbytes: Sequence[int]) -> int:
        """What the fullest host has too little for so many bytes of each device.

        A host has what its devices have shares of, and they use it together.
        """
        left: Counter[tuple[int, int]] = Counter()
        for machine, host, own in zip(self.machines, self.hosts, nbytes, strict=True):
            left[machine] += host.capacity_bytes - own
        return max(0, *(-nbytes for nbytes in left.values()))


def devices_of(cluster: Cluster) -> PipelineDevices:
    """All devices of a cluster in their order, machine by machine."""
    each = [cluster.groups[place.group].each[place.device].device for place in cluster.devices]
    shares = {
        (i, device): host_share(group, device)
        for i, group in enumerate(cluster.groups)
        for device in range(group.device_count)
    }
    hops = []
    for here, there in pairwise(cluster.devices):
        near = (here.group, here.machine) == (there.group, there.machine)
        ends = [cluster.groups[place.group] for place in (here, there)]
        paths = [group.peers if near else group.nic for group in ends]
        known = [path for path in paths if path]
        rate = min(path.bytes_per_s for path in known)
        hops.append(Network(rate, max(path.latency_s for path in known)))
    return PipelineDevices(
        tuple(device.capacity_bytes for device in each),
        tuple(device.bytes_per_s for device in each),
        tuple(hops),
        cluster.kinds,
        tuple(shares[place.group, place.device] for place in cluster.devices),
        tuple((place.group, place.machine) for place in cluster.devices),
    )
