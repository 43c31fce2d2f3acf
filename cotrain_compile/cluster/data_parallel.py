"""Data parallelism: every device has all layers and works on its share of the samples.

In: a `LayerProfile`, a `Cluster`, the samples of a step. Out: a `DataParallelPlan`: how many of the
devices share the samples, in which micro-batches, whether layers run again for the backward, what
rests on the host, the simulated step, seconds that no timing of these works can beat, and the peak
of a device.

`replicate` sums gradients over all devices once they are there, and every device updates all.
`shard` leaves each device a part of parameters, gradients and states: parameters are gathered
for each micro-batch, once or again for its backward, and gradients scattered after each backward.
Of N devices each sends in a ring 2 (N-1) / N of the bytes that are summed, and (N-1) / N of what is
gathered or scattered. Consecutive layers are exchanged together, `BUCKET_BYTES` or more at once.
Exchanges wait for the slowest kind of device; updates go by the rate of their memory. Where a
choice does not fit, as little as makes it fit rests on the rank's share of its host (`away`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import ceil

from cotrain_compile.cluster.away import NOTHING, Away, Room
from cotrain_compile.cluster.data_parallel_works import Gathering, Ring, Sent, Step, Way, works_of
from cotrain_compile.cluster.description import Cluster
from cotrain_compile.cluster.host_share import host_shares
from cotrain_compile.cluster.profiles import LayerProfile
from cotrain_compile.cluster.rank_memory import RankMemory, WorkingMemory
from cotrain_compile.cluster.subsets import first_devices
from cotrain_compile.cluster.units import knows_peaks, units_of, ways_of
from cotrain_compile.errors import OptionError
from cotrain_compile.placement.simulate.engine import LaneSpec, lower_bound, simulate
from cotrain_compile.plan import Timeline

SHARD = (Gathering.ONCE, Gathering.AGAIN)


@dataclass(frozen=True)
class DataParallelPlan:
    """What a step takes, simulated; `moved_bytes` are each device's, by what they go over.

    `peak_bytes` is that of each device, None where the profile knows no peaks; `missing_bytes` what
    the smallest device has too little with what is `away`. `on_host` says what that is, and takes
    `host_bytes` of each rank. With units `one_at_a_time` nothing is gathered or fetched ahead.
    """

    gathering: Gathering
    devices: int
    micro_batch: int
    micro_batches: int
    recompute: bool
    away: Away
    on_host: str
    host_bytes: int
    step_s: float
    bound_s: float
    peak_bytes: int | None
    missing_bytes: int
    moved_bytes: Mapping[Way, int]
    timeline: Timeline
    one_at_a_time: bool

    @property
    def sent_bytes(self) -> int:
        """What each device sends to the next."""
        return self.moved_bytes.get(Way.RING, 0)


@dataclass(frozen=True)
class _Choice:
    """How the samples are shared; `working` is None where nobody knows peaks."""

    step: Step
    cluster: Cluster
    recompute: bool
    busy_s: float
    working: WorkingMemory | None

    @cached_property
    def room(self) -> Room | None:
        """What it takes, and what devices and hosts have."""
        if self.working is None:
            return None
        streamed = self.step.gathering is Gathering.AGAIN
        memory = RankMemory(
            self.working, self.step.parts, streamed, self.step.micro_batches, self.step.ahead
        )
        return Room(
            len(self.step.units),
            self.step.gathering is not Gathering.ONCE,
            memory.peak_bytes,
            memory.host_bytes,
            min(self.cluster.capacities_bytes),
            min(host.capacity_bytes for host in self.step.hosts.values()),
        )

    def placements(self) -> list[Away]:
        return self.room.placements() if self.room else [NOTHING]

    @cached_property
    def one_at_a_time(self) -> _Choice:
        """The same with one unit whole at once: slower, and in less memory."""
        return replace(self, step=replace(self.step, ahead=1))


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
    that run again, with as little on the host as fits. Where none fits, the nearest to it.

    Raises:
        OptionError: there are no samples, or none of `counts` shares them evenly.
    """
    counts = counts or range(1, len(cluster.devices) + 1)
    choices = list(_choices(profile, cluster, samples, gatherings, counts, all_reduce))
    if not choices:
        raise OptionError(
            f"{samples} samples are not shared evenly by {', '.join(map(str, counts))} devices; "
            "take another number of samples"
        )
    choices.sort(key=lambda choice: (choice.busy_s, choice.step.micro_batches))
    best: DataParallelPlan | None = None
    for choice in choices:
        if best and choice.busy_s >= best.step_s:
            break
        ahead = choice.placements()
        for away in ahead:
            best = _faster(choice, away, best)
        for away in choice.one_at_a_time.placements() if ahead != [NOTHING] else ():
            best = _faster(choice.one_at_a_time, away, best)
    return best or _nearest([choice.one_at_a_time for choice in choices])


