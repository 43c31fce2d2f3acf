"""Course: how a task that works in pieces goes along, behind those that it follows.

The gradient of a large parameter comes down, the parameter is updated, the weight goes back up: the
second may begin with what the first has done so far, and the third with what the second has. A
`Piecewise` says so of a task, the same in every step; a `Course` is one such task under way.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Piecewise:
    """A task works on `rows` rows of `row_elements` at a time, `count` times.

    Before each piece it waits for the same piece of the task that it `follows`, if any, which is
    one of those it comes after.
    """

    rows: int
    row_elements: int
    count: int
    follows: str = ""


class FollowedFailed(Exception):
    """A task that is followed has failed with `error`."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


class Course:
    """A task under way in the pieces of `piecewise`, None: in one; it follows the course `ahead`.

    `arrive` returns when a piece, by its number, that `ahead` has done is there to be read.
    """

    def __init__(
        self,
        piecewise: Piecewise | None = None,
        ahead: Course | None = None,
        arrive: Callable[[int], None] | None = None,
    ) -> None:
        self.piecewise = piecewise
        self.waited_s = 0.0  # between the pieces
        self._ahead = ahead
        self._arrive = arrive
        self._error: BaseException | None = None
        self._come = [
            threading.Event() for _ in range(piecewise.count if piecewise is not None else 0)
        ]
        self._tell: list[Callable[[], None]] = []

    @property
    def follows(self) -> str:
        """The task that it follows, "" for none."""
        return self.piecewise.follows if self.piecewise is not None else ""

    @property
    def count(self) -> int:
        """In how many pieces it goes."""
        return self.piecewise.count if self.piecewise is not None else 1

    def pieces(self) -> Iterator[int]:
        """The number of each piece, when it may be worked on; asking for the next one ends it.

        Raises `FollowedFailed`.
        """
        if self.piecewise is None:
            yield 0
            return
        for number, come in enumerate(self._come):
            began_s = time.perf_counter()
            self.wait_for_the_one_ahead(number)
            self.waited_s += time.perf_counter() - began_s
            yield number
            come.set()
            for tell in self._tell:
                tell()

    def slices(self, *tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
        """As `pieces`, with what each of these dense tensors has of the piece."""
        for number in self.pieces():
            if self.piecewise is None:
                yield tensors
                return
            elements = self.piecewise.rows * self.piecewise.row_elements
            here = slice(number * elements, (number + 1) * elements)
            yield tuple(tensor.view(-1)[here] for tensor in tensors)

    def wait_for_the_one_ahead(self, number: int) -> None:
        """Return when what is followed has done this piece. Raises `FollowedFailed`."""
        if self._ahead is None:
            return
        self._ahead._come[number].wait()
        if self._ahead._error is not None:
            raise FollowedFailed(self._ahead._error)
        if self._arrive is not None:
            self._arrive(number)

    def tell(self, call: Callable[[], None]) -> None:
        """`call()` after each further piece, on the thread that works on it; it must not raise."""
        if self.piecewise is not None:  # `WHOLE` is everybody's
            self._tell.append(call)

    def next_may_begin(self, number: int) -> bool:
        """Whether piece `number` of what is followed is done, so that nobody would wait for it."""
        return self._ahead is None or self._ahead._come[number].is_set()

    def end(self, error: BaseException | None) -> None:
        """The task has ended, well or with `error`: nobody is to wait for it any longer."""
        if self.piecewise is None:
            return  # nobody follows it, and `WHOLE` is everybody's
        self._error = error
        for come in self._come:
            come.set()


WHOLE = Course()
