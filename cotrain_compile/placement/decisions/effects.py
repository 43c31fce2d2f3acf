"""Effects: what a strategy of a cluster does to memory, links and processors, as plain data.

`strategies` makes an `Effect`, once for each strategy of each cluster. The greedy, both versions of
the integer program and with them the certified bound read nothing else of a strategy, so that none
of them can leave out what another counts. Sizes are in bytes, times in seconds; moments are the
buckets of a `DecisionSpace`: 0 is before the first op, the last one after the last.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from cotrain_compile.machine import Tier
from cotrain_compile.plan import Lane


class Flow(StrEnum):
    """A class of copies, or of work on the host, that the program adds up: names of variables."""

    OFFLOAD = "act_out"
    RELOAD = "act_in"
    GRADIENT = "grad"
    MASTER = "master"
    NEW_WEIGHT = "back"
    FETCH = "wf"
    REFETCH = "wb"
    HOST_UPDATE = "host"
    HOST_CAST = "cast"
    KEPT_UP = "kept_up"
    KEPT_DOWN = "kept_down"
    DISK_READ = "disk_read"
    DISK_WRITE = "disk_write"
    DISK_FETCH = "disk_fetch"
    DISK_STORE = "disk_store"

    @property
    def lane(self) -> Lane:
        """The lane that it occupies."""
        return _LANES[self]

    @property
    def is_copy(self) -> bool:
        """Whether its amounts are bytes, and not seconds."""
        return self.lane is not Lane.HOST


_LANES = {
    Flow.OFFLOAD: Lane.D2H,
    Flow.RELOAD: Lane.H2D,
    Flow.GRADIENT: Lane.D2H,
    Flow.MASTER: Lane.D2H,
    Flow.NEW_WEIGHT: Lane.H2D,
    Flow.FETCH: Lane.H2D,
    Flow.REFETCH: Lane.H2D,
    Flow.HOST_UPDATE: Lane.HOST,
    Flow.HOST_CAST: Lane.HOST,
    Flow.KEPT_UP: Lane.H2D,
    Flow.KEPT_DOWN: Lane.D2H,
    Flow.DISK_READ: Lane.DISK_READ,
    Flow.DISK_WRITE: Lane.DISK_WRITE,
    Flow.DISK_FETCH: Lane.DISK_READ,
    Flow.DISK_STORE: Lane.DISK_WRITE,
}


@dataclass(frozen=True)
class Demand:
    """`amount` of a flow: bytes of a copy, seconds of work.

    It can begin when bucket `released` is over, and is done when bucket `needed` begins; None
    where nothing but the step's end says so. What a bound may count on begins in `earliest`, where
    that is another bucket, and only what is `certain` is in every plan. What is `needed_again` in
    a bucket of the next step may go on up to that, where steps overlap. A copy of what is `made` in
    an earlier bucket may begin behind that; what it frees is there until `released` all the same.
    """

    flow: Flow
    amount: float
    released: int | None = None
    needed: int | None = None
    earliest: int | None = None
    needed_again: int | None = None
    certain: bool = True
    made: int | None = None

    def exists(self, *, relaxed: bool) -> int | None:
        """The bucket behind which it can begin."""
        known = (self.made, self.frees(relaxed=relaxed))
        return min((bucket for bucket in known if bucket is not None), default=None)

    def frees(self, *, relaxed: bool) -> int | None:
        """The bucket behind which what it frees is of no other use."""
        return self.earliest if relaxed and self.earliest is not None else self.released


@dataclass(frozen=True)
class Hold:
    """`nbytes` of the device in buckets `first` to `last`, to the end of the step if that is None.

    Negative ones are missing there from what the step holds by itself. Where it `begins` or `ends`
    with a copy, that copy says when, else the buckets do. With `until_update` the update ends it,
    not bucket `last`. Only what is `certain` is in every plan: a bound does not count on the rest.
    """

    nbytes: int
    first: int = 0
    last: int | None = None
    begins: Demand | None = None
    ends: Demand | None = None
    until_update: bool = False
    certain: bool = True

    @property
    def is_resting(self) -> bool:
        """Whether it is there during the whole step."""
        return self.first == 0 and self.last is None


@dataclass(frozen=True)
class HostHold:
    """A copy of `nbytes` on the host, from bucket `first` to `last`, to the end if that is None.

    In every plan it is there after bucket `since` and before `until`, where these are given.
    """

    nbytes: int
    first: int
    last: int | None = None
    since: int | None = None
    until: int | None = None

    def is_in(self, bucket: int) -> bool:
        """Whether it may be there in `bucket`."""
        return self.first <= bucket and (self.last is None or bucket <= self.last)

    def is_certain_in(self, bucket: int) -> bool:
        """Whether it is there in `bucket` in every plan."""
        return self.since is not None and self.since < bucket < (self.until or 0)


@dataclass(frozen=True)
class Transient:
    """`nbytes` of the device that something in `bucket` takes for a moment."""

    nbytes: float
    bucket: int


@dataclass(frozen=True)
class DeviceWork:
    """`seconds` more (or less) of the device in `bucket`, or from `earliest` on up to there."""

    seconds: float
    bucket: int
    earliest: int | None = None


@dataclass(frozen=True)
class Exchanged:
    """Seconds on the network, that begin in bucket `begun` and are over in bucket `awaited`."""

    seconds: float
    begun: int
    awaited: int


@dataclass(frozen=True)
class UpdateEffect:
    """The updates of a cluster on the processor of `tier`, possible when `released` is over.

    `up_bytes` come to the device for them, `home_bytes` go home after them. They read
    `gradient_bytes`; the largest takes `workspace_bytes` beyond that on the device, and all that
    it makes takes `made_bytes`. `largest` and `least_largest` are those of the cluster, or of its
    pieces. One on `guesses` is done before it is possible.
    """

    tier: Tier
    seconds: float
    released: int
    home_bytes: int
    gradient_bytes: int
    workspace_bytes: int
    made_bytes: int
    largest: float
    least_largest: float
    up_bytes: int = 0
    guesses: bool = False


@dataclass(frozen=True)
class Effect:
    """All that one strategy of one cluster does in a step.

    `host_bytes` are there during the whole step, copies on the host in `host_holds`. What rests on
    disk has `disk_bytes`; the rooms that it passes through are in no effect. `exchanges` are those
    beside the step's own.
    """

    holds: tuple[Hold, ...] = ()
    moved: tuple[Demand, ...] = ()
    transients: tuple[Transient, ...] = ()
    device_work: tuple[DeviceWork, ...] = ()
    exchanges: tuple[Exchanged, ...] = ()
    update: UpdateEffect | None = None
    host_bytes: int = 0
    host_holds: tuple[HostHold, ...] = ()
    disk_bytes: int = 0

    @property
    def demands(self) -> Iterator[Demand]:
        """All copies and all work on the host, but for what is streamed for an update."""
        for hold in self.holds:
            yield from (demand for demand in (hold.begins, hold.ends) if demand is not None)
        yield from self.moved

    def most_on_host(self, bucket: int) -> int:
        """Bytes that it may hold on the host in `bucket`."""
        return self.host_bytes + sum(h.nbytes for h in self.host_holds if h.is_in(bucket))

    @property
    def streamed(self) -> UpdateEffect | None:
        """The update, where something comes to the device for it and goes home after it."""
        return self.update if self.update is not None and self.update.up_bytes else None

    @property
    def resident_update(self) -> UpdateEffect | None:
        """The update, where it runs on the device on what is there."""
        update = self.update
        if update is None or update.tier is Tier.HOST or update.up_bytes:
            return None
        return update

    @property
    def freed_bytes(self) -> int:
        """What the update frees on the device."""
        return sum(hold.nbytes for hold in self.holds if hold.until_update)

    @property
    def only_device_s(self) -> float:
        """Seconds of the device without those of updates."""
        return sum(work.seconds for work in self.device_work)

    def bytes_of(self, *flows: Flow) -> float:
        """What it moves in some flows."""
        return sum(demand.amount for demand in self.demands if demand.flow in flows)

    def link_bytes(self, lane: Lane) -> float:
        """What it moves over a link, streamed or not."""
        own = sum(demand.amount for demand in self.demands if demand.flow.lane is lane)
        if self.streamed is None:
            return own
        return own + (self.streamed.up_bytes if lane is Lane.H2D else self.streamed.home_bytes)
