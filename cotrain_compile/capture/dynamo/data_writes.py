"""Writes into `.data`: what eager hides from autograd is hidden from AOTAutograd as well.

In: Dynamo's graph. Out: the same graph, where a write into memory of a parameter by an alias that
requires no gradient happens without gradients. AOTAutograd looks at the mode in which an input is
written, and not by which alias: a step that writes a parameter both in its optimizer, without
gradients, and by `.data` would look like one that returns what requires a gradient.

`p.data = value` is traced as a copy of the value, which leaves `p` in its memory. In eager the two
share memory from then on; where the step could tell, it is refused.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from cotrain_compile.errors import CaptureError

_IN_PLACE = {
    operator.iadd,
    operator.isub,
    operator.imul,
    operator.itruediv,
    operator.setitem,
}
_SET_MODE = torch._C._set_grad_enabled


def hide_writes_by_aliases(module: fx.GraphModule) -> None:
    """Turn gradients off around each write into a leaf's memory by an alias without gradient."""
    placeholders = module.graph.find_nodes(op="placeholder")
    leaves = {_storage(node) for node in placeholders if _requires_grad(node)}
    recording = True
    for node in list(module.graph.nodes):
        if node.target is _SET_MODE:
            recording = node.args[0]
        elif recording and _writes(node) and _storage(node.args[0]) in leaves:
            if any(map(_requires_grad, node.all_input_nodes)):
                continue
            with module.graph.inserting_before(node):
                module.graph.call_function(_SET_MODE, (False,))
            with module.graph.inserting_after(node):
                module.graph.call_function(_SET_MODE, (True,))
    module.recompile()


@dataclass(frozen=True)
class CopiedData:
    """An assignment to `.data` of an input: the `value`, and its `copy` into the input."""

    value: fx.Node
    copy: fx.Node


def can_be_copied(owner: Any, value: Any) -> bool:
    """Whether `owner.data = value` may be a copy: an input of the same type and layout."""
    if not owner.source or not isinstance(value, type(owner)):
        return False
    old, new = _value(owner.as_proxy().node), _value(value.as_proxy().node)
    return old is not None and new is not None and _layout(old) == _layout(new)


def copy_data(tx: Any, owner: Any, value: Any, copied: list[CopiedData]) -> None:
    """Trace `owner.data = value` as a copy, and note it in `copied`."""
    if _storage(owner.as_proxy().node) == _storage(value.as_proxy().node):
        return  # `p.data -= ...` assigns what it has written already
    alias = owner.call_method(tx, "detach", [], {})
    source = value.call_method(tx, "detach", [], {})
    copy = alias.call_method(tx, "copy_", [source], {})
    copied.append(CopiedData(value.as_proxy().node, copy.as_proxy().node))


def refuse_shared_data(module: fx.GraphModule, copied: Sequence[CopiedData]) -> None:
    """Raise `CaptureError` where the step could tell a copied value from one that is shared.

    That is where the value is memory of another input, or used after it was assigned.
    """
    order = {node: place for place, node in enumerate(module.graph.nodes)}
    inputs = {_storage(node) for node in module.graph.find_nodes(op="placeholder")}
    for item in copied:
        if item.copy not in order:
            continue  # of an earlier attempt at this trace
        storage = _storage(item.value)
        sharing = [node for node in order if _storage(node) == storage]
        later = any(order[user] > order[item.copy] for node in sharing for user in node.users)
        if later or storage in inputs:
            raise CaptureError(
                "a value that is assigned to `.data` of a parameter is used elsewhere, too, so "
                "that they would share memory; write p.data.copy_(value) instead, and in place of "
                "vector_to_parameters(vector, ps), under torch.no_grad(): for p, part in zip(ps, "
                "vector.split([p.numel() for p in ps])): p.copy_(part.view_as(p))"
            )


def _layout(value: torch.Tensor) -> tuple[object, ...]:
    return value.dtype, value.device, value.shape, value.stride()


def _writes(node: fx.Node) -> bool:
    name = str(node.target)
    if node.op == "call_method":
        return name.endswith("_") and not name.endswith("__") and name != "requires_grad_"
    return node.op == "call_function" and node.target in _IN_PLACE


def _requires_grad(node: fx.Node) -> bool:
    value = _value(node)
    return value is not None and value.requires_grad


def _storage(node: Any) -> object:
    value = _value(node)
    try:
        return None if value is None else value.untyped_storage()._cdata
    except NotImplementedError:  # of a transform of torch.func: no tensor of the user's is one
        return value


def _value(node: Any) -> torch.Tensor | None:
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None
