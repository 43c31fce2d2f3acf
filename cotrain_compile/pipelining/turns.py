"""Turns: the graphs of a stage, each compiled by this backend, and planned for the stage's budget.

A stage's turn with a micro-batch is its forward, or its backward. The forward keeps nothing but
what entered the stage; the backward runs the forward again from there, as one graph with it, so
that offloading, making values again and what rests on the host are planned for both together. The
last stage runs forward, loss and backward of a micro-batch as one turn. The update of all stages of
a rank is a graph of its own.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from cotrain_compile.distribute.ranks import note_exchanges_outside
from cotrain_compile.pipelining.cut import StagePart, kept_buffers

_number = itertools.count()
LossFunction = Callable[[Any, torch.Tensor], torch.Tensor]


class Turns:
    """What a rank calls to run a stage; gradients are added up in `.grad`.

    `share` is the part of a micro-batch in the loss of a step, `ranks` are those that share the
    layers of the stage. `bring` is called before a turn, with whether it has a backward, where the
    parameters are not on the device all the time.
    """

    def __init__(
        self,
        part: StagePart,
        loss_fn: LossFunction,
        share: float,
        ranks: tuple[int, ...],
        forward_options: Mapping[str, Any],
        backward_options: Mapping[str, Any],
        bring: Callable[[bool], None] | None = None,
    ) -> None:
        self.part = part
        self._bring = bring
        self._forward = compiled(_forward_of(part), forward_options, ranks)
        self._backward = compiled(_backward_of(part), backward_options, ranks)
        self._whole = compiled(_whole_of(part, loss_fn, share), backward_options, ranks)
        self._judged = compiled(_judged_of(part, loss_fn), forward_options, ranks)

    @property
    def is_last(self) -> bool:
        """Whether no stage comes after it."""
        return self.part.leaves is None

    @property
    def functions(self) -> tuple[Callable[..., Any], ...]:
        """What a step of training calls, for `cotrain_compile.inspect`."""
        return (self._whole,) if self.is_last else (self._forward, self._backward)

    def forward(self, received: torch.Tensor | None, batch: Sequence[torch.Tensor]) -> torch.Tensor:
        """What the next stage begins with."""
        self._come(backward=False)
        with torch.no_grad():
            result: torch.Tensor = self._forward(received, *batch)
        return result

    def backward(
        self,
        received: torch.Tensor | None,
        batch: Sequence[torch.Tensor],
        gradient: torch.Tensor,
        drawn: torch.Tensor,
    ) -> torch.Tensor | None:
        """The gradient of what was `received`.

        The forward draws the random numbers again that it drew from the state `drawn`, and leaves
        buffers as its first run has left them.
        """
        self._come(backward=True)
        with self._as_first(drawn):
            return _own(self._backward(received, gradient, *batch))

    def whole(
        self, received: torch.Tensor | None, batch: Sequence[torch.Tensor], target: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The loss, and the gradient of what was `received`."""
        self._come(backward=True)
        loss, gradient = self._whole(received, target, *batch)
        return loss, _own(gradient)

    def judged(
        self, received: torch.Tensor | None, batch: Sequence[torch.Tensor], target: torch.Tensor
    ) -> torch.Tensor:
        """The loss, without a backward."""
        self._come(backward=False)
        with torch.no_grad():
            loss: torch.Tensor = self._judged(received, target, *batch)
        return loss

    def dry_run(self, batch: Sequence[torch.Tensor], target: torch.Tensor) -> None:
        """Compile the turns of a step with a micro-batch of made-up activations, and undo it."""
        enters, leaves = self.part.enters, self.part.leaves
        received = None if enters is None else enters.full(0.0)
        with torch.random.fork_rng(), self._as_first(torch.get_rng_state()):
            if leaves is None:
                self.whole(received, batch, target)
            else:
                self.forward(received, batch)
                self.backward(received, batch, leaves.full(0.0), torch.get_rng_state())

    def _come(self, *, backward: bool) -> None:
        if self._bring is not None:
            self._bring(backward)

    @contextmanager
    def _as_first(self, drawn: torch.Tensor) -> Iterator[None]:
        state = torch.get_rng_state()
        torch.set_rng_state(drawn)
        try:
            with kept_buffers(self.part.module):
                yield
        finally:
            torch.set_rng_state(state)


