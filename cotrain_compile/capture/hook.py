"""Hook: Dynamo compiles a frame for this backend as one whole training step, or not at all.

One pass-through hook stays in `convert_frame._compile`; what else changes, changes while a step is
traced for us (`dynamo_patches`) and is put back before the hook returns.

Private torch API used: `torch._dynamo.convert_frame._compile`, `torch._dynamo.types`. Reason: the
backend is called after the trace, too late to change it. Tried on torch 2.11.0, 2.13.0 and 2.15.0.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Mapping
from types import CodeType
from typing import Any

import torch._dynamo.convert_frame as convert_frame
from torch._dynamo.types import (  # type: ignore[attr-defined]
    ConvertFrameReturn,
    FrameAction,
    FrameExecStrategy,
)

from cotrain_compile.capture.compute_device import chosen_device, seen_on_compute_device
from cotrain_compile.capture.diagnose import diagnose
from cotrain_compile.capture.dynamo_patches import whole_step_tracing
from cotrain_compile.capture.session import Session, active
from cotrain_compile.errors import CaptureError
from cotrain_compile.options import Options


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
    parsed, code = Options.parse(options), frame["code"]
    device = chosen_device(parsed.device)
    session = Session(parsed, code, frame_objects(code, frame["closure"]), device)
    try:
        with active(session), whole_step_tracing(session), seen_on_compute_device(session):
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
