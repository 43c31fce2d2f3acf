"""Cluster machines: what one machine of a group is, and each of its ranks, as a `Machine`.

In: a `MachineGroup` or a `Cluster`. Out: one machine with all its spaces, links and shared paths; a
machine of one device and its host for each rank, with what that has while all are busy. A rank has
an equal share of its host: of memory, of its rate, of updates, and of the way to it. No torch.

Device i of several is space and processor "device<i>", its links are "d2h<i>" and "h2d<i>"; the
host is as in `two_tier`. `side_by_side` makes such a machine, `seen_from` is what one device has.
"""

from __future__ import annotations

from dataclasses import replace

from cotrain_compile.cluster.model.description import Cluster, MachineGroup
from cotrain_compile.errors import OptionError
from cotrain_compile.machine import (
    HostUpdate,
    Link,
    Machine,
    Network,
    SharedPath,
    Space,
    Tier,
    TierSpec,
    two_tier,
)


def side_by_side(machine: Machine, count: int, *, together: float = 1.0) -> Machine:
    """`count` devices like that of `machine`, with one host whose memory and link they share.

    Copies to several devices get `together` times what one gets (1.0: one link for all; `count`:
    a link for each), and so do copies from several; both directions as `machine.duplex` says.
    """
    if count < 1:
        raise ValueError(f"a machine has at least one device, not {count}")
    names = [f"device{i}" for i in range(count)]
    down, up = ([f"{way}{i}" for i in range(count)] for way in ("d2h", "h2d"))
    device, host = machine.processors[Tier.DEVICE], machine.processors[Tier.HOST]
    paths = [SharedPath(pair, machine.duplex) for pair in zip(down, up, strict=True)]
    if count > 1:
        paths += [SharedPath(tuple(same), together) for same in (down, up)]
        paths.append(SharedPath((*down, *up), machine.duplex * together))
    return Machine(
        name=f"{count} x {machine.name}",
        spaces={
            **{name: Space(machine.device.capacity_bytes) for name in names},
            "host": machine.spaces[Tier.HOST],
        },
        processors={**{name: replace(device, space=name) for name in names}, "host": host},
        links={
            **{a: replace(machine.d2h, source=b) for a, b in zip(down, names, strict=True)},
            **{a: replace(machine.h2d, target=b) for a, b in zip(up, names, strict=True)},
        },
        shared_paths=tuple(paths),
        source=machine.source,
        rates=machine.rates,
        compute_capability=machine.compute_capability,
    ).with_disk(machine.disk)


def seen_from(machine: Machine, device: str, *, crowded: bool = False) -> Machine:
    """The device in space `device` with the host, as a machine of one device.

    Where it is `crowded`, its links have what is left of them while all others are busy.
    """
    down, up = machine.link_between(device, Tier.HOST), machine.link_between(Tier.HOST, device)
    busy = tuple(machine.links) if crowded else ()
    d2h, h2d = (
        replace(link, bytes_per_s=link.bytes_per_s / machine.slowdown(name, busy))
        for name, link in ((down, machine.links[down]), (up, machine.links[up]))
    )
    works = next(p for p in machine.processors.values() if p.space == device)
    update = next(p.update for p in machine.processors.values() if p.space == Tier.HOST)
    if update is None:
        raise ValueError(f"the host of machine {machine.name} says nothing of its updates")
    one = two_tier(
        name=f"{machine.name}, {device}",
        device=machine.tier(device),
        host=machine.tier(Tier.HOST),
        h2d=h2d,
        d2h=d2h,
        host_update=update,
        duplex=2.0 if crowded else _duplex(machine, down, up),
        source=machine.source,
        issue_s=works.issue_s,
        fuses_updates=works.fuses_updates,
        runs_ahead=works.runs_ahead,
        rates=machine.rates,
    )
    return one.but(compute_capability=machine.compute_capability).with_disk(machine.disk)


def _duplex(machine: Machine, down: str, up: str) -> float:
    """What both links reach together while all others are idle, as a multiple of one."""
    paths = (path for path in machine.shared_paths if {down, up} <= set(path.links))
    return min((path.together for path in paths if path.together < 2.0), default=2.0)


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


def machines_by_kind(cluster: Cluster) -> dict[str, Machine]:
    """What a rank on each kind of device has, by the name of the kind's machine.

    Where a kind is in several places, the less of all, figure by figure.
    """
    found: dict[str, Machine] = {}
    for group in cluster.groups:
        for device, kind in enumerate(group.kinds):
            own = rank_machine(group, device)
            found[kind] = slower_of(own, found[kind]) if kind in found else own
    return found


def beside_copies(update: HostUpdate) -> float:
    """The rate of updates while a link is busy, which they are slowed by."""
    return update.bytes_per_s / update.slowdown_while_copying


def swapping_machine(group: MachineGroup) -> Machine:
    """What each device of a machine has where all swap in one direction at a time.

    Its smallest device is that of all. Copies in both directions share the host's memory, half of
    its rate for each, and each direction the switches; latencies count in none.

    Raises:
        OptionError: the machines have no devices.
    """
    if not group.devices:
        raise OptionError(f"machines of {group.name} have no devices; plan for those that have")
    links = [min(one.h2d.bytes_per_s, one.d2h.bytes_per_s) for one in group.each]
    slowest = min(links)
    together = min(_to_host(group, links), group.host.bytes_per_s / 2)
    link = Link(min(slowest, together / group.device_count))
    smallest = min(group.each, key=lambda one: one.device.capacity_bytes)
    peers = Network(group.peers.bytes_per_s if group.peers else slowest)
    return smallest.but(h2d=link, d2h=link, duplex=2.0, network=peers)


def _to_host(group: MachineGroup, links: list[float]) -> float:
    """What all devices reach together in one direction, through their switches."""
    below = {device for switch in group.switches for device in switch.devices}
    direct = sum(rate for device, rate in enumerate(links) if device not in below)
    return direct + sum(
        min(switch.up_bytes_per_s, sum(links[device] for device in switch.devices))
        for switch in group.switches
    )


def slower_of(one: Machine, other: Machine) -> Machine:
    """The less of both, figure by figure; the name of the first."""
    update = min(one.host_update, other.host_update, key=beside_copies)
    return one.but(
        device=_less(one.device, other.device),
        host=_less(one.host, other.host),
        h2d=_slower_link(one.h2d, other.h2d),
        d2h=_slower_link(one.d2h, other.d2h),
        host_update=update,
    )


def _less(one: TierSpec, other: TierSpec) -> TierSpec:
    return replace(
        one,
        capacity_bytes=min(one.capacity_bytes, other.capacity_bytes),
        bytes_per_s=min(one.bytes_per_s, other.bytes_per_s),
    )


def _slower_link(one: Link, other: Link) -> Link:
    rate = min(one.bytes_per_s, other.bytes_per_s)
    return replace(one, bytes_per_s=rate, latency_s=max(one.latency_s, other.latency_s))


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
