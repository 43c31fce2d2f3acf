"""The emulated device: a second memory tier in RAM, for machines without a GPU.

Device and host tensors are both CPU tensors, told apart by the meter. Copies and host updates run
on threads of their own, so that a missing wait is a real race; the destination of a copy holds NaN
until the copy is done, so that it shows as a wrong number and not as luck. With `throttle`, copies
take as long as the machine's links say, and exchanges with other ranks as long as `network_s` has
for them. `poison` can be left out to measure times.

A dry run is a step on such a device that leaves what the user holds as it is: this package's ops
take and free its memory and write to fresh tensors; of the rest they note that it came.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import fx

from cotrain_compile.machine import Machine, Tier
from cotrain_compile.plan import Lane as LaneName
from cotrain_compile.plan import Span
from cotrain_compile.runtime.bound_ops import copy_all
from cotrain_compile.runtime.course import WHOLE, Course, Piecewise
from cotrain_compile.runtime.device import Device
from cotrain_compile.runtime.disk.state_files import StateFile
from cotrain_compile.runtime.host.fused_kernel import HostKernel
from cotrain_compile.runtime.lanes import Task
from cotrain_compile.runtime.meter import MemoryMeter
from cotrain_compile.runtime.network import ThrottledLink, ThrottledNetwork
from cotrain_compile.runtime.ops import Bundle, Launch, Runtime, running_on
from cotrain_compile.runtime.process.cores import ANY_CORE, Cores


class EmulatedDevice(Device):
    """Runs the tasks of a placed step on threads; one per compiled step."""

    def __init__(
        self,
        machine: Machine,
        budgets: Mapping[Tier, int],
        kernels: Mapping[str, HostKernel],
        piecewise: Mapping[str, Piecewise] | None = None,
        *,
        host_cores: Cores = ANY_CORE,
        throttle: bool = False,
        poison: bool = True,
        network_s: Mapping[str, float] | None = None,
    ) -> None:
        workers = machine.host_update.workers
        super().__init__(MemoryMeter(budgets), kernels, piecewise or {}, workers, host_cores)
        # The thread of a link that is imitated sleeps, while others may work.
        self.holds_small = not throttle
        self._poison = _poison if poison else _leave
        self._machine = machine if throttle else None
        self._links = {lane: ThrottledLink() for lane in (LaneName.D2H, LaneName.H2D)}
        self.network = ThrottledNetwork(network_s) if throttle and network_s else None
        self._host_bytes_per_s = machine.host.bytes_per_s

    def mark(self) -> float:
        return time.perf_counter()

    def clock(self) -> Callable[[float], float]:
        origin_s = self.origin_s
        return lambda mark: mark - origin_s

    def timing(self) -> Callable[[], list[Span]]:
        """Of the tasks of this step, and of what was left of the one before.

        Times count from its start; what goes on after the step is cut at the present.
        """
        now_s, origin_s = time.perf_counter(), self.origin_s
        tasks = dict.fromkeys([*self._previous.values(), *self._tasks.values()])

        def spans() -> list[Span]:
            ran = [span for task in tasks for span in task.spans(origin_s, now_s)]
            return [span for span in ran if span.end_s > 0]

        return spans

    def peak_bytes(self) -> Mapping[Tier, int]:
        return self.meter.peak_bytes_held

    def random_state_devices(self) -> Sequence[int]:
        return ()

    def _allocate(self, tier: Tier, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        made = torch.empty_like(like, dtype=dtype, requires_grad=False)
        self._poison(made)
        return made

    def _start_copy(
        self, lane: LaneName, destination: torch.Tensor, source: torch.Tensor, launch: Launch
    ) -> None:
        course = self._course(launch)
        after = self._comes_after(launch, course)
        copy = partial(
            self._copy_along, course, lane, destination, source, time.perf_counter(), after
        )
        self._submit(lane, launch, copy, after, course)

    def _start_copies(
        self,
        lane: LaneName,
        destinations: Sequence[torch.Tensor],
        sources: Sequence[torch.Tensor],
        bundle: Bundle,
    ) -> None:
        after = self._comes_after(bundle.launch, WHOLE)
        copy = partial(self._copy_all, lane, destinations, sources, time.perf_counter(), after)
        self._submit(lane, bundle.launch, copy, after, WHOLE)
        self._note_members(bundle)

    def _start_read(
        self, row: torch.Tensor, file: StateFile, dtype: torch.dtype, launch: Launch
    ) -> None:
        read = partial(self._read, row, file, dtype)
        self._submit(LaneName.DISK_READ, launch, read, self._comes_after(launch, WHOLE), WHOLE)

    def _read(self, row: torch.Tensor, file: StateFile, dtype: torch.dtype) -> None:
        assert self.drive is not None
        self._poison(row)
        for here, piece in self.drive.pieces(file, dtype):
            self._copy(LaneName.H2D, row[here], piece, time.perf_counter())

    def _start_write(self, file: StateFile, row: torch.Tensor, launch: Launch) -> None:
        assert self.drive is not None
        course = self._course(launch)
        write = partial(self.drive.store, file, row, self._bring_down)
        self._submit(LaneName.DISK_WRITE, launch, write, self._comes_after(launch, course), course)

    def _bring_down(self, room: torch.Tensor, piece: torch.Tensor) -> None:
        self._copy(LaneName.D2H, room, piece, time.perf_counter())

    def _start_work(
        self,
        work: Callable[[], object],
        launch: Launch,
        course: Course,
        fresh: torch.Tensor | None = None,
    ) -> None:
        self._submit(LaneName.HOST, launch, work, self._comes_after(launch, course), course)

    def _copy_along(
        self,
        course: Course,
        lane: LaneName,
        destination: torch.Tensor,
        source: torch.Tensor,
        issued_s: float,
        after: Sequence[Task],
    ) -> None:
        self._poison(destination)
        if course is WHOLE:
            ready_s = max([issued_s, *[task.end_s for task in after]])
            self._copy(lane, destination, source, ready_s)
            return
        for to, piece in course.slices(destination, source):
            self._copy(lane, to, piece, time.perf_counter())

    def _copy_all(
        self,
        lane: LaneName,
        destinations: Sequence[torch.Tensor],
        sources: Sequence[torch.Tensor],
        issued_s: float,
        after: Sequence[Task],
    ) -> None:
        for destination in destinations:
            self._poison(destination)
        if self._machine is None:
            copy_all(destinations, sources)
            return
        ready_s = max([issued_s, *[task.end_s for task in after]])
        for number, (destination, source) in enumerate(zip(destinations, sources, strict=True)):
            self._copy(lane, destination, source, ready_s, int(not number))

    def _copy(
        self,
        lane: LaneName,
        destination: torch.Tensor,
        source: torch.Tensor,
        ready_s: float,
        copies: int = 1,
    ) -> None:
        machine = self._machine
        if machine is None:
            destination.copy_(source)
            return
        link_s = machine.copy_s(source.nbytes, *machine.links[lane].ends, copies=copies)
        copying_s = 2 * source.nbytes / self._host_bytes_per_s
        self._links[lane].carry(lambda: destination.copy_(source), ready_s, link_s, copying_s)


def _poison(destination: torch.Tensor) -> None:
    """Fill a destination with what no computation survives unnoticed."""
    if destination.is_floating_point() or destination.is_complex():
        destination.fill_(float("nan"))
    elif destination.dtype is not torch.bool:
        destination.fill_(torch.iinfo(destination.dtype).min)


def _leave(destination: torch.Tensor) -> None:
    """Leave a destination as it is."""


@contextmanager
def in_dry_run(device: Device) -> Iterator[None]:
    """Within it, this package's ops run on `device` but write nothing that the user holds.

    Memory is taken and freed, and copies into fresh tensors run, as in the step itself.
    """
    with running_on(_DryRun(device)):
        yield


class _DryRun(Runtime):
    """Starts what writes to nothing that was there before; of the rest, notes that it came."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def offload(self, source: torch.Tensor, launch: Launch) -> torch.Tensor:
        return self._device.offload(source, launch)

    def offload_into(self, destination: torch.Tensor, source: torch.Tensor, launch: Launch) -> None:
        self._device.skip(launch)

    def prefetch(self, source: torch.Tensor, launch: Launch) -> torch.Tensor:
        return self._device.prefetch(source, launch)

    def prefetch_into(
        self, destination: torch.Tensor, source: torch.Tensor, launch: Launch
    ) -> None:
        self._device.skip(launch)

    def host_cast(self, source: torch.Tensor, dtype: torch.dtype, launch: Launch) -> torch.Tensor:
        return self._device.host_cast(source, dtype, launch)

    def run_region(self, region: fx.GraphModule, inputs: Sequence[Any], launch: Launch) -> None:
        self._device.skip(launch)

    def copy_all(
        self, sources: Sequence[torch.Tensor], bundle: Bundle, *, down: bool
    ) -> list[torch.Tensor]:
        return self._device.copy_all(sources, bundle, down=down)

    def copy_all_into(
        self,
        destinations: Sequence[torch.Tensor],
        sources: Sequence[torch.Tensor],
        bundle: Bundle,
        *,
        down: bool,
    ) -> None:
        self._skip_all(bundle)

    def run_regions(
        self,
        regions: Sequence[fx.GraphModule],
        inputs: Sequence[Sequence[Any]],
        bundle: Bundle,
    ) -> None:
        self._skip_all(bundle)

    def _skip_all(self, bundle: Bundle) -> None:
        for launch in bundle.members:
            self._device.skip(launch)

    def wait(self, tasks: Sequence[str]) -> None:
        self._device.wait(tasks)

    def wait_previous(self, tasks: Sequence[str]) -> None:
        pass
