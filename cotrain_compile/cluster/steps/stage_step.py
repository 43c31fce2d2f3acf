"""Stage step: what ranks do in a step, as data; what it takes follows from their machines alone.

In: `Rank`s, a machine each, and `StageTask`s in the order of their lanes, each of so many seconds
by the profile or of so many bytes. Out: `Work`s for the simulator's engine, with the seconds that
the machine of a rank takes for them; the simulated step, a bound, and the bytes that move.

Every strategy of a cluster makes its step of these: stages of layers, run on ranks for
micro-batches in an order, with what comes before a turn and what leaves behind it. A lane runs its
tasks one at a time, in the order in which they are listed. No torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any, NamedTuple

from cotrain_compile.analysis.costs import exchange_s
from cotrain_compile.cluster.model.machines import beside_copies
from cotrain_compile.dataflow import Collective
from cotrain_compile.errors import PlanError
from cotrain_compile.machine import NETWORK, Machine, Network, Tier
from cotrain_compile.placement.simulate.engine import LaneSpec, Work, simulate
from cotrain_compile.plan import Timeline

# Adding to what rests on the host reads both and writes one of them.
_ADD_TOUCHES = 3
# A bound of a plan is a sum in another order than the simulator's.
ROUNDING = 1 - 1e-9


class Does(StrEnum):
    """What a task does, and of what its amount is."""

    COMPUTE = "compute"  # seconds by the profile
    UPDATE = "update"  # bytes that an update on the device reads and writes
    FETCH = "swap in"  # bytes from the host
    STORE = "swap out"  # bytes to the host
    ADD = "add"  # bytes that the host adds to as many
    HOST_UPDATE = "host update"  # bytes that an update on the host reads and writes
    SEND = "send"  # bytes to the next rank, or back
    GATHER = "all_gather"  # bytes of the whole, as in what follows
    SCATTER = "reduce_scatter"
    SUM = "all_reduce"


_STREAMS = {
    Does.COMPUTE: "",
    Does.UPDATE: "",
    Does.FETCH: "/swap in",
    Does.STORE: "/swap out",
    Does.ADD: "/host",
    Does.HOST_UPDATE: "/host",
}
EXCHANGES = (Does.GATHER, Does.SCATTER, Does.SUM)


class StageTask(NamedTuple):
    """What one rank does, or where none is named every rank at once; an exchange all together.

    It begins when all tasks that it comes `after` have ended. `lane` is told where it is another
    one than that of what it does. The amount is that of every rank, or one for each of them. An
    exchange goes `over` the ring of that name, without one over that of the step.
    """

    name: str
    does: Does
    amount: float | tuple[float, ...]
    after: Sequence[str] = ()
    rank: int | None = None
    lane: str = ""
    over: str = ""

    def amount_of(self, rank: int) -> float:
        """What that rank does."""
        return self.amount[rank] if isinstance(self.amount, tuple) else self.amount


@dataclass(frozen=True)
class Rank:
    """A device with its share of the host, or all of a kind, which do the same.

    It computes on `lane`, and takes `slowness` times as long as the profile says. Where ranks have
    works of one name, `said` tells them apart. What it sends goes over its machine's network.
    """

    machine: Machine
    lane: str
    slowness: float = 1.0
    said: str = ""

    def lane_of(self, does: Does) -> str:
        """Where it does what is no exchange."""
        return f"{self.lane}{_STREAMS[does]}"

    def seconds(self, does: Does, amount: float) -> float:
        """What a task takes that is no exchange."""
        machine = self.machine
        match does:
            case Does.COMPUTE:
                return amount * self.slowness
            case Does.UPDATE:
                return amount / machine.device.bytes_per_s
            case Does.FETCH:
                return machine.copy_s(amount, Tier.HOST, Tier.DEVICE) if amount else 0.0
            case Does.STORE:
                return machine.copy_s(amount, Tier.DEVICE, Tier.HOST) if amount else 0.0
            case Does.ADD:
                return _ADD_TOUCHES * amount / machine.host.bytes_per_s
            case Does.HOST_UPDATE:
                return amount / beside_copies(machine.host_update)
            case _:
                return _sent_s(amount, machine.network)


def _sent_s(nbytes: float, network: Network | None) -> float:
    if not nbytes:
        return 0.0
    assert network is not None  # a rank that sends has a network
    return nbytes / network.bytes_per_s + network.latency_s


@dataclass(frozen=True)
class Ring:
    """So many ranks, each of which sends to the next over `network`.

    `sum_s` is what so many bytes take to be summed, where the ring does not sum them. Exchanges of
    all rings on a `lane` take turns.
    """

    network: Network
    ranks: int
    sum_s: Callable[[float], float] | None = None
    lane: str = NETWORK

    def seconds(self, does: Does, nbytes: float) -> float:
        """What an exchange of so many bytes takes."""
        if not nbytes:
            return 0.0
        if does is Does.SUM and self.sum_s:
            return self.sum_s(nbytes)
        return exchange_s(self._exchange(does, nbytes), self.network)

    def sent_bytes(self, does: Does, nbytes: float) -> float:
        """What each rank sends for it."""
        return self._exchange(does, nbytes).wire_bytes

    def _exchange(self, does: Does, nbytes: float) -> Collective:
        return Collective(does.value, self.ranks, round(nbytes))


@dataclass(frozen=True)
class StageStep:
    """The tasks of ranks; `ring` is what they exchange over, None where they exchange nothing, and
    `rings` are others that some of them do, by name."""

    ranks: tuple[Rank, ...]
    tasks: tuple[StageTask, ...]
    ring: Ring | None = None
    rings: Mapping[str, Ring] = field(default_factory=dict)

    @cached_property
    def works(self) -> tuple[Work, ...]:
        return tuple(works_of(self))

    @cached_property
    def _timed(self) -> _Timed:
        return _timed(self)

    @property
    def lanes_s(self) -> Mapping[str, float]:
        """The seconds that each lane is busy."""
        return self._timed.lanes_s

    @property
    def busiest(self) -> tuple[str, float]:
        """The first of the lanes that have most to do, and its seconds."""
        most_s = max(self.lanes_s.values())
        return next(each for each in self.lanes_s.items() if each[1] >= most_s * ROUNDING)

    @property
    def seconds(self) -> float:
        """Simulated; raises `PlanError` where tasks wait for each other, or for none of these."""
        return self._timed.seconds

    @property
    def bound_s(self) -> float:
        """What no timing of the same tasks can beat."""
        return max(self._timed.chain_s, *self.lanes_s.values())

    @cached_property
    def timeline(self) -> Timeline:
        return simulate(self.works, self._lanes)

    @property
    def _lanes(self) -> list[LaneSpec]:
        return [LaneSpec(lane) for lane in self.lanes_s]

    def task_s(self, task: StageTask) -> float:
        """What a task takes, on the first of its ranks."""
        return self.seconds_on(task, task.rank or 0)

    def seconds_on(self, task: StageTask, rank: int) -> float:
        """What a task takes on one of its ranks, an exchange on all."""
        if task.does in EXCHANGES:
            return self.ring_of(task).seconds(task.does, task.amount_of(0))
        return self.ranks[rank].seconds(task.does, task.amount_of(rank))

    def lane_of(self, task: StageTask, rank: int) -> str:
        """Where a rank does it."""
        if task.lane:
            return task.lane
        if task.does in EXCHANGES:
            return self.ring_of(task).lane
        return self.ranks[rank].lane_of(task.does)

    def ring_of(self, task: StageTask) -> Ring:
        """What an exchange goes over."""
        found = self.rings[task.over] if task.over else self.ring
        assert found is not None  # who exchanges has a ring
        return found

    @cached_property
    def moved_bytes(self) -> Mapping[Does, float]:
        """What is copied and sent: of what every rank does, by each of them."""
        moved = dict.fromkeys((Does.FETCH, Does.STORE, Does.SEND, *EXCHANGES), 0.0)
        for task in self.tasks:
            if task.does in EXCHANGES:
                moved[task.does] += self.ring_of(task).sent_bytes(task.does, task.amount_of(0))
            elif task.does in moved:
                moved[task.does] += task.amount_of(task.rank or 0)
        return moved


def works_of(step: StageStep) -> Iterator[Work]:
    """All works of a step, in the order of its tasks."""
    names = {task.name: tuple(_names(step, task)) for task in step.tasks}
    for task in step.tasks:
        after = tuple(name for before in task.after for name in names[before])
        numbers = (0,) if task.does in EXCHANGES else _ranks(step, task)
        for name, number in zip(names[task.name], numbers, strict=True):
            yield Work(name, step.lane_of(task, number), step.seconds_on(task, number), after)


def _ranks(step: StageStep, task: StageTask) -> Sequence[int]:
    return range(len(step.ranks)) if task.rank is None else (task.rank,)


def _names(step: StageStep, task: StageTask) -> Iterator[str]:
    if task.does in EXCHANGES:
        yield task.name
    else:
        yield from (f"{task.name}{step.ranks[number].said}" for number in _ranks(step, task))


class _Timed(NamedTuple):
    """When the last task of a step ends, the longest chain of them, how busy lanes are."""

    seconds: float
    chain_s: float
    lanes_s: Mapping[str, float]


def _timed(step: StageStep) -> _Timed:
    """A step where each lane runs one task at a time, as `simulate` has it: no work is made."""
    lanes: defaultdict[str, list[tuple[StageTask, float]]] = defaultdict(list)
    parts: dict[str, int] = {}  # of each task those that have not ended
    known: dict[tuple[Any, ...], float] = {}
    for task in step.tasks:
        if task.name in parts:
            raise PlanError(f"two tasks are named {task.name}; names must be unique")
        numbers = (0,) if task.does in EXCHANGES else _ranks(step, task)
        parts[task.name] = len(numbers)
        for number in numbers:
            key = task.does, task.amount_of(number), number, task.over
            if key not in known:
                known[key] = step.seconds_on(task, number)
            lanes[step.lane_of(task, number)].append((task, known[key]))
    busy_s = {lane: sum(seconds for _, seconds in queue) for lane, queue in lanes.items()}
    ends_s, chains_s = _ends(lanes, parts)
    return _Timed(max(ends_s.values(), default=0.0), max(chains_s.values(), default=0.0), busy_s)


def _ends(
    lanes: Mapping[str, list[tuple[StageTask, float]]], parts: dict[str, int]
) -> tuple[dict[str, float], dict[str, float]]:
    """When each task ends, and the longest chain up to there; a lane that waits is looked at again
    when the task has ended that it waits for."""
    ends_s, chains_s = dict.fromkeys(parts, 0.0), dict.fromkeys(parts, 0.0)
    waiting: defaultdict[str, list[str]] = defaultdict(list)
    free_s = dict.fromkeys(lanes, 0.0)
    ready = list(lanes)
    for queue in lanes.values():
        queue.reverse()
    while ready:
        lane = ready.pop()
        queue, now_s = lanes[lane], free_s[lane]
        while queue:
            task, seconds = queue[-1]
            chain_s = 0.0
            for before in task.after:
                if parts.get(before, 1):
                    waiting[before].append(lane)
                    break
                now_s, chain_s = max(now_s, ends_s[before]), max(chain_s, chains_s[before])
            else:
                queue.pop()
                now_s += seconds
                name = task.name
                ends_s[name] = max(ends_s[name], now_s)
                chains_s[name] = max(chains_s[name], chain_s + seconds)
                parts[name] -= 1
                if not parts[name]:
                    ready += waiting.pop(name, ())
                continue
            break
        free_s[lane] = now_s
    if heads := ", ".join(queue[-1][0].name for queue in lanes.values() if queue):
        raise PlanError(f"tasks can never start, the first on their lanes are {heads}")
    return ends_s, chains_s
