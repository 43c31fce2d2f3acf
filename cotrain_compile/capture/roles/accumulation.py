"""Half steps: accumulation across calls, where one call adds gradients up and another updates.

A call without `optimizer.step()` leaves its gradients in `p.grad`; a call without `backward()`
updates from what it finds there, or is one that only looks: an early return, an evaluation. What is
neither is refused, and so are a lost update and a lost gradient.

Kept gradients: which values that a step returns are stored in the `.grad` of which parameter.

In: Dynamo's graph with the stores that its trace has seen, then the step graph made of it. Out: for
`StepGraph.kept`, the returned nodes with the names of their parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from types import CodeType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import fx
from torch.optim import Optimizer

from cotrain_compile.capture.dynamo.session import Session
from cotrain_compile.capture.dynamo.settings import FrameObjects
from cotrain_compile.capture.roles.local_parts import returned_positions
from cotrain_compile.errors import CaptureError
from cotrain_compile.graph import StepGraph, returned_values, writes
from cotrain_compile.graph.user_lines import first_line

# By the optimizer that updates it and the id of a parameter, the functions of which some graph has
# dropped its gradient. The optimizer keeps it alive, not a weak reference: with one on it,
# `torch.utils.swap_tensors` would refuse the parameter.
_dropped_by: WeakKeyDictionary[Optimizer, dict[int, set[tuple[CodeType, FrameObjects]]]]
_dropped_by = WeakKeyDictionary()


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
    needed = _dropped_by_function(session) - session.cleared_first
    for param in params:
        if id(param) in needed and param.grad is None:
            raise session.refuse(
                f"{first_line(session.code)}: this call adds to gradients that an earlier one, "
                "which began with zero_grad(), has not kept in p.grad; "
                'set options={"keep_grads": True}'
            )


def _dropped_by_function(session: Session) -> frozenset[int]:
    """Ids of parameters whose gradients another graph of this function has dropped."""
    return frozenset(
        id(param)
        for optimizer, functions in list(_dropped_by.items())
        for param in _params(optimizer)
        if session.function in functions.get(id(param), ())
    )


def note_dropped(session: Session, dropped: Set[int]) -> None:
    """Remember that a graph of this function drops the gradients of parameters, by their ids."""
    for record in session.optimizers:
        functions = _dropped_by.setdefault(record.optimizer, {})
        for param in _params(record.optimizer):
            if id(param) in dropped:
                functions.setdefault(id(param), set()).add(session.function)


def _params(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    return (param for group in optimizer.param_groups for param in group["params"])


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
    written, updated = _written(step), session.updated
    missing = [
        item.name
        for item, value in zip(step.inputs, values, strict=True)
        if id(value) in updated and item.node not in written
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


def kept_outputs(
    module: fx.GraphModule, stores: Sequence[tuple[torch.Tensor, fx.Node]]
) -> tuple[int, Mapping[int, torch.Tensor]]:
    """How many values Dynamo's graph returns, and whose gradient each of them is, by position."""
    (output,) = module.graph.find_nodes(op="output")
    returned: Any = output.args[0]
    param_of = {node: param for param, node in stores}
    found = {i: param_of[node] for i, node in enumerate(returned) if node in param_of}
    return len(returned), found


def kept_in(
    step: StepGraph,
    kept: tuple[int, Mapping[int, torch.Tensor]],
    values: Sequence[Any],
) -> Mapping[str, str]:
    """The names of the returned nodes that are `kept` gradients, with their parameters'.

    `values` are the user's tensors that the inputs of `step` stand for. None where the ATen graph
    returns something else than Dynamo's, value by value.
    """
    count, params = kept
    returned = returned_values(step)
    names = {id(value): item.name for value, item in zip(values, step.inputs, strict=True)}
    positions = returned_positions(step.module.graph, count)
    return {
        node.name: names[id(params[position])]
        for node, position in zip(returned, positions, strict=True)
        if isinstance(node, fx.Node) and position in params and id(params[position]) in names
    }
