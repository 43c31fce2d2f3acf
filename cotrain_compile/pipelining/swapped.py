"""Swapped: the stages of a rank take turns on its device, as in Harmony's pipeline.

A stage runs all of its micro-batches back to back (Li et al., VLDB 2022): its parameters come once
for its forwards and once for its backwards, and its gradients leave once. No plan of a turn fetches
anything.

Nothing else of the rank is on the device meanwhile; or, with `ahead`, the parameters of the stage
that comes next, and the gradients of the one before, on their way home until the next one comes.

The module of a stage gets copies of its parameters; they rest in the model, on the host. What comes
and goes does so on a `SwapLink`, one copy after the other, beside the thread that runs the turns.
That thread gives and takes all memory, so what is on the device does not depend on timing.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn

from cotrain_compile.machine import Machine, Tier
from cotrain_compile.runtime.lanes import Task, WorkerLane
from cotrain_compile.runtime.network import ThrottledLink

# A parameter or gradient at home, and the one on the device.
Pair = tuple[torch.Tensor, torch.Tensor]


class SwapLink:
    """One direction between host and device; no faster than the link of `machine`, if there is one.

    `moved_bytes` counts what was begun.
    """

    def __init__(self, name: str, machine: Machine | None, source: Tier, to: Tier) -> None:
        self._lane = WorkerLane(name)
        self._link = ThrottledLink()
        self._copy_s = (
            None if machine is None else partial(machine.copy_s, source=source, target=to)
        )
        self.moved_bytes = 0

    def begin(
        self, name: str, pairs: Sequence[Pair], copy: Callable[[torch.Tensor, torch.Tensor], object]
    ) -> Task:
        """Let `copy` have pair by pair."""
        ready_s = time.perf_counter()
        self.moved_bytes += sum(home.nbytes for home, _ in pairs)

        def carry() -> None:
            for home, there in pairs:
                one = partial(copy, home, there)
                if self._copy_s is None:
                    one()
                else:
                    self._link.carry(one, ready_s, self._copy_s(home.nbytes), 0.0)

        return self._lane.submit(name, carry, ())


class SwappedStage:
    """The parameters of `module` and their gradients. It is made with its parameters there."""

    def __init__(self, module: nn.Module) -> None:
        self._copies = _with_own_parameters(module)
        self._trained = [(home, copy) for home, copy in self._copies if home.requires_grad]
        self._has_parameters, self._has_gradients = True, False
        self._coming: Task | None = None
        self._going: Task | None = None
        for _, copy in self._trained:
            copy.grad = torch.zeros_like(copy)
            _free(copy.grad)

    @property
    def device_bytes(self) -> int:
        """What has memory on the device."""
        there = (*(copy for _, copy in self._copies), *self._gradients())
        return sum(tensor.untyped_storage().nbytes() for tensor in there)

    def fetch(self, way: SwapLink) -> None:
        """The parameters begin to come, where they are not there or on their way."""
        if self._has_parameters:
            return
        for _, copy in self._copies:
            _allocate(copy)
        self._coming = way.begin("parameters", self._copies, _overwrite)
        self._has_parameters = True

    def arrive(self) -> None:
        """The parameters are there after it."""
        if self._coming is not None:
            _await(self._coming)
            self._coming = None

    def need_gradients(self) -> None:
        """There are gradients to add to after it."""
        if not self._has_gradients:
            for gradient in self._gradients():
                _allocate(gradient).zero_()
            self._has_gradients = True

    def leave(self, way: SwapLink) -> None:
        """The parameters are gone after it, and gradients begin to go home."""
        self._drop_parameters()
        if self._has_gradients:
            self._going = way.begin("gradients", self._to_add(), _add)

    def await_home(self) -> None:
        """The gradients are at home after it, and gone from the device."""
        if self._going is not None:
            _await(self._going)
        self._drop_gradients()

    def drop(self) -> None:
        """The device has nothing of this stage after it, and what was on its way is let go."""
        self._drop_parameters()
        self._drop_gradients()

    def _drop_parameters(self) -> None:
        if self._coming is not None:
            self._coming.done.wait()
        for _, copy in self._copies:
            _free(copy)
        self._coming, self._has_parameters = None, False

    def _drop_gradients(self) -> None:
        if self._going is not None:
            self._going.done.wait()
        for gradient in self._gradients():
            _free(gradient)
        self._going, self._has_gradients = None, False

    def _gradients(self) -> list[torch.Tensor]:
        found = [copy.grad for _, copy in self._trained]
        return [gradient for gradient in found if gradient is not None]  # all have one

    def _to_add(self) -> list[Pair]:
        pairs = []
        for (home, _), gradient in zip(self._trained, self._gradients(), strict=True):
            assert home.grad is not None  # a step attaches them
            pairs.append((home.grad, gradient))
        return pairs


def _overwrite(home: torch.Tensor, there: torch.Tensor) -> None:
    there.copy_(home)


def _add(home: torch.Tensor, there: torch.Tensor) -> None:
    home.add_(there)


def _await(task: Task) -> None:
    task.done.wait()
    if task.error is not None:
        raise task.error


def _with_own_parameters(module: nn.Module) -> list[tuple[nn.Parameter, nn.Parameter]]:
    """Give `module` copies of its parameters, one for each that is shared; both, pair by pair."""
    copies: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    for part in module.modules():
        for name, home in part.named_parameters(recurse=False):
            if id(home) not in copies:
                own = nn.Parameter(home.detach().clone(), home.requires_grad)
                copies[id(home)] = (home, own)
            setattr(part, name, copies[id(home)][1])
    return list(copies.values())


def _allocate(tensor: torch.Tensor) -> torch.Tensor:
    storage = tensor.untyped_storage()
    storage.resize_(tensor.nbytes)
    return tensor


def _free(tensor: torch.Tensor) -> None:
    tensor.untyped_storage().resize_(0)


class Swapped:
    """The stages of a rank. Copies take what they take on `machine`, where one is given.

    `beside_bytes` has what others had on the device in the last turn of each stage, by its number
    on this rank and by whether the turn had a backward.
    """

    def __init__(self, machine: Machine | None, *, ahead: bool) -> None:
        self.ahead = ahead
        self._up = SwapLink("swap in", machine, Tier.HOST, Tier.DEVICE)
        self._down = SwapLink("swap out", machine, Tier.DEVICE, Tier.HOST)
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
