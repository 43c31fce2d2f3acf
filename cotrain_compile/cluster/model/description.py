"""Cluster: groups of equal machines, their devices, switches and networks, as plain data.

In: a JSON file or a preset (`cluster_presets`). Out, for the planners: all devices in order, what a
ring of all of them reaches, and the first so many of them as a cluster of their own, for a strategy
need not use all: where an exchange with one more takes longer than it saves, the others stay idle.
Rates are per direction. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Literal

from cotrain_compile.errors import OptionError, did_you_mean
from cotrain_compile.machine import HostUpdate, Machine, Network, TierSpec, default_budget
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
        """The device with a host. Of its memory it has what a step gets by default.

        So whoever plans for the cluster plans for what a compiled step may take there.
        """
        whole = self.machine if isinstance(self.machine, Machine) else find(self.machine)
        given = replace(whole.device, capacity_bytes=default_budget.of_machine(whole))
        return whole.but(device=given)


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
class DevicePlace:
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
    def devices(self) -> tuple[DevicePlace, ...]:
        """All devices, machine by machine."""
        return tuple(self._places())

    def _places(self) -> Iterator[DevicePlace]:
        for g, group in enumerate(self.groups):
            for machine in range(group.count):
                for device in range(group.device_count):
                    yield DevicePlace(g, machine, device)

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
            min(part.bytes_per_s for part in parts),
            max(part.latency_s for part in parts),
            max(part.scatter for part in parts),
        )


def fastest_first(cluster: Cluster) -> Cluster:
    """The same groups, the fastest devices in front and CPU machines last, whatever their order,
    and so the devices within each machine.

    Strategies take the first devices; what they find does not depend on the order in a file.
    """
    return replace(cluster, groups=tuple(sorted(map(_ordered, cluster.groups), key=_by_speed)))


def _ordered(group: MachineGroup) -> MachineGroup:
    """Its fastest devices first, each below the switch that it is below."""
    starts = [0, *accumulate(devices.count for devices in group.devices)]
    order = sorted(range(len(group.devices)), key=lambda i: _speed(group.devices[i].one))
    if order == sorted(order):
        return group
    places = [place for i in order for place in range(starts[i], starts[i + 1])]
    new = {place: number for number, place in enumerate(places)}
    switches = (
        replace(switch, devices=tuple(sorted(new[place] for place in switch.devices)))
        for switch in group.switches
    )
    return replace(
        group,
        devices=tuple(group.devices[i] for i in order),
        switches=tuple(sorted(switches, key=lambda switch: switch.devices)),
    )


def _speed(machine: Machine) -> tuple[float, float, int, str]:
    """Least for the fastest: what it computes, its memory's rate, its memory."""
    one = machine.device
    return -max(one.flops_per_s.values()), -one.bytes_per_s, -one.capacity_bytes, machine.name


def _by_speed(group: MachineGroup) -> tuple[bool, float, float, int, str]:
    """By the slowest of its devices."""
    flops_per_s, bytes_per_s, capacity_bytes, _ = max(
        map(_speed, group.each), default=(0.0, 0.0, 0, "")
    )
    return not group.devices, flops_per_s, bytes_per_s, capacity_bytes, group.name


def first_devices(cluster: Cluster, count: int) -> Cluster:
    """The first `count` devices, machine by machine, and all CPU machines.

    Raises:
        OptionError: the cluster does not have so many.
    """
    have = len(cluster.devices)
    if not 1 <= count <= have:
        raise OptionError(f"cluster {cluster.name} has 1 to {have} devices to take, not {count}")
    return cluster if count == have else replace(cluster, groups=tuple(_groups(cluster, count)))


def _groups(cluster: Cluster, left: int) -> Iterator[MachineGroup]:
    for group in cluster.groups:
        if not group.devices:
            yield group
            continue
        whole, part = divmod(min(left, group.count * group.device_count), group.device_count)
        left -= whole * group.device_count + part
        if whole:
            yield replace(group, count=whole)
        if part:
            name = f"{group.name}, first {part}" if whole else group.name
            yield replace(first_of_machine(group, part), name=name, count=1)


def first_of_machine(group: MachineGroup, count: int) -> MachineGroup:
    """Machines that have the first `count` devices of each of `group`."""
    switches = tuple(
        replace(switch, devices=tuple(device for device in switch.devices if device < count))
        for switch in group.switches
    )
    return replace(
        group,
        devices=tuple(_first_of(group.devices, count)),
        switches=tuple(switch for switch in switches if switch.devices or switch.has_nic),
        peers=group.peers if count > 1 else None,
    )


def _first_of(devices: Sequence[Devices], left: int) -> Iterator[Devices]:
    for each in devices:
        if left > 0:
            yield replace(each, count=min(each.count, left))
        left -= each.count
