"""Copy streams: give copies to the streams of a card, one for each direction of the link.

In: copies that may be issued, and what they come after. Out: their events, and streams that wait
for each other. The step's thread and those of the host call it; why no stream waits for itself is
in `cuda`.

Small copies of the step's thread that come one after the other are kept until the last of them and
then given at once: they share its event. Whoever could need one of them calls `give_batch` first.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch

from cotrain_compile.plan import Lane as LaneName
from cotrain_compile.runtime.course import WHOLE
from cotrain_compile.runtime.cuda.card import Card
from cotrain_compile.runtime.cuda.issued import IssuedCopy
from cotrain_compile.runtime.cuda.pinned import Event, PinnedPool, Slab
from cotrain_compile.runtime.lanes import Task
from cotrain_compile.runtime.ops import Launch

LINK = (LaneName.D2H, LaneName.H2D)
# Copies of up to this many bytes together share an event: the first of them waits for the last one
# no longer than it takes to issue them one by one.
TOGETHER_BYTES = 1 << 20

# A copy, its destination and source, and the memory of the host that it reads or writes.
_Waiting = tuple[IssuedCopy, torch.Tensor, torch.Tensor, Slab | None]


class CopyStreams:
    """The streams of `card` that copies are given to; slabs of `pool` learn of their events."""

    def __init__(self, card: Card, pool: PinnedPool, *, timed: bool) -> None:
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
