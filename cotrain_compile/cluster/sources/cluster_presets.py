"""Cluster presets: clusters to plan for without owning one. A name in, a `Cluster` out.

Cards, hosts and servers are rows of `presets.tables`; what is added here is how they are joined. A
name may be followed by changes: "8xv100 machines=4 network=25GB". No torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache

from cotrain_compile.cluster.model.description import Cluster, Devices, MachineGroup, Switch
from cotrain_compile.errors import OptionError, did_you_mean
from cotrain_compile.files import load
from cotrain_compile.machine import HostUpdate, Link, Machine, Network, TierSpec, two_tier
from cotrain_compile.presets import ADAMW_BYTES_PER_PARAMETER
from cotrain_compile.presets.tables import HOSTS, SERVERS, Host, Server
from cotrain_compile.support.units import Size

_GB = 10**9
_GIB = 2**30
_TERA = 10**12
# What a round of an exchange takes beside its bytes, on NVLink and over a network card. Assumed.
_ROUND_S = 10e-6
_HOST_LAUNCH_S = 10e-6

_V100_HOST = next(host for host in HOSTS if host.name == "dgx-2")
_CLOUD_HOST = next(host for host in HOSTS if host.name == "server-pcie3")
_SERVERS = {server.name: server for server in SERVERS}


def _host(row: Server | Host) -> tuple[TierSpec, HostUpdate]:
    """A host with its updates, which copies slow down as they share its memory."""
    cards = row.cards if isinstance(row, Server) else 1
    update = row.adam * ADAMW_BYTES_PER_PARAMETER
    demand = update + cards * (row.up + row.down)
    rates = {"float32": row.tflops * _TERA}
    host = TierSpec(row.gb * _GB, row.memory * _GB, rates, _HOST_LAUNCH_S)
    slowdown = max(1.0, demand / row.memory)
    return host, HostUpdate(float(round(update * _GB)), slowdown_while_copying=slowdown)


def _server(name: str) -> MachineGroup:
    """A server of `presets.tables`, whose cards exchange through the host's memory."""
    row = _SERVERS[name]
    host, update = _host(row)
    return MachineGroup(
        name=name,
        count=1,
        host=host,
        host_update=update,
        devices=(Devices(row.card, row.cards),),
        peers=Network(row.ring * _GB, _ROUND_S),
        source=row.source,
    )


def _pairs(count: int, up: float, *, has_nic: bool) -> tuple[Switch, ...]:
    """Devices two by two below a switch that reaches `up` GB/s."""
    return tuple(Switch((i, i + 1), up * _GB, has_nic) for i in range(0, count, 2))


def _rtx4090_box() -> Cluster:
    return Cluster("8xrtx4090", (_server("8xrtx4090"),), "One server of preset_tables.")


def _a100_pair() -> Cluster:
    nic = Network(8 * 25 * _GB * 0.9, _ROUND_S)
    group = replace(
        _server("8xa100"),
        count=2,
        switches=_pairs(8, 24, has_nic=True),
        peer_path="nvlink",
        nic=nic,
    )
    return Cluster(
        "2x8xa100",
        (group,),
        "Two DGX A100. Network: data sheet, eight ConnectX-6 of 200 Gb/s x 0.9 (assumed). Two "
        "cards and a network card below a switch of PCIe 4 x16 with 24 GB/s (assumed).",
    )


def _h100_box() -> Cluster:
    nic = Network(8 * 50 * _GB * 0.9, _ROUND_S)
    return Cluster(
        "8xh100",
        (replace(_server("8xh100"), peer_path="nvlink", nic=nic),),
        "One DGX H100. Network: data sheet, eight ConnectX-7 of 400 Gb/s x 0.9 (assumed).",
    )


def _gh200_pair() -> Cluster:
    nic = Network(2 * 50 * _GB * 0.9, _ROUND_S)
    return Cluster(
        "2xgh200",
        (replace(_server("2xgh200"), peer_path="nvlink", nic=nic),),
        "One GH200 NVL2. Network: a ConnectX-7 of 400 Gb/s a card x 0.9 (assumed).",
    )


