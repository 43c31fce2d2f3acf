"""Cluster: groups of equal machines, their devices, switches and networks, as plain data.

In: a JSON file or a preset (`cluster_presets`). Out, for the planners: all devices in order, one
machine with all its spaces and links (`whole_machine`), what one rank has while all are busy
(`rank_machine`), and what a ring of all devices reaches. Rates are per direction. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from cotrain_compile.errors import OptionError, did_you_mean
from cotrain_compile.machine import HostUpdate, Machine, Network, SharedPath, Space, Tier, TierSpec
from cotrain_compile.machine_devices import seen_from
from cotrain_compile.presets import PRESETS, find

FORMAT_VERSION = 1

# What joins the devices of a machine: a network of their own, the PCIe switches, or nothing: then
# what goes from one to another goes through the host's memory.
PeerPath = Literal["nvlink", "switch", "host"]


@dataclass(frozen=True)
class Devices:
    """`count` equal devices of a machine.

    `machine` is one device with its host, as a `Machine` or by the name of a preset, which may be
    followed by changes. Of it count the device and the links; the host is the group's.
    """

    machine: str | Machine
    count: int

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"count of devices must be at least 1, not {self.count}")
        if isinstance(self.machine, Machine):
            if not self.machine.has_one_device:
                raise ValueError(f"machine {self.machine.name} is not one device and its host")
        elif not set(self.machine.split()[:1]) & PRESETS.keys():
            raise ValueError(
                f"no preset is named {self.machine!r}{did_you_mean(self.machine, PRESETS)}; known "
                f"are {', '.join(PRESETS)}"
            )
        else:
            _ = self.one  # the changes behind its name are read

    @cached_property
    def one(self) -> Machine:
        """The device with a host."""
        return self.machine if isinstance(self.machine, Machine) else find(self.machine)


@dataclass(frozen=True)
class Switch:
    """A PCIe switch: the devices below it by number, and what it reaches to the host.

    `has_nic` says whether the network card hangs on it too; elsewhere it hangs on the host.
    """

    devices: tuple[int, ...]
    up_bytes_per_s: float
    has_nic: bool = False

    def __post_init__(self) -> None:
        if len(set(self.devices)) != len(self.devices) or self.up_bytes_per_s <= 0:
            raise ValueError("a switch has different devices and a positive up_bytes_per_s")


@dataclass(frozen=True)
class MachineGroup:
    """`count` equal machines: their host, their devices (none: a CPU machine) and what joins them.

    `host.bytes_per_s` is its memory's rate, which all copies of its devices share. `peers` is what
    one device exchanges with the others of its machine over, as `Network` has it; None where it has
    no others. `nic` is what the whole machine exchanges with other machines over.
    """

    name: str
    count: int
    host: TierSpec
    host_update: HostUpdate
    devices: tuple[Devices, ...] = ()
    switches: tuple[Switch, ...] = ()
    peer_path: PeerPath = "host"
    peers: Network | None = None
    nic: Network | None = None
    source: str = ""

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"group {self.name}: count of machines must be at least 1")
        below = [device for switch in self.switches for device in switch.devices]
        if len(set(below)) != len(below) or not set(below) <= set(range(self.device_count)):
            raise ValueError(
                f"group {self.name}: switches hold devices {below}, which must be different and "
                f"below {self.device_count}"
            )
        if (self.device_count > 1) != (self.peers is not None):
            has = "has peers" if self.peers else "has no peers"
            raise ValueError(
                f"group {self.name} has {self.device_count} devices a machine and {has}; where "
                "there are several, and only there, say in peers what joins them"
            )
        if self.peer_path == "switch" and len(below) != self.device_count:
            raise ValueError(
                f"group {self.name}: peer_path is 'switch', so each device needs its switch"
            )

    @cached_property
    def device_count(self) -> int:
        """Devices of one machine."""
        return sum(devices.count for devices in self.devices)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The name of the machine of each of its devices."""
        return tuple(one.name for one in self.each)

    @cached_property
    def each(self) -> tuple[Machine, ...]:
        """The devices of one machine in order, each as a machine of one device."""
        return tuple(d.one for d in self.devices for _ in range(d.count))


@dataclass(frozen=True)
class Place:
    """Where a device is: the number of its group, of its machine there, and in the machine."""

    group: int
    machine: int
    device: int


@dataclass(frozen=True)
class Cluster:
    """Groups of machines, and where their figures come from."""

    name: str
    groups: tuple[MachineGroup, ...]
    source: str = ""

    def __post_init__(self) -> None:
        names = [group.name for group in self.groups]
        if not names or len(set(names)) != len(names):
            raise ValueError("a cluster has groups of machines, each with a name of its own")
        if not self.devices:
            raise ValueError("a cluster has at least one device")
        without = [group.name for group in self.groups if group.nic is None]
        if without and sum(group.count for group in self.groups) > 1:
            raise ValueError(f"groups {without} need a nic: the cluster has several machines")

    @cached_property
    def devices(self) -> tuple[Place, ...]:
        """All devices, machine by machine."""
        return tuple(self._places())

    def _places(self) -> Iterator[Place]:
        for g, group in enumerate(self.groups):
            for machine in range(group.count):
                for device in range(group.device_count):
                    yield Place(g, machine, device)

    @property
    def capacities_bytes(self) -> tuple[int, ...]:
        """What each device has, in the order of `devices`."""
        return tuple(
            self.groups[place.group].each[place.device].device.capacity_bytes
            for place in self.devices
        )

    @property
    def kinds(self) -> tuple[str, ...]:
        """The name of each device's machine, in the order of `devices`."""
        return tuple(self.groups[place.group].each[place.device].name for place in self.devices)

    @property
    def device_machines(self) -> int:
        """How many machines have devices."""
        return sum(group.count for group in self.groups if group.devices)

    @property
    def cpu_machines(self) -> int:
        """How many machines have none."""
        return sum(group.count for group in self.groups if not group.devices)

    @cached_property
    def ring(self) -> Network | None:
        """What each device sends to the next in a ring of all; None for a single device.

        A ring crosses the network of each machine once, so its slowest part is either the devices'
        own exchange or a machine's network card.
        """
        parts = [group.peers for group in self.groups if group.peers and group.devices]
        if self.device_machines > 1:
            parts += [group.nic for group in self.groups if group.nic and group.devices]
        if not parts:
            return None
        return Network(
            min(part.bytes_per_s for part in parts), max(part.latency_s for part in parts)
        )


