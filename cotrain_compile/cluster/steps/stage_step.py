"""Stage step: what ranks do in a step, as data; what it takes follows from their machines alone.

In: `Rank`s, a machine each, and `StageTask`s in the order of their lanes, each of so many seconds
by the profile or of so many bytes. Out: `Work`s for the simulator's engine, with the seconds that
the machine of a rank takes for them; the simulated step, a bound, and the bytes that move.

Every strategy of a cluster makes its step of these: stages of layers, run on ranks for
micro-batches in an order, with what comes before a turn and what leaves behind it. A lane runs its
tasks one at a time, in the order in which they are listed. No torch.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple, Protocol, TypeVar

from cotrain_compile.analysis.costs import exchange_s
from cotrain_compile.cluster.model.machines import beside_copies
from cotrain_compile.dataflow import Collective
from cotrain_compile.errors import PlanError
from cotrain_compile.machine import NETWORK, Machine, Network, Tier
from cotrain_compile.placement.simulate.engine import LaneSpec, Work, lower_bound, simulate
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
    def lanes_s(self) -> Mapping[str, float]:
        """The seconds that each lane is busy."""
        busy: defaultdict[str, float] = defaultdict(float)
        for work in self.works:
            busy[work.lane] += work.seconds
        return busy

    @property
    def busiest(self) -> tuple[str, float]:
        """The first of the lanes that have most to do, and its seconds."""
        most_s = max(self.lanes_s.values())
        return next(each for each in self.lanes_s.items() if each[1] >= most_s * ROUNDING)

    @cached_property
    def seconds(self) -> float:
        """Simulated."""
        return last_end_s(self.works)

    @cached_property
    def bound_s(self) -> float:
        """What no timing of the same works can beat."""
        return lower_bound(self.works, self._lanes)

    @cached_property
    def timeline(self) -> Timeline:
        return simulate(self.works, self._lanes)

    @property
    def _lanes(self) -> list[LaneSpec]:
        return [LaneSpec(lane) for lane in self.lanes_s]

    def task_s(self, task: StageTask) -> float:
        """What a task takes, on the first of its ranks."""
        first = task.rank or 0
        if task.does not in EXCHANGES:
            return self.ranks[first].seconds(task.does, task.amount_of(first))
        return self.ring_of(task).seconds(task.does, task.amount_of(0))

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


class Candidate(Protocol):
    """A choice with its step, and seconds that the step takes at least."""

    @property
    def least_s(self) -> float: ...

    @property
    def step(self) -> StageStep: ...


P = TypeVar("P", bound=Candidate)
Made = TypeVar("Made", bound=Candidate, covariant=True)


class PlanOption(Protocol[Made]):
    """Some choices with seconds that none of them passes under, before any of them is made."""

    @property
    def least_s(self) -> float: ...

    def plans(self) -> Iterable[Made]: ...


def fastest(plans: Iterable[P]) -> P | None:
    """The first of those that take least; what is ruled out by what it takes at least is not
    simulated, and no step is kept but the best one."""
    queue = deque(sorted(plans, key=lambda plan: plan.least_s))
    best: P | None = None
    while queue:
        plan = queue.popleft()
        if best and plan.least_s >= best.step.seconds:
            break
        if best is None or plan.step.seconds < best.step.seconds:
            best = plan
    return best


def fastest_option(options: Iterable[PlanOption[P]]) -> tuple[int, P] | None:
    """The same of all plans of all options, behind the number of its option; of those whose bound
    is above the best no plan is made.

    Of those that take as long the one with the least bound, then the first.
    """
    found: tuple[float, float, tuple[int, int]] | None = None
    best: tuple[int, P] | None = None
    numbered = sorted(enumerate(options), key=lambda each: (each[1].least_s, each[0]))
    for number, option in numbered:
        if found and option.least_s > found[0]:
            break
        for i, plan in enumerate(option.plans()):
            if found and plan.least_s > found[0]:
                continue
            key = plan.step.seconds, plan.least_s, (number, i)
            if found is None or key < found:
                found, best = key, (number, plan)
    return best


def works_of(step: StageStep) -> Iterator[Work]:
    """All works of a step, in the order of its tasks."""
    names = {task.name: tuple(_names(step, task)) for task in step.tasks}
    for task in step.tasks:
        after = tuple(name for before in task.after for name in names[before])
        if task.does in EXCHANGES:
            lane = task.lane or step.ring_of(task).lane
            yield Work(task.name, lane, step.task_s(task), after)
            continue
        for name, number in zip(names[task.name], _ranks(step, task), strict=True):
            rank = step.ranks[number]
            lane = task.lane or rank.lane_of(task.does)
            yield Work(name, lane, rank.seconds(task.does, task.amount_of(number)), after)


def _ranks(step: StageStep, task: StageTask) -> Sequence[int]:
    return range(len(step.ranks)) if task.rank is None else (task.rank,)


def _names(step: StageStep, task: StageTask) -> Iterator[str]:
    if task.does in EXCHANGES:
        yield task.name
    else:
        yield from (f"{task.name}{step.ranks[number].said}" for number in _ranks(step, task))


def last_end_s(works: Iterable[Work]) -> float:
    """Seconds of one step of `works`, as `simulate` has them where each lane runs one at a time.

    Raises:
        PlanError: works wait for each other, or for one that is not there.
    """
    lanes: dict[str, list[Work]] = {}
    for work in works:
        lanes.setdefault(work.lane, []).append(work)
    for queue in lanes.values():
        queue.reverse()
    free_s = dict.fromkeys(lanes, 0.0)
    ends: dict[str, float] = {}
    while lanes:
        waiting = {lane: len(queue) for lane, queue in lanes.items()}
        for lane, queue in lanes.items():
            now_s = free_s[lane]
            while queue and all(name in ends for name in queue[-1].after):
                work = queue.pop()
                now_s = max([now_s, *[ends[name] for name in work.after]]) + work.seconds
                ends[work.name] = now_s
            free_s[lane] = now_s
        if all(waiting[lane] == len(queue) for lane, queue in lanes.items()):
            heads = ", ".join(queue[-1].name for queue in lanes.values())
            raise PlanError(f"works can never start, the first on their lanes are {heads}")
        lanes = {lane: queue for lane, queue in lanes.items() if queue}
    return max(free_s.values(), default=0.0)
