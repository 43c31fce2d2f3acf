"""Lanes: threads that run tasks first in, first out, and remember when each ran.

A thread that dies ends the task it was at with an error, and another takes its place. A process
that is forked has the lanes without their threads: it is told so, and goes no further.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import torch

from cotrain_compile.errors import StepFailed
from cotrain_compile.plan import Span
from cotrain_compile.runtime.course import WHOLE, Course, FollowedFailed
from cotrain_compile.runtime.process.cores import ANY_CORE, Cores, bind_this_thread

# How long the end of the process waits for work in flight: no update takes longer.
EXIT_LIMIT_S = 60.0


class Done:
    """As `threading.Event`, for what mostly nobody has to wait for: only then is one made."""

    __slots__ = ("_event", "_is_set")
    _making = threading.Lock()

    def __init__(self) -> None:
        self._is_set = False
        self._event: threading.Event | None = None

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        # In this order, and `wait` asks in the other one: a waiter is never overlooked.
        self._is_set = True
        if self._event is not None:
            self._event.set()

    def wait(self, timeout: float | None = None) -> bool:
        if self._is_set:
            return True
        with self._making:
            event = self._event = self._event or threading.Event()
        if self._is_set:
            event.set()
        return event.wait(timeout)


class Task:
    """One unit of work on a lane; `done` is set when it has ended, well or badly.

    `course` says how it goes along: behind the one that it follows, which is not in `after`.
    """

    def __init__(
        self,
        name: str,
        lane: str,
        work: Callable[[], object],
        after: Sequence[Task],
        course: Course = WHOLE,
    ) -> None:
        self.name = name
        self.lane = lane
        self.done = Done()
        self.started = False
        self.is_handed_over = False  # to a thread
        self._is_claimed = False  # by the thread that runs it
        self.error: BaseException | None = None
        self.start_s = self.end_s = 0.0
        self._state = threading.Lock()
        self._work: Callable[[], object] | None = work
        self.after: Sequence[Task] = after
        self._then: list[Callable[[], None]] | None = None  # made for the first
        self.course = course
        self.members: Sequence[str] = ()  # of a bundle, by name

    def when_done(self, call: Callable[[], None]) -> None:
        """`call()` when the task has ended, on the thread that ends it, or now where it has.

        It may be called more than once, and must not raise.
        """
        with self._state:
            if not self.done.is_set():
                self._then = self._then or []
                self._then.append(call)
                return
        call()

    def run(self) -> None:
        """Do the work when what comes before it is done; nothing where it has been given up.

        Of two threads that it was handed over to the second waits until it has ended.
        """
        with self._state:
            is_first, self._is_claimed = not self._is_claimed, True
        if not is_first:
            self.done.wait()
            return
        work: Callable[[], object] | None = None
        try:
            for task in self.after:
                task.done.wait()
                if task.error is not None:
                    self.error = self.error or task.error
            if self.error is None:
                self.course.wait_for_the_one_ahead(0)
            work = self._begin()
            if work is not None:
                work()
        except FollowedFailed as failed:
            self._fail(failed.error)
        except BaseException as error:
            self._fail(error)
        finally:
            work = None
            self._end()

    def resume(self) -> None:
        """Go on where an interrupt of the step's thread has left it: nothing, for a lane's task."""

    def give_up(self, error: BaseException) -> None:
        """End it with `error`, also where its work is still at it, perhaps for ever."""
        self._fail(error)
        self._end()

    def _begin(self) -> Callable[[], object] | None:
        with self._state:
            if self.error is not None:
                return None
            self.started, self.start_s = True, time.perf_counter()
            return self._work

    def _fail(self, error: BaseException) -> None:
        error = without_frames(error)
        with self._state:
            if not self.done.is_set():
                self.error = error

    def _end(self) -> None:
        with self._state:
            if not self.done.is_set():
                self.end_s = time.perf_counter()
                # The tensors the work holds are freed now, not when the next step starts.
                self._work = None
                self.after = ()
                self.course.end(self.error)
                self.done.set()
        # One is taken out when it has been called: an exception from outside leaves it for the
        # thread's end, which comes here again.
        then = self._then or []
        for call in list(then):
            call()
            with contextlib.suppress(ValueError):
                then.remove(call)

    @property
    def ran(self) -> bool:
        """Whether the work was done to its end."""
        return self.done.is_set() and self.error is None

    @property
    def broke_off(self) -> bool:
        """Whether the work was begun and failed, so that what it writes may be half written."""
        return self.started and self.error is not None

    def span(self, origin_s: float, now_s: float) -> Span | None:
        """When it ran, from `origin_s` to `now_s` at most, in seconds from `origin_s`.

        What it waited between pieces is left out, as if it had waited before the first.
        None where it failed or had not begun by `now_s`.
        """
        if self.error is not None or not self.started or self.start_s > now_s:
            return None
        end_s = min(self.end_s, now_s) if self.done.is_set() else now_s
        start_s = min(self.start_s + self.course.waited_s, end_s)
        return Span(self.lane, self.name, max(0.0, start_s - origin_s), end_s - origin_s)

    def spans(self, origin_s: float, now_s: float) -> list[Span]:
        """As `span`; the members of a bundle share its time evenly."""
        whole = self.span(origin_s, now_s)
        if whole is None or not self.members:
            return [] if whole is None else [whole]
        each_s = (whole.end_s - whole.start_s) / len(self.members)
        return [
            Span(
                whole.lane,
                name,
                whole.start_s + number * each_s,
                whole.start_s + (number + 1) * each_s,
            )
            for number, name in enumerate(self.members)
        ]


def without_frames(error: BaseException) -> BaseException:
    """`error` with the lines it came through as a note: frames would keep their tensors alive."""
    if error.__traceback__ is not None:
        error.add_note("".join(traceback.format_tb(error.__traceback__)))
    return error.with_traceback(None)


class WorkerLane:
    """A lane with `workers` threads, on `cores` alone.

    They end when the lane is collected. One thread submits tasks and hands them over.
    """

    def __init__(self, name: str, workers: int = 1, cores: Cores = ANY_CORE) -> None:
        self.name = name
        self._queue: SimpleQueue[Sequence[Task] | None] = SimpleQueue()
        self._last: Task | None = None
        self._process = os.getpid()
        for number in range(workers):
            _start_thread(self._queue, f"cotrain-{name}-{number}", cores, deque())
        _queues[self] = self._queue, workers
        weakref.finalize(self, _stop, self._queue, workers)

    def refuse_fork(self) -> None:
        """Raise `StepFailed` in a process that was forked from the one with the lane's threads."""
        if os.getpid() != self._process:
            raise StepFailed(
                "this process was forked from the one that compiled the step, and has no copy of "
                "the threads that carry it out; nothing was changed. Start processes with the "
                "method 'spawn', or compile the step in this one"
            )

    def submit(
        self,
        name: str,
        work: Callable[[], object],
        after: Sequence[Task],
        course: Course = WHOLE,
        *,
        held: bool = False,
    ) -> Task:
        """A new task, which begins in its turn; `held`: not before `hand_over`."""
        task = Task(name, self.name, work, after, course)
        if not held:
            self.hand_over([task])
        return task

    def hand_over(self, tasks: Sequence[Task]) -> None:
        """Let `tasks` begin, also those of other lanes: one worker does one after the other."""
        self._last = tasks[-1]
        self._queue.put(tasks)
        # Last: what an interrupt keeps from being said is handed over twice, which `run` allows.
        for task in tasks:
            task.is_handed_over = True

    @property
    def is_idle(self) -> bool:
        """Whether what was handed over last has ended."""
        return self._last is None or self._last.done.is_set()


