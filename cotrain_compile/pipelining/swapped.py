"""Swapped: the stages of a rank take turns on its device, as in Harmony's pipeline.

A stage runs all of its micro-batches back to back (Li et al., VLDB 2022): its parameters come once
for its forwards and once for its backwards, and its gradients leave once. No plan of a turn fetches
anything.

Nothing else of the rank is on the device meanwhile; or, with `ahead`, the parameters of the stage
that comes next, and the gradients of the one before, on their way home until the next one comes.
"""

from __future__ import annotations

from collections import deque

from torch import nn

from cotrain_compile.machine import Machine, Tier
from cotrain_compile.pipelining.swapped_stage import SwappedStage, Way


class Swapped:
    """The stages of a rank. Copies take what they take on `machine`, where one is given.

    `beside_bytes` has what others had on the device in the last turn of each stage, by its number
    on this rank and by whether the turn had a backward.
    """

    def __init__(self, machine: Machine | None, *, ahead: bool) -> None:
        self.ahead = ahead
        self._up = Way("swap in", machine, Tier.HOST, Tier.DEVICE)
        self._down = Way("swap out", machine, Tier.DEVICE, Tier.HOST)
        self._stages: list[SwappedStage] = []
        self._to_come: deque[int] = deque()
        self._here: int | None = None
        self._going: int | None = None
        self.beside_bytes: dict[tuple[int, bool], int] = {}

    @property
    def fetched_bytes(self) -> int:
        """What has come to the device."""
        return self._up.moved_bytes

    @property
    def sent_bytes(self) -> int:
        """What has gone home."""
        return self._down.moved_bytes

    def count_from_now(self) -> None:
        """Count what comes and goes anew."""
        self._up.moved_bytes = self._down.moved_bytes = 0

    def add(self, module: nn.Module) -> int:
        """Another stage, whose `module` gets parameters of its own; its number. It is here then."""
        self.leave()
        self._stages.append(SwappedStage(module))
        self._here = len(self._stages) - 1
        return self._here

    def begin(self, *, training: bool) -> None:
        """A step begins, whose stages come in turn and, in a training, in reverse after that."""
        for stage in self._stages:
            stage.drop()  # what a step that broke off has left
        self._here = self._going = None
        forth = range(len(self._stages))
        self._to_come = deque((*forth, *(reversed(forth[:-1]) if training else ())))
        if self.ahead:
            self._stages[0].fetch(self._up)

    def come(self, number: int, *, backward: bool) -> None:
        """The stage is here after it, with gradients for a `backward`; the one before leaves."""
        stage = self._stages[number]
        if self._here != number:
            self._let_leave()
            self._here, after = number, self._after(number)
            # Where a turn has failed, what was fetched for it is not the stage that comes.
            for other in {*range(len(self._stages))} - {number, after, self._going}:
                self._stages[other].drop()
            stage.fetch(self._up)
            if self.ahead and after is not None:
                self._stages[after].fetch(self._up)
            stage.arrive()
        if backward:
            stage.need_gradients()
        of_all = sum(each.device_bytes for each in self._stages)
        self.beside_bytes[number, backward] = of_all - stage.device_bytes

    def leave(self) -> None:
        """Nothing is on the device after it, and gradients are at home."""
        self._let_leave()
        self._await_home()
        for stage in self._stages:
            stage.drop()

    def _let_leave(self) -> None:
        self._await_home()
        if self._here is not None:
            self._stages[self._here].leave(self._down)
            self._here, self._going = None, self._here
        if not self.ahead:
            self._await_home()

    def _await_home(self) -> None:
        if self._going is not None:
            self._stages[self._going].await_home()
            self._going = None

    def _after(self, number: int) -> int | None:
        """The stage that comes after this one; None where it is not this one's time."""
        while self._to_come:
            if self._to_come.popleft() == number:
                return self._to_come[0] if self._to_come else None
        return None
