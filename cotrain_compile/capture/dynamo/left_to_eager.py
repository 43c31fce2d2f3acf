"""Left to eager: which steps run there (`on_break="warn"`), and that each of them is told.

Dynamo leaves code to eager for good, and with it every other step that the same function has made,
without a word. Here one call is left to eager at a time, and what is remembered is the step. It is
remembered where Dynamo keeps what it knows of the code, so `torch._dynamo.reset()` forgets.

Private torch API used: `torch._dynamo.types`, the dictionary `frame_state` that Dynamo keeps for
each code and hands to its callback. Tried on torch 2.13.0.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch._dynamo.types import (  # type: ignore[attr-defined]
    ConvertFrameReturn,
    FrameAction,
    FrameExecStrategy,
)

from cotrain_compile.capture.dynamo.settings import CalledStep
from cotrain_compile.errors import CaptureError

_KEPT_AS = "_cotrain_left_to_eager"


@dataclass
class _Kept:
    """Of one code: the steps that stay in eager, and what was said of each."""

    left: list[CalledStep] = field(default_factory=list)
    told: list[tuple[CalledStep, str]] = field(default_factory=list)


def is_left(frame_state: Mapping[str, Any], step: CalledStep) -> bool:
    """Whether `step` runs in eager, as it was told."""
    kept: _Kept | None = frame_state.get(_KEPT_AS)
    return kept is not None and any(step.is_same(other) for other in kept.left)


def leave_for_good(
    frame_state: dict[str, Any], step: CalledStep, why: CaptureError
) -> ConvertFrameReturn:
    """Leave this call of `step` and all later ones to eager, and say so."""
    _kept(frame_state).left.append(step)
    return leave_call(frame_state, step, why)


def leave_call(
    frame_state: dict[str, Any], step: CalledStep, why: CaptureError
) -> ConvertFrameReturn:
    """Leave this call alone to eager; it is said once of a step, for each reason."""
    kept = _kept(frame_state)
    if not any(step.is_same(other) and told == str(why) for other, told in kept.told):
        kept.told.append((step, str(why)))
        # With a registry of its own: Python would not say again what it has said of another step.
        warnings.warn_explicit(
            f"cotrain: the step runs in eager, without a budget. {why}",
            UserWarning,
            step.code.co_filename,
            step.code.co_firstlineno,
            registry={},
        )
    return in_eager()


def in_eager() -> ConvertFrameReturn:
    """What Dynamo is told of one call, and of nothing else that has its code."""
    return ConvertFrameReturn(
        frame_exec_strategy=FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP),
        apply_to_code=False,
    )


def _kept(frame_state: dict[str, Any]) -> _Kept:
    kept: _Kept = frame_state.setdefault(_KEPT_AS, _Kept())
    return kept
