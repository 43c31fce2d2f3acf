"""Data parallelism: every device has all layers and works on its share of the samples.

In: a `LayerProfile`, a `Cluster`, the samples of a step. Out: a `DataParallelPlan`: how many of the
devices share the samples, in which micro-batches, whether layers run again for the backward, the
simulated step, seconds that no timing of these works can beat, and the peak of a device.

`replicate` sums gradients over all devices once they are there, and every device updates all.
`shard` leaves each device a part of parameters, gradients and states: parameters are gathered
before use, once or again for the backward, and gradients are scattered after each backward. Of N
devices each sends in a ring 2 (N-1) / N of the bytes that are summed, and (N-1) / N of what is
gathered or scattered. Consecutive layers are exchanged together, `BUCKET_BYTES` or more at once.
Exchanges wait for the slowest kind of device; updates go by the rate of their memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import ceil

from cotrain_compile.cluster.data_parallel_peaks import (
    Unit,
    knows_peaks,
    peak_bytes,
    running_again,
    units_of,
)
from cotrain_compile.cluster.data_parallel_works import (
    Ring,
    Sent,
    Step,
    replicated_works,
    sharded_works,
)
from cotrain_compile.cluster.description import Cluster
from cotrain_compile.cluster.profiles import LayerProfile
from cotrain_compile.cluster.subsets import first_devices
from cotrain_compile.errors import OptionError
from cotrain_compile.placement.simulate.engine import LaneSpec, lower_bound, simulate
from cotrain_compile.plan import Timeline


class Gathering(StrEnum):
    """What becomes of parameters: REPLICATE keeps them whole; ONCE and AGAIN are of `shard`."""

    REPLICATE = "replicate"
    ONCE = "gathered once"
    AGAIN = "gathered again"


SHARD = (Gathering.ONCE, Gathering.AGAIN)


@dataclass(frozen=True)
class DataParallelPlan:
    """What a step takes, simulated; `sent_bytes` are what each device sends to the next.

    `peak_bytes` is that of each device, None where the profile knows no peaks; `missing_bytes` what
    the smallest device has too little.
    """

    gathering: Gathering
    devices: int
    micro_batch: int
    micro_batches: int
    recompute: bool
    step_s: float
    bound_s: float
    peak_bytes: int | None
    missing_bytes: int
    sent_bytes: int
    timeline: Timeline


@dataclass(frozen=True)
class _Draft:
    """A choice with what it takes, before it is simulated; `busy_s` is of its computing alone."""

    gathering: Gathering
    cluster: Cluster
    micro_batch: int
    micro_batches: int
    recompute: bool
    units: tuple[Unit, ...]
    peak_bytes: int | None
    busy_s: float
    slowness: Mapping[str, float]

    @property
    def missing_bytes(self) -> int:
        return max(0, (self.peak_bytes or 0) - min(self.cluster.capacities_bytes))


# What an exchange of gradients takes in place of a ring's all-reduce, by the cluster it is in.
AllReduce = Callable[[Cluster], Callable[[float], float]]


def plan_data_parallel(
    profile: LayerProfile,
    cluster: Cluster,
    samples: int,
    gatherings: tuple[Gathering, ...] = (Gathering.REPLICATE,),
    *,
    counts: Sequence[int] = (),
    all_reduce: AllReduce | None = None,
) -> DataParallelPlan:
    """The fastest of all that fit: so many of the first devices as share the samples evenly (any
    number, or one of `counts`), sizes of micro-batches that divide a share, with and without layers
    that run again. Where none fits, the one that is nearest to it.

    Raises:
        OptionError: there are no samples, or none of `counts` shares them evenly.
    """
    counts = counts or range(1, len(cluster.devices) + 1)
    drafts = list(_drafts(profile, cluster, samples, gatherings, counts))
    if not drafts:
        raise OptionError(
            f"{samples} samples are not shared evenly by {', '.join(map(str, counts))} devices; "
            "take another number of samples"
        )
    least = min(draft.missing_bytes for draft in drafts)
    best: DataParallelPlan | None = None
    for draft in sorted(drafts, key=lambda draft: (draft.busy_s, draft.micro_batches)):
        if draft.missing_bytes > least:
            continue
        if best and draft.busy_s >= best.step_s:
            break
        plan = _simulated(draft, all_reduce)
        if best is None or plan.step_s < best.step_s:
            best = plan
    assert best is not None  # the draft with the least missing is simulated
    return best


def _drafts(
    profile: LayerProfile,
    cluster: Cluster,
    samples: int,
    gatherings: tuple[Gathering, ...],
    counts: Sequence[int],
) -> Iterator[_Draft]:
    if samples < 1:
        raise OptionError(f"a step has at least one sample, not {samples}")
    for count in counts:
        if samples % count == 0:
            part, share = first_devices(cluster, count), samples // count
            for each in _sizes(profile, share):
                for gathering in gatherings:
                    yield from _at(profile, part, gathering, each, share // each)


def _sizes(profile: LayerProfile, share: int) -> list[int]:
    """Micro-batches are for memory: where no peaks are known there is one."""
    if not any(knows_peaks(way) for way, _ in ways_of(profile)):
        return [share]
    return [each for each in range(1, share + 1) if share % each == 0]


def ways_of(profile: LayerProfile) -> list[tuple[LayerProfile, bool]]:
    """As it is, and with every layer run again; those of which peaks are known, if there are any.

    What layers that run again keep is their input, which every profile knows.
    """
    ways = [(profile, False), (running_again(profile), True)]
    return [way for way in ways if knows_peaks(way[0])] or ways[:1]


def _at(
    profile: LayerProfile, part: Cluster, gathering: Gathering, each: int, micro_batches: int
) -> Iterator[_Draft]:
    parts = len(part.devices) if gathering in SHARD else 1
    for way, recompute in ways_of(profile):
        units = units_of(way)
        peak = None
        if knows_peaks(way):
            again = gathering is Gathering.AGAIN
            peak = peak_bytes(way, units, each, parts, again=again)
        busy_s = micro_batches * sum(layer.compute_s(each) for layer in way.layers)
        busy_s *= profile.times_slower(part.kinds)
        slowness = profile.slowness
        yield _Draft(gathering, part, each, micro_batches, recompute, units, peak, busy_s, slowness)


def _simulated(draft: _Draft, all_reduce: AllReduce | None) -> DataParallelPlan:
    works = list(_works(draft, all_reduce))
    lanes = [LaneSpec(lane) for lane in dict.fromkeys(each.work.lane for each in works)]
    timeline = simulate([each.work for each in works], lanes)
    return DataParallelPlan(
        draft.gathering,
        len(draft.cluster.devices),
        draft.micro_batch,
        draft.micro_batches,
        draft.recompute,
        max(span.end_s for span in timeline.spans),
        lower_bound([each.work for each in works], lanes),
        draft.peak_bytes,
        draft.missing_bytes,
        ceil(sum(each.nbytes for each in works)),
        timeline,
    )


def _works(draft: _Draft, all_reduce: AllReduce | None) -> Iterator[Sent]:
    part = draft.cluster
    ring = Ring(part.ring, len(part.devices)) if part.ring else None
    rates = memory_rates(part)
    step = Step(draft.units, draft.micro_batch, draft.micro_batches, rates, ring, draft.slowness)
    if ring and draft.gathering in SHARD:
        return sharded_works(step, again=draft.gathering is Gathering.AGAIN)
    return replicated_works(step, all_reduce(part) if all_reduce and ring else None)


def memory_rates(cluster: Cluster) -> dict[str, float]:
    """The memory's rate of each kind of device, by the name of its machine."""
    rates: dict[str, float] = {}
    for group, device in sorted({(place.group, place.device) for place in cluster.devices}):
        kind = cluster.groups[group].each[device]
        rate = kind.device.bytes_per_s
        rates[kind.name] = min(rate, rates.get(kind.name, rate))
    return rates
