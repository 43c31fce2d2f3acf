"""Small clusters and layer profiles whose figures can be followed by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cotrain_compile.cluster.model.description import Cluster, Devices, MachineGroup
from cotrain_compile.cluster.model.profiles import (
    BATCH,
    BySamples,
    Layer,
    LayerProfile,
    Read,
    constant,
    per_sample,
)
from cotrain_compile.machine import HostUpdate, Link, Machine, Network, TierSpec, two_tier

HOST = TierSpec(10**15, 1e18, {"float32": 1e15})
UPDATE = HostUpdate(1e18)
SMALL_HOST = replace(HOST, capacity_bytes=8)  # nothing can rest there


def a_device(capacity_bytes: int = 10**15, link_bytes_per_s: float = 1e18) -> Devices:
    """One device whose memory takes no time."""
    link = Link(link_bytes_per_s)
    device = TierSpec(capacity_bytes, 1e18, {"float32": 1e15})
    update = HostUpdate(1e18)
    return Devices(two_tier("small", device, HOST, h2d=link, d2h=link, host_update=update), 1)


def a_machine(
    capacity_bytes: int = 10**15,
    bytes_per_s: float = 1e18,
    network: Network | None = None,
    *,
    host: TierSpec = HOST,
    update: HostUpdate = UPDATE,
) -> Machine:
    """What a rank has: its device, whose memory takes no time, and its share of the host."""
    link = Link(bytes_per_s)
    return a_device(capacity_bytes).one.but(
        h2d=link, d2h=link, network=network, host=host, host_update=update
    )


def a_box(
    count: int,
    bytes_per_s: float,
    capacity_bytes: int = 10**15,
    *,
    host: TierSpec = HOST,
    update: HostUpdate = UPDATE,
) -> Cluster:
    """Devices of one machine, joined by a ring and to the host at that rate."""
    one = a_device(capacity_bytes, bytes_per_s)
    peers = Network(bytes_per_s) if count > 1 else None
    group = MachineGroup("box", 1, host, update, (one,) * count, peers=peers)
    return Cluster("box", (group,))


def a_mixed_box(
    count: int, bytes_per_s: float, capacity_bytes: int, *, host: TierSpec = HOST
) -> Cluster:
    """A box in which every second device has twice the memory, from the second on."""
    (group,) = a_box(count, bytes_per_s, host=host).groups
    devices = [a_device(capacity_bytes * (1 + i % 2), bytes_per_s) for i in range(count)]
    return Cluster("mixed box", (replace(group, devices=tuple(devices)),))


def some_machines(
    count: int, bytes_per_s: float, capacity_bytes: int = 10**15, *, host: TierSpec = HOST
) -> Cluster:
    """Machines of one device, and one without any."""
    nic = Network(bytes_per_s)
    one = a_device(capacity_bytes, bytes_per_s)
    groups = [MachineGroup("cards", count, host, HostUpdate(1e18), (one,), nic=nic)]
    groups += [MachineGroup("cpu", 1, HOST, HostUpdate(1e18), nic=nic)]
    return Cluster("machines", tuple(groups))


def a_model(
    params: Sequence[int], kept: BySamples | None, *, forward_s: float = 1.0, crossing: int = 10
) -> LayerProfile:
    """A chain; a sample takes `forward_s` forward and twice that backward in each layer.

    While it runs a layer takes its parameters and gradients, 30 bytes a sample it keeps, 40 more.
    """
    layers = [
        Layer(
            name=f"layers.{i}",
            op="layer",
            reads=(Read(f"layers.{i - 1}" if i else BATCH, per_sample(crossing)),),
            forward_s=per_sample(forward_s),
            backward_s=per_sample(2 * forward_s),
            param_bytes=nbytes,
            grad_bytes=nbytes,
            state_bytes=2 * nbytes,
            forward_peak_bytes=constant(nbytes),
            backward_peak_bytes=BySamples((1, 2), (2 * nbytes + 70, 2 * nbytes + 140)),
            kept_bytes=kept,
        )
        for i, nbytes in enumerate(params)
    ]
    return LayerProfile("small", tuple(layers))
