"""Data parallelism: every device has all layers and works on its share of the samples.

In: a `LayerProfile`, a `Cluster`, the samples of a step. Out: a `DataParallelPlan`: how many of the
devices share the samples, in which micro-batches, whether layers run again for the backward, what
rests on the host, and from these the step, and the peak of a device.

`replicate` sums gradients over all devices once they are there, and every device updates all.
`shard` leaves each device a part of parameters, gradients and states: parameters are gathered
for each micro-batch, once or again for its backward, and gradients scattered after each backward.
Of N devices each sends in a ring 2 (N-1) / N of the bytes that are summed, and (N-1) / N of what is
gathered or scattered. Consecutive layers are exchanged together, `BUCKET_BYTES` or more at once.
Exchanges wait for the slowest kind of device; updates go by the rate of their memory. Where kinds
are not as fast, samples may go by speed: of a micro-batch each device has a share of its own.
Where a choice does not fit, as little as makes it fit rests on the rank's share of its host
(`residence`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import heapify, heapreplace
from itertools import product
from math import ceil

from cotrain_compile.cluster.data_parallel.ahead import ahead_step
from cotrain_compile.cluster.data_parallel.step import (
    Replicas,
    Sharding,
    data_parallel_step,
    lanes_s,
    least_s,
    passes_s,
)
from cotrain_compile.cluster.model.description import Cluster, first_devices
from cotrain_compile.cluster.model.machines import machines_by_kind
from cotrain_compile.cluster.model.profiles import LayerProfile, knows_peaks, units_of, ways_of
from cotrain_compile.cluster.steps.fastest import fastest_option
from cotrain_compile.cluster.steps.rank_memory import (
    ON_DEVICE,
    RankDemand,
    RankMemory,
    Residence,
    WorkingMemory,
)
from cotrain_compile.cluster.steps.stage_step import (
    EXCHANGES,
    ROUNDING,
    Rank,
    Ring,
    StageStep,
)
from cotrain_compile.errors import OptionError

SHARD = (Sharding.ONCE, Sharding.AGAIN)


class LayersAs:
    """The layers as they are, or run again; what they take is worked out once for each size."""

    def __init__(self, profile: LayerProfile, recompute: bool) -> None:
        self.profile, self.recompute = profile, recompute
        self.units = units_of(profile)
        self.knows_peaks = knows_peaks(profile)
        self._working: dict[int, WorkingMemory] = {}

    def working(self, samples: int) -> WorkingMemory | None:
        """None where nobody knows peaks."""
        if not self.knows_peaks:
            return None
        new = WorkingMemory(self.profile, samples)
        return self._working.setdefault(samples, new)


@dataclass(frozen=True)
class DataParallelPlan:
    """How samples are shared by all devices of `cluster`, and what of a rank rests on its host.

    Where they go `by_speed`, it has those of a micro-batch for each device. With `beside_forward`
    half of an exchange goes on beside the next forward, where nothing rests on the host.
    """

    layers: LayersAs
    cluster: Cluster
    replicas: Replicas
    by_speed: tuple[int, ...] = ()
    beside_forward: bool = False

    @property
    def devices(self) -> int:
        return len(self.cluster.devices)

    @property
    def recompute(self) -> bool:
        return self.layers.recompute

    @cached_property
    def step(self) -> StageStep:
        return ahead_step(self.replicas) if self.beside_forward else self._plain_step

    @cached_property
    def _plain_step(self) -> StageStep:
        return data_parallel_step(self.replicas)

    @property
    def share_and_parts(self) -> tuple[int, int]:
        """The largest share of a device, and in how many micro-batches: of plans that take as long
        the smaller one is taken."""
        count = self.replicas.micro_batches
        return count * self.replicas.micro_batch, count

    @property
    def passes_s(self) -> float:
        """What it takes at least with anything on the host."""
        if self.beside_forward:
            return self.least_s
        return passes_s(self.but(ON_DEVICE).replicas) * ROUNDING

    @cached_property
    def least_s(self) -> float:
        """What the step takes at least."""
        if self.beside_forward:  # its exchanges have other sizes, and other latencies so
            busy_s = lanes_s(self.replicas)
            return max(busy_s[rank.lane] for rank in self.replicas.ranks) * ROUNDING
        return least_s(self.replicas) * ROUNDING

    @property
    def closer_s(self) -> float:
        """No other bound is known."""
        return self.least_s

    @cached_property
    def demand(self) -> RankDemand | None:
        """What it takes, and what devices and hosts have, of the kind that has least left; None
        where nobody knows peaks."""
        if not self.layers.knows_peaks:
            return None
        replicas, ranks = self.replicas, self._kinds
        rooms = [room for _, room in ranks]
        hosts = [rank.machine.host.capacity_bytes for rank in replicas.ranks]

        def on_device(residence: Residence) -> int:
            return max(own.peak_bytes(residence) - room for own, room in ranks) + min(rooms)

        def on_host(residence: Residence) -> int:
            each = zip((own for own, _ in ranks), hosts, strict=True)
            return max(own.host_bytes(residence) - room for own, room in each) + min(hosts)

        streamed = replicas.sharding is not Sharding.ONCE
        units = len(replicas.units)
        return RankDemand(units, streamed, on_device, on_host, min(rooms), min(hosts))

    @cached_property
    def _kinds(self) -> list[tuple[RankMemory, int]]:
        """Of each kind of device what it holds and has; of equal samples that of the smallest."""
        part = self.cluster
        rooms = [min(part.capacities_bytes)] * len(self.replicas.ranks)
        if self.by_speed:
            rooms = list(dict(zip(part.kinds, part.capacities_bytes, strict=True)).values())
        return list(zip(map(self._memory, self.replicas.sizes), rooms, strict=True))

    def _memory(self, samples: int) -> RankMemory:
        replicas, working = self.replicas, self.layers.working(samples)
        assert working is not None  # asked for where peaks are known
        again = replicas.sharding is Sharding.AGAIN
        return RankMemory(working, replicas.parts, again, replicas.micro_batches, replicas.ahead)

    @property
    def peak_bytes(self) -> int | None:
        """Of the fullest device, None where the profile knows no peaks."""
        peaks = self.peaks_bytes
        return None if peaks is None else max(peaks)

    @property
    def peaks_bytes(self) -> tuple[int, ...] | None:
        """By device."""
        return self._by_device(lambda own: own.peak_bytes(self.replicas.residence))

    @property
    def missing_bytes(self) -> int:
        """What the device that has least left has too little."""
        return self.demand.missing_bytes(self.replicas.residence) if self.demand else 0

    @property
    def host_bytes(self) -> int:
        """What rests on all hosts."""
        return sum(self._by_device(lambda own: own.host_bytes(self.replicas.residence)) or ())

    def _by_device(self, figure: Callable[[RankMemory], int]) -> tuple[int, ...] | None:
        if not self.layers.knows_peaks:
            return None
        each = [figure(memory) for memory, _ in self._kinds]
        own = dict(zip(dict.fromkeys(self.cluster.kinds), each, strict=True))
        return tuple(own[kind] for kind in self.cluster.kinds)

    @property
    def sent_bytes(self) -> int:
        """What each device sends to the next."""
        return ceil(sum(self._plain_step.moved_bytes[does] for does in EXCHANGES))

    def but(self, residence: Residence) -> DataParallelPlan:
        """The same with so much on the host."""
        return replace(self, replicas=replace(self.replicas, residence=residence))

    @property
    def one_at_a_time(self) -> DataParallelPlan:
        """The same with one unit whole at once: slower, and in less memory."""
        return replace(self, replicas=replace(self.replicas, ahead=1))

    def fitting(self) -> list[DataParallelPlan]:
        """The same with as little on the host as fits, in every way to choose it."""
        found = self.demand.fitting() if self.demand else [ON_DEVICE]
        return [self.but(residence) for residence in found]

    def plans(self) -> list[DataParallelPlan]:
        """`fitting`, and where that needs the host, with one unit whole at once as well."""
        found = self.fitting()
        if self.beside_forward:
            return [plan for plan in found if plan.replicas.residence == ON_DEVICE]
        if [plan.replicas.residence for plan in found] != [ON_DEVICE]:
            found += self.one_at_a_time.fitting()
        return found


# What an exchange of gradients takes in place of a ring's, by the cluster it is in.
SumsOf = Callable[[Cluster], Callable[[float], float]]


def plan_data_parallel(
    profile: LayerProfile,
    cluster: Cluster,
    samples: int,
    shardings: tuple[Sharding, ...] = (Sharding.REPLICATE,),
    *,
    counts: Sequence[int] = (),
    sums_of: SumsOf | None = None,
) -> DataParallelPlan:
    """The fastest of all that fit: so many of the first devices as share the samples evenly (any
    number, or one of `counts`), sizes of micro-batches that divide a share, with and without layers
    that run again, with as little on the host as fits. Where none fits, the nearest to it.

    Raises:
        OptionError: there are no samples, or none of `counts` shares them evenly.
    """
    counts = counts or range(1, len(cluster.devices) + 1)
    tried = _choices(profile, cluster, samples, shardings, counts, sums_of)
    choices = [DataParallelOption(plan, plan.passes_s) for plan in tried]
    if not choices:
        raise OptionError(
            f"{samples} samples are not shared evenly by {', '.join(map(str, counts))} devices; "
            "take another number of samples"
        )
    choices.sort(key=lambda choice: choice.plan.share_and_parts)
    found = fastest_option(choices)
    return found[1] if found else _nearest([choice.plan.one_at_a_time for choice in choices])


@dataclass(frozen=True)
class DataParallelOption:
    """A plan with nothing on the host, and all that fit with as little there as that takes."""

    plan: DataParallelPlan
    least_s: float

    def plans(self) -> list[DataParallelPlan]:
        return self.plan.plans()


def _nearest(choices: Sequence[DataParallelPlan]) -> DataParallelPlan:
    """The plan that has least missing, where none fits."""
    plans = [choice.but(choice.demand.nearest()) for choice in choices if choice.demand]
    return min(plans, key=lambda plan: plan.missing_bytes)


def _choices(
    profile: LayerProfile,
    cluster: Cluster,
    samples: int,
    shardings: tuple[Sharding, ...],
    counts: Sequence[int],
    sums_of: SumsOf | None,
) -> Iterator[DataParallelPlan]:
    if samples < 1:
        raise OptionError(f"a step has at least one sample, not {samples}")
    ways = [LayersAs(way, recompute) for way, recompute in ways_of(profile)]
    alike = len({profile.times_slower([kind]) for kind in set(cluster.kinds)}) == 1
    for count in counts:
        if alike and samples % count:
            continue
        part = first_devices(cluster, count)
        ranks = tuple(ranks_of(part, profile))
        sum_s = sums_of(part) if sums_of and part.ring else None
        ring = Ring(part.ring, count, sum_s) if part.ring else None
        if samples % count == 0:
            share = samples // count
            for each, sharding, layers in product(sizes_of(ways, share), shardings, ways):
                replicas = Replicas(layers.units, each, share // each, ranks, ring, sharding)
                yield DataParallelPlan(layers, part, replicas)
                if sum_s:
                    yield DataParallelPlan(layers, part, replicas, beside_forward=True)
        slowness = [profile.times_slower([kind]) for kind in part.kinds]
        if len(set(slowness)) > 1 and not sums_of:
            for batch, sharding, layers in product(sizes_of(ways, samples), shardings, ways):
                if batch >= count:
                    plan = samples_by_speed(slowness, batch)
                    replicas = Replicas(
                        layers.units,
                        max(plan),
                        samples // batch,
                        ranks,
                        ring,
                        sharding,
                        samples=_largest(part, plan),
                    )
                    yield DataParallelPlan(layers, part, replicas, plan)


def samples_by_speed(slowness: Sequence[float], batch: int) -> tuple[int, ...]:
    """The samples of a micro-batch by device, at least one each, of devices that take so many times
    as long: what the last of them takes is least, for each goes where it is done first."""
    shares = [1] * len(slowness)
    queue = [(2 * times, i) for i, times in enumerate(slowness)]
    heapify(queue)
    for _ in range(batch - len(shares)):
        _, i = queue[0]
        shares[i] += 1
        heapreplace(queue, (slowness[i] * (shares[i] + 1), i))
    return tuple(shares)


def _largest(part: Cluster, shares: Sequence[int]) -> tuple[int, ...]:
    """Of each kind of device, in order."""
    found: dict[str, int] = {}
    for kind, own in zip(part.kinds, shares, strict=True):
        found[kind] = max(own, found.get(kind, 0))
    return tuple(found.values())


def ranks_of(part: Cluster, profile: LayerProfile) -> Iterator[Rank]:
    """One for each kind of device."""
    for kind, machine in machines_by_kind(part).items():
        yield Rank(machine, f"compute {kind}", profile.times_slower([kind]), f" on {kind}")


def sizes_of(ways: Sequence[LayersAs], share: int) -> list[int]:
    """Micro-batches are for memory: where no peaks are known there is one."""
    if not any(layers.knows_peaks for layers in ways):
        return [share]
    return [each for each in range(1, share + 1) if share % each == 0]
