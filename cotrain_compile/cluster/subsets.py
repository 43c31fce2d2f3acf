"""Subsets: the first devices of a cluster, as a cluster of their own.

A strategy need not use all devices: where an exchange with one more takes longer than it saves, the
others stay idle. In: a `Cluster` and a number of devices. Out: a `Cluster` with so many. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from cotrain_compile.cluster.description import Cluster, Devices, MachineGroup
from cotrain_compile.errors import OptionError


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
