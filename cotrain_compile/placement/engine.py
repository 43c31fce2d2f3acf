"""Engine: discrete-event simulation of works on lanes, for any number of devices, hosts and links.

In: `Work`s (seconds, dependencies, bytes they allocate and free), `LaneSpec`s, and by how much a
busy lane slows another. Out: a predicted `Timeline`, or the period of the repeated step.

Lanes and tiers are names and nothing else ("device0", "h2d1"), so several devices need nothing
new. The rules are:

- A lane starts its works in the order listed: the first that has not started waits for its
  dependencies and holds up those behind it. Up to `workers` of a lane's works run at once.
- A work on lane A proceeds at the rate 1 / f while other lanes are busy, where f is the largest
  `slowdown[A, B]` over the busy lanes B. Rates change only when a lane becomes busy or idle, so
  the end of every work is exact.
- Bytes are allocated when a work starts and freed when it ends. Of events at the same instant,
  ends come first.

A step costs about n log n in its works where each slows and feeds few others.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from graphlib import CycleError, TopologicalSorter
from typing import TypeVar, cast

import networkx as nx

from cotrain_compile.errors import PlanError
from cotrain_compile.machine import Tier
from cotrain_compile.plan import Span, Timeline

_V = TypeVar("_V")


@dataclass(frozen=True)
class Work:
    """One thing a lane does: `seconds` long when nothing slows it.

    `after` names works of the same step that must have ended before this one starts,
    `after_previous` works of the step before (the first step has none). `allocates` and `frees`
    are bytes by tier, taken at the start and returned at the end.
    """

    name: str
    lane: str
    seconds: float
    after: tuple[str, ...] = ()
    after_previous: tuple[str, ...] = ()
    allocates: Mapping[str, int] = field(default_factory=dict)
    frees: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not (self.seconds >= 0 and math.isfinite(self.seconds)):
            raise ValueError(f"work {self.name} takes {self.seconds} s; it must be 0 or more")


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

    `timeline` covers all repetitions; work `w` of step `k` is named `w@k` there.
    """

    first_s: float
    period_s: float
    timeline: Timeline


def simulate(
    works: Sequence[Work],
    lanes: Iterable[LaneSpec],
    slowdown: Mapping[tuple[str, str], float] | None = None,
    initial_bytes: Mapping[str, int] | None = None,
) -> Timeline:
    """Run `works` from time 0, each lane in the order listed, and say when everything happened.

    `slowdown[a, b]` (at least 1) is how many times longer a work on lane a takes while lane b is
    busy. `initial_bytes` are the bytes alive on each tier before the first work.

    Raises:
        PlanError: two works share a name, a lane or dependency is unknown, works wait for each
            other in a circle, or a tier would hold less than nothing.
    """
    lane_specs = {lane.name: lane for lane in lanes}
    slowdown = slowdown or {}
    _check_names(works, lane_specs, slowdown)
    run = _Run(works, lane_specs, slowdown, initial_bytes or {})
    run.to_the_end()
    return Timeline(
        source="predicted",
        spans=tuple(run.spans),
        peak_bytes=_by_tier(run.memory.peak_bytes),
        memory=_by_tier({tier: tuple(curve) for tier, curve in run.memory.curve.items()}),
    )


def steady_state(
    works: Sequence[Work],
    lanes: Iterable[LaneSpec],
    slowdown: Mapping[tuple[str, str], float] | None = None,
    initial_bytes: Mapping[str, int] | None = None,
    *,
    steps: int = 8,
) -> Periodic:
    """Repeat the step `steps` times and measure the first one and the period.

    The period is the mean distance of the ends of the steps over the second half of the run. A
    mean, because the slowest circuit of dependencies may span two steps or more, and the distance
    of two neighbouring ends then swings for ever.

    Raises:
        ValueError: `steps` is below 2.
        PlanError: as `simulate`.
    """
    if steps < 2:
        raise ValueError(f"a period needs at least 2 steps, not {steps}")
    timeline = simulate(repeat(works, steps), lanes, slowdown, initial_bytes)
    ends_s = [0.0] * steps
    for span in timeline.spans:
        step = int(span.name.rpartition("@")[2])
        ends_s[step] = max(ends_s[step], span.end_s)
    middle = (steps - 1) // 2
    period_s = (ends_s[-1] - ends_s[middle]) / (steps - 1 - middle)
    return Periodic(first_s=ends_s[0], period_s=period_s, timeline=timeline)


