"""The emulated device: a second memory tier in RAM, for machines without a GPU.

Device and host tensors are both CPU tensors, told apart by the meter. Copies and host updates run
on threads of their own, so that a missing wait is a real race; the destination of a copy holds NaN
until the copy is done, so that it shows as a wrong number and not as luck. With `throttle`, copies
take as long as the machine's links say, and exchanges with other ranks as long as `network_s` has
for them. `poison` can be left out to measure times.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from cotrain_compile.machine import Machine, Tier
from cotrain_compile.plan import Lane as LaneName
from cotrain_compile.plan import Span
from cotrain_compile.runtime.course import Course, Piecewise
from cotrain_compile.runtime.device import Device
from cotrain_compile.runtime.host.kernels import HostKernel
from cotrain_compile.runtime.meter import Meter
from cotrain_compile.runtime.network import ThrottledNetwork, sleep_until
from cotrain_compile.runtime.ops import Launch


class EmulatedDevice(Device):
    """Runs the tasks of a placed step on threads; one per compiled step."""

    def __init__(
        self,
        machine: Machine,
        budgets: Mapping[Tier, int],
        kernels: Mapping[str, HostKernel],
        piecewise: Mapping[str, Piecewise] | None = None,
        *,
        host_cores: Collection[int] = (),
        throttle: bool = False,
        poison: bool = True,
        network_s: Mapping[str, float] | None = None,
    ) -> None:
        workers = machine.host_update.workers
        super().__init__(Meter(budgets), kernels, piecewise or {}, workers, host_cores)
        self._poison = _poison if poison else _leave
        self._machine = machine if throttle else None
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
        tasks = [*self._previous.values(), *self._tasks.values()]

        def spans() -> list[Span]:
            ran = [span for t in tasks if (span := t.span(origin_s, now_s)) is not None]
            return [span for span in ran if span.end_s > 0]

        return spans

    def peak_bytes(self) -> Mapping[Tier, int]:
        return dict(self.meter.peak_bytes)

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

        def copy() -> None:
            self._poison(destination)
            for to, piece in course.slices(destination, source):
                self._copy(lane, to, piece)

        self._submit(lane, launch, copy, course)

    def _start_work(
        self,
        work: Callable[[], object],
        launch: Launch,
        course: Course,
        fresh: torch.Tensor | None = None,
    ) -> None:
        self._submit(LaneName.HOST, launch, work, course)

    def _copy(self, lane: LaneName, destination: torch.Tensor, source: torch.Tensor) -> None:
        machine = self._machine
        if machine is None:
            destination.copy_(source)
            return
        copy_s = machine.copy_s(source.nbytes, *machine.links[lane].ends)
        end_s = time.perf_counter() + copy_s
        # The bytes land as late as they may, so that until then a missing wait shows.
        sleep_until(end_s - 2 * source.nbytes / self._host_bytes_per_s)
        destination.copy_(source)
        sleep_until(end_s)


def _poison(destination: torch.Tensor) -> None:
    """Fill a destination with what no computation survives unnoticed."""
    if destination.is_floating_point() or destination.is_complex():
        destination.fill_(float("nan"))
    elif destination.dtype is not torch.bool:
        destination.fill_(torch.iinfo(destination.dtype).min)


def _leave(destination: torch.Tensor) -> None:
    """Leave a destination as it is."""
