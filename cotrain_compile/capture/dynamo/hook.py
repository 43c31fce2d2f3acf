"""Hook: Dynamo compiles a frame for this backend as one whole training step, or not at all.

Three pass-through hooks stay: in `torch._dynamo.optimize`, which `torch.compile` calls with what
the user asked for, in `convert_frame._compile`, and in `CatchErrorsWrapper`, which leaves frames
to eager before that. What else changes, changes while a step is traced for us (`dynamo_patches`)
and is put back before the hook returns.

Private torch API used: `torch._dynamo.convert_frame._compile` and `CatchErrorsWrapper`,
`torch._dynamo.types`, `torch._dynamo.trace_rules`, `torch._dynamo.optimize` with its argument
`backend`, `exc.ShortenTraceback`. Reason: the backend is called after the trace, too late to change
it, to check options before it, or not at all. Tried on torch 2.11.0, 2.13.0 and 2.15.0, `optimize`
and `CatchErrorsWrapper` on 2.13.0 alone; without `optimize` options are checked in the first call.
"""

from __future__ import annotations

import dis
import functools
import inspect
import os
import re
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from types import CodeType
from typing import Any

import torch
import torch._dynamo
import torch._dynamo.convert_frame as convert_frame
from torch._dynamo import config, trace_rules
from torch._dynamo.exc import FailOnRecompileLimitHit, ShortenTraceback, UserError
from torch._dynamo.types import ConvertFrameReturn

from cotrain_compile.capture.counts import calls_counted
from cotrain_compile.capture.dynamo.ambient import why_passed_over, why_refused
from cotrain_compile.capture.dynamo.compute_device import chosen_device, seen_on_compute_device
from cotrain_compile.capture.dynamo.diagnose import diagnose, size_behind
from cotrain_compile.capture.dynamo.left_to_eager import (
    in_eager,
    is_left,
    leave_call,
    leave_for_good,
)
from cotrain_compile.capture.dynamo.patches import whole_step_tracing
from cotrain_compile.capture.dynamo.session import Session, active
from cotrain_compile.capture.dynamo.settings import FrameObjects, called_step, seen_settings
from cotrain_compile.capture.dynamo.ways_on import way_on_of
from cotrain_compile.errors import CaptureError, CotrainError
from cotrain_compile.options import Options
from cotrain_compile.support.collector import collector_off
from cotrain_compile.support.raised_by_handler import raised_by_handler

_TORCH_DISTRIBUTED = os.path.join(os.path.dirname(torch.__file__), "distributed") + os.sep
_COMPILER = "_torchdynamo_orig_backend"  # what a frame's converter calls its compiler function
_NUMBERS = (int, float, complex, str, type(None))
# Torch 2.11 asks for the code alone.
_ASKED_WITH_FRAME = "frame" in inspect.signature(trace_rules.check).parameters


def install(
    is_ours: Callable[[object], Mapping[str, Any] | None],
    check: Callable[[Mapping[str, Any]], Options],
    failed: Callable[[CodeType, Exception], None],
    shown: Callable[[Options], AbstractContextManager[None]],
) -> None:
    """Hook `torch.compile` and Dynamo's frame compiler, once per process.

    `is_ours` gets the compiler function of a frame and returns the user's options when the frame is
    to be compiled by this backend, None otherwise; other frames pass through untouched. `check`
    gets these options when `torch.compile` is called and before a trace; it raises where they, or
    files that they name, are wrong. `failed` is told of each error that ends a trace; it goes on
    inside `shown(options)`.
    """
    original = convert_frame._compile
    if getattr(original, "_cotrain_hook", False):
        return
    _check_at_compile(is_ours, check)
    _refuse_to_pass_over(is_ours, check, failed)
    signature = inspect.signature(original)

    @functools.wraps(original)
    def compile_frame(*args: Any, **kwargs: Any) -> ConvertFrameReturn:
        bound = signature.bind(*args, **kwargs)
        options = is_ours(bound.arguments["compiler_fn"])
        if options is None:
            return original(*args, **kwargs)
        # A graph break must be an error with the user's line, not two graphs.
        bound.arguments["one_graph"] = True
        try:
            parsed = check(options)
            with shown(parsed), collector_off():
                return _trace_step(
                    lambda: original(*bound.args, **bound.kwargs), bound.arguments, parsed
                )
        except Exception as error:
            failed(bound.arguments["code"], error)
            if not isinstance(error, CotrainError):
                raise
            if config.verbose:  # TORCHDYNAMO_VERBOSE=1 keeps the frames and the cause.
                raise
            raise _Refused(error) from None

    compile_frame._cotrain_hook = True  # type: ignore[attr-defined]
    convert_frame._compile = compile_frame