def whole_machine(group: MachineGroup, *, peers: bool = True) -> Machine:
    """One machine of the group with all of its devices, in the words of `Machine`.

    Device i is space and processor "device<i>" with links "d2h<i>" and "h2d<i>"; "p2p<i>to<j>" goes
    between devices where `peers` are asked for and joined by more than the host's memory. Links
    share the path of their device, of their switch and of the host's memory.
    """
    if not group.devices:
        raise OptionError(f"group {group.name} has no devices; ask for one that has")
    spaces, processors, links = {}, {}, {}
    paths: list[SharedPath] = []
    for i, one in enumerate(group.each):
        name = f"device{i}"
        spaces[name] = Space(one.device.capacity_bytes)
        processors[name] = replace(one.processors[Tier.DEVICE], space=name)
        links[f"d2h{i}"] = replace(one.d2h, source=name)
        links[f"h2d{i}"] = replace(one.h2d, target=name)
        paths.append(SharedPath((f"d2h{i}", f"h2d{i}"), one.duplex))
    host_rate = max(link.bytes_per_s for link in links.values())
    if len(group.each) > 1:
        paths.append(_path(tuple(links), group.host.bytes_per_s / host_rate))
    to_peers = _peer_links(group) if peers and group.peers else {}
    for name, (i, j) in to_peers.items():
        assert group.peers is not None
        rate, latency_s = group.peers.bytes_per_s, group.peers.latency_s
        links[name] = replace(
            group.each[i].d2h,
            bytes_per_s=rate,
            latency_s=latency_s,
            source=f"device{i}",
            target=f"device{j}",
        )
    paths += _switch_paths(group, to_peers) + _port_paths(group, to_peers)
    spaces[Tier.HOST.value] = Space(group.host.capacity_bytes)
    processors[Tier.HOST.value] = replace(
        group.each[0].processors[Tier.HOST],
        bytes_per_s=group.host.bytes_per_s,
        flops_per_s=group.host.flops_per_s,
        launch_s=group.host.launch_s,
        update=group.host_update,
    )
    return Machine(group.name, spaces, processors, links, tuple(paths), group.source)


def rank_machine(group: MachineGroup, device: int = 0) -> Machine:
    """What the rank on that device has while all of its machine are busy: a machine of one device.

    Its host is an equal share; its links have what is left while every device copies to and from
    the host; its network is that of the machine's devices, or the network card.
    """
    n = group.device_count
    seen = seen_from(whole_machine(group, peers=False), f"device{device}", crowded=n > 1)
    host, update = group.host, group.host_update
    rates = {dtype: rate / n for dtype, rate in host.flops_per_s.items()}
    shared = replace(
        host,
        capacity_bytes=host.capacity_bytes // n,
        bytes_per_s=host.bytes_per_s / n,
        flops_per_s=rates,
    )
    network = group.peers or group.nic
    return seen.but(
        name=f"{group.name}, device {device}",
        host=shared,
        host_update=replace(update, bytes_per_s=update.bytes_per_s / n),
        network=network,
    )


def _peer_links(group: MachineGroup) -> dict[str, tuple[int, int]]:
    if group.peer_path == "host":
        return {}
    every = range(group.device_count)
    return {f"p2p{i}to{j}": (i, j) for i in every for j in every if i != j}


def _switch_paths(group: MachineGroup, to_peers: dict[str, tuple[int, int]]) -> list[SharedPath]:
    """What goes up through a switch shares its way, and so does what comes down."""
    paths = []
    crosses = to_peers if group.peer_path == "switch" else {}
    for switch in group.switches:
        below = set(switch.devices)
        rate = max((group.each[i].d2h.bytes_per_s for i in below), default=0.0)
        up = [f"d2h{i}" for i in switch.devices]
        down = [f"h2d{i}" for i in switch.devices]
        up += [name for name, (i, j) in crosses.items() if i in below and j not in below]
        down += [name for name, (i, j) in crosses.items() if j in below and i not in below]
        for links in (up, down):
            if len(links) > 1:
                paths.append(_path(tuple(links), switch.up_bytes_per_s / rate))
    return paths


def _port_paths(group: MachineGroup, to_peers: dict[str, tuple[int, int]]) -> list[SharedPath]:
    """A device sends to one peer at full rate or to several at a part of it; so it receives."""
    every = range(group.device_count)
    ports = [
        tuple(name for name, ends in to_peers.items() if ends[side] == device)
        for side in (0, 1)
        for device in every
    ]
    return [SharedPath(port, 1.0) for port in ports if len(port) > 1]


def _path(links: tuple[str, ...], together: float) -> SharedPath:
    return SharedPath(links, min(max(together, 1.0), float(len(links))))
