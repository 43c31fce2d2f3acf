"""Machine: what a step runs on, as numbers: memory spaces, processors and the links between them.

Any number of each, by name. Links that share a path say what they reach together. From a preset,
a JSON file, or `cotrain-compile calibrate`. `two_tier` makes the machine of one device and its
host, which a plan is made for. No torch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property

from cotrain_compile.machine.parts import (
    LARGEST,
    UNDISTURBED,
    Contention,
    Disk,
    HostUpdate,
    Link,
    Network,
    Processor,
    Rates,
    SharedPath,
    Space,
    TierSpec,
)

__all__ = [
    "LARGEST",
    "MEMORIES",
    "UNDISTURBED",
    "Contention",
    "Disk",
    "HostUpdate",
    "Link",
    "Machine",
    "Network",
    "Processor",
    "Rates",
    "SharedPath",
    "Space",
    "Tier",
    "TierSpec",
    "two_tier",
]

# 2: any number of spaces, processors and links; `machine.files` reads what came before.
FORMAT_VERSION = 2


class Tier(StrEnum):
    """The spaces of a machine with one device; the processor that works in each has its name.

    A drive is one, where the machine has any: no processor works there.
    """

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


# The tiers that processors work in: every plan has a budget for each.
MEMORIES = (Tier.DEVICE, Tier.HOST)
# The links of a machine with one device, and those of its drive.
_DOWN, _UP = "d2h", "h2d"
_READ, _WRITE = "disk_read", "disk_write"
# The lane of what it exchanges with others.
NETWORK = "network"


@dataclass(frozen=True)
class Machine:
    """Spaces, processors and links by name; `rates` and, in words, `source` say whence they are.

    A copy goes over the one link from its source to its target. A processor that runs updates is
    slowed by every link that begins or ends in its space, but for those of a drive, which carry a
    small part of what a memory does. `network` is what it reaches other
    machines over, or others like it; None where nobody knows. `compute_capability` is that of its
    CUDA card, by which kernels are chosen; None where the device is no card, or nobody knows.
    """

    name: str
    spaces: Mapping[str, Space]
    processors: Mapping[str, Processor]
    links: Mapping[str, Link]
    shared_paths: tuple[SharedPath, ...] = ()
    source: str = ""
    network: Network | None = None
    rates: Rates = Rates.GIVEN
    compute_capability: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        for name, processor in self.processors.items():
            _require(
                processor.space in self.spaces,
                f"processor {name} works in {processor.space!r}, which is no space",
            )
        for name, link in self.links.items():
            known = {link.source, link.target} <= self.spaces.keys()
            _require(
                known and link.source != link.target,
                f"link {name} goes from {link.source!r} to {link.target!r}, not between two of "
                f"the spaces {', '.join(self.spaces)}",
            )
        _require(len(self._by_ends) == len(self.links), "two links have the same ends")
        both = self.processors.keys() & self.links.keys()
        _require(not both, f"{', '.join(sorted(both))}: a processor and a link share a name")
        taken = NETWORK in self.processors or NETWORK in self.links
        _require(not taken, f"{NETWORK} is the name of the network, and of nothing else")
        for path in self.shared_paths:
            unknown = set(path.links) - self.links.keys()
            _require(not unknown, f"shared_paths names {sorted(unknown)}, no links")

    @cached_property
    def _by_ends(self) -> Mapping[tuple[str, str], Link]:
        return {link.ends: link for link in self.links.values()}

    # Copies.

    def copy_s(self, nbytes: float, source: str, target: str, *, copies: int = 1) -> float:
        """Seconds to bring `nbytes` from `source` to `target` in so many copies, undisturbed.

        With no copy given (0) it is what the bytes alone take: a bound for any number of them.
        """
        link = self._by_ends.get((source, target))
        if link is None:
            link = self.links[self.link_between(source, target)]
        return copies * link.latency_s + nbytes / link.bytes_per_s

    def link_between(self, source: str, target: str) -> str:
        """The name of the link from `source` to `target`; ValueError where there is none."""
        for name, link in self.links.items():
            if link.ends == (source, target):
                return name
        raise ValueError(f"machine {self.name} has no link from {source} to {target}")

    def slowdown(self, lane: str, busy: Collection[str]) -> float:
        """How many times longer work on `lane` takes while the lanes `busy` are at work."""
        processor = self.processors.get(lane)
        if processor is None:
            return max(
                (
                    path.slowdown(len({lane, *busy}.intersection(path.links)))
                    for path in self.shared_paths
                    if lane in path.links
                ),
                default=1.0,
            )
        is_slowed = not set(busy).isdisjoint(self._links_at(processor))
        return processor.update.slowdown_while_copying if processor.update and is_slowed else 1.0

    # Lanes.

    @cached_property
    def lanes(self) -> Mapping[str, int]:
        """What works beside each other: every processor, link and the network, with its workers."""
        workers = {
            name: 1 if processor.update is None else processor.update.workers
            for name, processor in self.processors.items()
        }
        return workers | dict.fromkeys([*self.links, *([NETWORK] if self.network else ())], 1)

    @cached_property
    def contention(self) -> Contention:
        """How the lanes slow one another."""
        crowded = tuple(path for path in self.shared_paths if len(path.links) > 2)
        return Contention(self._disturbed(), crowded)

    def _disturbed(self) -> dict[tuple[str, str], float]:
        """By how much a busy lane slows another, (slowed, busy), where these two say it all."""
        pairs = {
            (path.links[i], path.links[1 - i]): path.slowdown(2)
            for path in self.shared_paths
            if len(path.links) == 2
            for i in (0, 1)
        }
        for name, processor in self.processors.items():
            if processor.update is not None:
                pairs |= {
                    (name, link): self.slowdown(name, (link,)) for link in self._links_at(processor)
                }
        return pairs

    def _links_at(self, processor: Processor) -> Iterator[str]:
        for name, link in self.links.items():
            if processor.space in link.ends and Tier.DISK not in link.ends:
                yield name

    # One device and its host.

    @property
    def has_one_device(self) -> bool:
        """Whether it is one that `two_tier` could have made, which a plan is made for."""
        names = {Tier.DEVICE.value, Tier.HOST.value}
        links = {name: link.ends for name, link in self.links.items()}
        ends = {name: each for name, each in links.items() if Tier.DISK not in each}
        return (
            self.spaces.keys() - {Tier.DISK} == names == self.processors.keys()
            and ends == {_DOWN: (Tier.DEVICE, Tier.HOST), _UP: (Tier.HOST, Tier.DEVICE)}
            and self.processors[Tier.HOST].update is not None
        )

    def tier(self, space: str) -> TierSpec:
        """A space with the processor that works in it."""
        return self._tiers[space]

    @cached_property
    def _tiers(self) -> Mapping[str, TierSpec]:
        return {
            p.space: TierSpec(
                self.spaces[p.space].capacity_bytes,
                p.bytes_per_s,
                p.flops_per_s,
                p.launch_s,
                p.factors,
                p.starts_s,
            )
            for p in self.processors.values()
        }

    @property
    def device(self) -> TierSpec:
        return self._tiers[Tier.DEVICE]

    @property
    def host(self) -> TierSpec:
        return self._tiers[Tier.HOST]

    @property
    def h2d(self) -> Link:
        return self.links[_UP]

    @property
    def d2h(self) -> Link:
        return self.links[_DOWN]

    @property
    def duplex(self) -> float:
        """What both directions together reach, as a multiple of one."""
        own = (path.together for path in self.shared_paths if _READ not in path.links)
        return min(own, default=2.0)

    @property
    def disk(self) -> Disk | None:
        """Its drive, if it has any."""
        if Tier.DISK not in self.spaces:
            return None
        read, write = self.links[_READ], self.links[_WRITE]
        (path,) = (path for path in self.shared_paths if _READ in path.links)
        space, rates = self.spaces[Tier.DISK], (read.bytes_per_s, write.bytes_per_s)
        latency_s, rated_bytes = read.latency_s, space.rated_bytes
        return Disk(space.capacity_bytes, *rates, path.together, latency_s, rated_bytes)

    def with_disk(self, disk: Disk | None) -> Machine:
        """The same machine with another drive, or with none."""
        spaces = {name: space for name, space in self.spaces.items() if name != Tier.DISK}
        links = {name: link for name, link in self.links.items() if name not in (_READ, _WRITE)}
        paths = tuple(path for path in self.shared_paths if _READ not in path.links)
        if disk is not None:
            host, drive, latency_s = Tier.HOST.value, Tier.DISK.value, disk.latency_s
            spaces[drive] = Space(disk.capacity_bytes, disk.rated_bytes)
            links[_READ] = Link(disk.read_bytes_per_s, latency_s, drive, host)
            links[_WRITE] = Link(disk.write_bytes_per_s, latency_s, host, drive)
            paths += (SharedPath((_READ, _WRITE), disk.together),)
        return replace(self, spaces=spaces, links=links, shared_paths=paths)

    @property
    def issue_s(self) -> float:
        return self.processors[Tier.DEVICE].issue_s

    @property
    def fuses_updates(self) -> bool:
        return self.processors[Tier.DEVICE].fuses_updates

    @property
    def runs_ahead(self) -> bool:
        return self.processors[Tier.DEVICE].runs_ahead

    @property
    def host_update(self) -> HostUpdate:
        update = self.processors[Tier.HOST].update
        assert update is not None, "the host of one device runs updates"
        return update

    def but(
        self,
        *,
        name: str | None = None,
        device: TierSpec | None = None,
        host: TierSpec | None = None,
        h2d: Link | None = None,
        d2h: Link | None = None,
        host_update: HostUpdate | None = None,
        duplex: float | None = None,
        source: str | None = None,
        issue_s: float | None = None,
        fuses_updates: bool | None = None,
        runs_ahead: bool | None = None,
        network: Network | None = None,
        rates: Rates | None = None,
        compute_capability: tuple[int, int] | None = None,
    ) -> Machine:
        """The same machine of one device with other figures, named as `two_tier` has them."""
        made = two_tier(
            name=self.name if name is None else name,
            device=device or self.device,
            host=host or self.host,
            h2d=h2d or self.h2d,
            d2h=d2h or self.d2h,
            host_update=host_update or self.host_update,
            duplex=self.duplex if duplex is None else duplex,
            source=self.source if source is None else source,
            issue_s=self.issue_s if issue_s is None else issue_s,
            fuses_updates=self.fuses_updates if fuses_updates is None else fuses_updates,
            runs_ahead=self.runs_ahead if runs_ahead is None else runs_ahead,
            rates=rates or self.rates,
        )
        return replace(
            made.with_disk(self.disk),
            network=network or self.network,
            compute_capability=compute_capability or self.compute_capability,
        )


def two_tier(
    name: str,
    device: TierSpec,
    host: TierSpec,
    h2d: Link,
    d2h: Link,
    host_update: HostUpdate,
    duplex: float = 2.0,
    source: str = "",
    issue_s: float = 0.0,
    fuses_updates: bool = False,
    runs_ahead: bool = False,
    rates: Rates = Rates.GIVEN,
) -> Machine:
    """A device with its host.

    `duplex` is what both link directions together reach, as a multiple of one: 2.0 when they do not
    disturb each other, 1.0 when they share one path. `issue_s`, `fuses_updates` and `runs_ahead`
    are those of the device, see `Processor`.
    """
    if not 1.0 <= duplex <= 2.0:
        raise ValueError("duplex must lie between 1.0 (shared) and 2.0 (independent)")
    on_device = Processor(
        Tier.DEVICE.value,
        device.bytes_per_s,
        device.flops_per_s,
        device.launch_s,
        issue_s,
        fuses_updates,
        runs_ahead=runs_ahead,
        factors=device.factors,
        starts_s=device.starts_s,
    )
    on_host = Processor(
        Tier.HOST.value,
        host.bytes_per_s,
        host.flops_per_s,
        host.launch_s,
        update=host_update,
        factors=host.factors,
        starts_s=host.starts_s,
    )
    return Machine(
        name=name,
        spaces={
            Tier.DEVICE.value: Space(device.capacity_bytes),
            Tier.HOST.value: Space(host.capacity_bytes),
        },
        processors={Tier.DEVICE.value: on_device, Tier.HOST.value: on_host},
        links={
            _DOWN: replace(d2h, source=Tier.DEVICE.value, target=Tier.HOST.value),
            _UP: replace(h2d, source=Tier.HOST.value, target=Tier.DEVICE.value),
        },
        shared_paths=(SharedPath((_DOWN, _UP), duplex),),
        source=source,
        rates=rates,
    )


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
