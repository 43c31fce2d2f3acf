"""Torch stages: the turns of a stage as `torch.distributed.pipelining` calls them.

torch's schedules say which turn comes when, and send and receive; a stage of ours runs the turn.

Private torch API used: of `PipelineStage` the caches `fwd_cache` and `bwd_cache` and the received
`args_recv_info` and `grad_recv_info`. Its methods that run a micro-batch are public by name, but
what they leave in these caches for the methods that send is nowhere documented, and there is no
other way to let a stage run anything else than autograd. Tried on torch 2.13.0.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from cotrain_compile.errors import DistributeError
from cotrain_compile.pipelining.cut import TensorShape
from cotrain_compile.pipelining.turns import Turns

T = TypeVar("T")

# Schedules of one stage a rank, and of several that are dealt to the ranks in turn.
ONE_EACH = ("GPipe", "1F1B")
IN_TURN = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble")


@dataclass(frozen=True)
class Entered:
    """A micro-batch at the beginning of the last stage, whose turn waits for the target."""

    number: int
    received: torch.Tensor | None
    batch: tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Waiting:
    """A micro-batch whose whole turn is in the place of its backward; then `loss` has its value."""

    entered: Entered
    target: torch.Tensor
    loss: torch.Tensor


class TurnStage(PipelineStage):
    """A stage that runs its `turns`; `sent_bytes` counts what it has sent to other stages.

    `failed` is the error of the first turn that raised one in this step. From then on the stage
    computes nothing and sends zeros, so that the others come to the end of the step, where they are
    told, and do not wait for what never comes.
    """

    def __init__(
        self,
        turns: Turns,
        index: int,
        count: int,
        device: torch.device,
        batch: Sequence[torch.Tensor],
        result: torch.Tensor,
        group: Any,
        in_turn: bool,
    ) -> None:
        """`batch` is one micro-batch, `result` what the last stage is said to give, a scalar.

        `group` has the ranks of all stages. Where a rank has several stages `in_turn`, whole turns
        are in the place of forwards: parameters of what is swapped come once for both.
        """
        part = turns.part
        inputs = tuple(batch) if part.enters is None else _with_gradient(part.enters)
        outputs = result if part.leaves is None else _with_gradient(part.leaves)
        super().__init__(
            part.module, index, count, device, inputs, output_args=outputs, group=group
        )
        self.turns = turns
        self._in_turn = in_turn
        self.sent_bytes = 0
        self.failed: Exception | None = None
        self.fwd_cache: dict[int, Any] = {}

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:
        """The forward of a micro-batch; `args` is its part of the batch, on every rank."""
        received = None
        if not self.is_first:
            received = _buffer_of(self.args_recv_info[fwd_chunk_id])
        if self.turns.is_last:
            return Entered(fwd_chunk_id, received, args)
        drawn = torch.get_rng_state()
        leaves = self.turns.part.leaves
        assert leaves is not None  # it is not the last stage
        result = self._turn(lambda: self.turns.forward(received, args), lambda: leaves.full(0.0))
        self.fwd_cache[fwd_chunk_id] = ((result,), (received, args, drawn))
        return result

    def loss_of(self, entered: Entered, target: torch.Tensor) -> torch.Tensor:
        """The loss of a micro-batch of the last stage, whose whole turn this is."""
        received, batch, no_loss = entered.received, entered.batch, torch.zeros(())
        if not self.has_backward:
            return self._turn(lambda: self.turns.judged(received, batch, target), lambda: no_loss)
        if self._in_turn:
            loss, gradient = self._whole(entered, target)
            self.fwd_cache[entered.number] = ((gradient,), ())
            return loss
        waiting = Waiting(entered, target, torch.zeros((), device=target.device))
        self.fwd_cache[entered.number] = ((waiting,), ())
        return waiting.loss

    def _whole(
        self, entered: Entered, target: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self._turn(
            lambda: self.turns.whole(entered.received, entered.batch, target),
            lambda: (torch.zeros(()), self._no_gradient()),
        )

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: torch.Tensor | None = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        """The backward of a micro-batch, all of it, also where a schedule asks for a half first."""
        if not self.has_backward:
            return
        (kept,), inputs = self.fwd_cache.pop(bwd_chunk_id)
        if isinstance(kept, Waiting):
            loss, kept_gradient = self._whole(kept.entered, kept.target)
            kept.loss.copy_(loss)
            kept = kept_gradient
        if not self.turns.is_last:
            received, batch, drawn = inputs
            gradient = _buffer_of(self.grad_recv_info[bwd_chunk_id])
            kept = self._turn(
                lambda: self.turns.backward(received, batch, gradient, drawn), self._no_gradient
            )
        if not self.is_first:
            self.bwd_cache[bwd_chunk_id] = (kept,)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Nothing is left to do: the gradients of parameters came with that of what entered."""

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Nothing is left to do: a turn has scaled its loss."""

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[Any]:
        return [] if self.is_last else self._counted(super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[Any]:
        return [] if self.is_first else self._counted(super().get_bwd_send_ops(bwd_chunk_id))

    def _turn(self, run: Callable[[], T], instead: Callable[[], T]) -> T:
        if self.failed is None:
            try:
                return run()
            except Exception as error:
                self.failed = error
        return instead()

    def _no_gradient(self) -> torch.Tensor | None:
        enters = self.turns.part.enters
        return None if enters is None else enters.full(0.0)

    def _counted(self, ops: list[Any]) -> list[Any]:
        self.sent_bytes += sum(op.tensor.numel() * op.tensor.element_size() for op in ops)
        return ops


def _buffer_of(received: Sequence[Any]) -> torch.Tensor:
    buffer: torch.Tensor = received[0].buffer
    return buffer.detach()


def _with_gradient(crosses: TensorShape) -> torch.Tensor:
    return crosses.full(0.0, device="meta").requires_grad_()


@contextmanager
def without_dumps() -> Iterator[None]:
    """Within it torch logs no whole schedule where an exchange fails; the error says enough."""
    logger = logging.getLogger("torch.distributed.pipelining.schedules")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def schedule_class(name: str, stages: int, ranks: int) -> Any:
    """torch's class for schedule `name`.

    Raises `DistributeError` where it is none of those that run here, or needs another number of
    stages.
    """
    names = ONE_EACH if stages == ranks else IN_TURN
    known = {known.lower(): known for known in (*ONE_EACH, *IN_TURN)}
    if name.lower() not in known:
        raise DistributeError(f"schedule {name!r}: known are {', '.join(known.values())}")
    if stages % ranks:
        raise DistributeError(
            f"the plan has {stages} stages, and there are {ranks} ranks; start as many ranks as "
            f"there are stages (torchrun --nproc-per-node {stages}), or a divisor of that"
        )
    if known[name.lower()] not in names:
        raise DistributeError(
            f"schedule {known[name.lower()]} is not for {stages} stages on {ranks} ranks; take "
            f"{' or '.join(names)}"
        )
    return get_schedule_class(name)


def make_schedule(name: str, stages: list[TurnStage], ranks: int, micro_batches: int) -> Any:
    """torch's schedule of the stages of this rank."""
    count = stages[0].num_stages
    cls = schedule_class(name, count, ranks)
    if cls.__name__ == "Schedule1F1B" and micro_batches < count:  # torch has it for no fewer
        cls = schedule_class("GPipe", count, ranks)

    def loss(entered: Entered, target: torch.Tensor) -> torch.Tensor:
        return stages[-1].loss_of(entered, target)

    held: Any = stages[0] if issubclass(cls, PipelineScheduleSingle) else stages
    return cls(held, micro_batches, loss_fn=loss, scale_grads=False)
