"""Session: one tracing of a user's step by Dynamo for this backend, and what has to be undone.

Stock Dynamo never sees a whole training step (`docs/decisions/0001-whole-step-capture.md`). This
module changes it *while a step is traced for us, and only then*: one pass-through hook stays in
`convert_frame._compile`; everything else is put back before the hook returns.

Private torch API used: `torch._dynamo.convert_frame._compile`, `config.trace_autograd_ops`,
`variables.builder.OptimizerVariable`, `OutputGraph._validate_outputs_safe_for_autograd_nodes`,
`TensorVariable.method_backward` and `.var_getattr`, `exc.*`. Reason: there is no public way to keep
`backward()` and `optimizer.step()` in one graph. Tried on torch 2.11.0, 2.13.0 and 2.15.0.
"""

from __future__ import annotations

import functools
import inspect
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import CodeType
from typing import Any
from unittest import mock

import torch
import torch._dynamo.convert_frame as convert_frame
from torch._dynamo import config
from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.types import (  # type: ignore[attr-defined]
    ConvertFrameReturn,
    FrameAction,
    FrameExecStrategy,
)
from torch._dynamo.variables import builder
from torch._dynamo.variables.tensor import TensorVariable
from torch.fx.traceback import annotate, preserve_node_meta

from cotrain_compile.capture.diagnose import diagnose
from cotrain_compile.capture.optimizers import (
    PHASE_ANNOTATION,
    OptimizerRecord,
    build_optimizer_variable,
)
from cotrain_compile.errors import CaptureError
from cotrain_compile.options import Options


@dataclass
class Session:
    """What one tracing knows: the options, the frame, and the optimizers it has met so far."""

    options: Options
    code: CodeType
    frame_objects: tuple[int, ...]
    optimizers: list[OptimizerRecord] = field(default_factory=list)
    refusal: CaptureError | None = None
    graph_was_compiled: bool = False

    def record_of(self, optimizer: torch.optim.Optimizer) -> OptimizerRecord:
        """The record of `optimizer`, made on the first call."""
        for record in self.optimizers:
            if record.optimizer is optimizer:
                return record
        record = OptimizerRecord(optimizer)
        self.optimizers.append(record)
        return record

    def refuse(self, message: str) -> CaptureError:
        """Remember why this step cannot be captured; Dynamo would bury the exception itself."""
        self.refusal = CaptureError(message)
        return self.refusal

    def trace_ended(self) -> None:
        """Put the optimizers' flags back. Guards are built later, from the values found then."""
        for record in self.optimizers:
            record.restore_flags()

    def undo(self) -> None:
        """Leave every optimizer as it was before this tracing."""
        for record in self.optimizers:
            record.restore_flags()
            record.remove_created_state()


_active = threading.local()


def current_session() -> Session | None:
    """The session of this thread, while it traces a step for us."""
    return getattr(_active, "session", None)


def install(is_ours: Callable[[object], Mapping[str, Any] | None]) -> None:
    """Hook Dynamo's frame compiler, once per process.

    `is_ours` gets the compiler function of a frame and returns the user's options when the frame is
    to be compiled by this backend, None otherwise; other frames pass through untouched.
    """
    original = convert_frame._compile
    if getattr(original, "_cotrain_hook", False):
        return
    signature = inspect.signature(original)

    @functools.wraps(original)
    def compile_frame(*args: Any, **kwargs: Any) -> ConvertFrameReturn:
        bound = signature.bind(*args, **kwargs)
        options = is_ours(bound.arguments["compiler_fn"])
        if options is None:
            return original(*args, **kwargs)
        # A graph break must be an error with the user's line, not two graphs.
        bound.arguments["one_graph"] = True
        return _trace_step(lambda: original(*bound.args, **bound.kwargs), bound.arguments, options)

    compile_frame._cotrain_hook = True  # type: ignore[attr-defined]
    convert_frame._compile = compile_frame