def _nearest(choices: Sequence[_Choice]) -> DataParallelPlan:
    """The plan that has least missing, where none fits."""
    rooms = [(choice, choice.room, choice.room.nearest()) for choice in choices if choice.room]
    choice, _, away = min(rooms, key=lambda one: one[1].missing_bytes(one[2]))
    plan = _faster(choice, away, None)
    assert plan is not None  # it is compared with none
    return plan


def _choices(
    profile: LayerProfile,
    cluster: Cluster,
    samples: int,
    gatherings: tuple[Gathering, ...],
    counts: Sequence[int],
    all_reduce: AllReduce | None,
) -> Iterator[_Choice]:
    if samples < 1:
        raise OptionError(f"a step has at least one sample, not {samples}")
    ways = [_Way(way, recompute) for way, recompute in ways_of(profile)]
    for count in counts:
        if samples % count:
            continue
        part, share = first_devices(cluster, count), samples // count
        times, on_part = profile.times_slower(part.kinds), _step_on(part, profile, all_reduce)
        for each, gathering, way in product(_sizes(ways, share), gatherings, ways):
            step = replace(
                on_part,
                units=way.units,
                micro_batch=each,
                micro_batches=share // each,
                gathering=gathering,
            )
            busy_s = times * step.micro_batches * way.compute_s(each)
            yield _Choice(step, part, way.recompute, busy_s, way.working(each))


def _step_on(part: Cluster, profile: LayerProfile, all_reduce: AllReduce | None) -> Step:
    """A step on those devices, of no layers yet."""
    ring = Ring(part.ring, len(part.devices)) if part.ring else None
    return Step(
        (),
        1,
        1,
        memory_rates(part),
        ring,
        slowness=profile.slowness,
        hosts=host_shares(part),
        all_reduce_s=all_reduce(part) if all_reduce and ring else None,
    )


class _Way:
    """The layers as they are, or run again; what they take is worked out once for each size."""

    def __init__(self, profile: LayerProfile, recompute: bool) -> None:
        self.profile, self.recompute = profile, recompute
        self.units = units_of(profile)
        self.knows_peaks = knows_peaks(profile)
        self._working: dict[int, WorkingMemory] = {}

    def compute_s(self, samples: int) -> float:
        return sum(layer.compute_s(samples) for layer in self.profile.layers)

    def working(self, samples: int) -> WorkingMemory | None:
        """None where nobody knows peaks."""
        if not self.knows_peaks:
            return None
        new = WorkingMemory(self.profile, samples)
        return self._working.setdefault(samples, new)


def _sizes(ways: Sequence[_Way], share: int) -> list[int]:
    """Micro-batches are for memory: where no peaks are known there is one."""
    if not any(way.knows_peaks for way in ways):
        return [share]
    return [each for each in range(1, share + 1) if share % each == 0]


def _faster(choice: _Choice, away: Away, best: DataParallelPlan | None) -> DataParallelPlan | None:
    """The plan of a choice with so much away, where it is faster than the best one."""
    step = replace(choice.step, away=away)
    sent = list(works_of(step))
    lanes: defaultdict[str, float] = defaultdict(float)
    for each in sent:
        lanes[each.work.lane] += each.work.seconds
    if best and max(lanes.values()) >= best.step_s:
        return best
    plan = _simulated(choice, step, sent, [LaneSpec(lane) for lane in lanes])
    return plan if best is None or plan.step_s < best.step_s else best


def _simulated(
    choice: _Choice, step: Step, sent: Sequence[Sent], lanes: Sequence[LaneSpec]
) -> DataParallelPlan:
    works = [each.work for each in sent]
    timeline = simulate(works, lanes)
    moved: defaultdict[Way, float] = defaultdict(float)
    for each in sent:
        moved[each.way] += each.nbytes
    room = choice.room
    return DataParallelPlan(
        step.gathering,
        len(choice.cluster.devices),
        step.micro_batch,
        step.micro_batches,
        choice.recompute,
        step.away,
        step.away.in_words(len(step.units)),
        room.host_bytes(step.away) if room else 0,
        max(span.end_s for span in timeline.spans),
        lower_bound(works, lanes),
        room.peak_bytes(step.away) if room else None,
        room.missing_bytes(step.away) if room else 0,
        {way: ceil(nbytes) for way, nbytes in moved.items() if nbytes},
        timeline,
        step.ahead == 1,
    )


def memory_rates(cluster: Cluster) -> dict[str, float]:
    """The memory's rate of each kind of device, by the name of its machine."""
    rates: dict[str, float] = {}
    for group, device in sorted({(place.group, place.device) for place in cluster.devices}):
        kind = cluster.groups[group].each[device]
        rate = kind.device.bytes_per_s
        rates[kind.name] = min(rate, rates.get(kind.name, rate))
    return rates
