"""The emulated device: a second memory tier in RAM, for machines without a GPU.

Device and host tensors are both CPU tensors, told apart by the meter. Copies and host updates run
on threads of their own, so that a missing wait is a real race; the destination of a copy holds NaN
until the copy is done, so that it shows as a wrong number and not as luck. With `throttle`, copies
take as long as the machine's links say. `poison` can be left out to measure times.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from cotrain_compile.errors import StepFailed
from cotrain_compile.machine import Link, Machine, Tier
from cotrain_compile.plan import Lane as LaneName
from cotrain_compile.plan import Span
from cotrain_compile.runtime.host_kernels import HostKernel
from cotrain_compile.runtime.lanes import Lane, Task
from cotrain_compile.runtime.meter import Meter

# Linux wakes a sleeping thread this much late (prctl(2), PR_SET_TIMERSLACK).
_TIMER_SLACK_S = 50e-6


class EmulatedDevice:
    """Runs the tasks of a placed step on threads; one per compiled step.

    `kernels` has a host kernel for each region, by task name.
    """

    def __init__(
        self,
        machine: Machine,
        budgets: Mapping[Tier, int],
        kernels: Mapping[str, HostKernel],
        *,
        throttle: bool = False,
        poison: bool = True,
    ) -> None:
        self.meter = Meter(budgets)
        self._kernels = kernels
        self._poison = _poison if poison else _leave
        links = {LaneName.D2H: machine.d2h, LaneName.H2D: machine.h2d}
        self._links: Mapping[LaneName, Link] = links if throttle else {}
        self._host_bytes_per_s = machine.host.bytes_per_s
        self._lanes = {
            LaneName.D2H: Lane(LaneName.D2H),
            LaneName.H2D: Lane(LaneName.H2D),
            LaneName.HOST: Lane(LaneName.HOST, machine.host_update.workers),
        }
        self._tasks: dict[str, Task] = {}
        self._previous: dict[str, Task] = {}
        self.origin_s = 0.0

    def start_step(self) -> None:
        """Begin a new step: what is in flight is of the step before, peaks count from here."""
        self._previous, self._tasks = self._tasks, {}
        self.origin_s = time.perf_counter()
        in_flight = not all(task.done.is_set() for task in self._previous.values())
        self.meter.start_step(keep=Tier.HOST if in_flight else None)

    def offload(
        self,
        source: torch.Tensor,
        task: str,
        after: Sequence[str],
        after_previous: Sequence[str] = (),
    ) -> torch.Tensor:
        needed = self._needed(after, after_previous)
        return self._copy_afresh(LaneName.D2H, Tier.HOST, source, task, needed)

    def offload_into(
        self,
        destination: torch.Tensor,
        source: torch.Tensor,
        task: str,
        after: Sequence[str],
        after_previous: Sequence[str] = (),
    ) -> None:
        needed = self._needed(after, after_previous)
        self._copy_over(LaneName.D2H, destination, source, task, needed)

    def prefetch(
        self,
        source: torch.Tensor,
        task: str,
        after: Sequence[str],
        after_previous: Sequence[str] = (),
    ) -> torch.Tensor:
        needed = self._needed(after, after_previous)
        return self._copy_afresh(LaneName.H2D, Tier.DEVICE, source, task, needed)

    def prefetch_into(
        self,
        destination: torch.Tensor,
        source: torch.Tensor,
        task: str,
        after: Sequence[str],
        after_previous: Sequence[str] = (),
    ) -> None:
        needed = self._needed(after, after_previous)
        self._copy_over(LaneName.H2D, destination, source, task, needed)

    def host_cast(
        self,
        source: torch.Tensor,
        dtype: torch.dtype,
        task: str,
        after: Sequence[str],
        after_previous: Sequence[str] = (),
    ) -> torch.Tensor:
        made = torch.empty_like(source, dtype=dtype, requires_grad=False)
        self._poison(made)
        self.meter.track(made, Tier.HOST, task)
        needed = self._needed(after, after_previous)
        self._submit(LaneName.HOST, task, needed, lambda: made.copy_(source))
        return made

    def run_region(
        self,
        region: fx.GraphModule,
        task: str,
        after: Sequence[str],
        inputs: Sequence[Any],
        after_previous: Sequence[str] = (),
    ) -> None:
        kernel = self._kernels[task]
        needed = self._needed(after, after_previous)
        self._submit(LaneName.HOST, task, needed, lambda: kernel(inputs, self.meter))

    def wait(self, tasks: Sequence[str]) -> None:
        for name in tasks:
            self._await(self._tasks[name])

    def wait_previous(self, tasks: Sequence[str]) -> None:
        for name in tasks:
            if name in self._previous:
                self._await(self._previous[name])

    def _await(self, task: Task) -> None:
        task.done.wait()
        if task.error is not None:
            # What failed first: the error of a task is also that of those that come after it.
            known = (*self._previous.values(), *self._tasks.values())
            first = next(t for t in known if t.error is task.error)
            raise StepFailed(f"{first.name} failed: {task.error}") from task.error

    def drain(self) -> None:
        """Wait until every task in flight has ended, whether or not it failed."""
        for task in (*self._previous.values(), *self._tasks.values()):
            task.done.wait()

    def tasks(self, *, previous: bool = False) -> Mapping[str, Task]:
        """The tasks started in this step, or in the one before, by name."""
        return self._previous if previous else self._tasks

    @property
    def is_busy(self) -> bool:
        """Whether a task is in flight."""
        return not all(task.done.is_set() for task in self._tasks.values())

    def forget(self) -> None:
        """Let go of all tasks, which have ended: the next step finds none before it."""
        self._previous, self._tasks = {}, {}

    def spans(self) -> list[Span]:
        """What the tasks of this step, and what is left of the one before, have done in it so far.

        Times count from its start; what goes on after the step is cut at the present.
        """
        now_s = time.perf_counter()
        tasks = [*self._previous.values(), *self._tasks.values()]
        spans = [span for task in tasks if (span := task.span(self.origin_s, now_s)) is not None]
        return [span for span in spans if span.end_s > 0]

    def _needed(self, after: Sequence[str], after_previous: Sequence[str]) -> list[Task]:
        """The tasks that one waits for before it starts."""
        previous = [self._previous[name] for name in after_previous if name in self._previous]
        return [*previous, *(self._tasks[name] for name in after)]

    def _copy_afresh(
        self, lane: LaneName, tier: Tier, source: torch.Tensor, task: str, needed: Sequence[Task]
    ) -> torch.Tensor:
        """A new tensor on `tier` that gets the whole storage of `source`, so that any view fits."""
        row = _whole_storage(source)
        copied = torch.empty_like(row)
        self._poison(copied)
        self.meter.track(copied, tier, task)
        self._submit(lane, task, needed, lambda: self._copy(lane, copied, row))
        return copied.as_strided(source.size(), source.stride(), source.storage_offset())

    def _copy_over(
        self,
        lane: LaneName,
        destination: torch.Tensor,
        source: torch.Tensor,
        task: str,
        needed: Sequence[Task],
    ) -> None:
        def copy() -> None:
            self._poison(destination)
            self._copy(lane, destination, source)

        self._submit(lane, task, needed, copy)

    def _copy(self, lane: LaneName, destination: torch.Tensor, source: torch.Tensor) -> None:
        nbytes, link = source.untyped_storage().nbytes(), self._links.get(lane)
        end_s = time.perf_counter() + (link.seconds(nbytes) if link is not None else 0.0)
        # The bytes land as late as they may, so that until then a missing wait shows.
        _sleep_until(end_s - 2 * nbytes / self._host_bytes_per_s)
        destination.copy_(source)
        _sleep_until(end_s)

    def _submit(self, lane: LaneName, name: str, needed: Sequence[Task], work: Any) -> None:
        self._tasks[name] = self._lanes[lane].submit(name, work, needed)


def _sleep_until(time_s: float) -> None:
    time.sleep(max(0.0, time_s - time.perf_counter() - _TIMER_SLACK_S))


def _whole_storage(tensor: torch.Tensor) -> torch.Tensor:
    """All of the storage that `tensor` shows, as one row."""
    return tensor.new_empty(0).set_(tensor.untyped_storage())


def _poison(destination: torch.Tensor) -> None:
    """Fill a destination with what no computation survives unnoticed."""
    if destination.is_floating_point() or destination.is_complex():
        destination.fill_(float("nan"))
    elif destination.dtype is not torch.bool:
        destination.fill_(torch.iinfo(destination.dtype).min)


def _leave(destination: torch.Tensor) -> None:
    """Leave a destination as it is."""
