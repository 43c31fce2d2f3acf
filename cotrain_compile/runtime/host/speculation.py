"""Speculation: an update on the host done early on guesses, and kept or done again.

In: the kernels of a placed graph. Out: for each update on guesses a `Guess`, and for the one that
confirms it a `Confirm`. The first saves what the update overwrites and runs it with 1 for a factor,
False for a flag. Where the values turn out to be just these, all is as if it had run with them.
Where not, what was saved is put back and the update runs as it would have without any guess. So the
tensors of the user's are the homes throughout, and both ways leave the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from cotrain_compile.graph import StepGraph, writes
from cotrain_compile.machine import Tier
from cotrain_compile.runtime.course import WHOLE, Course
from cotrain_compile.runtime.meter import MemoryMeter
from cotrain_compile.runtime.task_nodes import RegionCall, region_calls

# Of how many steps the share of wrong guesses is, about.
MEMORY_STEPS = 16


class Kernel(Protocol):
    """As `HostKernel`."""

    def __call__(
        self, inputs: Sequence[Any], meter: MemoryMeter, course: Course = WHOLE, /
    ) -> None: ...


@dataclass
class Gate:
    """Whether to guess: while the share of steps in which that was wrong is small enough.

    It pays while less than `pays_below` are wrong. `wrong_share` is the share of late, in which
    the last step counts most; steps that were held back count as well. Nothing is known before the
    first step, so it begins as if all had been wrong. `steps` counts those that it was told of,
    `wrong` those in which to guess was or would have been wrong.
    """

    pays_below: float = math.inf
    wrong_share: float = 1.0
    steps: int = 0
    wrong: int = 0

    @property
    def is_open(self) -> bool:
        return self.wrong_share < self.pays_below

    def note(self, *, right: bool) -> None:
        """How the guesses of a step turned out, or would have."""
        self.steps += 1
        self.wrong += not right
        self.wrong_share += ((not right) - self.wrong_share) / MEMORY_STEPS


@dataclass(eq=False)
class Speculation:
    """One parameter's update by `kernel`, which overwrites the inputs at `written`.

    `neutral` has the guesses by the position of the input; `gate` is the parameter's own, and all
    are told the same. What is overwritten and not confirmed is in `at_stake`, with what it was.
    """

    kernel: Kernel
    written: Sequence[int]
    neutral: Mapping[int, torch.Tensor]
    gate: Gate
    at_stake: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    _second: list[torch.Tensor] = field(default_factory=list)
    _is_whole: bool = False

    def guess(self, inputs: Sequence[Any], meter: MemoryMeter, course: Course) -> None:
        """Save what will be overwritten, and run on guesses; nothing where the gate is shut."""
        if not self.gate.is_open:
            return
        tensors = [inputs[position] for position in self.written]
        if not self._second:  # kept from step to step: fresh memory waits for the system's pages
            self._second = [torch.empty_like(tensor) for tensor in tensors]
        for tensor, second in zip(tensors, self._second, strict=True):
            meter.track(second, Tier.HOST, "what a speculative update has saved")
            second.copy_(tensor)
        self._is_whole = False
        self.at_stake = list(zip(tensors, self._second, strict=True))
        self.kernel([self.neutral.get(p, value) for p, value in enumerate(inputs)], meter, course)
        self._is_whole = True

    def confirm(self, inputs: Sequence[Any], meter: MemoryMeter, course: Course) -> None:
        """Keep what was done on guesses where these are right, else do it from what was saved."""
        right = all(torch.equal(inputs[p], neutral) for p, neutral in self.neutral.items())
        self.gate.note(right=right)
        if right and self.at_stake and self._is_whole:
            self.at_stake = []
            for _ in course.pieces():
                pass
            return
        self.take_back()
        self.kernel(inputs, meter, course)

    def take_back(self) -> None:
        """Put back what was saved and is not confirmed."""
        for tensor, second in self.at_stake:
            tensor.copy_(second)
        self.at_stake = []


@dataclass(frozen=True)
class Guess:
    """The kernel of an update on guesses."""

    speculation: Speculation

    def __call__(self, inputs: Sequence[Any], meter: MemoryMeter, course: Course = WHOLE) -> None:
        self.speculation.guess(inputs, meter, course)


@dataclass(frozen=True)
class Confirm:
    """The kernel of an update that confirms guesses."""

    speculation: Speculation

    def __call__(self, inputs: Sequence[Any], meter: MemoryMeter, course: Course = WHOLE) -> None:
        self.speculation.confirm(inputs, meter, course)


def speculative_kernels(
    placed: StepGraph, kernels: Mapping[str, Kernel], pays_below: float
) -> dict[str, Kernel]:
    """Kernels of all updates on guesses in `placed`, and of those that confirm them.

    `kernels` has one for each update that confirms; `pays_below` is as in `Gate`.
    """
    calls = [call for _, call in region_calls(placed.module.graph)]
    confirming = {str(call.region.target): call for call in calls if not call.guesses}
    found: dict[str, Kernel] = {}
    for call in calls:
        if call.guesses:
            update = confirming[str(call.region.target)].launch.task
            speculation = _speculation(placed, call, kernels[update], Gate(pays_below))
            found |= {call.launch.task: Guess(speculation), update: Confirm(speculation)}
    return found


def _speculation(placed: StepGraph, call: RegionCall, kernel: Kernel, gate: Gate) -> Speculation:
    graph = call.subgraph(placed.module).graph
    inputs = list(graph.find_nodes(op="placeholder"))
    written = dict.fromkeys(inputs.index(destination) for _, destination, _ in writes(graph))
    neutral = {position: _neutral(inputs[position].meta["val"]) for position in call.guesses}
    return Speculation(kernel, tuple(written), neutral, gate)


def _neutral(value: torch.Tensor) -> torch.Tensor:
    """What changes nothing: a factor of 1, a flag that is not set."""
    fill = 0 if value.dtype is torch.bool else 1
    return torch.full(tuple(value.shape), fill, dtype=value.dtype, device="cpu")
