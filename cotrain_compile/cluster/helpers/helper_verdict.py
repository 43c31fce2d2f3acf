"""Helper verdict: what becomes of a step where idle CPU machines sum its gradients, against NCCL.

In: a layer profile, a cluster, samples a device. Out: how gradients go inside a machine, the step
both ways, and which to use with the figure that decides it. Latencies count in neither. No torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cotrain_compile.cluster.helpers.cpu_helpers import HostLoad, Sharing, host_work, share
from cotrain_compile.cluster.model.description import Cluster, MachineGroup
from cotrain_compile.cluster.model.profiles import LayerProfile
from cotrain_compile.errors import OptionError
from cotrain_compile.presets import ADAMW_BYTES_PER_PARAMETER
from cotrain_compile.support.units import format_seconds

# Helpers that gain less are not worth their machines.
LEAST_GAIN = 1.02

ALONE = "copy to the host"
ROOT = "reduce to a device whose switch has no network card, and broadcast from it"
SCATTER = "reduce-scatter between devices, and all-gather"
SWITCHED = "reduce-scatter below each switch, add on the host, and all-gather below each switch"


@dataclass(frozen=True)
class InsideMachine:
    """How gradients go between the devices of a machine and its host: `seconds` of the busiest way.

    `copied_share` of them every device copies to the host by itself, where that is free.
    """

    way: str
    seconds: float
    copied_share: float = 0.0


def inside_machine(group: MachineGroup, nbytes: float) -> InsideMachine:
    """How a machine of `group` should bring the sum of its devices' gradients to its host.

    Copies between devices never cross a PCIe switch. Where devices have links of their own, one of
    them carries all to the host if only some switches have a network card: the ways of those stay
    free for it. Without such links, `copied_share_below` a switch goes to the host uncombined.
    """
    n = group.device_count
    if not n:
        raise OptionError(f"group {group.name} has no devices; ask for one that has")
    link = min(min(m.d2h.bytes_per_s, m.h2d.bytes_per_s) for m in group.each)
    if group.peers is None:
        return InsideMachine(ALONE, nbytes / link)
    if group.peer_path == "nvlink":
        return _with_own_links(group, nbytes, link, group.peers.bytes_per_s)
    below = [(len(s.devices), s.up_bytes_per_s) for s in group.switches if s.devices]
    below += [(1, link)] * (n - sum(count for count, _ in below))
    copied, seconds = max(
        (copied_share_below(count, min(up, count * link), link) for count, up in below),
        key=lambda found: found[1],
    )
    return InsideMachine(SWITCHED, seconds * nbytes, copied)


def _with_own_links(group: MachineGroup, nbytes: float, link: float, peer: float) -> InsideMachine:
    n = group.device_count
    with_nic = [s for s in group.switches if s.devices and s.has_nic]
    without = [s for s in group.switches if s.devices and not s.has_nic]
    if with_nic and without:
        up = max(min(link, s.up_bytes_per_s) for s in without)
        return InsideMachine(ROOT, max(2 * nbytes / peer, nbytes / up))
    part = nbytes / n
    ways = [2 * (n - 1) * part / peer, part / link]
    ways += [len(s.devices) * part / s.up_bytes_per_s for s in group.switches]
    return InsideMachine(SCATTER, max(ways))


def copied_share_below(devices: int, up: float, device: float) -> tuple[float, float]:
    """Of the gradients of n devices below a switch, the share x copied uncombined, and seconds.

    Seconds a byte of gradients, with y = 1 - x and the rates of the switch and of a device's link:

        J = max((n x + y) / up, ((2n-1)/n y + x) / device)

    The first rises with x, the second falls, so J is least where they meet, or at 0 or 1.
    """
    n = devices
    x = 0.0
    if n > 1:
        x = (up * (2 * n - 1) / n - device) / ((n - 1) * (device + up / n))
        x = min(max(x, 0.0), 1.0)
    y = 1 - x
    return x, max((n * x + y) / up, ((2 * n - 1) / n * y + x) / device)


@dataclass(frozen=True)
class HelperVerdict:
    """The step with all-reduce and with helpers, where gradients go while the backward runs.

    `exposed` seconds are what is left of an exchange behind the backward.
    """

    sharing: Sharing
    inside: InsideMachine
    host: HostLoad
    compute_s: float
    all_reduce_s: float
    all_reduce_exposed_s: float
    helpers_s: float
    helpers_exposed_s: float

    @property
    def gain(self) -> float:
        """How many times faster a step is with helpers."""
        return (self.compute_s + self.all_reduce_exposed_s) / (
            self.compute_s + self.helpers_exposed_s
        )

    @property
    def keeps_nccl(self) -> bool:
        return self.gain < LEAST_GAIN

    def __str__(self) -> str:
        step_s = self.compute_s + self.all_reduce_exposed_s
        figures = (
            f"NCCL's all-reduce takes {format_seconds(self.all_reduce_s)}, of which "
            f"{format_seconds(self.all_reduce_exposed_s)} of a step of {format_seconds(step_s)} "
            f"are not hidden; with {self.sharing.helpers} CPU machines it is "
            f"{format_seconds(self.helpers_s)} and {format_seconds(self.helpers_exposed_s)}"
        )
        if self.keeps_nccl:
            return f"keep NCCL: {figures}, {self.gain:.3f} times as fast"
        return f"use the CPU machines: {figures}, {self.gain:.3f} times as fast"


def judge_helpers(
    profile: LayerProfile, cluster: Cluster, samples: int, *, bytes_per_gradient: int = 4
) -> HelperVerdict:
    """Whether the CPU machines of `cluster` should sum the gradients of a data-parallel step.

    Every device works on `samples`. Machines of several kinds each count as the slowest of these,
    devices and CPU machines apart: all wait for that one, and shares are equal.

    Raises:
        OptionError: there is one machine with devices.
    """
    worked = [group for group in cluster.groups if group.devices]
    helping = [group for group in cluster.groups if not group.devices]
    if cluster.device_machines < 2:
        raise OptionError(
            f"cluster {cluster.name} has one machine with devices, whose gradients cross no "
            "network; within one machine keep NCCL"
        )
    nbytes, rate = profile.grad_bytes, _network_card(worked)
    helper_rate = _network_card(helping) if helping else None
    sharing = share(cluster.device_machines, cluster.cpu_machines, nbytes, rate, helper_rate)
    inside = max((inside_machine(group, nbytes) for group in worked), key=lambda way: way.seconds)
    work = host_work(
        min(group.host.bytes_per_s for group in helping or worked),
        helper_rate or rate,
        sharing.machines,
        update_bytes_per_parameter=ADAMW_BYTES_PER_PARAMETER,
        bytes_per_gradient=bytes_per_gradient,
    )
    helpers_s = max(sharing.seconds, inside.seconds)
    if not work.sums:
        helpers_s = max(helpers_s, sharing.seconds * work.sum_touches / work.available)
    all_reduce_s = max(sharing.all_reduce_s, *(_ring_inside_s(group, nbytes) for group in worked))
    compute_s = sum(layer.compute_s(samples) for layer in profile.layers)
    return HelperVerdict(
        sharing,
        inside,
        work,
        compute_s,
        all_reduce_s,
        _exposed_s(profile, samples, all_reduce_s),
        helpers_s,
        _exposed_s(profile, samples, helpers_s),
    )


def _network_card(groups: Sequence[MachineGroup]) -> float:
    """The rate of the slowest; a cluster of several machines has one in every group."""
    return min(group.nic.bytes_per_s for group in groups if group.nic)


def _ring_inside_s(group: MachineGroup, nbytes: float) -> float:
    """All-reduce between the devices of a machine."""
    n = group.device_count
    return 2 * (n - 1) / n * nbytes / group.peers.bytes_per_s if group.peers else 0.0


def _exposed_s(profile: LayerProfile, samples: int, exchange_s: float) -> float:
    """What is left behind the backward, where each layer's gradients go once they are there."""
    backward: Sequence[tuple[float, int]] = [
        (layer.backward_s.at(samples), layer.grad_bytes) for layer in reversed(profile.layers)
    ]
    ready_s, free_s = 0.0, 0.0
    for seconds, nbytes in backward:
        ready_s += seconds
        if nbytes:
            free_s = max(free_s, ready_s) + exchange_s * nbytes / profile.grad_bytes
    return max(0.0, free_s - ready_s)
