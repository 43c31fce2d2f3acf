"""Copy streams: give copies to the streams of a card, one for each direction of the link.

In: copies that may be issued, and what they come after. Out: their events, and streams that wait
for each other. The step's thread and those of the host call it; why no stream waits for itself is
in `cuda`.

Small copies of the step's thread that come one after the other are kept until the last of them and
then given at once: they share its event. Whoever could need one of them calls `give_batch` first.

Issued copies: copies that a card does, which no thread has to run.

Streams order what a card does, so a copy is given to its stream by whoever comes by: the step's
thread, where all it comes after has been done or issued, else the thread of the host that ends the
last of it. In: what gives the copy to its stream, piece by piece. Out: tasks for the `Device`.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch

from cotrain_compile.plan import Lane as LaneName
from cotrain_compile.runtime.course import WHOLE, Course, FollowedFailed
from cotrain_compile.runtime.cuda.card import StreamsOfCard
from cotrain_compile.runtime.cuda.pinned import Event, PinnedPool, Slab
from cotrain_compile.runtime.lanes import Done, Task, without_frames
from cotrain_compile.runtime.ops import Launch

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
    is_handed_over = True
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

    @property
    def ran(self) -> bool:
        """Whether all of it was issued, and that was noted: an interrupt may come before either."""
        return self.error is None and bool(self.pieces) and self.done.is_set()

    @property
    def broke_off(self) -> bool:
        return self.started and not self.ran

    def refused(self, error: BaseException) -> None:
        """It could not be issued."""
        self.error = without_frames(error)
        self.course.end(error)


class LateCopy(IssuedCopy):
    """A copy that is given to its stream when the tasks in `after` and what it follows allow it."""

    def __init__(self, name: str, lane: str, course: Course, after: Sequence[Task]) -> None:
        Task.__init__(self, name, lane, _nothing, after, course)
        self.is_handed_over = True  # to no thread: those that it waits for issue it
        self.pieces = []
        self._issuing: Issuing | None = None
        self._asked = 0
        self._at_work: int | None = None  # the thread that issues it

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

    def resume(self) -> None:
        """As `Task.resume`; all that it waits for has ended."""
        with self._state:
            if self.done.is_set() or self._at_work not in (None, threading.get_ident()):
                return
            # This thread was at it, or had not said how it is issued.
            was_interrupted = self._at_work is not None or self._issuing is None
            self._at_work = None
        if was_interrupted:
            self._ended(InterruptedError("an interrupt came before it was issued"))
        else:
            self._go_on()

    def _go_on(self) -> None:
        """Issue what may be issued; where another thread is at it, that one looks once more."""
        try:
            with self._state:
                self._asked += 1
                if self._at_work is not None or self.done.is_set():
                    return
                self._at_work = threading.get_ident()
            while self._is_asked_again():
                pass
        except FollowedFailed as failed:
            self._ended(failed.error)
        except BaseException as error:
            if self._at_work == threading.get_ident():  # or another thread ends it
                self._ended(error)
            if not isinstance(error, Exception):
                raise

    def _is_asked_again(self) -> bool:
        """Issue what may be issued; whether somebody asked meanwhile and there is more to do."""
        asked = self._asked
        if all(task.done.is_set() for task in self.after) and self._is_issued():
            return False
        with self._state:
            if self._asked == asked:
                self._at_work = None
            return self._at_work is not None

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


LINK = (LaneName.D2H, LaneName.H2D)
# Copies of up to this many bytes together share an event: the first of them waits for the last one
# no longer than it takes to issue them one by one.
TOGETHER_BYTES = 1 << 20

# A copy, its destination and source, and the memory of the host that it reads or writes.
_Waiting = tuple[IssuedCopy, torch.Tensor, torch.Tensor, Slab | None]


class CopyStreams:
    """The streams of `card` that copies are given to; slabs of `pool` learn of their events."""

    def __init__(self, card: StreamsOfCard, pool: PinnedPool, *, timed: bool) -> None:
        self._card, self._pool, self._timed = card, pool, timed
        self._streams: dict[str, Any] = {lane: card.stream() for lane in LINK}
        self._issuing: dict[str, threading.Lock] = {lane: threading.Lock() for lane in LINK}
        self._issued: dict[str, int] = dict.fromkeys(LINK, 0)  # copies on each stream so far
        self._place: Event | None = None  # of the last copy in the graph
        # What each stream was held for last: a place, and of each other stream the last copy.
        self._held_for: dict[str, Event] = {}
        self._reached: dict[tuple[str | None, str], int] = {}
        self._batch: list[_Waiting] = []
        self._batch_bytes = 0

    def start_step(self) -> None:
        """A new step, which may compute on another stream than the one before."""
        self._place, self._reached = None, {}

    def leave_place(self) -> None:
        """The compute stream has been given something since the last copy."""
        self._place = None

    def place_of(self, launch: Launch) -> Event:
        """When the compute stream has done what the graph has before this copy."""
        if self._place is None or not launch.alongside:
            self._place = self._card.record(None)
        return self._place

    def hold(self, lane: str | None, tasks: Iterable[Task]) -> None:
        """Make the stream of `lane`, None: the compute stream, wait for the copies in `tasks`.

        They have been issued. Of each stream the last one is enough, on their own none, and none
        where a later one was waited for.
        """
        stream = self._streams[lane] if lane is not None else None
        for copy in last_on_each_stream(tasks):
            way = lane, copy.lane
            if copy.lane != lane and self._reached.get(way, 0) < copy.number:
                self._card.hold(stream, copy.end)
                self._reached[way] = copy.number  # behind it: others rely on what they read here

    def issue_now(
        self,
        copy: IssuedCopy,
        place: Event,
        after: Sequence[Task],
        destination: torch.Tensor,
        source: torch.Tensor,
        *,
        more: bool,
    ) -> None:
        """Give `copy` to its stream, or keep it for a batch where there are `more` to come.

        All that it comes after has ended; where that failed, so does `copy`.
        """
        if after:
            failed = next((task.error for task in after if task.error is not None), None)
            if failed is not None:
                copy.refused(failed)
                return
        try:
            if copy.course is not WHOLE or self._timed:
                self.give_batch()
                for _ in self.issue(copy, place, after, destination, source):
                    pass
                return
            if self._batch and self._batch[0][0].lane != copy.lane:
                self.give_batch()
            slab = self._begin(copy, place, after, destination, source)
            self._batch.append((copy, destination, source, slab))
        except BaseException as error:
            copy.refused(error)
            if not isinstance(error, Exception):
                raise
        self._batch_bytes += source.nbytes
        if not more or self._batch_bytes > TOGETHER_BYTES:
            self.give_batch()

    def issue(
        self,
        copy: IssuedCopy,
        place: Event,
        after: Sequence[Task],
        destination: torch.Tensor,
        source: torch.Tensor,
    ) -> Iterator[None]:
        """Give `copy` to its stream, piece by piece; what it comes after has been issued."""
        slab = self._begin(copy, place, after, destination, source)
        for to, piece in copy.course.slices(destination, source):
            with self._issuing[copy.lane]:
                self._card.copy(self._streams[copy.lane], to, piece)
                copy.pieces.append(self._end(copy.lane))
                copy.number = self._issued[copy.lane]
            yield
        if slab is not None:
            slab.note(copy.end)

    def give_batch(self) -> None:
        """Give the copies that were kept to their stream."""
        if not self._batch:
            return
        batch, self._batch, self._batch_bytes = self._batch, [], 0
        copies, destinations, sources, slabs = zip(*batch, strict=True)
        lane = copies[0].lane
        try:
            with self._issuing[lane]:
                self._card.copy_all(self._streams[lane], destinations, sources)
                end = self._end(lane)
                number = self._issued[lane]
        except BaseException as error:
            for copy in copies:
                copy.refused(error)
            if not isinstance(error, Exception):
                raise
            return
        for copy in copies:
            copy.pieces, copy.number = [end], number
        for slab in slabs:
            if slab is not None:
                slab.note(end)

    def _begin(
        self,
        copy: IssuedCopy,
        place: Event,
        after: Sequence[Task],
        destination: torch.Tensor,
        source: torch.Tensor,
    ) -> Slab | None:
        """Let the stream of `copy` wait for all that it comes after; its slab of the host."""
        card, lane = self._card, copy.lane
        stream = self._streams[lane]
        if self._held_for.get(lane) is not place:
            card.hold(stream, place)
            self._held_for[lane] = place  # behind it, as above
        if after:
            self.hold(lane, after)
        is_down = lane == LaneName.D2H
        slab = self._pool.slab_of(destination if is_down else source)
        if is_down and slab is not None:
            for event in slab.events:
                card.hold(stream, event)
        if self._timed:
            copy.start = card.record(stream, timed=True)
        return slab

    def _end(self, lane: str) -> Event:
        """The end of what was given to a stream last; numbers are in the order of the stream."""
        self._issued[lane] += 1
        return self._card.record(self._streams[lane], timed=self._timed)


def last_on_each_stream(tasks: Iterable[Task]) -> Collection[IssuedCopy]:
    """Of the copies among `tasks` that have been issued, those that the others come before."""
    last: dict[str, IssuedCopy] = {}
    for task in tasks:
        if isinstance(task, IssuedCopy) and task.ran:
            known = last.get(task.lane)
            if known is None or known.number < task.number:
                last[task.lane] = task
    return last.values()