def repeat(works: Sequence[Work], steps: int) -> tuple[Work, ...]:
    """`steps` copies of a step, work `w` of step `k` named `w@k`, joined by `after_previous`."""
    return tuple(
        replace(
            work,
            name=f"{work.name}@{step}",
            after=tuple(f"{name}@{step}" for name in work.after)
            + tuple(f"{name}@{step - 1}" for name in work.after_previous if step > 0),
            after_previous=(),
        )
        for step in range(steps)
        for work in works
    )


def lower_bound(works: Sequence[Work], lanes: Iterable[LaneSpec]) -> float:
    """Seconds that no schedule of `works` can beat, in whatever order its lanes run them.

    The larger of the busiest lane (its seconds over its workers) and the longest chain of
    dependencies.

    Raises:
        PlanError: a lane or dependency is unknown, or works wait for each other in a circle.
    """
    lane_specs = {lane.name: lane for lane in lanes}
    _check_names(works, lane_specs, {})
    busy_s = dict.fromkeys(lane_specs, 0.0)
    for work in works:
        busy_s[work.lane] += work.seconds
    busiest_s = max((busy_s[name] / lane.workers for name, lane in lane_specs.items()), default=0.0)
    return max(busiest_s, _longest_chain_s(works))


def _longest_chain_s(works: Sequence[Work]) -> float:
    by_name = {work.name: work for work in works}
    end_s: dict[str, float] = {}
    try:
        order = tuple(TopologicalSorter({w.name: w.after for w in works}).static_order())
    except CycleError as error:
        raise PlanError(f"works wait for each other: {' -> '.join(error.args[1])}") from error
    for name in order:
        work = by_name[name]
        end_s[name] = work.seconds + max((end_s[before] for before in work.after), default=0.0)
    return max(end_s.values(), default=0.0)


def _check_names(
    works: Sequence[Work],
    lanes: Mapping[str, LaneSpec],
    slowdown: Mapping[tuple[str, str], float],
) -> None:
    names = {work.name for work in works}
    if len(names) < len(works):
        twice = next(name for name, n in Counter(work.name for work in works).items() if n > 1)
        raise PlanError(f"two works are named {twice}; names must be unique")
    for work in works:
        if work.lane not in lanes:
            raise PlanError(f"work {work.name} is on lane {work.lane}, known are {sorted(lanes)}")
        for before in work.after:
            if before not in names:
                raise PlanError(f"work {work.name} waits for {before}, which is no work here")
    for (slowed, busy), factor in slowdown.items():
        if slowed not in lanes or busy not in lanes or slowed == busy or not factor >= 1:
            raise PlanError(
                f"slowdown of lane {slowed} by {busy} is {factor}: it takes two different lanes "
                f"of {sorted(lanes)} and a factor of at least 1"
            )


@dataclass(eq=False)
class _Running:
    """A started work: what is left of it as of `since_s`, at `rate` seconds per second."""

    work: Work
    start_s: float
    left_s: float
    since_s: float
    rate: float
    ticket: int = 0  # of its latest entry in the queue of ends; older entries are void


class _Memory:
    """Bytes alive per tier: now, at their peak, and as a curve."""

    def __init__(self, initial_bytes: Mapping[str, int]) -> None:
        self.alive_bytes = Counter(initial_bytes)
        self.peak_bytes = dict(initial_bytes)
        self.curve = {tier: [(0.0, nbytes)] for tier, nbytes in initial_bytes.items()}

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


