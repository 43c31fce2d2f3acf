"""Device: what a compiled step needs of the device it runs on, and what all kinds have in common.

A `Device` carries out the tasks of a placed step on lanes (one thread for each direction of the
link, one or more for the host), remembers which of them ran, and says when and with how much
memory. `emulated.in_dry_run` is the same without the writes that the user would see.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from cotrain_compile.machine import Tier
from cotrain_compile.plan import Lane as LaneName
from cotrain_compile.plan import Span
from cotrain_compile.runtime.course import WHOLE, Course, Piecewise
from cotrain_compile.runtime.disk.drive import Drive
from cotrain_compile.runtime.disk.state_files import StateFile, file_of, leave_disk
from cotrain_compile.runtime.held import Held
from cotrain_compile.runtime.host.fused_kernel import HostKernel
from cotrain_compile.runtime.host.speculation import Confirm, Gate
from cotrain_compile.runtime.in_flight import InFlight
from cotrain_compile.runtime.lanes import Task, WorkerLane
from cotrain_compile.runtime.meter import MemoryMeter
from cotrain_compile.runtime.network import ThrottledNetwork
from cotrain_compile.runtime.ops import Bundle, Launch, Runtime
from cotrain_compile.runtime.process.cores import ANY_CORE, Cores
from cotrain_compile.runtime.storages import copied_of, part_of


class Device(InFlight, Runtime, ABC):
    """Runs the tasks of a placed step; one per compiled step.

    `meter` counts the bytes of live tensors; on the device, `slack_bytes` more than a plan says may
    be taken. By task name, `kernels` has a host kernel for each region, `piecewise` what works in
    pieces. Work on the host keeps to `host_cores`; without `link_threads` no thread runs
    copies. Times are perf_counter seconds; `origin_s` is when the step began. What kinds of devices
    differ in is how they allocate, start a copy and start work on the host.
    """

    slack_bytes = 0
    # Whether `peak_bytes` has what compiled code takes inside, too.
    sees_all_memory = False
    # Whether the meter is told what ops and copies leave on the device.
    counts_device = True
    # Changes when addresses that homes had may have become those of other memory.
    memory_version: int = 0
    # Whether small tasks are held until somebody waits for one, or a larger one comes.
    holds_small = False
    # Makes exchanges with other ranks take as long as on another network; None: as they take.
    network: ThrottledNetwork | None = None
    # Reads and writes what rests on disk; None where nothing does.
    drive: Drive | None = None

    def __init__(
        self,
        meter: MemoryMeter,
        kernels: Mapping[str, HostKernel],
        piecewise: Mapping[str, Piecewise],
        host_workers: int,
        host_cores: Cores = ANY_CORE,
        *,
        link_threads: bool = True,
    ) -> None:
        super().__init__()
        self.meter = meter
        self._kernels = kernels
        self._piecewise = piecewise
        self.origin_s = 0.0
        self._lanes = {LaneName.HOST: WorkerLane(LaneName.HOST, host_workers, host_cores)}
        if link_threads:
            self._lanes |= {name: WorkerLane(name) for name in (LaneName.D2H, LaneName.H2D)}
        self._held = Held(self._lanes)

    def refuse_if_unusable(self) -> None:
        """Raise `StepFailed` where a task has been given up, and in a forked process."""
        self._lanes[LaneName.HOST].refuse_fork()
        self.refuse_if_given_up()

    def start_step(self, *, again: bool = False) -> None:
        """Begin a new step: what is in flight is of the step before, peaks count from here.

        `again`: it is the last one once more, and what that has left on the device is its own.
        """
        self._previous, self._tasks = self._tasks, {}
        self.origin_s = time.perf_counter()
        if self.network is not None:
            self.network.start_step()
        in_flight = not all(task.done.is_set() for task in self._previous.values())
        self.meter.start_step(keep=Tier.HOST if in_flight else None)
        if self.drive is not None:
            self.meter.hold(self.drive.room_bytes, Tier.HOST, "rooms of what rests on disk")

    def inputs_are_counted(self) -> None:
        """The meter knows the tensors that the step was given; what comes now is its own."""

    def finish_step(self) -> None:
        """Return when what the step has started is done, but for what the next one waits for."""
        self._held.hand_over()

    def wait(self, tasks: Sequence[str]) -> None:
        awaited = [*dict.fromkeys(self._tasks[name] for name in tasks)]
        if not all(task.done.is_set() for task in awaited):
            last = self._held.hand_over_for(awaited)
            if last is not None:
                self._end_of(last)  # with all others: who waits for each is woken up by each
            self._held.hand_over()
        for task in awaited:
            if task.error is not None or not task.done.is_set():
                self._await(task)

    def drain(self) -> None:
        """Wait until every task in flight has ended, whether or not it failed."""
        started = (*self._previous.values(), *self._tasks.values())
        self._held.hand_over_rest(started)
        for task in started:
            task.resume()  # in this order: all that it waits for has ended
            self._end_of(task)

    @property
    def gate(self) -> Gate | None:
        """How guesses have turned out, which all updates on guesses see alike; None without any."""
        gates = (k.speculation.gate for k in self._kernels.values() if isinstance(k, Confirm))
        return next(gates, None)

    def take_back(self) -> None:
        """Put back what tasks, which have all ended, have done on guesses that nobody confirms."""
        for kernel in self._kernels.values():
            if isinstance(kernel, Confirm):
                kernel.speculation.take_back()

    def offload(self, source: torch.Tensor, launch: Launch) -> torch.Tensor:
        if self.drive is not None and self.drive.stores(launch.task):
            return self._store_afresh(self.drive, source, launch)
        return self._copy_afresh(LaneName.D2H, Tier.HOST, source, launch)

    def offload_into(self, destination: torch.Tensor, source: torch.Tensor, launch: Launch) -> None:
        file = file_of(destination) if self.drive is not None and not launch.part else None
        if file is not None and source.is_contiguous():
            self._start_write(file, source.view(-1), launch)
            return
        self._start_copy(LaneName.D2H, part_of(destination, launch), source, launch)

    def use(self, drive: Drive) -> None:
        """Let `drive` have what rests on disk."""
        self.drive = drive
        for lane in (LaneName.DISK_READ, LaneName.DISK_WRITE):
            self._lanes[lane] = WorkerLane(lane)

    def prefetch(self, source: torch.Tensor, launch: Launch) -> torch.Tensor:
        file = file_of(source) if self.drive is not None else None
        if file is not None:
            made, row, shown = self._new_copy(Tier.DEVICE, source, launch)
            self._start_read(made.view(-1), file, row.dtype, launch)
            return shown
        return self._copy_afresh(LaneName.H2D, Tier.DEVICE, part_of(source, launch), launch)

    def prefetch_into(
        self, destination: torch.Tensor, source: torch.Tensor, launch: Launch
    ) -> None:
        self._start_copy(LaneName.H2D, destination, source, launch)

    def host_cast(self, source: torch.Tensor, dtype: torch.dtype, launch: Launch) -> torch.Tensor:
        made = self._allocate(Tier.HOST, source, dtype)
        self.meter.track(made, Tier.HOST, launch.task)
        cast = made.copy_ if self.drive is None else partial(self.drive.cast, made)
        self._start_work(partial(cast, source), launch, WHOLE, fresh=made)
        return made

    def run_region(self, region: fx.GraphModule, inputs: Sequence[Any], launch: Launch) -> None:
        kernel, course = self._kernels[launch.task], self._course(launch)
        resting = self.drive.kernels.get(launch.task) if self.drive is not None else None
        if resting is None or self.drive is None:
            self._start_work(partial(kernel, inputs, self.meter, course), launch, course)
            return
        passing = resting.ask(self.drive.rooms, inputs)
        work = partial(resting, inputs, self.meter, course, self.drive.rooms, passing)
        self._start_work(work, launch, course)
        if passing is not None:  # a task that fails before its turn takes nothing
            self._tasks[launch.task].when_done(passing.close)

    def copy_all(
        self, sources: Sequence[torch.Tensor], bundle: Bundle, *, down: bool
    ) -> list[torch.Tensor]:
        lane, tier = (LaneName.D2H, Tier.HOST) if down else (LaneName.H2D, Tier.DEVICE)
        made = [
            self._new_copy(tier, source, launch)
            for source, launch in zip(sources, bundle.members, strict=True)
        ]
        copied, rows, shown = zip(*made, strict=True)
        self._start_copies(lane, copied, rows, bundle)
        return [*shown]

    def copy_all_into(
        self,
        destinations: Sequence[torch.Tensor],
        sources: Sequence[torch.Tensor],
        bundle: Bundle,
        *,
        down: bool,
    ) -> None:
        lane = LaneName.D2H if down else LaneName.H2D
        self._start_copies(lane, destinations, sources, bundle)

    def run_regions(
        self,
        regions: Sequence[fx.GraphModule],
        inputs: Sequence[Sequence[Any]],
        bundle: Bundle,
    ) -> None:
        kernel = self._kernels[bundle.launch.task]
        self._start_work(partial(kernel, inputs, self.meter), bundle.launch, WHOLE)
        self._note_members(bundle)

    def _note_members(self, bundle: Bundle) -> None:
        """The task of `bundle` is that of each member."""
        task = self._tasks.pop(bundle.launch.task)
        task.members = names = [launch.task for launch in bundle.members]
        self._tasks.update(dict.fromkeys(names, task))

    def _start_copies(
        self,
        lane: LaneName,
        destinations: Sequence[torch.Tensor],
        sources: Sequence[torch.Tensor],
        bundle: Bundle,
    ) -> None:
        """Start all copies of `bundle` on a lane of the link, here one after the other."""
        for destination, source, launch in zip(destinations, sources, bundle.members, strict=True):
            self._start_copy(lane, destination, source, launch)

    def skip(self, launch: Launch) -> None:
        """Note a task that does nothing but come after others."""
        self._submit(LaneName.HOST, launch, _nothing, self._comes_after(launch, WHOLE), WHOLE)

    def bring_home(self, tensors: Sequence[tuple[torch.Tensor, Tier]]) -> None:
        """Move persistent tensors of the user's to the tiers where the plan wants them.

        Raises `DiskError` and `HostMemoryError`; what has moved by then stays where it is.
        """
        if self.drive is not None:
            self.drive.bring_home([tensor for tensor, tier in tensors if tier is Tier.DISK])
        leave_disk([tensor for tensor, tier in tensors if tier is not Tier.DISK])

    def rest_on(self, tier: Tier, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Let persistent tensors rest on `tier` until a step brings them home; those that moved.

        Here tiers are names: nothing moves.
        """
        return []

    def is_at_home(self, made: torch.Tensor) -> None:
        """Note that `made`, which a step has left on the host for the user, rests there."""

    @abstractmethod
    def mark(self) -> Any:
        """This moment of the device's own work, None where it is not timed."""

    @abstractmethod
    def clock(self) -> Callable[[Any], float]:
        """What tells seconds from the start of this step to a mark, also in later steps."""

    @abstractmethod
    def timing(self) -> Callable[[], list[Span]]:
        """What tells when the tasks of this step ran until now, also in later steps."""

    @abstractmethod
    def peak_bytes(self) -> Mapping[Tier, int]:
        """The most bytes the step had alive on each tier."""

    @property
    def compute_device(self) -> torch.device:
        """Where tensors of the device are, for torch."""
        return torch.device("cpu")

    @property
    def reserved_bytes(self) -> int | None:
        """The most that a card's allocator had taken for the step since it began; None without."""
        return None

    @abstractmethod
    def random_state_devices(self) -> Sequence[int]:
        """Indices of the accelerators whose random numbers the step draws from."""

    @abstractmethod
    def _allocate(self, tier: Tier, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A tensor on `tier` of the size and layout of `like`, which is dense."""

    @abstractmethod
    def _start_copy(
        self, lane: LaneName, destination: torch.Tensor, source: torch.Tensor, launch: Launch
    ) -> None:
        """Start a copy on a lane of the link; return before it is done."""

    @abstractmethod
    def _start_read(
        self, row: torch.Tensor, file: StateFile, dtype: torch.dtype, launch: Launch
    ) -> None:
        """Start to bring what is in `file` to `row` on the device; return before it is done."""

    @abstractmethod
    def _start_write(self, file: StateFile, row: torch.Tensor, launch: Launch) -> None:
        """Start to write `row` of the device to `file`; return before it is done."""

    @abstractmethod
    def _start_work(
        self,
        work: Callable[[], object],
        launch: Launch,
        course: Course,
        fresh: torch.Tensor | None = None,
    ) -> None:
        """Start `work` on the host; return before it is done. `fresh` is what it makes, if any."""

    def _copy_afresh(
        self, lane: LaneName, tier: Tier, source: torch.Tensor, launch: Launch
    ) -> torch.Tensor:
        """A new tensor on `tier` that gets the whole storage of `source`, so that any view fits."""
        copied, row, shown = self._new_copy(tier, source, launch)
        self._start_copy(lane, copied, row, launch)
        return shown

    def _store_afresh(self, drive: Drive, source: torch.Tensor, launch: Launch) -> torch.Tensor:
        """As `_copy_afresh`, of what rests on disk then."""
        row = copied_of(source, launch)
        made = drive.destination(launch.task, row)
        self.meter.track(made, Tier.DISK, launch.task)
        file = file_of(made)
        assert file is not None
        self._start_write(file, row.view(-1), launch)
        return made.as_strided(source.size(), source.stride(), source.storage_offset())

    def _new_copy(
        self, tier: Tier, source: torch.Tensor, launch: Launch
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """A new tensor, what of `source` is copied there, and what then shows the same of it."""
        row = copied_of(source, launch)
        copied = self._allocate(tier, row, row.dtype)
        if self.counts_device or tier is Tier.HOST:
            self.meter.track(copied, tier, launch.task)
        if row is source:
            return copied, row, copied
        view = copied.as_strided(source.size(), source.stride(), source.storage_offset())
        return copied, row, view

    def _course(self, launch: Launch) -> Course:
        """How a task of this step goes along; what it follows has been started."""
        piecewise = self._piecewise.get(launch.task)
        if piecewise is None:
            return WHOLE
        if not piecewise.follows:
            return Course(piecewise)
        return Course(
            piecewise, self._tasks[piecewise.follows].course, self._arrival(piecewise.follows)
        )

    def _arrival(self, task: str) -> Callable[[int], None] | None:
        """What waits until a piece that `task` has done can be read; None: it can at once."""
        return None

    def _submit(
        self,
        lane: LaneName,
        launch: Launch,
        work: Callable[[], object],
        after: Sequence[Task],
        course: Course,
    ) -> None:
        task = self._lanes[lane].submit(launch.task, work, after, course, held=True)
        self._tasks[launch.task] = task
        self._held.add(task)
        if not (self.holds_small and launch.small):
            self._held.hand_over()

    def _comes_after(self, launch: Launch, course: Course) -> Sequence[Task]:
        """What must have ended before it begins, without the task that it follows by pieces."""
        if not launch.after and not launch.after_previous:
            return ()
        previous = [self._previous[t] for t in launch.after_previous if t in self._previous]
        ours = [self._tasks[task] for task in launch.after if task != course.follows]
        return [*dict.fromkeys((*previous, *ours))]


def _nothing() -> None:
    """The work of a skipped task."""