def _check_at_compile(
    is_ours: Callable[[object], Mapping[str, Any] | None],
    check: Callable[[Mapping[str, Any]], object],
) -> None:
    """Have options checked when `torch.compile` is called, right below it."""
    original = torch._dynamo.optimize

    @functools.wraps(original)
    def optimize(*args: Any, **kwargs: Any) -> Any:
        options = is_ours(kwargs.get("backend"))
        if options is not None:
            try:
                check(options)
            except CotrainError as error:
                raise error.with_traceback(None) from None
        return original(*args, **kwargs)

    torch._dynamo.optimize = optimize


def _refuse_to_pass_over(
    is_ours: Callable[[object], Mapping[str, Any] | None],
    check: Callable[[Mapping[str, Any]], Options],
    failed: Callable[[CodeType, Exception], None],
) -> None:
    """Refuse a step that Dynamo would leave to eager, in this call and in all that follow."""
    wrapper = convert_frame.CatchErrorsWrapper
    original = wrapper.__call__

    @functools.wraps(original)
    def compile_or_skip(
        self: Any, frame: Any, cache_entry: Any, frame_state: Any, *args: Any
    ) -> ConvertFrameReturn:
        compiler_fn = getattr(self._torchdynamo_orig_backend, _COMPILER, None)
        options = is_ours(compiler_fn)
        if options is None or config.disable or _is_skipped(frame):
            return original(self, frame, cache_entry, frame_state, *args)
        code, objects = frame.f_code, frame_objects(frame.f_code, frame.closure)
        step = called_step(code, compiler_fn, objects, frame.f_locals)
        if is_left(frame_state, step):
            return in_eager()
        if (why := why_passed_over()) is None:
            return original(self, frame, cache_entry, frame_state, *args)
        error = CaptureError(f"{_where(code)}: {why}. Nothing was updated.")
        failed(code, error)
        if check(options).on_break == "warn":
            return leave_call(frame_state, step, error)
        raise _Refused(error)

    instead: Any = compile_or_skip
    wrapper.__call__ = instead  # type: ignore[method-assign]


def _is_skipped(frame: Any) -> bool:
    """Whether Dynamo leaves `frame` to eager by its rules, as code of a library."""
    return trace_rules.check(frame.f_code, **({"frame": frame} if _ASKED_WITH_FRAME else {}))


class _Refused(ShortenTraceback):
    """Brings an error up to the call of the compiled function, which raises it there.

    So neither Dynamo's frames nor ours stand between the user's line and the message.
    """

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error), first_useful_frame=None)
        self.error = error

    def remove_dynamo_frames(self) -> Any:
        return self.error.with_traceback(None)