_this_thread = threading.local()


def is_lane_thread() -> bool:
    """Whether the caller is a thread of a lane, which must never wait for a task."""
    return getattr(_this_thread, "is_lane", False)


def _start_thread(
    queue: SimpleQueue[Sequence[Task] | None], name: str, cores: Cores, left: deque[Task]
) -> None:
    arguments = (queue, name, cores, left)
    thread = threading.Thread(target=_work_off, args=arguments, name=name, daemon=True)
    thread.start()
    _threads.add(thread)


def _work_off(
    queue: SimpleQueue[Sequence[Task] | None], name: str, cores: Cores, left: deque[Task]
) -> None:
    """Run the tasks that are `left`, and all that come; one is taken out when it has ended."""
    _this_thread.is_lane = True
    try:
        bind_this_thread(cores)
        # Grad mode is per thread and on by default: a write into a parameter would fail.
        with torch.no_grad():
            _run(left)
            # An exception from outside comes between two lines, not between the queue and `left`.
            for tasks in iter(queue.get, None):
                left.extend(tasks)
                _run(left)
                tasks = ()  # a parked thread must not keep the tensors of its tasks alive
    except BaseException as error:
        if left:
            left.popleft().give_up(error)
        _start_thread(queue, name, cores, left)


def _run(left: deque[Task]) -> None:
    while left:
        left[0].run()
        left.popleft()


def _stop(queue: SimpleQueue[Sequence[Task] | None], workers: int) -> None:
    for _ in range(workers):
        queue.put(None)


def _finish() -> None:
    """Let what is in flight end: a thread that the interpreter stops inside torch aborts it."""
    for queue, workers in list(_queues.values()):
        _stop(queue, workers)
    until_s = time.monotonic() + EXIT_LIMIT_S
    for thread in list(_threads):
        thread.join(max(0.0, until_s - time.monotonic()))


_queues: weakref.WeakKeyDictionary[WorkerLane, tuple[SimpleQueue[Sequence[Task] | None], int]]
_queues = weakref.WeakKeyDictionary()
_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
atexit.register(_finish)