class _Run:
    """The state of one simulation between two events."""

    def __init__(
        self,
        works: Sequence[Work],
        lanes: Mapping[str, LaneSpec],
        slowdown: Mapping[tuple[str, str], float],
        initial_bytes: Mapping[str, int],
    ) -> None:
        self.works = works
        self.lanes = lanes
        self.waiting: dict[str, deque[Work]] = {name: deque() for name in lanes}
        self.running: dict[str, list[_Running]] = {name: [] for name in lanes}
        self.open_dependencies: dict[str, int] = {}
        self.dependents: dict[str, list[Work]] = {work.name: [] for work in works}
        for work in works:
            self.waiting[work.lane].append(work)
            before = set(work.after)
            self.open_dependencies[work.name] = len(before)
            for name in before:
                self.dependents[name].append(work)
        self.slowed_by: dict[str, list[tuple[str, float]]] = {name: [] for name in lanes}
        self.slows: dict[str, list[str]] = {name: [] for name in lanes}
        for (slowed, busy), factor in slowdown.items():
            self.slowed_by[slowed].append((busy, factor))
            self.slows[busy].append(slowed)
        self.now_s = 0.0
        self.tickets = 0
        self.ends: list[tuple[float, int, _Running]] = []
        self.spans: list[Span] = []
        self.memory = _Memory(initial_bytes)

    def to_the_end(self) -> None:
        self._start_ready(self.lanes)
        while self.ends:
            self._start_ready(self._end_due())
        if len(self.spans) < len(self.works):
            raise PlanError(_deadlock(self.works, {span.name for span in self.spans}))

    def _end_due(self) -> dict[str, None]:
        """End every work that is due first; return the lanes on which something may start now."""
        touched: dict[str, None] = {}  # a set that keeps its order, so that runs are repeatable
        self.now_s = self.ends[0][0]
        while self.ends and self.ends[0][0] == self.now_s:
            _, ticket, running = heapq.heappop(self.ends)
            if ticket == running.ticket:
                touched.update(self._end(running))
        return touched

    def _end(self, running: _Running) -> dict[str, None]:
        work = running.work
        self.running[work.lane].remove(running)
        self.spans.append(Span(work.lane, work.name, running.start_s, self.now_s))
        self.memory.change(work, self.now_s, work.frees, -1)
        touched = {work.lane: None}
        for dependent in self.dependents[work.name]:
            self.open_dependencies[dependent.name] -= 1
            if self.open_dependencies[dependent.name] == 0:
                touched[dependent.lane] = None
        return touched

    def _start_ready(self, lanes: Iterable[str]) -> None:
        """Start what can start on `lanes`, then correct the rates wherever that matters."""
        slowed: dict[str, None] = {}
        for lane in lanes:
            self._start_on(lane)
            slowed.update(dict.fromkeys(self.slows[lane]))
        for lane in slowed:
            self._correct_rate(lane)

    def _start_on(self, lane: str) -> None:
        waiting, running = self.waiting[lane], self.running[lane]
        while (
            waiting
            and len(running) < self.lanes[lane].workers
            and self.open_dependencies[waiting[0].name] == 0
        ):
            work = waiting.popleft()
            self.memory.change(work, self.now_s, work.allocates, +1)
            running.append(_Running(work, self.now_s, work.seconds, self.now_s, self._rate(lane)))
            self._expect_end(running[-1])

    def _rate(self, lane: str) -> float:
        factors = (factor for busy, factor in self.slowed_by[lane] if self.running[busy])
        return 1.0 / max(factors, default=1.0)

    def _correct_rate(self, lane: str) -> None:
        rate = self._rate(lane)
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


def _deadlock(works: Sequence[Work], ended: set[str]) -> str:
    """Say which works wait for each other: a circle of dependencies and lane order."""
    graph = nx.DiGraph()
    last_on_lane: dict[str, str] = {}
    for work in works:
        if work.name in ended:
            continue
        graph.add_edges_from((work.name, before) for before in work.after if before not in ended)
        if work.lane in last_on_lane:
            graph.add_edge(work.name, last_on_lane[work.lane])
        last_on_lane[work.lane] = work.name
    circle = [waits for waits, _ in nx.find_cycle(graph)]
    return (
        f"{len(works) - len(ended)} works can never start; these wait for each other, by "
        f"dependency or by their order on a lane: {' -> '.join([*circle, circle[0]])}"
    )


def _by_tier(values: Mapping[str, _V]) -> dict[Tier, _V]:
    """Keys that name a tier become that `Tier`; others ("device1") stay plain names."""
    known = {tier.value: tier for tier in Tier}
    return {cast(Tier, known.get(name, name)): value for name, value in values.items()}