def _v100_server() -> Cluster:
    host, update = _host(_V100_HOST._replace(gb=768))
    group = MachineGroup(
        name="8xv100",
        count=1,
        host=host,
        host_update=update,
        devices=(Devices("v100-dgx2", 8),),
        switches=_pairs(8, 12, has_nic=False),
        peer_path="nvlink",
        peers=Network(150 * _GB * 0.8, _ROUND_S),
        nic=Network(12.5 * _GB, _ROUND_S),
        source=f"768 GB, otherwise the host of v100-dgx2: {_V100_HOST.source}",
    )
    return Cluster(
        "8xv100",
        (group,),
        "Cards with six NVLinks of 25 GB/s each way (data sheet) x 0.8 (assumed); two below a "
        "PCIe 3 x16 switch; one network card of 100 Gb/s, as BytePS (OSDI 2020) has it.",
    )


def _v100_with_helpers() -> Cluster:
    host, update = _host(_V100_HOST._replace(gb=256))
    nic = Network(12.5 * _GB, _ROUND_S)
    workers = MachineGroup(
        "v100", 32, host, update, (Devices("v100-dgx2", 1),), nic=nic, source=_V100_HOST.source
    )
    helpers = MachineGroup("cpu", 16, host, update, nic=nic, source=_V100_HOST.source)
    return Cluster(
        "32xv100-16cpu",
        (workers, helpers),
        "The example of BytePS (OSDI 2020), n = 32 and k = 16, at 100 Gb/s. Hosts as of v100-dgx2 "
        "with 256 GB (assumed).",
    )


def _gtx1080ti() -> Machine:
    host, update = _host(_V100_HOST._replace(gb=64))
    way = Link(11.5 * _GIB, 10e-6)
    return two_tier(
        name="gtx1080ti",
        device=TierSpec(11 * _GIB, 484 * _GB * 0.85, {"float32": 11.34 * 0.7 * _TERA}, 5e-6),
        host=host,
        h2d=way,
        d2h=way,
        host_update=update,
        duplex=1.8,
        source="GTX 1080 Ti data sheet: 11 GB, 484 GB/s x 0.85, 3584 cores x 2 x 1.582 GHz = "
        "11.34 TFLOP/s fp32 x 0.7. Link: 11.5 GiB/s, Harmony's default. Duplex and latencies: "
        "assumed.",
        issue_s=26e-6,
        fuses_updates=True,
        runs_ahead=True,
    )


def _gtx1080ti_box() -> Cluster:
    host, update = _host(_V100_HOST._replace(gb=384, memory=115, adam=1.75))
    group = MachineGroup(
        name="4xgtx1080ti",
        count=1,
        host=host,
        host_update=update,
        devices=(Devices(_gtx1080ti(), 4),),
        switches=(Switch((0, 1, 2, 3), 11.5 * _GIB),),
        peer_path="switch",
        peers=Network(8.2 * _GIB, _ROUND_S),
        source="384 GB (assumed) of 8 channels DDR4-2400 = 153.6 GB/s x 0.75; host update: 10/2.57 "
        "G parameters/s of ZeRO-Offload's table 4 x 0.45, the ratio of memory rates is 0.6 "
        "(assumed).",
    )
    return Cluster(
        "4xgtx1080ti",
        (group,),
        "Harmony's server (VLDB 2022): its model gives each of N cards an N-th of 11.5 GiB/s to "
        "the host, and 8.2 GiB/s between cards.",
    )


def _mixed_box() -> Cluster:
    mixed = (Devices("rtx4090", 4), Devices("a6000", 4))
    group = replace(_server("8xrtx4090"), name="24 and 48 GB", devices=mixed)
    return Cluster(
        "4xrtx4090-4xa6000",
        (group,),
        "The host of 8xrtx4090 with four cards of 24 GB and four of 48 GB; exchanges as there.",
    )


def _t4_machines() -> Cluster:
    host, update = _host(_CLOUD_HOST._replace(gb=64))
    group = MachineGroup(
        "t4", 8, host, update, (Devices("t4", 1),), nic=Network(1.25 * _GB, 50e-6),
        source=f"64 GB (assumed), otherwise the host of v100-16: {_CLOUD_HOST.source}",
    )  # fmt: skip
    return Cluster("8xt4", (group,), "Eight machines of one T4 with Ethernet of 10 Gb/s, rounds of "
                   "50 us (assumed).")  # fmt: skip


