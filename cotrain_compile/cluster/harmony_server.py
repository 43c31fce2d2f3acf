"""The server that Harmony plans for, from a cluster's description.

In: a group of machines. Out: the `Server` that one of them is: what all of its devices together
reach to and from the host's memory, what one of them reaches, and what goes between them.
"""

from __future__ import annotations

from cotrain_compile.cluster.description import MachineGroup
from cotrain_compile.cluster.harmony_lanes import Server
from cotrain_compile.errors import OptionError


def server_of(group: MachineGroup) -> Server:
    """One machine of `group`; its smallest device is the cap of all.

    Copies in both directions share the host's memory, half of its rate for each; so do updates for
    different devices.

    Raises:
        OptionError: the machines have no devices.
    """
    if not group.devices:
        raise OptionError(f"machines of {group.name} have no devices; plan for those that have")
    links = [min(one.h2d.bytes_per_s, one.d2h.bytes_per_s) for one in group.each]
    slowest = min(links)
    return Server(
        devices=group.device_count,
        cap_bytes=min(one.device.capacity_bytes for one in group.each),
        swap_bytes_per_s=min(_to_host(group, links), group.host.bytes_per_s / 2),
        link_bytes_per_s=slowest,
        peer_bytes_per_s=group.peers.bytes_per_s if group.peers else slowest,
        message_bytes_per_s=group.host.bytes_per_s,
        update_share=1 / group.device_count,
    )


def _to_host(group: MachineGroup, links: list[float]) -> float:
    """What all devices reach together in one direction, through their switches."""
    below = {device for switch in group.switches for device in switch.devices}
    direct = sum(rate for device, rate in enumerate(links) if device not in below)
    return direct + sum(
        min(switch.up_bytes_per_s, sum(links[device] for device in switch.devices))
        for switch in group.switches
    )
