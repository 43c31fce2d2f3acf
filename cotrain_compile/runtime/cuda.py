"""The CUDA runtime: the tasks of a placed step on streams of a card and on threads of the host.

Each direction of the link has a stream, fed by the thread of its lane. A copy is issued by the
thread when the host tasks it comes after are done; its stream waits for the copies it comes after,
and for the event that the step's thread recorded on the compute stream at the copy's place in the
graph. A task of the host waits for copies by their events. So a lane's task is done when it is
issued (a copy) or when its work is (the host), and the compute stream waits for the rest.

Why no tensor is freed too early. Device tensors are all allocated and freed by the step's thread,
in the order of the compute stream, which is the order the caching allocator knows. (1) A fetch
writes to memory allocated before its event was recorded, so what that memory was used for before
comes before the copy. (2) The source of an offload and the destination of a fetch are alive until
the compute stream waits for the copy (`kept` of the wait, first use of the fetched tensor), so what
the memory is used for next comes after it. (3) A slab of the host goes back to the pool with the
events of its copies, and the next writer waits for those. (4) A step that fails keeps its tensors
until `drain` has synchronised the card. Nothing is left to `record_stream`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from cotrain_compile.errors import StepFailed
from cotrain_compile.machine import Tier
from cotrain_compile.plan import Lane as LaneName
from cotrain_compile.plan import Span
from cotrain_compile.runtime import homes
from cotrain_compile.runtime.card import Card
from cotrain_compile.runtime.course import Course, Cut
from cotrain_compile.runtime.device import Device
from cotrain_compile.runtime.host_kernels import HostKernel
from cotrain_compile.runtime.meter import Meter
from cotrain_compile.runtime.ops import Launch
from cotrain_compile.runtime.pinned import Event, PinnedPool

_UNLIMITED = 1 << 62
# How often the end of a copy is asked for: as late as a blocking wait would wake up.
POLL_S = 5e-5


@dataclass
class _Copy:
    """The events of a copy, from when it is issued; `start` only where copies are timed.

    `pieces` has the end of each piece, of which `end` is the last.
    """

    start: Event | None = None
    end: Event | None = None
    pieces: list[Event] = field(default_factory=list)


class CudaDevice(Device):
    """Runs the tasks of a placed step on `card`; one per compiled step.

    `pool` has the host's memory. The card limits device memory, `host_budget_bytes` the host's.
    `timed` times every op and copy, which
    costs an event each and a synchronisation before the step.
    """

    # Workspaces of libraries (cuBLAS takes up to 32 MiB) are no tensors of the step.
    slack_bytes = 2**26
    sees_all_memory = True

    def __init__(
        self,
        card: Card,
        pool: PinnedPool,
        host_budget_bytes: int,
        kernels: Mapping[str, HostKernel],
        cuts: Mapping[str, Cut] | None = None,
        *,
        host_workers: int = 1,
        host_cores: Collection[int] = (),
        timed: bool = False,
    ) -> None:
        meter = Meter({Tier.DEVICE: _UNLIMITED, Tier.HOST: host_budget_bytes})
        super().__init__(meter, kernels, cuts or {}, host_workers, host_cores)
        self._card = card
        self._pool = pool
        self._timed = timed
        self._streams = {lane: card.stream() for lane in (LaneName.D2H, LaneName.H2D)}
        self._copies: dict[str, _Copy] = {}
        self._previous_copies: dict[str, _Copy] = {}
        self._origin: Event | None = None
        self._before_bytes = self._others_bytes = 0

    def start_step(self) -> None:
        super().start_step()
        self._previous_copies, self._copies = self._copies, {}
        self._card.start_step()
        self._before_bytes = self._card.allocated_bytes()
        if self._timed:
            # Events and perf_counter then count from one moment.
            self._card.synchronize()
            self._origin = self._card.record(None, timed=True)
            self.origin_s = time.perf_counter()

    def inputs_are_counted(self) -> None:
        self._others_bytes = self._before_bytes - self.meter.used_bytes[Tier.DEVICE]

    def finish_step(self) -> None:
        if self._timed:
            self._card.synchronize()  # what is timed has to have come
        # The user may read a home on the host at once, and no stream orders that. What has not
        # been issued yet goes on under the next step, and writes to no home on the host.
        for name, copy in self._copies.items():
            if copy.end is not None:
                self._end_of_copy(name, copy.end)

    def _end_of_copy(self, name: str, end: Event) -> None:
        if self.watchdog_s is None:
            end.synchronize()
            return
        late_s = time.monotonic() + self.watchdog_s
        while not end.query():
            if time.monotonic() > late_s:
                self._given_up = name
                raise StepFailed(
                    f"{name} failed: the card had not done this copy {self.watchdog_s:g} s after "
                    "the rest of the step, when the option watchdog_s gave it up; go on from the "
                    "last checkpoint in a new process"
                )
            time.sleep(POLL_S)

    def drain(self) -> None:
        super().drain()
        if not self._given_up:
            self._card.synchronize()

    @property
    def is_busy(self) -> bool:
        ends = [copy.end for copy in self._copies.values()]
        return super().is_busy or not all(end is not None and end.query() for end in ends)

    def forget(self) -> None:
        super().forget()
        self._previous_copies, self._copies = {}, {}

    def bring_home(self, tensors: Sequence[tuple[torch.Tensor, Tier]]) -> None:
        homes.bring_home(tensors, self._card, self._pool)

    def is_at_home(self, made: torch.Tensor) -> None:
        homes.rests_on_host(made, self._card)

    def run_region(self, region: fx.GraphModule, inputs: Sequence[Any], launch: Launch) -> None:
        # A hyper-parameter or constant may live on the device; it is a few bytes.
        at_hand = [v.cpu() if isinstance(v, torch.Tensor) else v for v in inputs]
        super().run_region(region, at_hand, launch)

    def wait(self, tasks: Sequence[str]) -> None:
        super().wait(tasks)
        for end in self._ends(tasks, ()):
            self._card.hold(None, end)

    def wait_previous(self, tasks: Sequence[str]) -> None:
        super().wait_previous(tasks)
        for end in self._ends((), tasks):
            self._card.hold(None, end)

    def mark(self) -> Event | None:
        return self._card.record(None, timed=True) if self._timed else None

    def clock(self) -> Callable[[Event], float]:
        card, origin = self._card, self._origin

        def seconds(mark: Event) -> float:
            assert origin is not None
            return card.seconds_between(origin, mark)

        return seconds

    def timing(self) -> Callable[[], list[Span]]:
        """Of the tasks of this step alone; what is still to do when it returns has none."""
        card, origin_s, seconds = self._card, self.origin_s, self.clock()
        ran = [task for task in self._tasks.values() if task.ran]
        timed = [
            (self._tasks[name].lane, name, copy.start, copy.end)
            for name, copy in self._copies.items()
            if copy.start is not None and copy.end is not None
        ]
        on_host = [task for task in ran if task.name not in self._copies]

        def spans() -> list[Span]:
            if timed:
                card.synchronize()  # what goes on under the next step has to have come, too
            copies = [Span(lane, name, seconds(a), seconds(b)) for lane, name, a, b in timed]
            updates = [task.span(origin_s, task.end_s) for task in on_host]
            return [span for span in updates if span is not None] + copies

        return spans

    def peak_bytes(self) -> Mapping[Tier, int]:
        """On the device what the allocator says, without what was there before the step."""
        on_device = self._card.peak_bytes() - self._others_bytes
        return {**self.meter.peak_bytes, Tier.DEVICE: on_device}

    def random_state_devices(self) -> Sequence[int]:
        return [self._card.device.index] if self._card.device.type == "cuda" else []

    def _allocate(self, tier: Tier, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if tier is Tier.HOST:
            return self._pool.empty_like(like, dtype)
        return torch.empty_like(like, dtype=dtype, device=self._card.device)

    def _start_copy(
        self, lane: LaneName, destination: torch.Tensor, source: torch.Tensor, launch: Launch
    ) -> None:
        card, stream = self._card, self._streams[lane]
        on_host = destination if lane is LaneName.D2H else source
        issued = card.record(None)
        before = self._copies_of(launch.after, launch.after_previous)
        copy, course = _Copy(), self._course(launch)
        self._copies[launch.task] = copy

        def issue() -> None:
            card.hold(stream, issued)
            for event in (*_ends(before), *self._pool.pending(destination)):
                card.hold(stream, event)
            copy.start = card.record(stream, timed=True) if self._timed else None
            for to, piece in course.slices(destination, source):
                card.copy(stream, to, piece)
                copy.pieces.append(card.record(stream, timed=self._timed))
            copy.end = copy.pieces[-1]
            self._pool.note(on_host, copy.end)

        self._submit(lane, launch, issue, course)

    def _start_work(
        self,
        work: Callable[[], object],
        launch: Launch,
        course: Course,
        fresh: torch.Tensor | None = None,
    ) -> None:
        after = [task for task in launch.after if task != course.follows]
        before = self._copies_of(after, launch.after_previous)
        # Copies that its slab was used for, when it belonged to something else.
        busy = self._pool.pending(fresh) if fresh is not None else []

        def wait_and_work() -> None:
            for event in (*_ends(before), *busy):
                event.synchronize()
            work()

        self._submit(LaneName.HOST, launch, wait_and_work, course)

    def _arrival(self, task: str) -> Callable[[int], None] | None:
        copy = self._copies.get(task)
        # That a copy has been issued is not enough: its event has to come.
        return (lambda number: copy.pieces[number].synchronize()) if copy is not None else None

    def _ends(self, tasks: Sequence[str], previous: Sequence[str]) -> list[Event]:
        return _ends(self._copies_of(tasks, previous))

    def _copies_of(self, tasks: Sequence[str], previous: Sequence[str]) -> list[_Copy]:
        """Those of `tasks`, of this step and of the one before, that are copies."""
        ours = [self._copies[task] for task in tasks if task in self._copies]
        return ours + [self._previous_copies[t] for t in previous if t in self._previous_copies]


def _ends(copies: Sequence[_Copy]) -> list[Event]:
    """When each copy is done; all have been issued."""
    return [copy.end for copy in copies if copy.end is not None]
