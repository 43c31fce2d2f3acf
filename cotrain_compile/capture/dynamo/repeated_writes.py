"""What a checkpoint writes is written twice, as eager does, which runs the checkpoint again.

    BatchNorm in a checkpoint     num_batches_tracked.add_(1)        num_batches_tracked.add_(1)
                                  batch_norm(x, mean, var)      ->   num_batches_tracked.add_(1)
                                                                     batch_norm(x, mean, var)
                                                                     batch_norm(x, mean, var)

In: the graph of the whole step, in which a checkpoint is there once. Changed in place: each write
of a buffer in a checkpoint that one backward goes through is followed by itself, from the same
values, as eager's second run has them. That comes earlier than in eager, so nobody may look at the
buffer between the two; where somebody does, or the second run writes something else, the step is
refused.

Private torch API used: `tag_activation_checkpoint`, by its name, the mark of a `context_fn` and the
`example_value` of Dynamo's nodes. Reason: the graph is theirs. Tried on torch 2.13.0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, NoReturn

import torch
from torch import fx

from cotrain_compile.errors import CaptureError
from cotrain_compile.graph.user_lines import user_line

_NORMS = ("batch_norm", "instance_norm")
# What has autograd keep values, so that the second run, which ends at the last of them, reaches it.
_KEEPS = {*_NORMS, "linear", "conv1d", "conv2d", "conv3d", "layer_norm", "group_norm"}


def repeat_writes_of_checkpoints(module: fx.GraphModule) -> None:
    """Have each write of a buffer in a checkpoint happen as often as in eager."""
    for owner, body, calls in _checkpoints(module):
        written = [(node, buffers) for node in body.graph.nodes if (buffers := _written(node))]
        repeated = [_is_run_again(module, call) for call in calls] if written else []
        if not any(repeated):
            continue
        if owner is not module or not all(repeated) or "_checkpoint_context_fn" in body.meta:
            _refuse(calls[0])
        for node, buffers in written:
            for call in calls:
                _refuse_unless_repeatable(module, body, call, node, buffers)
        for node, _ in written:
            with body.graph.inserting_after(node):
                again = body.graph.create_node(node.op, node.target, node.args, node.kwargs)
            again.meta.update(node.meta)
        body.recompile()


def _checkpoints(
    module: fx.GraphModule,
) -> Iterator[tuple[fx.GraphModule, fx.GraphModule, list[fx.Node]]]:
    """Each body of a checkpoint, with the module that has its calls."""
    for owner in [m for m in module.modules() if isinstance(m, fx.GraphModule)]:
        calls = [n for n in owner.graph.nodes if _calls_checkpoint(n)]
        for name, same in groupby(sorted(calls, key=_body_name), key=_body_name):
            body = getattr(owner, name, None)
            if isinstance(body, fx.GraphModule):
                yield owner, body, list(same)


def _calls_checkpoint(node: fx.Node) -> bool:
    return "checkpoint" in getattr(node.target, "__name__", "") and bool(node.args)


def _body_name(call: fx.Node) -> str:
    return str(getattr(call.args[0], "target", ""))


def _written(node: fx.Node) -> list[fx.Node]:
    """The inputs of a checkpoint's body that `node` writes: by its name, or as a norm does."""
    name = _name(node)
    if node.op not in ("call_function", "call_method"):
        return []
    found: Sequence[Any] = ()
    if name.endswith("_") and not name.endswith("__") and node.args:
        first = node.args[0]
        found = first if isinstance(first, list | tuple) else [first]
    elif name in _NORMS and _argument(node, 5, _TRAINING[name]):
        found = [_argument(node, 1, "running_mean"), _argument(node, 2, "running_var")]
    return [item for item in found if isinstance(item, fx.Node) and item.op == "placeholder"]


_TRAINING = {"batch_norm": "training", "instance_norm": "use_input_stats"}


def _argument(node: fx.Node, place: int, name: str) -> Any:
    return node.args[place] if len(node.args) > place else node.kwargs.get(name)


def _is_run_again(module: fx.GraphModule, call: fx.Node) -> bool:
    """Whether a backward of the step goes through what `call` returns.

    A checkpoint in a checkpoint, or in a function, counts as one: it is not looked into.
    """
    return call.graph is not module.graph or bool(_backwards(call))


def _backwards(call: fx.Node) -> list[fx.Node]:
    """The backwards that go through `call`, by what requires a gradient."""
    reached, found = {call} if _requires_grad(call) else set(), []
    for node in call.graph.nodes:
        if reached.isdisjoint(node.all_input_nodes):
            continue
        if node.target is torch.autograd.grad:
            outputs = node.args[0] if node.args else node.kwargs["outputs"]
            outputs = outputs if isinstance(outputs, list | tuple) else [outputs]
            if not reached.isdisjoint(outputs):
                found.append(node)
        elif _requires_grad(node):
            reached.add(node)
    return found


def _refuse_unless_repeatable(
    module: fx.GraphModule,
    body: fx.GraphModule,
    call: fx.Node,
    node: fx.Node,
    buffers: Sequence[fx.Node],
) -> None:
    """Raise `CaptureError` unless `node` may run twice in a row in place of once more later."""
    (*others, last) = _backwards(call)
    is_norm = _name(node) in _NORMS
    reads_values = not is_norm and (node.users or len(node.all_input_nodes) > len(buffers))
    inside = body.graph.find_nodes(op="placeholder")
    order = {n: place for place, n in enumerate(module.graph.nodes)}
    outside = [call.args[1 + inside.index(buffer)] for buffer in buffers]
    between = any(
        order[call] < order[user] < order[last]
        for buffer in outside
        if isinstance(buffer, fx.Node)
        for user in buffer.users
    )
    alone = all(set(buffer.users) == {node} for buffer in buffers)
    if others or reads_values or between or not alone or not _is_reached(body, node):
        _refuse(call)


def _is_reached(body: fx.GraphModule, node: fx.Node) -> bool:
    """Whether something that autograd keeps values of is at `node`, or behind it in the body."""
    nodes = list(body.graph.nodes)
    behind = nodes[nodes.index(node) :]
    return any(_name(later) in _KEEPS and _requires_grad(later) for later in behind)


def _requires_grad(node: fx.Node) -> bool:
    value = node.meta.get("example_value")
    values = value if isinstance(value, list | tuple) else [value]
    return any(isinstance(item, torch.Tensor) and item.requires_grad for item in values)


def _name(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target))


def _refuse(call: fx.Node) -> NoReturn:
    raise CaptureError(
        f"{user_line(call.meta.get('stack_trace')) or 'the step'}: a checkpoint writes a buffer, "
        "as BatchNorm does its statistics, and eager writes it again where it runs the checkpoint "
        "for the backward, which this graph cannot do at the same place; move what writes it out "
        "of the checkpoint, or let its module be in evaluation mode"
    )
