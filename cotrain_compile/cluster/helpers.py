"""CPU helpers: gradients of n machines with devices, summed on them and on k machines without any.

BytePS (Jiang et al., OSDI 2020), of M bytes of gradients at B bytes a second and direction:

    every CPU machine sums     M_cpu = 2 (n-1) M / (n^2 + k n - 2 k)
    every device machine sums  M_gpu = (n-k) M / (n^2 + k n - 2 k)
    a CPU machine sends        n M_cpu
    a device machine sends     M + (n-2) M_gpu
    all take                   2 n (n-1) M / ((n^2 + k n - 2 k) B)

They follow from k M_cpu + n M_gpu = M and from all machines being done at once, where a CPU machine
takes n M_cpu / B. The paper prints M_cpu / B for that in its equation 4, from which its equations
1, 2 and 6, which are these, do not follow. Where network cards differ, the same two conditions give
other shares. Chunks of the gradients go in the order of their next use. No torch.

`judge_helpers` is what becomes of a step where idle CPU machines sum its gradients, against NCCL.
In: a layer profile, a cluster of machines of as many devices each, samples a device. Out: the step
both ways, and which to use with the figure that decides it. Latencies count in neither. Devices of
a machine add up their gradients among themselves first, and share what comes back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

from cotrain_compile.cluster.model.description import Cluster, MachineGroup
from cotrain_compile.cluster.model.profiles import LayerProfile
from cotrain_compile.errors import OptionError
from cotrain_compile.presets import ADAMW_BYTES_PER_PARAMETER
from cotrain_compile.support.units import format_seconds

# No chunk of gradients, which are sent and summed at once, has more.
CHUNK_BYTES = 4_000_000


@dataclass(frozen=True)
class Sharing:
    """How many machines sum how much: bytes for each of `machines`, and for each of `helpers`.

    `seconds` is until every machine has sent and received all, `all_reduce_s` what the same
    gradients take without helpers.
    """

    machines: int
    helpers: int
    nbytes: float
    machine_bytes: float
    helper_bytes: float
    seconds: float
    all_reduce_s: float

    @property
    def machine_traffic_bytes(self) -> float:
        """What a machine with devices sends; it receives as much."""
        return self.nbytes + (self.machines - 2) * self.machine_bytes

    @property
    def helper_traffic_bytes(self) -> float:
        """What a helper sends; it receives as much."""
        return self.machines * self.helper_bytes


def share(
    machines: int,
    helpers: int,
    nbytes: float,
    bytes_per_s: float,
    helper_bytes_per_s: float | None = None,
) -> Sharing:
    """Who sums how much of `nbytes`, such that all are done as early as can be.

    Rates are of one network card per direction, that of a helper the same where none is given.
    Helpers beyond those that can take anything off the others share what there is.
    """
    if machines < 2 or helpers < 0:
        raise OptionError(
            f"{machines} machines with devices and {helpers} helpers: gradients go over a network "
            "between two machines with devices or more"
        )
    if nbytes <= 0 or bytes_per_s <= 0 or (helper_bytes_per_s or bytes_per_s) <= 0:
        raise OptionError("bytes of gradients and rates of network cards must be positive")
    n, k = machines, helpers
    helper_rate = helper_bytes_per_s or bytes_per_s
    each_helper = 2 * (n - 1) * nbytes / (n * n * bytes_per_s / helper_rate + k * n - 2 * k)
    if k and k * each_helper > nbytes:
        each_helper = nbytes / k
    each_machine = (nbytes - k * each_helper) / n
    busiest_s = (nbytes + (n - 2) * each_machine) / bytes_per_s
    if k:
        busiest_s = max(busiest_s, n * each_helper / helper_rate)
    return Sharing(
        machines=n,
        helpers=k,
        nbytes=nbytes,
        machine_bytes=each_machine,
        helper_bytes=each_helper if k else 0.0,
        seconds=busiest_s,
        all_reduce_s=2 * (n - 1) * nbytes / (n * bytes_per_s),
    )


class Chunk(NamedTuple):
    """Bytes of a layer's gradients, from `begin` on, and the machine that sums them.

    Machines with devices are 0 to n-1, helpers n to n+k-1.
    """

    layer: str
    begin: int
    nbytes: int
    owner: int


def chunks_of(
    sizes: Sequence[tuple[str, int]], sharing: Sharing, chunk_bytes: int = CHUNK_BYTES
) -> tuple[Chunk, ...]:
    """All gradients, by name and bytes, in chunks of at most `chunk_bytes`, in their order.

    Every machine computes the same owner from a chunk's name: a hash, which falls to a machine as
    often as its share is large. So shares are met by many chunks, not by each.
    """
    if chunk_bytes < 1:
        raise OptionError(f"a chunk has at least one byte, not {chunk_bytes}")
    return tuple(
        Chunk(name, begin, nbytes, _owner(f"{name}:{begin}", sharing))
        for name, size in sizes
        for begin in range(0, size, chunk_bytes)
        for nbytes in [min(chunk_bytes, size - begin)]
    )


def _owner(name: str, sharing: Sharing) -> int:
    drawn = int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big") / 2**64
    n, k = sharing.machines, sharing.helpers
    of_helpers = k * sharing.helper_bytes / sharing.nbytes
    if drawn < of_helpers:
        return n + min(int(drawn / of_helpers * k), k - 1)
    return min(int((drawn - of_helpers) / (1 - of_helpers) * n), n - 1)


def sent_bytes(chunks: Sequence[Chunk], sharing: Sharing) -> tuple[int, ...]:
    """What each machine sends, those with devices first; each receives as much.

    Each chunk goes to its owner, and its sum to every machine with devices.
    """
    sent = [0] * (sharing.machines + sharing.helpers)
    for chunk in chunks:
        for machine in range(sharing.machines):
            if machine != chunk.owner:
                sent[machine] += chunk.nbytes
                sent[chunk.owner] += chunk.nbytes
    return tuple(sent)


@dataclass(frozen=True)
class HostLoad:
    """What the host's memory must do for gradients that arrive, and what it can.

    `available` is the one number that decides: bytes that its memory reaches, for each byte that
    arrives. Sums and updates touch so many.
    """

    available: float
    sum_touches: float
    update_touches: float

    @property
    def sums(self) -> bool:
        """Whether it sums as fast as gradients arrive."""
        return self.available >= self.sum_touches

    @property
    def updates(self) -> bool:
        """Whether it can update the parameters as well."""
        return self.available >= self.sum_touches + self.update_touches

    def __str__(self) -> str:
        needed = f"a sum touches {self.sum_touches:.1f}, an update {self.update_touches:.1f} more"
        what = "sum and update" if self.updates else "sum, but update on the devices"
        if not self.sums:
            what = "neither sum nor update"
        return (
            f"the host's memory reaches {self.available:.1f} bytes for each that arrives; "
            f"{needed}: {what} there"
        )


def host_work(
    memory_bytes_per_s: float,
    arriving_bytes_per_s: float,
    copies: int,
    *,
    update_bytes_per_parameter: float,
    bytes_per_gradient: int = 4,
) -> HostLoad:
    """Whether a host sums, or sums and updates, as fast as `copies` of each gradient arrive.

    To add a byte, two are read and one is written. One copy alone needs no sum. An update
    comes once for all copies of a gradient.
    """
    if min(memory_bytes_per_s, arriving_bytes_per_s) <= 0 or copies < 1 or bytes_per_gradient < 1:
        raise OptionError("rates, copies and bytes of a gradient must be positive")
    return HostLoad(
        memory_bytes_per_s / arriving_bytes_per_s,
        3.0 * (copies - 1) / copies,
        update_bytes_per_parameter / (bytes_per_gradient * copies),
    )


# Helpers that gain less are not worth their machines.
LEAST_GAIN = 1.02


@dataclass(frozen=True)
class HelperVerdict:
    """The step with all-reduce and with helpers, where gradients go while the backward runs.

    `exposed` seconds are what is left of an exchange behind the backward.
    """

    sharing: Sharing
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


def judge_helpers(profile: LayerProfile, cluster: Cluster, samples: int) -> HelperVerdict:
    """Whether the CPU machines of `cluster` should sum the gradients of a data-parallel step.

    Every device works on `samples`. Machines of several kinds each count as the slowest of these,
    devices and CPU machines apart: all wait for that one, and shares are equal.

    Raises:
        OptionError: there is one machine with devices, or they have not as many each.
    """
    worked = [group for group in cluster.groups if group.devices]
    helping = [group for group in cluster.groups if not group.devices]
    if cluster.device_machines < 2:
        raise OptionError(
            f"cluster {cluster.name} has one machine with devices, whose gradients cross no "
            "network; within one machine keep NCCL"
        )
    if len({group.device_count for group in worked}) > 1:
        names = ", ".join(group.name for group in worked)
        raise OptionError(
            f"machines {names} of {cluster.name} have not as many devices each, and CPU machines "
            "sum the gradients of machines that have; take `replicate`, whose gradients NCCL sums"
        )
    nbytes, rate = profile.grad_bytes, _network_card(worked)
    helper_rate = _network_card(helping) if helping else None
    sharing = share(cluster.device_machines, cluster.cpu_machines, nbytes, rate, helper_rate)
    work = host_work(
        min(group.host.bytes_per_s for group in helping or worked),
        helper_rate or rate,
        sharing.machines,
        update_bytes_per_parameter=ADAMW_BYTES_PER_PARAMETER,
    )
    helpers_s = max(
        sharing.seconds,
        *(max(_to_host_s(group, nbytes), _within_s(group, nbytes)) for group in worked),
    )
    if not work.sums:
        helpers_s = max(helpers_s, sharing.seconds * work.sum_touches / work.available)
    compute_s = sum(layer.compute_s(samples) for layer in profile.layers)
    return HelperVerdict(
        sharing,
        work,
        compute_s,
        sharing.all_reduce_s,
        _exposed_s(profile, samples, sharing.all_reduce_s),
        helpers_s,
        _exposed_s(profile, samples, helpers_s),
    )


def _to_host_s(group: MachineGroup, nbytes: float) -> float:
    """How long devices of a machine and its host take to give each other all gradients, each its
    part of them."""
    part = nbytes / group.device_count
    ways = [
        part / rate
        for machine in group.each
        for rate in (machine.d2h.bytes_per_s, machine.h2d.bytes_per_s)
    ]
    ways += [len(switch.devices) * part / switch.up_bytes_per_s for switch in group.switches]
    return max(ways)


def _within_s(group: MachineGroup, nbytes: float) -> float:
    """How long devices of a machine take to add up all gradients, and to share the sums."""
    if group.peers is None:
        return 0.0
    each = group.device_count
    return 2 * (each - 1) / each * nbytes / group.peers.bytes_per_s


def _network_card(groups: Sequence[MachineGroup]) -> float:
    """The rate of the slowest; a cluster of several machines has one in every group."""
    return min(group.nic.bytes_per_s for group in groups if group.nic)


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