def compiled_update(
    optimizer: torch.optim.Optimizer,
    options: Mapping[str, Any],
    ranks: tuple[int, ...],
    tell_failure: Callable[[Exception], None],
) -> Callable[[], None]:
    """A call that updates from the gradients, and leaves them zero.

    Other ranks update on their own: they are told of an error before it is raised.
    """

    def step() -> None:
        optimizer.step()

    planned = compiled(step, options, ranks)

    @functools.wraps(planned)
    def update() -> None:
        try:
            planned()
        except Exception as error:
            tell_failure(error)
            raise
        optimizer.zero_grad(set_to_none=False)  # where they rest: no copy, and no graph, is needed

    return update


def compiled(
    function: Callable[..., Any], options: Mapping[str, Any], ranks: tuple[int, ...]
) -> Callable[..., Any]:
    """`function` by this backend, run by `ranks`; what stages exchange is not in its graph.

    Its code becomes its own: Dynamo keeps what it has compiled by code, and would let a stage run
    what was planned for another one of equal layers.
    """
    code = function.__code__
    function.__code__ = code.replace(co_name=f"{code.co_name}_{next(_number)}")
    note_exchanges_outside(function.__code__, ranks)
    made: Callable[..., Any] = torch.compile(
        function, backend="cotrain", options=dict(options), dynamic=False
    )
    return made


class Gradients:
    """A gradient of every parameter of `module` to add to, so that all turns are the same graph.

    Until the first step there is none in `.grad`: torch fills an optimizer's states from a
    checkpoint only then.
    """

    def __init__(self, module: nn.Module) -> None:
        self._of = {p: torch.zeros_like(p) for p in module.parameters() if p.requires_grad}

    def params(self) -> list[nn.Parameter]:
        """The parameters that have one."""
        return list(self._of)

    def all(self) -> list[torch.Tensor]:
        """Where parameters have gradients, these, in their order."""
        return [param.grad for param in self._of if param.grad is not None]

    def attach(self) -> None:
        """Where a parameter has no gradient, give it one of zeros."""
        for param, gradient in self._of.items():
            if param.grad is None:
                param.grad = gradient.zero_()

    def detach(self) -> None:
        """Leave parameters without gradients."""
        for param in self._of:
            param.grad = None


def _forward_of(part: StagePart) -> Callable[..., Any]:
    def forward(received: torch.Tensor | None, *batch: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = part(received, batch)
        return result

    return forward


def _backward_of(part: StagePart) -> Callable[..., Any]:
    def backward(
        received: torch.Tensor | None, gradient: torch.Tensor, *batch: torch.Tensor
    ) -> torch.Tensor | None:
        if received is not None:
            received = received.detach().requires_grad_()
        part(received, batch).backward(gradient)
        return None if received is None else received.grad

    return backward


def _whole_of(part: StagePart, loss_fn: LossFunction, share: float) -> Callable[..., Any]:
    def whole(
        received: torch.Tensor | None, target: torch.Tensor, *batch: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if received is not None:
            received = received.detach().requires_grad_()
        loss = loss_fn(part(received, batch), target)
        (loss * share).backward()
        return loss.detach(), None if received is None else received.grad

    return whole


def _judged_of(part: StagePart, loss_fn: LossFunction) -> Callable[..., Any]:
    def judged(
        received: torch.Tensor | None, target: torch.Tensor, *batch: torch.Tensor
    ) -> torch.Tensor:
        return loss_fn(part(received, batch), target)

    return judged


def _own(gradient: torch.Tensor | None) -> torch.Tensor | None:
    return None if gradient is None else gradient.contiguous()
