"""Pipeline devices: what a pipeline knows of the devices of a cluster, one behind the other.

In: a `Cluster`. Out: `PipelineDevices`: memory and its rate of each device, what joins it to the
next one, and of which kind it is. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from cotrain_compile.cluster.description import Cluster
from cotrain_compile.cluster.profiles import LayerProfile
from cotrain_compile.errors import OptionError
from cotrain_compile.machine import Network


@dataclass(frozen=True)
class PipelineDevices:
    """Devices in order: their memory, its rate, and what the d-th sends to the next one over.

    `kinds` are the names of their machines, for a profile that knows several.
    """

    capacity_bytes: tuple[int, ...]
    memory_bytes_per_s: tuple[float, ...]
    hops: tuple[Network, ...]
    kinds: tuple[str, ...] = ()

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


def devices_of(cluster: Cluster) -> PipelineDevices:
    """All devices of a cluster in their order, machine by machine."""
    each = [cluster.groups[place.group].each[place.device].device for place in cluster.devices]
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
    )
