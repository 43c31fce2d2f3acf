"""Engine: discrete-event simulation of works on lanes, for any number of devices, hosts and links.

In: `Work`s (seconds, dependencies, bytes they allocate and free), `LaneSpec`s, and how busy lanes
slow one another (`Contention`). Out: a predicted `Timeline`, or the period of the repeated step.

Lanes and tiers are names and nothing else ("device0", "h2d1"), so several devices need nothing
new. The rules are:

- A lane starts its works in the order listed: the first that has not started waits for its
  dependencies and holds up those behind it. Up to `workers` of a lane's works run at once.
- A work on lane A proceeds at the rate 1 / f while others are busy, where f is the largest of
  `slowdown[A, B]` for each busy lane B and of what each crowded path of A says for its busy links.
  Rates change only when a lane becomes busy or idle, so the end of every work is exact.
- Bytes are allocated when a work starts and freed when it ends. Of events at the same instant,
  ends come first.

A step costs about n log n in its works where each slows and feeds few others.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from graphlib import CycleError, TopologicalSorter
from itertools import chain
from types import MappingProxyType
from typing import TypeVar, cast

import networkx as nx

from cotrain_compile.errors import PlanError
from cotrain_compile.machine import UNDISTURBED, Contention, SharedPath, Tier
from cotrain_compile.plan import Span, Timeline

_V = TypeVar("_V")
_Key = tuple[str, int]


_NOTHING: Mapping[str, int] = MappingProxyType({})


def _nothing() -> Mapping[str, int]:
    return _NOTHING


@dataclass(frozen=True)
class Work:
    """One thing a lane does: `seconds` long when nothing slows it.

    `after` names works of the same step that must have ended before this one starts,
    `after_previous` works of the step before `step` (step 0 has none). `allocates` and `frees`
    are bytes by tier, taken at the start and returned at the end.
    """

    name: str
    lane: str
    seconds: float
    after: tuple[str, ...] = ()
    after_previous: tuple[str, ...] = ()
    allocates: Mapping[str, int] = field(default_factory=_nothing)
    frees: Mapping[str, int] = field(default_factory=_nothing)
    step: int = 0

    def __post_init__(self) -> None:
        if not (self.seconds >= 0 and math.isfinite(self.seconds)):
            raise ValueError(f"work {self.name} takes {self.seconds} s; it must be 0 or more")

    @property
    def key(self) -> _Key:
        """What tells it from all others of a simulation."""
        return self.name, self.step


@dataclass(frozen=True)
class LaneSpec:
    """A queue that starts its works first in, first out and runs up to `workers` of them."""

    name: str
    workers: int = 1

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ValueError(f"lane {self.name} has {self.workers} workers; it needs at least 1")


@dataclass(frozen=True)
class Periodic:
    """A step repeated: seconds of the first one, seconds between the ends of the later ones.

    `steps` has the spans of each repetition, in order of their end.
    """

    first_s: float
    period_s: float
    steps: tuple[tuple[Span, ...], ...]


def simulate(
    works: Sequence[Work],
    lanes: Iterable[LaneSpec],
    contention: Contention = UNDISTURBED,
) -> Timeline:
    """Run `works` from time 0, each lane in the order listed, and say when everything happened.

    Raises:
        PlanError: two works share a name, a lane or dependency is unknown, works wait for each
            other in a circle, or a tier would hold less than nothing.
    """
    run = _run(works, lanes, contention)
    return Timeline(
        source="predicted",
        spans=tuple(span for _, span in run.spans()),
        peak_bytes=_by_tier(run.memory.peak_bytes),
        memory=_by_tier({tier: tuple(curve) for tier, curve in run.memory.curve.items()}),
    )


def makespan_s(
    works: Sequence[Work], lanes: Iterable[LaneSpec], contention: Contention = UNDISTURBED
) -> float:
    """Seconds from the first start to the last end of the same; raises as `simulate`."""
    ended = _run(works, lanes, contention).ended
    return ended[-1][2] - min(start_s for _, start_s, _ in ended) if ended else 0.0


def _run(
    works: Sequence[Work],
    lanes: Iterable[LaneSpec],
    contention: Contention,
) -> _Run:
    lane_specs = {lane.name: lane for lane in lanes}
    before = _dependencies(works, lane_specs, contention)
    return _Run(works, before, lane_specs, contention).to_the_end()


def steady_state(
    works: Sequence[Work],
    lanes: Iterable[LaneSpec],
    contention: Contention = UNDISTURBED,
    *,
    steps: int = 8,
) -> Periodic:
    """Repeat the step `steps` times and measure the first one and the period.

    The period is the mean distance of the ends of the steps over the second half of the run: the
    slowest circuit of dependencies may span several steps, and single distances swing for ever.

    Raises:
        ValueError: `steps` is below 2.
        PlanError: as `simulate`.
    """
    if steps < 2:
        raise ValueError(f"a period needs at least 2 steps, not {steps}")
    spans: list[list[Span]] = [[] for _ in range(steps)]
    for work, span in _run(repeat(works, steps), lanes, contention).spans():
        spans[work.step].append(span)
    # In order of their end: the last one of a step ends it.
    ends_s = [of_step[-1].end_s if of_step else 0.0 for of_step in spans]
    middle = (steps - 1) // 2
    period_s = (ends_s[-1] - ends_s[middle]) / (steps - 1 - middle)
    return Periodic(first_s=ends_s[0], period_s=period_s, steps=tuple(map(tuple, spans)))


def repeat(works: Sequence[Work], steps: int) -> tuple[Work, ...]:
    """`steps` copies of a step, which `after_previous` joins."""
    return tuple(replace(work, step=step) for step in range(steps) for work in works)


def lower_bound(works: Sequence[Work], lanes: Iterable[LaneSpec]) -> float:
    """Seconds that no schedule of `works` can beat, in whatever order its lanes run them.

    The larger of the busiest lane (its seconds over its workers) and the longest chain of
    dependencies.

    Raises:
        PlanError: a lane or dependency is unknown, or works wait for each other in a circle.
    """
    lane_specs = {lane.name: lane for lane in lanes}
    before = _dependencies(works, lane_specs, UNDISTURBED)
    busy_s = dict.fromkeys(lane_specs, 0.0)
    for work in works:
        busy_s[work.lane] += work.seconds
    busiest_s = max((busy_s[name] / lane.workers for name, lane in lane_specs.items()), default=0.0)
    return max(busiest_s, _longest_chain_s(works, before))


def _longest_chain_s(works: Sequence[Work], before: Sequence[Sequence[int]]) -> float:
    try:
        order = tuple(TopologicalSorter(dict(enumerate(before))).static_order())
    except CycleError as error:
        circle = " -> ".join(works[i].name for i in error.args[1])
        raise PlanError(f"works wait for each other: {circle}") from error
    end_s = [0.0] * len(works)
    for i in order:
        end_s[i] = works[i].seconds + max((end_s[earlier] for earlier in before[i]), default=0.0)
    return max(end_s, default=0.0)


def _dependencies(
    works: Sequence[Work],
    lanes: Mapping[str, LaneSpec],
    contention: Contention,
) -> list[list[int]]:
    """The works that each waits for, by their places among `works`; refuses names without sense."""
    places: dict[int, dict[str, int]] = {}  # of works by step and name
    for place, work in enumerate(works):
        places.setdefault(work.step, {})[work.name] = place
    if sum(map(len, places.values())) < len(works):
        twice = next(name for (name, _), n in Counter(w.key for w in works).items() if n > 1)
        raise PlanError(f"two works are named {twice}; names must be unique")
    before = []
    for work in works:
        if work.lane not in lanes:
            raise PlanError(f"work {work.name} is on lane {work.lane}, known are {sorted(lanes)}")
        try:
            own = places[work.step]
            earlier = [own[name] for name in work.after]
            if work.step and work.after_previous:
                own = places.get(work.step - 1, {})
                earlier += [own[name] for name in work.after_previous]
        except KeyError as error:
            text = f"work {work.name} waits for {error.args[0]}, which is no work here"
            raise PlanError(text) from None
        before.append(earlier)
    for (slowed, busy), factor in contention.slowdown.items():
        if slowed not in lanes or busy not in lanes or slowed == busy or not factor >= 1:
            raise PlanError(
                f"slowdown of lane {slowed} by {busy} is {factor}: it takes two different lanes "
                f"of {sorted(lanes)} and a factor of at least 1"
            )
    strange = {lane for path in contention.crowded for lane in path.links} - lanes.keys()
    if strange:
        raise PlanError(f"{sorted(strange)} share a path, known lanes are {sorted(lanes)}")
    return before


@dataclass(eq=False, slots=True)
class _Running:
    """A started work: what is left of it as of `since_s`, at `rate` seconds per second."""

    place: int
    start_s: float
    left_s: float
    since_s: float
    rate: float
    ticket: int  # of its latest entry in the queue of ends; older entries are void


class _Memory:
    """Bytes alive per tier: now, at their peak, and as a curve."""

    def __init__(self) -> None:
        self.alive_bytes = Counter[str]()
        self.peak_bytes: dict[str, int] = {}
        self.curve: dict[str, list[tuple[float, int]]] = {}

    def change(self, work: Work, now_s: float, changes: Mapping[str, int], sign: int) -> None:
        for tier, nbytes in changes.items():
            self.alive_bytes[tier] += sign * nbytes
            alive = self.alive_bytes[tier]
            if alive < 0:
                raise PlanError(
                    f"work {work.name} frees {nbytes} bytes on {tier}, {-alive} more than are alive"
                )
            self.peak_bytes[tier] = max(self.peak_bytes.get(tier, 0), alive)
            self.curve.setdefault(tier, [(0.0, 0)]).append((now_s, alive))


class _Rates:
    """How fast works on each lane proceed while others are busy: these by bits, as in `_Run`."""

    def __init__(self, number: Mapping[str, int], contention: Contention) -> None:
        self.slows: list[list[int]] = [[] for _ in number]  # by each lane
        self._factors: list[list[tuple[int, float]]] = [[] for _ in number]
        for (slowed, busy), factor in contention.slowdown.items():
            self._factors[number[slowed]].append((1 << number[busy], factor))
            self.slows[number[busy]].append(number[slowed])
        self._paths: list[list[tuple[int, SharedPath]]] = [[] for _ in number]
        for path in contention.crowded:
            on_path = [number[name] for name in path.links]
            for lane in on_path:
                others = [other for other in on_path if other != lane]
                self._paths[lane].append((sum(1 << other for other in others), path))
                self.slows[lane] += others
        self._known: list[dict[int, float]] = [{} for _ in number]

    def rate(self, lane: int, busy: int) -> float:
        """Seconds that a work on `lane` proceeds in a second."""
        if busy not in self._known[lane]:
            factors = (factor for other, factor in self._factors[lane] if busy & other)
            crowded = (path.slowdown(1 + (busy & o).bit_count()) for o, path in self._paths[lane])
            self._known[lane][busy] = 1.0 / max(chain(factors, crowded), default=1.0)
        return self._known[lane][busy]


class _Run:
    """The state of one simulation between two events. Lanes go by number, those busy by a bit."""

    def __init__(
        self,
        works: Sequence[Work],
        before: Sequence[Sequence[int]],
        lanes: Mapping[str, LaneSpec],
        contention: Contention,
    ) -> None:
        self.works, self.before = works, before
        number = {name: lane for lane, name in enumerate(lanes)}
        self.workers = [lane.workers for lane in lanes.values()]
        self.lane_of = [number[work.lane] for work in works]
        self.waiting: list[deque[int]] = [deque() for _ in lanes]
        self.running: list[list[_Running]] = [[] for _ in lanes]
        self.open_dependencies = [len(earlier) for earlier in before]
        self.dependents: list[list[int]] = [[] for _ in works]
        for place, lane in enumerate(self.lane_of):
            self.waiting[lane].append(place)
            for earlier in before[place]:
                self.dependents[earlier].append(place)
        self.rates = _Rates(number, contention)
        self.busy = 0
        self.settled = 0  # the lanes that were busy when rates were corrected last
        self.now_s = 0.0
        self.tickets = 0
        self.ends: list[tuple[float, int, _Running]] = []
        self.ended: list[tuple[int, float, float]] = []  # place, start and end
        self.memory = _Memory()

    def to_the_end(self) -> _Run:
        self._start_ready(range(len(self.workers)))
        ends = self.ends
        while ends:
            touched: dict[int, None] = {}  # a set that keeps its order, so that runs are repeatable
            self.now_s = ends[0][0]
            while ends and ends[0][0] == self.now_s:
                _, ticket, running = heapq.heappop(ends)
                if ticket == running.ticket:
                    self._end(running, touched)
            self._start_ready(touched)
        if len(self.ended) < len(self.works):
            raise PlanError(self._deadlock())
        return self

    def _end(self, running: _Running, touched: dict[int, None]) -> None:
        """End a work that is due; notes in `touched` the lanes on which something may start."""
        place = running.place
        lane = self.lane_of[place]
        self.running[lane].remove(running)
        if not self.running[lane]:
            self.busy &= ~(1 << lane)
        self.ended.append((place, running.start_s, self.now_s))
        if frees := self.works[place].frees:
            self.memory.change(self.works[place], self.now_s, frees, -1)
        touched[lane] = None
        for dependent in self.dependents[place]:
            self.open_dependencies[dependent] -= 1
            if self.open_dependencies[dependent] == 0:
                touched[self.lane_of[dependent]] = None

    def _start_ready(self, lanes: Iterable[int]) -> None:
        """Start what can start on `lanes`, then correct the rates wherever that matters."""
        changed = False
        for lane in lanes:
            waiting, running = self.waiting[lane], self.running[lane]
            while (
                waiting
                and len(running) < self.workers[lane]
                and self.open_dependencies[waiting[0]] == 0
            ):
                self._start(waiting.popleft(), lane)
                changed |= self.busy != self.settled
        if not changed and self.busy == self.settled:
            return
        self.settled = self.busy
        slowed = dict.fromkeys(slow for lane in lanes for slow in self.rates.slows[lane])
        for lane in slowed:
            if self.running[lane]:
                self._correct_rate(lane)

    def _start(self, place: int, lane: int) -> None:
        work = self.works[place]
        if work.allocates:
            self.memory.change(work, self.now_s, work.allocates, +1)
        rate = self.rates.rate(lane, self.busy)
        self.busy |= 1 << lane
        started = _Running(place, self.now_s, work.seconds, self.now_s, rate, 0)
        self.running[lane].append(started)
        self._expect_end(started)

    def _correct_rate(self, lane: int) -> None:
        rate = self.rates.rate(lane, self.busy)
        for running in self.running[lane]:
            if running.rate != rate:
                done_s = (self.now_s - running.since_s) * running.rate
                running.left_s = max(0.0, running.left_s - done_s)
                running.since_s, running.rate = self.now_s, rate
                self._expect_end(running)

    def _expect_end(self, running: _Running) -> None:
        self.tickets += 1
        running.ticket = self.tickets
        end_s = running.since_s + running.left_s / running.rate
        heapq.heappush(self.ends, (end_s, running.ticket, running))

    def spans(self) -> Iterator[tuple[Work, Span]]:
        """Each work with when it ran, in order of their end."""
        for place, start_s, end_s in self.ended:
            work = self.works[place]
            yield work, Span(work.lane, work.name, start_s, end_s)

    def _deadlock(self) -> str:
        """Say which works wait for each other: a circle of dependencies and lane order."""
        ended = {place for place, _, _ in self.ended}
        left = [place for place in range(len(self.works)) if place not in ended]
        graph = nx.DiGraph()
        unended, last_on_lane = set(left), dict[str, int]()
        for place in left:
            lane = self.works[place].lane
            graph.add_edges_from(
                (place, earlier) for earlier in self.before[place] if earlier in unended
            )
            if lane in last_on_lane:
                graph.add_edge(place, last_on_lane[lane])
            last_on_lane[lane] = place
        circle = [self.works[waits].name for waits, _ in nx.find_cycle(graph)]
        return (
            f"{len(left)} works can never start; these wait for each other, by dependency or by "
            f"their order on a lane: {' -> '.join([*circle, circle[0]])}"
        )


def _by_tier(values: Mapping[str, _V]) -> dict[Tier, _V]:
    return {cast(Tier, next((t for t in Tier if t == name), name)): v for name, v in values.items()}
