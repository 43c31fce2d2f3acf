"""Half steps: accumulation across calls, where one call adds gradients up and another updates.

A call without `optimizer.step()` leaves its gradients in `p.grad`; a call without `backward()`
updates from what it finds there. What is neither is refused, and so is a lost update.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from cotrain_compile.capture.dynamo.session import Session
from cotrain_compile.errors import CaptureError
from cotrain_compile.graph import StepGraph, writes


def refuse_untrained(session: Session, params: Sequence[torch.Tensor]) -> None:
    """Raise `CaptureError` where nothing is trained.

    `params` are those with a gradient from a backward of the step.
    """
    if not params and not session.updated:
        raise session.refuse(
            f"{_where(session)}: the step has no backward() and no parameter has a gradient, so it "
            f"is not training; {_WHOLE}, or call this one after a backward()"
        )


def dropped_gradients(session: Session) -> frozenset[int]:
    """Ids of the parameters whose gradients are not kept after the call.

    The call updates them and the next one clears them first, so nobody needs them in between. Those
    of other parameters may be for an optimizer outside the call.
    """
    if session.options.keep_grads:
        return frozenset()
    return session.updated & session.cleared_first


def refuse_lost_gradients(
    session: Session, step: StepGraph, values: Sequence[Any], params: Sequence[torch.Tensor]
) -> None:
    """Raise `CaptureError` where the step has gradients of `params` and updates none of them.

    An update is that of an optimizer, or a write by hand. `values` are what the inputs of `step`
    stand for.
    """
    if session.options.keep_grads or any(record.steps for record in session.optimizers):
        return
    written, trained = _written(step), set(map(id, params))
    by_hand = any(
        item.node in written and id(value) in trained
        for item, value in zip(step.inputs, values, strict=True)
    )
    if not by_hand:
        raise session.refuse(
            f"{_where(session)}: the step never calls optimizer.step(); {_WHOLE}, or, where "
            'another call updates, set options={"keep_grads": True} so that gradients stay in '
            "p.grad"
        )


def refuse_missing_updates(session: Session, step: StepGraph, values: Sequence[Any]) -> None:
    """A parameter that eager would update must be written by the graph, or it is a `CaptureError`.

    `values` are what the inputs of `step` stand for.
    """
    written = _written(step)
    missing = [
        item.name
        for item, value in zip(step.inputs, values, strict=True)
        if id(value) in session.updated and item.node not in written
    ]
    if missing:
        raise CaptureError(
            f"{len(missing)} parameters get a gradient but no update in the captured step "
            f"(first: {missing[0]}); their optimizer does something a graph cannot hold. "
            "Nothing was updated."
        )


_WHOLE = "compile the function that calls the model, backward() and optimizer.step()"


def _where(session: Session) -> str:
    code = session.code
    return f"{code.co_filename}:{code.co_firstlineno} in {code.co_name}"


def _written(step: StepGraph) -> set[str]:
    return {destination.name for _, destination, _ in writes(step.module.graph)}
