"""The lanes of Harmony's devices: what copies, computes and waits, and the bytes that it moves.

In: events one by one, each on a stream of a device. Out: `Works` for the simulator's engine. A lane
runs its works one at a time in the order in which they are put on it, and a work begins when all
that it waits for has ended. A copy between two devices is a work on a lane of each: both wait for
what either waits for and for what is before the other on its lane, so they begin together.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

from cotrain_compile.errors import OptionError, PlanError
from cotrain_compile.placement.simulate.engine import LaneSpec, Work


@dataclass(frozen=True)
class Server:
    """Devices that share the way to one host.

    `swap_bytes_per_s` is the way to and from host memory, one direction, shared by all devices that
    work, of which each has `link_bytes_per_s` at most; shared too is `message_bytes_per_s`, a copy
    from one process to another, which reads and writes host memory. `peer_bytes_per_s` is between
    two devices. `deletion_s` passes at the end of a task. `update_share` is what one device gets of
    the host's updates while all devices have some. The defaults are those of the authors'
    4 x GTX 1080 Ti.
    """

    devices: int
    cap_bytes: float = 10 * 2**30
    swap_bytes_per_s: float = 11.5 * 2**30
    link_bytes_per_s: float = math.inf
    peer_bytes_per_s: float = 8.2 * 2**30
    message_bytes_per_s: float = 16 * 2**30
    deletion_s: float = 0.04
    update_share: float = 1.0

    def __post_init__(self) -> None:
        rates = (self.swap_bytes_per_s, self.link_bytes_per_s, self.peer_bytes_per_s)
        if self.devices < 1 or min(self.cap_bytes, self.message_bytes_per_s, *rates) <= 0:
            raise OptionError(f"a server has devices, memory and ways to it, all above 0: {self}")
        if not 0 < self.update_share <= 1:
            raise OptionError(f"a device has a share of the host above 0, not {self.update_share}")
        if not 0 <= self.deletion_s < math.inf:
            raise OptionError(f"a deletion takes 0 s or more, not {self.deletion_s}")

    def update_s(self, alone_s: float, shared: bool) -> float:
        """An update that takes `alone_s` on a host of its own."""
        return alone_s / self.update_share if shared else alone_s


class Stream(StrEnum):
    """The lanes of a device."""

    SWAP_IN = "swap in"
    SWAP_OUT = "swap out"
    PEER_IN = "peer in"
    PEER_OUT = "peer out"
    COMPUTE = "compute"
    HOST = "host"


class Content(StrEnum):
    """What a work moves."""

    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    ACTIVATIONS = "activations"
    NOTHING = "nothing"


@dataclass(frozen=True)
class Works:
    """Works in the order of their lanes, the lanes, and the bytes that all devices move."""

    works: tuple[Work, ...]
    lanes: tuple[LaneSpec, ...]
    moved_bytes: dict[tuple[Stream, Content], float]

    @property
    def busiest_s(self) -> float:
        """Seconds of the lane that has most to do: no order of the works takes less."""
        busy: defaultdict[str, float] = defaultdict(float)
        for work in self.works:
            busy[work.lane] += work.seconds
        return max(busy.values(), default=0.0)

    def require_no_deadlock(self) -> None:
        """Make sure that no works wait for each other, by what they read or by their lanes.

        Then the step comes to its end however long each work takes.

        Raises:
            PlanError: some do; the message names them.
        """
        waits: dict[str, list[str]] = {work.name: [*work.after] for work in self.works}
        on_lane: dict[str, list[str]] = {}
        for work in self.works:
            on_lane.setdefault(work.lane, []).append(work.name)
        for names in on_lane.values():
            for earlier, later in pairwise(names):
                waits[later].append(earlier)
        try:
            TopologicalSorter(waits).prepare()
        except CycleError as error:
            circle = " -> ".join(reversed(error.args[1]))
            raise PlanError(f"tasks wait for each other: {circle}; order them anew") from None


@dataclass
class Event:
    """A work before the copies between devices are joined; `peer` is its other half."""

    name: str
    lane: str
    seconds: float
    after: list[str]
    peer: str = ""


class Lanes:
    """Events in the order in which they are put on the streams of devices."""

    def __init__(self, server: Server, devices: int) -> None:
        self.server = server
        self.swap_bytes_per_s = min(server.link_bytes_per_s, server.swap_bytes_per_s / devices)
        # Host memory is read and written, by one at a time.
        self.message_bytes_per_s = server.message_bytes_per_s / devices / 2
        self.events: dict[str, list[Event]] = {}
        self.moved: defaultdict[tuple[Stream, Content], float] = defaultdict(float)

    def put(
        self, device: int, stream: Stream, name: str, seconds: float, after: Iterable[str]
    ) -> Event:
        """Something on a stream; `after` names what it waits for."""
        lane = f"device{device}/{stream}"
        event = Event(name, lane, seconds, [*after])
        self.events.setdefault(lane, []).append(event)
        return event

    def swap(
        self,
        device: int,
        stream: Stream,
        name: str,
        nbytes: float,
        after: Iterable[str],
        content: Content = Content.ACTIVATIONS,
    ) -> None:
        """A copy from or to host memory."""
        self.put(device, stream, name, nbytes / self.swap_bytes_per_s, after)
        self.moved[stream, content] += nbytes

    def copy(
        self,
        device: int,
        stream: Stream,
        name: str,
        nbytes: float,
        after: Iterable[str],
        peer: str,
    ) -> None:
        """One half of a copy between two devices; it is counted where it goes out."""
        event = self.put(device, stream, name, nbytes / self.server.peer_bytes_per_s, after)
        event.peer = peer
        if stream is Stream.PEER_OUT:
            self.moved[stream, Content.ACTIVATIONS] += nbytes

    def hand_over(self, device: int, name: str, nbytes: float, after: Iterable[str]) -> None:
        """A copy in host memory, from one process to another."""
        self.put(device, Stream.HOST, name, nbytes / self.message_bytes_per_s, after)
        self.moved[Stream.HOST, Content.ACTIVATIONS] += nbytes

    def joined(self, copies: int) -> Works:
        """All of it as works; `copies` devices do the same."""
        ahead: dict[str, list[str]] = {}
        named: dict[str, Event] = {}
        for events in self.events.values():
            ahead[events[0].name] = []
            for earlier, later in pairwise(events):
                ahead[later.name] = [earlier.name]
            named |= {event.name: event for event in events}
        works = tuple(
            Work(event.name, event.lane, event.seconds, _awaited(event, named, ahead))
            for events in self.events.values()
            for event in events
        )
        moved = {key: nbytes * copies for key, nbytes in self.moved.items()}
        return Works(works, tuple(LaneSpec(lane) for lane in self.events), moved)


def _awaited(event: Event, named: dict[str, Event], ahead: dict[str, list[str]]) -> tuple[str, ...]:
    if not event.peer:
        return tuple(event.after)
    other = named[event.peer]
    return tuple(dict.fromkeys([*event.after, *other.after, *ahead[other.name]]))