def _trace_step(
    trace: Callable[[], ConvertFrameReturn], frame: Mapping[str, Any], options: Mapping[str, Any]
) -> ConvertFrameReturn:
    session = Session(
        Options.parse(options), frame["code"], frame_objects(frame["code"], frame["closure"])
    )
    try:
        with _whole_step_tracing(session):
            result = trace()
        if not session.graph_was_compiled:
            raise session.refuse(
                f"{_where(session.code)}: the step holds no tensor operation, so there is nothing "
                "to capture; compile the function that calls the model, backward() and "
                "optimizer.step()"
            )
    except Exception as error:
        session.undo()
        known = diagnose(error, session.refusal, session.code)
        if known is None:
            raise
        if isinstance(known, CaptureError) and session.options.on_break == "warn":
            warnings.warn(f"cotrain: the step runs in eager. {known}", stacklevel=2)
            return ConvertFrameReturn(
                frame_exec_strategy=FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP)
            )
        raise known from error
    except BaseException:
        session.undo()
        raise
    return result


@contextmanager
def _whole_step_tracing(session: Session) -> Iterator[None]:
    # Dynamo holds its compile lock here, so no other thread traces while these are in place; the
    # session itself is thread-local, so an eager optimizer elsewhere sees nothing of it either.
    with ExitStack() as stack:
        _active.session = session
        stack.callback(lambda: delattr(_active, "session"))
        stack.callback(session.trace_ended)
        stack.enter_context(
            config.patch(
                trace_autograd_ops=True,
                capture_scalar_outputs=True,
                # One factory makes the steps of many models: they share a code object, and Dynamo
                # counts their compiles together.
                recompile_limit=max(config.recompile_limit, 64),
            )
        )
        stack.enter_context(
            mock.patch.object(
                builder,
                "OptimizerVariable",
                functools.partial(build_optimizer_variable, session),
            )
        )
        # It breaks the graph when a returned tensor went through backward(); `to_aten` detaches
        # such outputs instead.
        stack.enter_context(
            mock.patch.object(
                OutputGraph, "_validate_outputs_safe_for_autograd_nodes", lambda *_: None
            )
        )
        stack.enter_context(
            mock.patch.object(TensorVariable, "method_backward", _annotated_backward)
        )
        # Up to torch 2.14 it is the first, from 2.15 on the second.
        for name in ("var_getattr", "tp_getattro_impl"):
            if name in vars(TensorVariable):
                look_up = _attribute_as_traced(vars(TensorVariable)[name])
                stack.enter_context(mock.patch.object(TensorVariable, name, look_up))
        yield


def _attribute_as_traced(original: Callable[..., Any]) -> Callable[..., Any]:
    """`original` but for a `.grad` that the trace has set: that is what it was set to.

    Dynamo then labels the value as read from the real `p.grad`. On None, one constant for all
    traces in the process, the label stays: a later store of None anywhere loads that gradient.
    """

    @functools.wraps(original)
    def look_up(self: TensorVariable, tx: Any, name: str) -> Any:
        effects = tx.output.side_effects
        if name == "grad" and effects.has_pending_mutation_of_attr(self, name):
            return effects.load_attr(self, name)
        return original(self, tx, name)

    return look_up


_method_backward = TensorVariable.method_backward


def _annotated_backward(*args: Any, **kwargs: Any) -> Any:
    with preserve_node_meta(), annotate({PHASE_ANNOTATION: "backward"}):
        return _method_backward(*args, **kwargs)


def frame_objects(code: CodeType, closure: tuple[Any, ...] | None) -> tuple[int, ...]:
    """Identity of what a function closes over: tells two steps made by one factory apart."""
    names = zip(code.co_freevars, closure or (), strict=False)
    return tuple(id(cell.cell_contents) for _, cell in names if _filled(cell))


def _filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _where(code: CodeType) -> str:
    return f"{code.co_filename}:{code.co_firstlineno} in {code.co_name}"
