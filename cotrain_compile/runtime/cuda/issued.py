"""Issued copies: copies that a card does, which no thread has to run.

Streams order what a card does, so a copy is given to its stream by whoever comes by: the step's
thread, where all it comes after has been done or issued, else the thread of the host that ends the
last of it. In: what gives the copy to its stream, piece by piece. Out: tasks for the `Device`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cotrain_compile.runtime.course import WHOLE, Course, FollowedFailed
from cotrain_compile.runtime.cuda.pinned import Event
from cotrain_compile.runtime.lanes import Done, Task, without_frames

_ISSUED = Done()
_ISSUED.set()

# Gives a copy to its stream, one piece at a time.
Issuing = Iterator[None]


class IssuedCopy(Task):
    """A copy that has been given to its stream; `done` says that, not that the card has done it.

    `start` is its first event where copies are timed, `pieces` the end of each piece; it is copy
    `number` of its stream.
    """

    # Not as a `Task` begins: most copies need neither lock nor event of their own.
    done, started, start_s, end_s = _ISSUED, True, 0.0, 0.0
    error: BaseException | None = None
    start: Event | None = None
    number = 0

    def __init__(self, name: str, lane: str, course: Course = WHOLE) -> None:
        self.name, self.lane, self.course = name, lane, course
        self.pieces: list[Event] = []

    @property
    def end(self) -> Event:
        """When the card has done all of it; it has been issued without an error."""
        return self.pieces[-1]

    def refused(self, error: BaseException) -> None:
        """It could not be issued."""
        self.error = without_frames(error)
        self.course.end(error)


class LateCopy(IssuedCopy):
    """A copy that is given to its stream when the tasks in `after` and what it follows allow it."""

    def __init__(self, name: str, lane: str, course: Course, after: Sequence[Task]) -> None:
        Task.__init__(self, name, lane, _nothing, after, course)
        self.pieces = []
        self._issuing: Issuing | None = None
        self._asked = 0
        self._at_work = False

    def begin(self, issuing: Issuing, followed: Task | None) -> None:
        """Go on whenever something that it waits for has ended, beginning now.

        `issuing` issues one piece each time it is asked, and notes the end when asked once more.
        """
        self._issuing = issuing
        if followed is not None:
            followed.course.tell(self._go_on)
            followed.when_done(self._go_on)
        for task in self.after:
            if not task.done.is_set():
                task.when_done(self._go_on)
        self._go_on()

    def _go_on(self) -> None:
        """Issue what may be issued; where another thread is at it, that one looks once more."""
        with self._state:
            self._asked += 1
            if self._at_work or self.done.is_set():
                return
            self._at_work = True
        try:
            while self._is_asked_again():
                pass
        except FollowedFailed as failed:
            self._ended(failed.error)
        except BaseException as error:
            self._ended(error)

    def _is_asked_again(self) -> bool:
        """Issue what may be issued; whether somebody asked meanwhile and there is more to do."""
        asked = self._asked
        if all(task.done.is_set() for task in self.after) and self._is_issued():
            return False
        with self._state:
            self._at_work = self._asked != asked
            return self._at_work

    def _is_issued(self) -> bool:
        """Issue the pieces that may be; whether it has ended with that."""
        error = next((task.error for task in self.after if task.error is not None), None)
        if error is not None:
            self._ended(error)
            return True
        issuing = self._issuing
        if issuing is None or self._begin() is None:
            return True  # it has been given up
        while len(self.pieces) < self.course.count:
            if not self.course.next_may_begin(len(self.pieces)):
                return False
            next(issuing, None)
        next(issuing, None)
        del issuing
        self._ended(None)
        return True

    def _ended(self, error: BaseException | None) -> None:
        # What it holds goes first: no tensor dies on this thread when the others go on.
        self._issuing = None
        if error is not None:
            self._fail(error)
        self._end()


def _nothing() -> None:
    """The work is what `begin` was given."""