def _trace_step(
    trace: Callable[[], ConvertFrameReturn], frame: Mapping[str, Any], options: Options
) -> ConvertFrameReturn:
    code, kept = frame["code"], frame["frame_state"]
    objects = frame_objects(code, frame["closure"])
    step = called_step(code, frame["compiler_fn"], objects, frame["locals"])
    session = Session(options, step, seen_settings(kept, step), chosen_device(options.device))
    reason = why_refused()
    try:
        if reason is not None:
            raise session.refuse(f"{_where(code)}: {reason}. Nothing was updated.")
        with (
            active(session),
            whole_step_tracing(session),
            seen_on_compute_device(session),
            calls_counted(),
        ):
            result = trace()
        if not session.graph_was_compiled and _is_of_torch_distributed(code):
            return result
        if not session.graph_was_compiled:
            raise session.refuse(
                f"{_where(session.code)}: the step holds no tensor operation, so there is nothing "
                "to capture; compile the function that calls the model, backward() and "
                "optimizer.step()"
            )
    except Exception as error:
        session.undo()
        if (own := raised_by_handler(error)) is not None:
            raise own from None
        warns = options.on_break == "warn"
        refusal = session.refusal
        if isinstance(error, FailOnRecompileLimitHit):
            refusal = _too_many_graphs(session)
        refusal = refusal or _size_from_data(error, session)
        known = diagnose(error, refusal, session.code, suggests_eager=not warns)
        own = session.own_error if isinstance(known, CaptureError) and refusal is None else None
        if own is not None and (way := way_on_of(own)):
            known, own = CaptureError(f"{_where(session.code)}: {way}"), None
        if own is not None and not warns:
            own.add_note(str(known))
            raise own if config.verbose else _Refused(own) from error
        if known is None:
            raise
        if isinstance(known, CaptureError) and warns:
            leave = leave_for_good if reason is None else leave_call
            return leave(kept, step, known)
        raise known from error
    except BaseException:
        session.undo()
        raise
    if session.changing:
        told = f"cotrain: the step is compiled again and again. {_where(session.code)}: "
        warnings.warn(told + session.changing, stacklevel=2)
    return result


def _size_from_data(error: Exception, session: Session) -> CaptureError | None:
    """The refusal of what made a size that the trace cannot do without, or None."""
    if not isinstance(error, UserError) or "data-dependent" not in str(error):
        return None
    symbols = re.findall(r"\bu\d+\b", str(error).partition("\n")[0])
    return size_behind(symbols, session.graph)


def _too_many_graphs(session: Session) -> CaptureError | None:
    """The refusal of a step that no graph fits and that may have no more, where it is known why."""
    if session.changing:
        return CaptureError(f"{_where(session.code)}: {session.changing}")
    if session.last_reason:
        return CaptureError(
            f"{_where(session.code)}: the step was compiled too often; torch says of the last "
            f"graph why it does not fit: `{session.last_reason}`. Keep Python values that change "
            "every step out of it (pass tensors), or raise torch._dynamo.config.recompile_limit"
        )
    return None


def _is_of_torch_distributed(code: CodeType) -> bool:
    """Whether a frame is one of torch's own that the compiled step calls.

    What AOTAutograd puts around a step reads `DTensor.device_mesh`, a property that Dynamo sees.
    """
    return code.co_filename.startswith(_TORCH_DISTRIBUTED)


def frame_objects(code: CodeType, closure: tuple[Any, ...] | None) -> FrameObjects:
    """What a function closes over: tells two steps made by one factory apart.

    A number, and what the function itself binds anew, is another object in the next call; its cell
    is not.
    """
    names = zip(code.co_freevars, closure or (), strict=False)
    return tuple(
        _identity(cell, name in _bound_anew(code)) for name, cell in names if _filled(cell)
    )


def _identity(cell: Any, is_bound_anew: bool) -> tuple[str, int]:
    changes = is_bound_anew or isinstance(cell.cell_contents, _NUMBERS)
    return ("cell", id(cell)) if changes else ("object", id(cell.cell_contents))


@functools.lru_cache(64)
def _bound_anew(code: CodeType) -> frozenset[str]:
    """The names of a closure that `code` assigns to, as `nonlocal` allows."""
    return frozenset(i.argval for i in dis.get_instructions(code) if i.opname == "STORE_DEREF")


def _filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _where(code: CodeType) -> str:
    return f"{code.co_filename}:{code.co_firstlineno} in {code.co_name}"
