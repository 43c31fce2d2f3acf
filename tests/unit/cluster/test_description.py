"""Clusters: presets and files, one whole machine, and what one rank has of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from cotrain_compile.cluster.model.description import (
    Cluster,
    DevicePlace,
    Devices,
    MachineGroup,
    Switch,
    fastest_first,
)
from cotrain_compile.cluster.model.machines import rank_machine, whole_machine
from cotrain_compile.cluster.sources.cluster_presets import CLUSTERS, find_cluster, preset
from cotrain_compile.errors import FormatError, OptionError
from cotrain_compile.files import from_json, load, save, to_json
from cotrain_compile.machine import HostUpdate, Network, TierSpec

HOST = TierSpec(64 * 10**9, 60e9, {"float32": 1e12})
UPDATE = HostUpdate(20e9)
PEERS = Network(10e9, 1e-5)
TWO = MachineGroup(
    "two",
    1,
    HOST,
    UPDATE,
    (Devices("rtx4090", 2),),
    (Switch((0, 1), 26.4e9, has_nic=True),),
    "switch",
    PEERS,
)


@pytest.mark.parametrize("name", CLUSTERS)
def test_a_preset_says_where_it_comes_from_and_is_read_back(name: str) -> None:
    cluster = preset(name)
    assert cluster.name == name
    assert cluster.source
    assert all(group.source for group in cluster.groups)
    assert from_json(to_json(cluster), Cluster) == cluster


@pytest.mark.parametrize("name", CLUSTERS)
def test_each_rank_of_a_preset_has_a_machine_that_a_plan_can_be_made_for(name: str) -> None:
    for group in preset(name).groups:
        for device in range(group.device_count):
            rank, alone = rank_machine(group, device), group.each[device]
            assert rank.has_one_device
            assert rank.device == alone.device
            assert rank.h2d.bytes_per_s <= alone.h2d.bytes_per_s
            shares = rank.host.capacity_bytes * group.device_count
            assert shares <= group.host.capacity_bytes


def test_the_promised_clusters_have_their_devices() -> None:
    counts = {name: len(preset(name).devices) for name in CLUSTERS}
    assert counts == {
        "8xrtx4090": 8,
        "2x8xa100": 16,
        "8xh100": 8,
        "2xgh200": 2,
        "8xv100": 8,
        "32xv100-16cpu": 32,
        "4xgtx1080ti": 4,
        "4xrtx4090-4xa6000": 8,
        "4xrtx3090": 4,
        "8xt4": 8,
        "4xa100-4xv100": 8,
    }
    helped = preset("32xv100-16cpu")
    assert (helped.device_machines, helped.cpu_machines) == (32, 16)
    gib = [nbytes >> 30 for nbytes in preset("4xrtx4090-4xa6000").capacities_bytes]
    assert gib == [21] * 4 + [44] * 4  # what steps get by default
    assert preset("2x8xa100").devices[9] == DevicePlace(0, 1, 1)


def test_devices_below_one_switch_share_its_way_to_the_host() -> None:
    """Each has 22 GB/s and the switch 26.4: together they get 1.2 times what one gets."""
    machine = whole_machine(TWO)
    assert machine.slowdown("h2d0", ["h2d1"]) == pytest.approx(2 / 1.2)
    assert machine.slowdown("p2p0to1", ["h2d0", "h2d1"]) == 1.0
    assert rank_machine(TWO).h2d.bytes_per_s == pytest.approx(26.4e9 / 2)


def test_copies_of_all_devices_share_the_memory_of_the_host() -> None:
    """Four ways of 22 GB/s on a memory of 60: each has a quarter of that."""
    free = replace(TWO, switches=(), peer_path="host")
    assert rank_machine(free).h2d.bytes_per_s == pytest.approx(60e9 / 4)
    alone = whole_machine(free)
    assert alone.slowdown("h2d0", ["h2d1"]) == 1.0


def test_a_copy_that_crosses_switches_takes_their_ways_to_the_host() -> None:
    apart = replace(TWO, switches=(Switch((0,), 22e9), Switch((1,), 22e9)))
    machine = whole_machine(apart)
    assert machine.slowdown("p2p0to1", ["d2h0"]) == 2.0
    assert machine.slowdown("p2p0to1", ["d2h1"]) == 1.0


def test_a_device_sends_to_two_peers_at_half_the_rate() -> None:
    machine = whole_machine(preset("8xh100").groups[0])
    assert machine.slowdown("p2p0to1", ["p2p0to2"]) == 2.0
    assert machine.slowdown("p2p0to1", ["p2p2to0"]) == 1.0
    assert "p2p0to1" not in whole_machine(preset("8xrtx4090").groups[0]).links


def test_a_ring_of_all_devices_is_as_fast_as_its_slowest_part() -> None:
    one = preset("8xv100")
    assert one.ring == one.groups[0].peers
    four = find_cluster("8xv100 machines=4")
    assert four.ring == Network(12.5e9, 1e-5)
    assert len(four.devices) == 32
    assert find_cluster("8xv100 machines=4 network=25GB").ring == Network(25 * 10**9, 1e-5)
    alone = MachineGroup("one", 1, HOST, UPDATE, (Devices("rtx4090", 1),))
    assert Cluster("one", (alone,)).ring is None


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("9xrtx4090", "no cluster named '9xrtx4090'.*known are 8xrtx4090"),
        ("8xh100 machines=0", "machines=0: give a number"),
        ("8xrtx4090 machines=2", "says nothing of a network"),
        ("8xh100 network=fast", "network=fast: give bytes a second"),
        ("8xh100 colour=red", "'colour=red' after a cluster's name"),
        ("", "no cluster named ''"),
    ],
)
def test_a_name_that_says_no_cluster_is_refused(name: str, told: str) -> None:
    with pytest.raises(OptionError, match=told):
        find_cluster(name)


def test_a_file_may_name_cards_or_hold_them(tmp_path: Path) -> None:
    cluster = preset("4xgtx1080ti")
    save(cluster, tmp_path / "cluster.json")
    assert find_cluster(str(tmp_path / "cluster.json")) == cluster
    assert load(tmp_path / "cluster.json", Cluster).groups[0].each[0].name == "gtx1080ti"
    assert json.loads(to_json(preset("8xh100")))["data"]["groups"][0]["devices"] == [
        {"machine": "h100", "count": 8}
    ]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"count": 0}, "count of machines must be at least 1"),
        ({"peers": None}, "has no peers; where there are several, and only there"),
        ({"switches": [{"devices": [0, 5], "up_bytes_per_s": 1e9}]}, "switches hold devices"),
        ({"switches": []}, "each device needs its switch"),
        ({"peer_path": "air"}, "'nvlink', 'switch' or 'host'"),
        ({"devices": [{"machine": "h1000", "count": 1}]}, "no preset is named 'h1000'"),
        ({"devices": [{"machine": "h100 colour=red", "count": 1}]}, "colour=red"),
        ({"devices": []}, "has peers|switches hold"),
        ({"count": 2}, "need a nic"),
        ({"color": "red"}, "unknown field"),
    ],
)
def test_a_file_that_describes_no_cluster_is_refused(change: dict[str, object], told: str) -> None:
    document = json.loads(to_json(Cluster("a", (TWO,))))
    document["data"]["groups"][0].update(change)
    with pytest.raises(FormatError, match=f"^it: .*({told})"):
        from_json(json.dumps(document), Cluster, "it")


def test_a_thousand_orders_of_groups_and_devices_are_one_cluster() -> None:
    """Each device stays below its switch; a profile traced for the first of them is one, too."""
    names = ("8xh100", "2x8xa100", "8xv100", "8xt4", "4xrtx4090-4xa6000", "32xv100-16cpu")
    nic = Network(5e9, 1e-5)
    groups = [
        replace(group, name=f"{name} {group.name}", nic=nic)
        for name in names
        for group in preset(name).groups
    ]
    mixed = groups[4]
    assert len(mixed.devices) == 2
    groups[4] = replace(mixed, switches=(Switch((0, 1, 2, 3), 1e10), Switch((4, 5, 6, 7), 2e10)))
    swapped = replace(
        groups[4],
        devices=mixed.devices[::-1],
        switches=(Switch((4, 5, 6, 7), 1e10), Switch((0, 1, 2, 3), 2e10)),
    )
    in_file, random = fastest_first(Cluster("mixed", tuple(groups))), Random(0)
    for number in range(1000):
        order = [swapped if number % 2 and group is groups[4] else group for group in groups]
        random.shuffle(order)
        assert fastest_first(Cluster("mixed", tuple(order))) == in_file
