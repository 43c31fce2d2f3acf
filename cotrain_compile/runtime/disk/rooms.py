"""Rooms: memory of the host that pieces of files pass through, and where updated back to them.

Updates ask for their pieces in the order in which they will run, before they run. As soon as a room
is free it is filled with the next piece that was asked for; an update takes the piece, works on it
and gives it back, and the room is free when that is written. Who only reads asks when it begins,
and lets go of each piece. A few threads read and write, so the drive always has several pieces to
do. An offload asks for rooms with nothing in them.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import torch

from cotrain_compile.plan.on_disk import PIECE_BYTES, ROOMS, THREADS, whole_blocks
from cotrain_compile.runtime.disk.state_files import StateFile

# What pins memory, and what undoes that before it is unmapped.
Pinning = tuple[Callable[[torch.Tensor], None], Callable[[torch.Tensor], None]]


class Room:
    """Memory for a piece of every state of a parameter, one behind the other."""

    def __init__(self, nbytes: int, pinning: Pinning | None) -> None:
        memory = mmap.mmap(-1, nbytes)
        self._bytes, self._view = torch.frombuffer(memory, dtype=torch.uint8), memoryview(memory)
        if pinning is not None:
            pin, unpin = pinning
            pin(self._bytes)
            weakref.finalize(self, unpin, self._bytes)

    def blocks(self, number: int, size: int) -> memoryview:
        """Whole blocks for state `number`, of which each has `size` bytes here."""
        start = number * whole_blocks(size)
        return self._view[start : start + whole_blocks(size)]

    def elements(self, number: int, size: int, dtype: torch.dtype) -> torch.Tensor:
        """The same bytes as a row of elements."""
        start = number * whole_blocks(size)
        return self._bytes[start : start + size].view(dtype)


@dataclass(eq=False)
class Passing:
    """The states of one parameter, each `nbytes` in one of `files`, on their way through rooms.

    The last `read_only` of them are not written back; what is `new` is not read, but written alone.
    `filled` has the rooms of pieces that have not been given back, with what fills each.
    """

    rooms: Rooms
    files: Sequence[StateFile]
    nbytes: int
    read_only: int = 0
    new: bool = False
    asked: int = 0  # how many pieces have a room, or had
    filled: dict[int, tuple[Room, list[Future[None]]]] = field(default_factory=dict)
    writes: list[Future[None]] = field(default_factory=list)

    @property
    def count(self) -> int:
        """How many pieces there are."""
        return -(-self.nbytes // PIECE_BYTES)

    def size(self, number: int) -> int:
        """Bytes of a piece of each state."""
        return min(PIECE_BYTES, self.nbytes - number * PIECE_BYTES)

    def take(self, number: int) -> Room:
        """The room with piece `number` of each state, when that has come. Raises `DiskError`."""
        room, reads = self.rooms.room_of(self, number)
        for read in reads:
            read.result()
        return room

    def pieces(self, dtype: torch.dtype) -> Iterator[tuple[slice, torch.Tensor]]:
        """The elements of the only file, in turn, each piece with where it belongs.

        It is there until the next one is asked for. Raises `DiskError`.
        """
        each = PIECE_BYTES // dtype.itemsize
        for number in range(self.count):
            piece = self.take(number).elements(0, self.size(number), dtype)
            yield slice(number * each, number * each + piece.numel()), piece
            self.rooms.free(self, number)

    def give_back(self, number: int) -> None:
        """Let piece `number` be written; its room is free after that."""
        self.rooms.write(self, number)

    def finish(self) -> None:
        """Return when all is written. Raises `DiskError`."""
        for write in self.writes:
            write.result()

    def close(self) -> None:
        """Let go of what was not given back; from any thread, and more than once."""
        self.rooms.close(self)


class Rooms:
    """The rooms of a compiled step, of `nbytes` together; made when a piece is first asked for.

    With `pinning` they are pinned.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.pinning: Pinning | None = None
        self._left = ROOMS  # to be made
        self._free: list[Room] = []
        self._waiting: deque[Passing] = deque()
        self._changed = threading.Condition(threading.RLock())
        self._threads = ThreadPoolExecutor(THREADS, "cotrain-disk")

    def ask(
        self,
        files: Sequence[StateFile],
        nbytes: int,
        *,
        read_only: int = 0,
        new: bool = False,
    ) -> Passing:
        """Let the states in `files` come, behind all that was asked for before; as `Passing`."""
        passing = Passing(self, files, nbytes, read_only, new)
        with self._changed:
            self._waiting.append(passing)
            self._fill()
        return passing

    def room_of(self, passing: Passing, number: int) -> tuple[Room, list[Future[None]]]:
        """The room of a piece that was asked for, and what fills it, as soon as it has one."""
        with self._changed:
            self._changed.wait_for(lambda: number in passing.filled)
            return passing.filled[number]

    def write(self, passing: Passing, number: int) -> None:
        """Write a piece that has been taken, and free its room."""
        with self._changed:
            room, _ = passing.filled.pop(number)
            files = passing.files[: len(passing.files) - passing.read_only]
            passing.writes += self._start(
                StateFile.write, files, passing, number, room, self._free_again
            )

    def free(self, passing: Passing, number: int) -> None:
        """Free the room of a piece that has been taken and is as it was."""
        with self._changed:
            self._free_again(passing.filled.pop(number)[0])

    def close(self, passing: Passing) -> None:
        """As `Passing.close`."""
        with self._changed:
            if passing in self._waiting:
                self._waiting.remove(passing)
            while passing.filled:
                _, (room, reads) = passing.filled.popitem()
                _when_all_done(reads, partial(self._free_again, room))
            self._fill()

    def _fill(self) -> None:
        """Under the lock: give rooms that are free to what comes next."""
        while self._waiting and (self._free or self._left):
            if not self._free:
                self._left -= 1
                self._free.append(Room(self.nbytes // ROOMS, self.pinning))
            passing, room = self._waiting[0], self._free.pop()
            number, passing.asked = passing.asked, passing.asked + 1
            files = () if passing.new else passing.files
            reads = self._start(StateFile.read, files, passing, number, room)
            passing.filled[number] = room, reads
            if passing.asked == passing.count:
                self._waiting.popleft()
            self._changed.notify_all()

    def _free_again(self, room: Room) -> None:
        with self._changed:
            self._free.append(room)
            self._fill()

    def _start(
        self,
        call: Callable[[StateFile, memoryview, int], None],
        files: Sequence[StateFile],
        passing: Passing,
        number: int,
        room: Room,
        then: Callable[[Room], None] | None = None,
    ) -> list[Future[None]]:
        """Read or write piece `number` of each of `files`; `then` is called when all have ended."""
        size, offset = passing.size(number), number * PIECE_BYTES
        begun = [
            self._threads.submit(call, file, room.blocks(place, size), offset)
            for place, file in enumerate(files)
        ]
        if then is not None:
            _when_all_done(begun, partial(then, room))
        return begun


def _when_all_done(futures: Sequence[Future[None]], call: Callable[[], None]) -> None:
    """`call()` when all have ended, well or badly, on the thread that ends the last."""
    if not futures:
        call()
        return
    left, lock = len(futures), threading.Lock()

    def one_less(_: Future[None]) -> None:
        nonlocal left
        with lock:
            left -= 1
            is_last = not left
        if is_last:
            call()

    for future in futures:
        future.add_done_callback(one_less)
