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


def refuse_half_a_step(session: Session, params: Sequence[torch.Tensor]) -> None:
    """Raise `CaptureError` where nothing is trained, or gradients would be lost.

    `params` are those with a gradient from a backward of the step.
    """
    where = f"{session.code.co_filename}:{session.code.co_firstlineno} in {session.code.co_name}"
    whole = "compile the function that calls the model, backward() and optimizer.step()"
    if not params and not session.updated:
        raise session.refuse(
            f"{where}: the step has no backward() and no parameter has a gradient, so it is not "
            f"training; {whole}, or call this one after a backward()"
        )
    updates = any(record.steps for record in session.optimizers)
    if not updates and not session.options.keep_grads:
        raise session.refuse(
            f"{where}: the step never calls optimizer.step(); {whole}, or, where another call "
            'updates, set options={"keep_grads": True} so that gradients stay in p.grad'
        )


def refuse_missing_updates(session: Session, step: StepGraph, values: Sequence[Any]) -> None:
    """A parameter that eager would update must be written by the graph, or it is a `CaptureError`.

    `values` are what the inputs of `step` stand for.
    """
    written = {destination.name for _, destination, _ in writes(step.module.graph)}
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
