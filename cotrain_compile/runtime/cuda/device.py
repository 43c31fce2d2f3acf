"""The CUDA runtime: the tasks of a placed step on streams of a card and on threads of the host.

Each direction of the link has a stream. A copy is given to it by the step's thread, at the copy's
place in the graph; where it comes after work of the host that is not done, by the thread that ends
that work (`LateCopy`). The stream waits for the copies that this one comes after, and for the event
that the step's thread recorded on the compute stream at the copy's place. A task of the host waits
for copies by their events. So a copy is done when it is issued, a task of the host when its work
is, and the compute stream waits for the rest. Copies on one stream come in the order in which they
were issued, which is not the plan's where one had to wait for the host. No stream waits for itself
by that: before the step's thread comes to the place of a copy, all that the compute stream waited
for up to there has been issued, so what is ahead of a copy on its stream never waits for what comes
after it in the graph.

Why no tensor is freed too early. Device tensors are all allocated and freed by the step's thread,
in the order of the compute stream, which is the order the caching allocator knows. (1) A fetch
writes to memory that the compute stream had done with at its event: between the event and the
allocation nothing is given to that stream. (2) The source of an offload and the destination of a
fetch are alive until the compute stream waits for the copy (`kept` of the wait, first use of the
fetched tensor), so what the memory is used for next comes after it. Whoever issues a copy lets go
of it before the copy is done, so the last reference dies on the step's thread. (3) A slab of the
host goes back to the pool with the events of its copies, and the next writer waits for those. (4) A
step that fails keeps its tensors until `drain` has synchronised the card. Nothing is left to
`record_stream`.

What a step has left on the card when it returns is ordered by the compute stream, as always in
CUDA. No stream orders what the user does on the host: a step returns when the copies to and from
homes there are done, and does not wait for the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from cotrain_compile.errors import StepFailed
from cotrain_compile.machine import Tier
from cotrain_compile.plan import Lane as LaneName
from cotrain_compile.plan import Span
from cotrain_compile.runtime.course import Course, Piecewise
from cotrain_compile.runtime.cuda import homes
from cotrain_compile.runtime.cuda.card import StreamsOfCard
from cotrain_compile.runtime.cuda.copy_streams import (
    CopyStreams,
    IssuedCopy,
    LateCopy,
    last_on_each_stream,
)
from cotrain_compile.runtime.cuda.pinned import Event, PinnedPool
from cotrain_compile.runtime.device import Device
from cotrain_compile.runtime.disk.drive import Drive
from cotrain_compile.runtime.disk.state_files import StateFile
from cotrain_compile.runtime.host.fused_kernel import HostKernel
from cotrain_compile.runtime.lanes import Task
from cotrain_compile.runtime.meter import MemoryMeter
from cotrain_compile.runtime.ops import Bundle, Launch
from cotrain_compile.runtime.process.cores import ANY_CORE, Cores

_UNLIMITED = 1 << 62
SLACK_BYTES = 2**26
# How often the end of a copy is asked for: as late as a blocking wait would wake up.
POLL_S = 5e-5


class CudaDevice(Device):
    """Runs the tasks of a placed step on `card`; one per compiled step.

    `pool` has the host's memory. The card limits device memory, `host_budget_bytes` the host's.
    `timed` times every op and copy and counts what they leave on the device, which costs an event
    each and a synchronisation before the step.
    """

    sees_all_memory = True

    def __init__(
        self,
        card: StreamsOfCard,
        pool: PinnedPool,
        host_budget_bytes: int,
        kernels: Mapping[str, HostKernel],
        piecewise: Mapping[str, Piecewise] | None = None,
        *,
        host_workers: int = 1,
        host_cores: Cores = ANY_CORE,
        timed: bool = False,
    ) -> None:
        meter = MemoryMeter({Tier.DEVICE: _UNLIMITED, Tier.HOST: host_budget_bytes})
        super().__init__(
            meter, kernels, piecewise or {}, host_workers, host_cores, link_threads=False
        )
        # Workspaces of libraries (cuBLAS takes up to 32 MiB) are no tensors of the step, nor is
        # what Inductor's tuner fills to empty the card's cache.
        self.slack_bytes = max(SLACK_BYTES, card.cache_bytes)
        self._card = card
        self._pool = pool
        self._timed = timed
        # The card's allocator counts by itself; the curve of a timeline needs every moment.
        self.counts_device = timed
        self._streams = CopyStreams(card, pool, timed=timed)
        self._at_homes: list[Task] = []  # copies to or from memory of the host that the user knows
        self._host_homes: Collection[int] = ()
        self._origin: Event | None = None
        self._before_bytes = self._others_bytes = 0

    def start_step(self, *, again: bool = False) -> None:
        super().start_step(again=again)
        self._at_homes = []
        self._streams.start_step()
        if again:
            self._card.give_back()  # what is kept for nothing is not the step's
        self._card.start_step()
        if not again:
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
        self._streams.give_batch()
        # What has not been issued yet goes on under the next step, and is at no home on the host.
        for copy in last_on_each_stream(self._at_homes):
            self._end_of_copy(copy.name, copy.end)

    def _end_of_copy(self, name: str, end: Event) -> None:
        if self.watchdog_s is None or end.query():
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
        self._streams.give_batch()
        super().drain()
        if not self._given_up:
            self._card.synchronize()

    @property
    def is_busy(self) -> bool:
        last = last_on_each_stream(self._tasks.values())
        return super().is_busy or not all(copy.end.query() for copy in last)

    def bring_home(self, tensors: Sequence[tuple[torch.Tensor, Tier]]) -> None:
        super().bring_home(tensors)
        in_memory = [(tensor, tier) for tensor, tier in tensors if tier is not Tier.DISK]
        homes.bring_home(in_memory, self._card, self._pool)
        for tensor, tier in tensors:
            if tier is Tier.DISK:
                homes.rests_on_host(tensor, self._card)
        hosted = [tensor for tensor, tier in tensors if tier is Tier.HOST]
        self._host_homes = {tensor.untyped_storage()._cdata for tensor in hosted}

    def rest_on(self, tier: Tier, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        self._card.synchronize()
        moved = homes.elsewhere(tensors, tier, self._card, self._pool)
        homes.bring_home([(each, tier) for each in moved], self._card, self._pool)
        if tier is Tier.HOST:
            self._card.give_back()
        return moved

    @property
    def memory_version(self) -> int:  # type: ignore[override]
        return self._pool.unpinned

    def is_at_home(self, made: torch.Tensor) -> None:
        homes.rests_on_host(made, self._card)
        for event in self._pool.pending(made):
            self._end_of_copy("the copy of a gradient to the host", event)

    def run_region(self, region: fx.GraphModule, inputs: Sequence[Any], launch: Launch) -> None:
        super().run_region(region, _at_hand(inputs), launch)

    def run_regions(
        self,
        regions: Sequence[fx.GraphModule],
        inputs: Sequence[Sequence[Any]],
        bundle: Bundle,
    ) -> None:
        super().run_regions(regions, [*map(_at_hand, inputs)], bundle)

    def wait(self, tasks: Sequence[str]) -> None:
        self._streams.give_batch()
        super().wait(tasks)
        self._streams.hold(None, [self._tasks[task] for task in tasks])

    def wait_previous(self, tasks: Sequence[str]) -> None:
        self._streams.give_batch()
        super().wait_previous(tasks)
        self._streams.hold(None, [self._previous[task] for task in tasks if task in self._previous])

    def skip(self, launch: Launch) -> None:
        self._streams.give_batch()
        super().skip(launch)
        if not launch.alongside:
            self._streams.leave_place()

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
        tasks, now_s, timed = list(self._tasks.values()), time.perf_counter(), self._timed

        def spans() -> list[Span]:
            ran = [task for task in tasks if task.ran and task.end_s <= now_s]
            copies = [t for t in ran if isinstance(t, IssuedCopy) and t.start is not None]
            updates = [t for t in dict.fromkeys(ran) if not isinstance(t, IssuedCopy)]
            if timed:
                card.synchronize()  # what goes on under the next step has to have come, too
            return [span for t in updates for span in t.spans(origin_s, t.end_s)] + [
                Span(t.lane, t.name, seconds(t.start), seconds(t.end)) for t in copies if t.start
            ]

        return spans

    def peak_bytes(self) -> Mapping[Tier, int]:
        """On the device what the allocator says, without what was there before the step."""
        on_device = self._card.peak_bytes() - self._others_bytes
        return {**self.meter.peak_bytes, Tier.DEVICE: on_device}

    @property
    def reserved_bytes(self) -> int | None:
        return self._card.reserved_peak_bytes() - self._others_bytes

    @property
    def compute_device(self) -> torch.device:
        return self._card.device

    def random_state_devices(self) -> Sequence[int]:
        return [self._card.device.index] if self._card.device.type == "cuda" else []

    def _allocate(self, tier: Tier, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if tier is Tier.HOST:
            return self._pool.empty_like(like, dtype)
        return torch.empty_like(like, dtype=dtype, device=self._card.device)

    def _start_copy(
        self, lane: LaneName, destination: torch.Tensor, source: torch.Tensor, launch: Launch
    ) -> None:
        streams = self._streams
        place = streams.place_of(launch)
        after = self._known(launch) if launch.after or launch.after_previous else ()
        course = self._course(launch)
        copy: IssuedCopy
        if not course.follows and (not after or all(task.done.is_set() for task in after)):
            copy = self._tasks[launch.task] = IssuedCopy(launch.task, lane, course)
            streams.issue_now(copy, place, after, destination, source, more=launch.more)
        else:
            streams.give_batch()
            after = [task for task in after if task.name != course.follows]
            copy = self._tasks[launch.task] = LateCopy(launch.task, lane, course, after)
            followed = self._tasks[course.follows] if course.follows else None
            copy.begin(streams.issue(copy, place, after, destination, source), followed)
        on_host = destination if lane is LaneName.D2H else source
        if on_host.untyped_storage()._cdata in self._host_homes:
            self._at_homes.append(copy)

    def use(self, drive: Drive) -> None:
        super().use(drive)
        for rooms in (drive.reading, drive.writing):
            rooms.pinning = self._card.pin, self._card.unpin

    def _start_read(
        self, row: torch.Tensor, file: StateFile, dtype: torch.dtype, launch: Launch
    ) -> None:
        drive = self.drive
        assert drive is not None

        def read(copy: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
            for here, piece in drive.pieces(file, dtype):
                copy(row[here], piece)

        self._start_passing(LaneName.DISK_READ, read, launch)

    def _start_write(self, file: StateFile, row: torch.Tensor, launch: Launch) -> None:
        assert self.drive is not None
        self._start_passing(LaneName.DISK_WRITE, partial(self.drive.store, file, row), launch)

    def _start_passing(
        self,
        lane: LaneName,
        passes: Callable[[Callable[[torch.Tensor, torch.Tensor], None]], None],
        launch: Launch,
    ) -> None:
        """Start `passes`, which copies pieces, on a thread and a stream of its own.

        When the task is done, so are its copies: a piece is in its room until then.
        """
        self._streams.give_batch()
        card, place, before = self._card, self._streams.place_of(launch), self._known(launch)
        copies = [task for task in before if isinstance(task, IssuedCopy)]

        def run() -> None:
            card.bind_thread()
            stream = card.stream()
            for event in (place, *_ends(copies)):
                card.hold(stream, event)

            def copy(destination: torch.Tensor, source: torch.Tensor) -> None:
                card.copy(stream, destination, source)
                card.record(stream).synchronize()

            passes(copy)

        course = self._course(launch)
        self._submit(lane, launch, run, before, course)

    def _start_work(
        self,
        work: Callable[[], object],
        launch: Launch,
        course: Course,
        fresh: torch.Tensor | None = None,
    ) -> None:
        self._streams.give_batch()
        before = self._known(launch)
        if course.follows:
            before = [task for task in before if task.name != course.follows]
        copies = [task for task in before if isinstance(task, IssuedCopy)]
        # Copies that its slab was used for, when it belonged to something else.
        busy = self._pool.pending(fresh) if fresh is not None else ()
        card = self._card

        def wait_and_work() -> None:
            card.bind_thread()
            for event in (*_ends(copies), *busy):
                event.synchronize()
            work()

        self._submit(LaneName.HOST, launch, wait_and_work, before, course)

    def _arrival(self, task: str) -> Callable[[int], None] | None:
        copy = self._tasks[task]
        if not isinstance(copy, IssuedCopy):
            return None
        # That a copy has been issued is not enough: its event has to come.
        pieces = copy.pieces
        return lambda number: pieces[number].synchronize()

    def _known(self, launch: Launch) -> list[Task]:
        """What `launch` comes after, of this step and of the one before."""
        ours = [*dict.fromkeys(self._tasks[task] for task in launch.after)]
        if launch.after_previous:
            previous = self._previous
            ours += [previous[task] for task in launch.after_previous if task in previous]
        return ours


def _at_hand(inputs: Sequence[Any]) -> list[Any]:
    """`inputs` on the host: a hyper-parameter or constant may live on the device, a few bytes."""
    return [v.cpu() if isinstance(v, torch.Tensor) and not v.is_cpu else v for v in inputs]


def _ends(tasks: Iterable[Task]) -> list[Event]:
    """When each copy among `tasks` is done, of those that have been issued."""
    return [task.end for task in tasks if isinstance(task, IssuedCopy) and task.ran]
