"""Where Dynamo's graph would do otherwise than the step does in eager: mended, or refused.

In: the graph of the whole step. Changed in place: it differentiates a user's `autograd.Function`
twice, a list op takes one tensor that is in its list twice for what it is, and a write in a
checkpoint is repeated, as eager does. Refused: a cast that autocast would have kept from before an
update.

Private torch API used: the `autograd_function_apply` op and the bodies that Dynamo gives it,
`torch._C._set_grad_enabled`, `amp.autocast_mode._enter_autocast`, the `example_value` of Dynamo's
nodes. Reason: the graph is theirs. Tried on torch 2.13.0.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from cotrain_compile.capture.dynamo.repeated_writes import repeat_writes_of_checkpoints
from cotrain_compile.errors import CaptureError
from cotrain_compile.graph.user_lines import user_line

_APPLY = "autograd_function_apply"
_ENTER, _EXIT = "_enter_autocast", "_exit_autocast"
# What autocast runs in the lower precision, as Dynamo's graph names it.
_CAST = {"linear", "bilinear", "matmul", "mm", "bmm", "mv", "addmm", "addbmm", "baddbmm", "einsum"}
_CAST |= {f"conv{kind}{n}d" for kind in ("", "_transpose") for n in (1, 2, 3)}
_CAST |= {"scaled_dot_product_attention"}


def do_as_eager(module: fx.GraphModule) -> None:
    """Mend `module`; `CaptureError` where it cannot be made to do as eager."""
    _refuse_kept_casts(module)
    repeat_writes_of_checkpoints(module)
    _differentiate_functions_twice(module)
    _write_shared_items_in_turn(module)


def _differentiate_functions_twice(module: fx.GraphModule) -> None:
    """Leave it to autograd whether the backward of a user's `Function` is differentiated itself.

    Dynamo has each such backward run under `no_grad`. So does autograd, but where `create_graph`
    asks for a second derivative: that would be without what went through the function.
    """
    for owner in [m for m in module.modules() if isinstance(m, fx.GraphModule)]:
        for node in owner.graph.nodes:
            if getattr(node.target, "__name__", "") == _APPLY and len(node.args) > 1:
                body = getattr(owner, str(getattr(node.args[1], "target", "")), None)
                if isinstance(body, fx.GraphModule):
                    _leave_grad_mode(body)


def _leave_grad_mode(body: fx.GraphModule) -> None:
    nodes = [node for node in body.graph.nodes if node.op not in ("placeholder", "output")]
    if len(nodes) > 1 and _sets_grad(nodes[0], False) and _sets_grad(nodes[-1], True):
        for node in (nodes[0], nodes[-1]):
            body.graph.erase_node(node)
        body.recompile()


def _sets_grad(node: fx.Node, to: bool) -> bool:
    return node.target is torch._C._set_grad_enabled and node.args == (to,)


def _write_shared_items_in_turn(module: fx.GraphModule) -> None:
    """Split a list op that writes the same memory twice into one op per item.

    Eager writes item after item. Made functional, the op would read all of them first: of two
    parameters with one tensor as their gradient, clipping would scale it only once.
    """
    for node in list(module.graph.nodes):
        name = getattr(node.target, "__name__", "")
        if node.op == "call_function" and name.startswith("_foreach_") and name.endswith("_"):
            storages = [_storage(item) for item in node.args[0]]
            if len(set(storages)) < len(storages):
                _split(module.graph, node)
    module.recompile()


def _split(graph: fx.Graph, node: fx.Node) -> None:
    count = len(node.args[0])  # type: ignore[arg-type]

    def pick(value: Any, place: int) -> Any:
        is_list = isinstance(value, list | tuple) and len(value) == count
        return [value[place]] if is_list else value

    with graph.inserting_before(node):
        for place in range(count):
            args = tuple(pick(arg, place) for arg in node.args)
            kwargs = {key: pick(value, place) for key, value in node.kwargs.items()}
            graph.call_function(node.target, args, kwargs).meta.update(node.meta)  # type: ignore[arg-type]
    graph.erase_node(node)


def _storage(item: Any) -> object:
    value = item.meta.get("example_value") if isinstance(item, fx.Node) else None
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else item


def _refuse_kept_casts(module: fx.GraphModule) -> None:
    """Raise `CaptureError` where eager would go on with the cast of a weight that was updated.

    Autocast keeps the casts of weights until its `with` block ends, and does not see that a weight
    is written meanwhile; in a captured step it keeps none.
    """
    cast: set[fx.Node] = set()
    stale: set[fx.Node] = set()
    depth = 0
    for node in module.graph.nodes:
        name = getattr(node.target, "__name__", str(node.target))
        if name == _ENTER:
            depth += depth > 0 or _keeps_casts(node)
        elif name == _EXIT:
            depth = max(0, depth - 1)
            if depth == 0:
                cast, stale = set(), set()
        elif depth and name in _CAST:
            used = [n for n in node.all_input_nodes if n.op == "placeholder"]
            for weight in used:
                if weight in stale:
                    _refuse_kept_cast(node)
            cast.update(used)
        elif depth and name.endswith("_") and not name.endswith("__"):
            stale.update(weight for weight in _written(node) if weight in cast)


def _keeps_casts(enter: fx.Node) -> bool:
    """Whether this `with torch.autocast(...)` is enabled and keeps casts."""
    return all(value is not False for value in enter.args[2:4])


def _written(node: fx.Node) -> Iterator[fx.Node]:
    first = node.args[0] if node.args else None
    items = first if isinstance(first, list | tuple) else [first]
    yield from (item for item in items if isinstance(item, fx.Node))


def _refuse_kept_cast(node: fx.Node) -> None:
    raise CaptureError(
        f"{user_line(node.meta.get('stack_trace')) or f'op {node.name}'}: a weight is used after "
        "it was updated in the same `with torch.autocast(...)`, which in eager goes on with its "
        "cast from before the update. Call optimizer.step() outside of it, or write "
        "torch.autocast(..., cache_enabled=False), by which eager, too, casts what is there"
    )
