"""Session: what one tracing of a user's step by Dynamo knows, and what has to be undone."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CodeType

import torch
from torch import fx
from torch.amp.grad_scaler import GradScaler

from cotrain_compile.capture.dynamo.leaves import CopiedData
from cotrain_compile.capture.dynamo.settings import CalledStep, FrameObjects, SeenSettings
from cotrain_compile.capture.state.optimizer_state import OptimizerRecord
from cotrain_compile.capture.state.scaler_state import ScalerRecord
from cotrain_compile.distribute.ddp import SeenDdp
from cotrain_compile.distribute.fsdp import ShardedTrace
from cotrain_compile.errors import CaptureError
from cotrain_compile.options import Options


@dataclass
class Session:
    """What one tracing knows: options, step, and the optimizers and loss scalers it has met."""

    options: Options
    step: CalledStep
    settings: SeenSettings
    # Where the user wants the step to compute; None: where its model is.
    device: torch.device | None = None
    optimizers: list[OptimizerRecord] = field(default_factory=list)
    scalers: list[ScalerRecord] = field(default_factory=list)
    # Ids of parameters whose gradients the step clears before it makes or uses any.
    cleared_first: set[int] = field(default_factory=set)
    # Ids of parameters that have a gradient in `.grad` after the step.
    keeping_gradient: set[int] = field(default_factory=set)
    # Placeholders of inputs that the step makes leaves.
    leaves_made: set[fx.Node] = field(default_factory=set)
    # What was assigned to `.data` of an input, and copied.
    copied_data: list[CopiedData] = field(default_factory=list)
    # Whether the next torch.autograd.grad() in the trace is that of a backward().
    differentiates_backward: bool = False
    # Each DistributedDataParallel that the trace of a graph of Dynamo's has called, by its id.
    ddp_seen: dict[int, SeenDdp] = field(default_factory=dict)
    ddp_seen_in: object = None
    # What the trace knows of modules that FSDP shards.
    sharded: ShardedTrace = field(default_factory=ShardedTrace)
    # What has made most of the step's earlier graphs useless, if it is one value.
    changing: str | None = None
    # Why the last graph there was does not fit this call, as torch says it.
    last_reason: str | None = None
    # The graph of the latest attempt, as far as it has come.
    graph: fx.Graph | None = None
    # What the step itself raises, where nobody in it catches that.
    own_error: BaseException | None = None
    refusal: CaptureError | None = None
    graph_was_compiled: bool = False

    @property
    def code(self) -> CodeType:
        """What is traced."""
        return self.step.code

    @property
    def frame_objects(self) -> FrameObjects:
        """What its function closes over."""
        return self.step.objects

    @property
    def function(self) -> tuple[CodeType, FrameObjects]:
        """Tells step functions apart, also two that one factory has made."""
        return self.code, self.frame_objects

    @property
    def updated(self) -> frozenset[int]:
        """Ids of the parameters that some optimizer of the step updates."""
        return frozenset(param for record in self.optimizers for param in record.updated)

    def record_of(self, optimizer: torch.optim.Optimizer) -> OptimizerRecord:
        """The record of `optimizer`, made on the first call."""
        for record in self.optimizers:
            if record.optimizer is optimizer:
                return record
        record = OptimizerRecord(optimizer)
        self.optimizers.append(record)
        return record

    def record_of_scaler(self, scaler: GradScaler) -> ScalerRecord:
        """The record of `scaler`, made on the first call."""
        for record in self.scalers:
            if record.scaler is scaler:
                return record
        record = ScalerRecord(scaler)
        self.scalers.append(record)
        return record

    def note_cleared(self, params: Iterable[torch.Tensor], after_backward: bool) -> None:
        """Note that the trace clears the gradients of `params`, if nothing came before that."""
        if not after_backward and not any(record.steps for record in self.optimizers):
            self.cleared_first.update(map(id, params))

    def refuse(self, message: str) -> CaptureError:
        """Remember why this step cannot be captured; Dynamo would bury the exception itself."""
        self.refusal = CaptureError(message)
        return self.refusal

    def trace_ended(self) -> None:
        """Put the optimizers' flags back. Guards are built later, from the values found then.

        Last first: an optimizer and a wrapper of it have the same groups.
        """
        for record in reversed(self.optimizers):
            record.restore_flags()

    def undo(self) -> None:
        """Leave every optimizer as it was before this tracing."""
        self.trace_ended()
        for record in self.optimizers:
            record.remove_created_state()
        for scaler in self.scalers:
            scaler.undo()


_active = threading.local()


def current_session() -> Session | None:
    """The session of this thread, while it traces a step for us."""
    return getattr(_active, "session", None)


@contextmanager
def active(session: Session) -> Iterator[None]:
    """Within it, `session` is this thread's; after it, the optimizers' flags are put back."""
    _active.session = session
    try:
        yield
    finally:
        del _active.session
        session.trace_ended()
