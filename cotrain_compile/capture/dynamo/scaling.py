"""Loss scaling: `GradScaler` in the trace, with an update that data can skip.

Dynamo traces the scaler's own methods but for one: eager reads from the device whether a gradient
is inf or NaN, and steps or not. Here the optimizer steps, and each tensor it wrote keeps its old
value where a gradient was not finite (`docs/decisions/0014-gradient-scaling.md`).

Private torch API used: `trace_rules.get_mod_inlinelist`, the methods and tensors of `GradScaler`,
`_amp_foreach_non_finite_check_and_unscale`. Tried on torch 2.11.0, 2.13.0 and 2.15.0.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._dynamo import trace_rules
from torch._dynamo.exc import unimplemented
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.functions import UserFunctionVariable
from torch.amp.grad_scaler import GradScaler
from torch.fx.traceback import annotate

from cotrain_compile.capture.dynamo.session import Session
from cotrain_compile.capture.nodes.phases import PHASE_ANNOTATION
from cotrain_compile.capture.nodes.skipped_values import KEPT_ANNOTATION

aten = torch.ops.aten


@contextmanager
def scalers_traced() -> Iterator[None]:
    """Within it, Dynamo traces the methods of `GradScaler`, which it skips otherwise."""
    traced = {*trace_rules.get_mod_inlinelist(), inspect.getfile(GradScaler)}
    rules = trace_rules.get_torch_obj_rule_map()
    # Dynamo would put the maker of an empty Python entry into the graph.
    fresh = torch.amp.grad_scaler._refresh_per_optimizer_state
    with (
        mock.patch.object(trace_rules, "get_mod_inlinelist", lambda: traced),
        mock.patch.dict(rules, {fresh: UserFunctionVariable}),
    ):
        yield


def traced_instead(session: Session, func: Any, args: list[VariableTracker]) -> Any:
    """What to trace for a call of `func`: itself, unless it is a part of `GradScaler` or `_refuse`.

    Notes each scaler, and creates its tensors where it is about to be used first.
    """
    called = getattr(func, "fn", None)
    owner = vars(args[0]).get("value") if args else None
    if isinstance(owner, GradScaler):
        record = session.record_of_scaler(owner)
        if called is GradScaler.scale:
            record.start_tracing()
    if called is GradScaler._maybe_opt_step:
        return UserFunctionVariable(_step_where_finite)  # type: ignore[arg-type]
    if called is _refuse:
        message = args[0].as_python_constant()
        session.refuse(message)
        unimplemented(gb_type="cotrain", context="GradScaler", explanation=message, hints=[])
    return func


def _step_where_finite(
    scaler: GradScaler, optimizer: Any, state: dict[str, Any], *args: Any, **kwargs: Any
) -> None:
    """`GradScaler._maybe_opt_step` without asking the device."""
    with annotate({PHASE_ANNOTATION: "optimizer"}):
        skip = sum(state["found_inf_per_device"].values()) > 0
        before = _held(optimizer)
        old = [value.clone() if isinstance(value, Tensor) else value for value in before]
    optimizer.step(*args, **kwargs)
    with torch.no_grad(), annotate({PHASE_ANNOTATION: "optimizer", KEPT_ANNOTATION: True}):
        after = _held(optimizer)
        if len(after) != len(before):
            _refuse(_LAZY)
        for value, was, kept in zip(after, before, old):  # noqa: B905  Dynamo knows no strict=
            if isinstance(value, Tensor) and value is was:
                value.copy_(torch.where(skip, kept, value))
            elif value is not was and value != kept:
                _refuse(_PYTHON)


# By which code the trace has come to a step that data may skip.
STEP_OF_SCALER = _step_where_finite.__code__


def _held(optimizer: Any) -> list[Any]:
    """Parameters with a gradient and the values of their states, in a fixed order."""
    found = []
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is not None:
                found.append(param)
                if param in optimizer.state:
                    found.extend(optimizer.state[param].values())
    return found


def _refuse(message: str) -> None:
    """Ends the trace, with `message` for the user; Dynamo meets it in `traced_instead`."""


_LAZY = (
    "this optimizer creates state in its first step, which GradScaler may skip; run the first step "
    "in eager, before the compiled one"
)
_PYTHON = (
    "this optimizer counts in Python numbers, which a step that GradScaler skips in the graph "
    "cannot take back; keep them in tensors, or train in bfloat16 autocast, which needs no scaling"
)


def scaling_decompositions() -> dict[Any, Callable[..., Any]]:
    """The check and unscaling of all gradients, one by one."""
    return {aten._amp_foreach_non_finite_check_and_unscale.default: _check_and_unscale}


def _check_and_unscale(
    gradients: list[Tensor], found_inf: Tensor, inv_scale: Tensor
) -> tuple[list[Tensor], Tensor]:
    # The largest magnitude is NaN or inf exactly where an element is, and needs no second gradient.
    largest = [torch.linalg.vector_norm(g, math.inf) for g in gradients if g.numel()]
    finite = functools.reduce(torch.logical_and, (value.isfinite() for value in largest))
    unscaled = [(g * inv_scale.to(torch.promote_types(g.dtype, torch.float32))) for g in gradients]
    return unscaled, torch.where(finite, found_inf, torch.ones_like(found_inf))