def _rtx3090_box() -> Cluster:
    four = (Devices("rtx3090", 4),)
    group = replace(_server("8xrtx4090"), name="4xrtx3090", devices=four)
    return Cluster("4xrtx3090", (group,), "The host of 8xrtx4090; exchanges as there.")


def _a100_and_v100() -> Cluster:
    nic = Network(12.5 * _GB, _ROUND_S)
    a100 = replace(_server("8xa100"), name="a100", devices=(Devices("a100-40", 4),), nic=nic)
    (eight,) = _v100_server().groups
    four = (Devices("v100-dgx2", 4),)
    pairs = _pairs(4, 12, has_nic=False)
    v100 = replace(eight, name="v100", devices=four, switches=pairs)
    return Cluster(
        "4xa100-4xv100",
        (replace(a100, peer_path="nvlink"), replace(v100, nic=nic)),
        "Half of a DGX A100 with cards of 40 GB, and half of 8xv100; 100 Gb/s between both.",
    )


_MAKERS: Mapping[str, Callable[[], Cluster]] = {
    "8xrtx4090": _rtx4090_box,
    "2x8xa100": _a100_pair,
    "8xh100": _h100_box,
    "2xgh200": _gh200_pair,
    "8xv100": _v100_server,
    "32xv100-16cpu": _v100_with_helpers,
    "4xgtx1080ti": _gtx1080ti_box,
    "4xrtx4090-4xa6000": _mixed_box,
    "4xrtx3090": _rtx3090_box,
    "8xt4": _t4_machines,
    "4xa100-4xv100": _a100_and_v100,
}
CLUSTERS = tuple(_MAKERS)


@cache
def preset(name: str) -> Cluster:
    """The cluster of that name, one of `CLUSTERS`."""
    return _MAKERS[name]()


def find_cluster(name_or_path: str) -> Cluster:
    """The cluster of that name, or the one in that JSON file; changed as the words after it say.

    Raises:
        OptionError: neither a known name nor a file, or a change that is none.
        FormatError: the file is not a cluster.
    """
    if name_or_path in _MAKERS:
        return preset(name_or_path)
    if os.path.isfile(name_or_path):
        return load(name_or_path, Cluster)
    base, *changes = name_or_path.split() or [""]
    if changes:
        return _changed(find_cluster(base), changes)
    raise OptionError(
        f"no cluster named {name_or_path!r} and no such file"
        f"{did_you_mean(name_or_path, CLUSTERS)}; known are {', '.join(CLUSTERS)}"
    )


def _changed(cluster: Cluster, changes: Sequence[str]) -> Cluster:
    for change in changes:
        key, _, value = change.partition("=")
        if key == "machines":
            cluster = _with_machines(cluster, value)
        elif key == "network":
            cluster = _with_network(cluster, value)
        else:
            raise OptionError(f"{change!r} after a cluster's name is none of machines=, network=")
    source = f"{cluster.source} Changed by hand: {', '.join(changes)}.".strip()
    return replace(cluster, source=source)


def _with_machines(cluster: Cluster, count: str) -> Cluster:
    """So many machines with devices, in a cluster whose machines with devices are all alike."""
    worked = [group for group in cluster.groups if group.devices]
    if not count.isdecimal() or int(count) < 1 or len(worked) != 1:
        raise OptionError(f"machines={count}: give a number of machines of one kind, as machines=4")
    if int(count) > 1 and worked[0].nic is None:
        raise OptionError(
            f"machines={count}: {cluster.name} says nothing of a network; put network=12.5GB before"
        )
    return _each(cluster, lambda g: replace(g, count=int(count)) if g.devices else g)


def _with_network(cluster: Cluster, size: str) -> Cluster:
    try:
        nbytes = Size.parse(size).nbytes
    except ValueError:
        nbytes = None
    if not nbytes:
        raise OptionError(f"network={size}: give bytes a second of a network card, as 12.5GB")
    nic = Network(nbytes, _ROUND_S)
    return _each(cluster, lambda g: replace(g, nic=nic))


def _each(cluster: Cluster, change: Callable[[MachineGroup], MachineGroup]) -> Cluster:
    return replace(cluster, groups=tuple(change(group) for group in cluster.groups))
