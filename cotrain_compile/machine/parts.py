"""Machine parts: the rates of a memory space, a processor, a link, and of links that share a path.

Plain numbers, refused where no computer can have them. A `Machine` gives them names. No torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf

from cotrain_compile.machine.op_classes import FACTORS

# No bytes, seconds, flops or rates of anything real are more, and their products are still floats.
LARGEST = 10**30
# About thirty years: no latency is longer.
LONGEST_S = 1e9

# An op that takes so many times what its bytes and flops take is not limited by them.
MOST_FACTOR = 1000.0

# Where it is not measured: an op takes for an element as long as a fused loop for so many bytes,
# and the system clears and maps a page of 4 KiB in two microseconds.
ASSUMED_BYTES_AN_ELEMENT = 6.5
ASSUMED_FRESH_BYTES_PER_S = 2e9


class Rates(StrEnum):
    """Where the rates of a machine come from.

    Measured on it; given, by a data sheet or by whoever wrote the machine down; or guessed, as for
    a computer that nobody has measured: seconds at guessed rates are guesses, and bound nothing.
    """

    MEASURED = "measured"
    GIVEN = "given"
    GUESSED = "guessed"

    @property
    def words(self) -> str:
        """What to say behind the name of a machine; nothing where it was measured."""
        told = {Rates.GIVEN: " (rates not measured)", Rates.GUESSED: " (rates guessed)"}
        return told.get(self, "")


@dataclass(frozen=True)
class Space:
    """A memory: what a processor works in, and a link joins to another.

    Of a drive, `rated_bytes` may be written in its life as its maker says (TBW); 0: nobody has.
    """

    capacity_bytes: int
    rated_bytes: float = 0.0

    def __post_init__(self) -> None:
        if self.capacity_bytes <= 0:
            raise ValueError("capacity_bytes must be positive")
        _refuse_absurd("capacity_bytes", self.capacity_bytes)
        if self.rated_bytes:
            _refuse_absurd("rated_bytes", self.rated_bytes)


@dataclass(frozen=True)
class HostUpdate:
    """How fast the host runs optimizer updates.

    `bytes_per_s` counts every byte a fused update reads or writes. `slowdown_while_copying` is the
    factor (at least 1) by which an update slows down while a link is busy: both share the host's
    memory bandwidth. Where ops run one by one, `elements_per_s` of any dtype are read or written in
    parts that stay in the cache, and large results are made in memory that the system hands out at
    `fresh_bytes_per_s`; 0 where nobody has measured it.
    """

    bytes_per_s: float
    workers: int = 1
    slowdown_while_copying: float = 1.0
    elements_per_s: float = 0.0
    fresh_bytes_per_s: float = 0.0

    @property
    def seconds_per_element(self) -> float:
        """Of what an op reads or writes."""
        return 1.0 / (self.elements_per_s or self.bytes_per_s / ASSUMED_BYTES_AN_ELEMENT)

    @property
    def seconds_per_fresh_byte(self) -> float:
        """Of a large result."""
        return 1.0 / (self.fresh_bytes_per_s or min(self.bytes_per_s, ASSUMED_FRESH_BYTES_PER_S))

    def __post_init__(self) -> None:
        if self.bytes_per_s <= 0 or self.workers < 1 or self.slowdown_while_copying < 1:
            raise ValueError(
                "bytes_per_s must be positive, workers and slowdown_while_copying at least 1"
            )
        for name in ("bytes_per_s", "workers", "slowdown_while_copying"):
            _refuse_absurd(name, getattr(self, name))
        for name in ("elements_per_s", "fresh_bytes_per_s"):
            _refuse_absurd(name, getattr(self, name) or 1.0)


@dataclass(frozen=True)
class Processor:
    """What works in `space`, as a roofline.

    `flops_per_s` is the achieved (not the advertised) matrix rate by dtype name ("float32",
    "bfloat16"); a dtype that is absent runs at the lowest rate given. `launch_s` is the least time
    an op takes however little it does. `issue_s` is what Python takes to start a copy or host
    update and to wait for it: the processor stands still meanwhile, or, where it `runs_ahead`, goes
    on with what it has been given, and waits where it comes to the end of that. `fuses_updates`
    says whether it updates a parameter in one loop, as compiled code does, or op by op. One that
    runs updates beside the step says in `update` how fast. `factors` has, by class of op, how many
    times its roofline an op takes. Where `starts_s` has anything, ops run one after the other: each
    takes the start of its class, else `launch_s`, and then its roofline.
    """

    space: str
    bytes_per_s: float
    flops_per_s: Mapping[str, float]
    launch_s: float = 0.0
    issue_s: float = 0.0
    fuses_updates: bool = False
    update: HostUpdate | None = None
    runs_ahead: bool = False
    factors: Mapping[str, float] = field(default_factory=dict)
    starts_s: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _refuse_rates(self.bytes_per_s, self.flops_per_s)
        refuse_factors(self.factors)
        _refuse_starts(self.starts_s)
        for name in ("launch_s", "issue_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative")
            _refuse_long(name, getattr(self, name))


@dataclass(frozen=True)
class TierSpec:
    """A space and the roofline of the processor that works in it: see `Processor`."""

    capacity_bytes: int
    bytes_per_s: float
    flops_per_s: Mapping[str, float]
    launch_s: float = 0.0
    factors: Mapping[str, float] = field(default_factory=dict)
    starts_s: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.capacity_bytes <= 0 or self.bytes_per_s <= 0 or self.launch_s < 0:
            raise ValueError(
                "capacity_bytes and bytes_per_s must be positive, launch_s not negative"
            )
        _refuse_absurd("capacity_bytes", self.capacity_bytes)
        _refuse_rates(self.bytes_per_s, self.flops_per_s)
        _refuse_long("launch_s", self.launch_s)
        refuse_factors(self.factors)
        _refuse_starts(self.starts_s)

    def flops_per_s_of(self, dtype: str) -> float:
        """The rate for `dtype`, or the lowest known one; "tfloat32" is float32 where cut to it."""
        if dtype == "tfloat32" and dtype not in self.flops_per_s:
            dtype = "float32"
        return self.flops_per_s.get(dtype, min(self.flops_per_s.values()))


@dataclass(frozen=True)
class Link:
    """The way from one space to another, in that direction. `two_tier` fills in the ends."""

    bytes_per_s: float
    latency_s: float = 0.0
    source: str = ""
    target: str = ""

    def __post_init__(self) -> None:
        if self.bytes_per_s <= 0 or self.latency_s < 0:
            raise ValueError("bytes_per_s must be positive, latency_s not negative")
        _refuse_absurd("bytes_per_s", self.bytes_per_s)
        _refuse_long("latency_s", self.latency_s)

    @property
    def ends(self) -> tuple[str, str]:
        """Source and target."""
        return self.source, self.target


# How often a drive may be written whole: 600 TBW for each TB in the data sheets of common drives
# for desktops (990 Pro, SN850X, 870 EVO); drives for servers bear several times that.
WRITES_BORNE = 600


@dataclass(frozen=True)
class Disk:
    """A drive beside the host: what it holds, and what large direct reads and writes reach on it.

    `write_bytes_per_s` is what it can keep up, behind its cache. Reads and writes at once reach
    `together` times what one of them does, as in `SharedPath`. `rated_bytes` is as of a `Space`.
    """

    capacity_bytes: int
    read_bytes_per_s: float
    write_bytes_per_s: float
    together: float = 1.5
    latency_s: float = 1e-4
    rated_bytes: float = 0.0

    @property
    def endurance_bytes(self) -> float:
        """What may be written to it; where nobody has said, as to most of its size."""
        return self.rated_bytes or WRITES_BORNE * self.capacity_bytes

    def __post_init__(self) -> None:
        Space(self.capacity_bytes, self.rated_bytes)
        for rate in (self.read_bytes_per_s, self.write_bytes_per_s):
            Link(rate, self.latency_s)
        if not 1.0 <= self.together <= 2.0:
            raise ValueError("together must lie between 1.0 (shared) and 2.0 (independent)")


@dataclass(frozen=True)
class Network:
    """What a rank exchanges with others over: so many bytes a second sent, and as many received.

    `latency_s` is what each round of an exchange takes beside its bytes. Exchanges take turns. A
    reduce-scatter takes `scatter` times what a ring of ranks needs for it: 1 with NCCL. gloo in
    torch 2.13 reduces the whole on every rank, which is twice as much.
    """

    bytes_per_s: float
    latency_s: float = 0.0
    scatter: float = 1.0

    def __post_init__(self) -> None:
        Link(self.bytes_per_s, self.latency_s)  # what no link has, no network has
        if not 1.0 <= self.scatter < inf:
            raise ValueError("scatter must be at least 1: no reduce-scatter is faster than a ring")


@dataclass(frozen=True)
class SharedPath:
    """Links that share a path, on which no more gets through than `together` of them carry alone.

    With k of them busy each runs at `together / k` of its own rate, or at its own where that is
    less. 1.0: one at a time; as many as there are links: they do not disturb each other.
    """

    links: tuple[str, ...]
    together: float

    def __post_init__(self) -> None:
        most = float(len(self.links))
        if len(set(self.links)) != len(self.links) or not 1.0 <= self.together <= most:
            raise ValueError(
                f"together must lie between 1.0 (shared) and {most} (independent) of "
                f"{len(self.links)} different links"
            )

    def slowdown(self, busy: int) -> float:
        """How many times longer each takes while `busy` of them are."""
        return max(1.0, busy / self.together)


@dataclass(frozen=True)
class Contention:
    """How lanes slow one another.

    `slowdown[a, b]` (at least 1) is how many times longer work on lane a takes while lane b is
    busy. On a `crowded` path, which more than two lanes share, it depends on how many are.
    """

    slowdown: Mapping[tuple[str, str], float] = field(default_factory=dict)
    crowded: tuple[SharedPath, ...] = ()


UNDISTURBED = Contention()


def refuse_factors(factors: Mapping[str, float]) -> None:
    """Raise ValueError where some are of no kind of op, or of no processor."""
    _refuse_classes("factors", factors)
    for kind, factor in factors.items():
        if not MOST_FACTOR**-1 <= factor <= MOST_FACTOR:
            raise ValueError(f"factors: {kind} cannot take {factor} times its roofline")


def _refuse_starts(starts_s: Mapping[str, float]) -> None:
    _refuse_classes("starts_s", starts_s)
    for name, seconds in starts_s.items():
        if not seconds >= 0:
            raise ValueError(f"starts_s: {name} cannot start in {seconds} s")
        _refuse_long(f"starts_s of {name}", seconds)


def _refuse_classes(what: str, names: Iterable[str]) -> None:
    for name in names:
        if name.partition(":")[0] not in FACTORS:
            raise ValueError(f"{what}: {name!r} is none of {', '.join(FACTORS)}")


def _refuse_rates(bytes_per_s: float, flops_per_s: Mapping[str, float]) -> None:
    if bytes_per_s <= 0:
        raise ValueError("bytes_per_s must be positive")
    if not flops_per_s or min(flops_per_s.values()) <= 0:
        raise ValueError("flops_per_s needs at least one dtype, every rate positive")
    _refuse_absurd("bytes_per_s", bytes_per_s)
    for dtype, rate in flops_per_s.items():
        _refuse_absurd(f"flops_per_s of {dtype}", rate)


def _refuse_absurd(name: str, figure: float) -> None:
    """At one byte a second all bytes that there are take a time that can still be added up."""
    if not 1 <= figure <= LARGEST:
        # Not as a float: a whole number in a file may be more than one can hold.
        raise ValueError(f"{name}: no computer has {figure}; figures go from 1 to 1e30")


def _refuse_long(name: str, seconds: float) -> None:
    if not seconds <= LONGEST_S:
        raise ValueError(f"{name}: no computer takes {seconds} s; seconds go from 0 to 1e9")
