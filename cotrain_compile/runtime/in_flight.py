"""In flight: the tasks that a step and the one before it have started, and how their ends are met.

A task that has been at work for too long is given up, and with it all that is in flight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cotrain_compile.errors import StepFailed
from cotrain_compile.runtime.lanes import Task

# How often a task is looked at before it is given up.
POLLS = 10


class InFlight:
    """Tasks by name: of this step, and of the one before, whose deferred tasks go on beside it."""

    # After how many seconds of work a task that has not ended is given up; None: never.
    watchdog_s: float | None = None

    def __init__(self) -> None:
        self._tasks: dict[str, Task] = {}
        self._previous: dict[str, Task] = {}
        self._given_up = ""

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

    def refuse_if_given_up(self) -> None:
        """Raise `StepFailed` where a task has been given up."""
        if self._given_up:
            raise StepFailed(
                f"{self._given_up} of an earlier step never ended, and may still write what it "
                "was to write; go on from the last checkpoint in a new process"
            )

    def wait_previous(self, tasks: Sequence[str]) -> None:
        for name in tasks:
            if name in self._previous:
                self._await(self._previous[name])

    def _await(self, task: Task) -> None:
        self._end_of(task)
        if task.error is not None:
            # What failed first: the error of a task is also that of those that come after it.
            known = (*self._previous.values(), *self._tasks.values())
            first = next(t for t in known if t.error is task.error)
            raise StepFailed(f"{first.name} failed: {task.error}") from task.error

    def _end_of(self, task: Task) -> None:
        """Return when `task` has ended, or has been given up with what it waits for."""
        poll_s = None if self.watchdog_s is None else self.watchdog_s / POLLS
        polls, at_work = 0, None
        while not task.done.wait(poll_s):
            # Counted, not timed: a process that was stopped for a while finds its tasks late.
            known = (*self._previous.values(), *self._tasks.values())
            started = [t for t in known if t.started and not t.done.is_set()]
            now_at_work = min(started, key=lambda t: t.start_s, default=task)
            polls = polls + 1 if now_at_work is at_work else 1
            at_work = now_at_work
            if polls > POLLS:
                self._give_up(at_work)

    def _give_up(self, stuck: Task) -> None:
        """Let every task in flight fail; none that has not begun will."""
        self._given_up = stuck.name
        error = TimeoutError(
            f"{stuck.name} was still at work on lane {stuck.lane} after {self.watchdog_s:g} s, "
            "when the option watchdog_s gave it up; go on from the last checkpoint in a new process"
        )
        for task in (stuck, *self._previous.values(), *self._tasks.values()):
            if not task.done.is_set():
                task.give_up(error)
