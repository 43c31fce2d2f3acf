"""Pipeline devices: what a pipeline knows of the devices of a cluster, one behind the other.

In: a `Cluster`. Out: `PipelineDevices`: the machine of each rank, whose network joins it to the
next one, of which kind its device is, and on which host. No torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from cotrain_compile.cluster.model.description import Cluster
from cotrain_compile.cluster.model.machines import rank_machine
from cotrain_compile.cluster.model.profiles import LayerProfile
from cotrain_compile.cluster.steps.stage_step import Rank
from cotrain_compile.errors import OptionError
from cotrain_compile.machine import Machine, Network


@dataclass(frozen=True)
class PipelineDevices:
    """Devices in order; what the d-th sends to the next one goes over the network of its machine.

    `kinds` are the names of their machines, for a profile that knows several. `hosts` says on which
    host each one is; without, nothing can rest there.
    """

    machines: tuple[Machine, ...]
    kinds: tuple[str, ...] = ()
    hosts: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        if not self.machines or not all(machine.network for machine in self.machines[:-1]):
            raise OptionError(
                "devices in a row are one or more, each with a network to the next, not "
                f"{len(self.machines)} of which {sum(not m.network for m in self.machines)} have "
                "none"
            )

    @property
    def capacity_bytes(self) -> tuple[int, ...]:
        return tuple(machine.device.capacity_bytes for machine in self.machines)

    def ranks(self, profile: LayerProfile) -> tuple[Rank, ...]:
        """One for each device, as many times slower as the profile says of its kind."""
        kinds = self.kinds or ("",) * len(self.machines)
        return tuple(
            Rank(machine, f"device{number}", profile.times_slower([kind]))
            for number, (machine, kind) in enumerate(zip(self.machines, kinds, strict=True))
        )

    def missing_on_hosts(self, nbytes: Sequence[int]) -> int:
        """What the fullest host has too little for so many bytes of each device.

        A host has what its devices have shares of, and they use it together.
        """
        left: Counter[tuple[int, int]] = Counter()
        for host, machine, own in zip(self.hosts, self.machines, nbytes, strict=True):
            left[host] += machine.host.capacity_bytes - own
        return max(0, *(-nbytes for nbytes in left.values()))


def devices_of(cluster: Cluster) -> PipelineDevices:
    """All devices of a cluster in their order, machine by machine."""
    shares = {
        (i, device): rank_machine(group, device)
        for i, group in enumerate(cluster.groups)
        for device in range(group.device_count)
    }
    hops = [*_hops(cluster), None]
    return PipelineDevices(
        tuple(
            shares[place.group, place.device].but(network=hop)
            for place, hop in zip(cluster.devices, hops, strict=True)
        ),
        cluster.kinds,
        tuple((place.group, place.machine) for place in cluster.devices),
    )


def _hops(cluster: Cluster) -> Iterator[Network]:
    """What joins each device to the next one."""
    for here, there in pairwise(cluster.devices):
        near = (here.group, here.machine) == (there.group, there.machine)
        ends = [cluster.groups[place.group] for place in (here, there)]
        known = [path for group in ends if (path := group.peers if near else group.nic)]
        rate = min(path.bytes_per_s for path in known)
        yield Network(rate, max(path.latency_s for path in known))
