"""Half steps: accumulation across calls, where one call adds gradients up and another updates.

A call without `optimizer.step()` leaves its gradients in `p.grad`; a call without `backward()`
updates from what it finds there, or is one that only looks: an early return, an evaluation. What is
neither is refused, and so are a lost update and a lost gradient.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

import torch
from torch import fx
from torch.utils.weak import WeakTensorKeyDictionary

from cotrain_compile.capture.dynamo.session import Session
from cotrain_compile.errors import CaptureError
from cotrain_compile.graph import StepGraph, writes
from cotrain_compile.graph.user_lines import first_line

# By parameter, the functions of which some graph has dropped its gradient.
_dropped_by = WeakTensorKeyDictionary()


def refuse_untrained(
    session: Session, params: Sequence[torch.Tensor], module: fx.GraphModule
) -> None:
    """Raise `CaptureError` where nothing is trained, unless the call can be seen to train nothing.

    `params` are those with a gradient from a backward of the step, whose graph is `module`: what it
    returns could be differentiated outside if it requires a gradient.
    """
    if params or session.updated:
        return
    steps = any(record.steps for record in session.optimizers)
    if steps or _returns_what_requires_a_gradient(module):
        raise session.refuse(
            f"{first_line(session.code)}: the step has no backward() and no parameter has a "
            f"gradient, so it is not training; {_WHOLE}, or call this one after a backward()"
            + ("" if steps else f". {_LOOKS}")
        )


def _returns_what_requires_a_gradient(module: fx.GraphModule) -> bool:
    (output,) = module.graph.find_nodes(op="output")
    returned = [node.meta.get("example_value") for node in output.all_input_nodes]
    return any(isinstance(value, torch.Tensor) and value.requires_grad for value in returned)


def refuse_additions_to_dropped(session: Session, params: Sequence[torch.Tensor]) -> None:
    """Raise `CaptureError` where a call would add to gradients that another call has dropped.

    That one has cleared them first, so nobody was to need them; but this call of the same function
    does not. `params` are those with a gradient from a backward of the step.
    """
    for param in params:
        dropped = session.function in _dropped_by.get(param, ())
        if dropped and param.grad is None and id(param) not in session.cleared_first:
            raise session.refuse(
                f"{first_line(session.code)}: this call adds to gradients that an earlier one, "
                "which began with zero_grad(), has not kept in p.grad; "
                'set options={"keep_grads": True}'
            )


def note_dropped(session: Session, params: Sequence[torch.Tensor], dropped: Set[int]) -> None:
    """Remember that a graph of this function drops the gradients of those of `params`."""
    for param in params:
        if id(param) in dropped:
            _dropped_by.setdefault(param, set()).add(session.function)


def dropped_gradients(session: Session) -> frozenset[int]:
    """Ids of the parameters whose gradients are not kept after the call.

    The call updates them and the next one clears them first, so nobody needs them in between. Those
    of other parameters may be for an optimizer outside the call.
    """
    if session.options.keep_grads:
        return frozenset()
    return session.updated & session.cleared_first


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
_LOOKS = (
    "A call that only looks, such as one that returns early, is called under torch.no_grad(), or "
    "returns detached tensors (loss.detach())"
)


def _written(step: StepGraph) -> set[str]:
    return {destination.name for _, destination, _ in writes(step.module.graph)}
