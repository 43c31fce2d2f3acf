"""Leaves that the step makes: `x.requires_grad_()` in the step.

Stock Dynamo cannot change whether an input requires a gradient. Here the trace reads a detached
alias of the input from then on, which it can make a leaf; the user's tensor is made one when the
step has run. Parameters are left to the user: what an optimizer updates must stay itself.

The backward of an `autograd.Function` that differentiates for itself makes leaves, too. They
belong to its own graph; stock Dynamo would ask the step's `backward()` for their gradients.

Private torch API used: `TensorVariable.method_requires_grad_` and `_collect_backward_inputs`,
`OutputGraph.tracers`, and what traces `setattr`. Reason: there is no public way to change how a
tensor's method or attribute is traced. Tried on torch 2.13.0.

Writes into `.data`: what eager hides from autograd is hidden from AOTAutograd as well.

In: Dynamo's graph. Out: the same graph, where a write into memory of a parameter by an alias that
requires no gradient happens without gradients. AOTAutograd looks at the mode in which an input is
written, and not by which alias: a step that writes a parameter both in its optimizer, without
gradients, and by `.data` would look like one that returns what requires a gradient.

`p.data = value` is traced as a copy of the value, which leaves `p` in its memory. In eager the two
share memory from then on; where the step could tell, it is refused.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import fx, nn
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.variables import builtin
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.tensor import TensorVariable

from cotrain_compile.errors import CaptureError

# What traces `setattr` has a class of its own from some torch between 2.11 and 2.13 on. Before, it
# is remembered as bound when it was first called, in this table.
_HAS_CLASS = hasattr(builtin, "SetAttrBuiltinVariable")
_SETATTR: tuple[Any, str] = (
    (builtin.SetAttrBuiltinVariable, "_call_setattr")
    if _HAS_CLASS
    else (builtin.BuiltinVariable, "call_setattr")
)
_REMEMBERED = "call_function_handler_cache"

# Other versions of torch may not have it; `gradient_hooks` asks, too.
_COLLECT = "_collect_backward_inputs"


@contextmanager
def leaves_traced(made: set[fx.Node], copied: list[CopiedData]) -> Iterator[None]:
    """Within it, a trace makes leaves of inputs, and notes in `made` the placeholders of these.

    What it assigns to `.data` is noted in `copied`.
    """
    with ExitStack() as stack:
        method = _require_gradient(made, TensorVariable.method_requires_grad_)
        stack.enter_context(mock.patch.object(TensorVariable, "method_requires_grad_", method))
        if hasattr(TensorVariable, _COLLECT):
            collect = _of_graphs_under_way(getattr(TensorVariable, _COLLECT))
            stack.enter_context(mock.patch.object(TensorVariable, _COLLECT, collect))
        owner, name = _SETATTR
        assign = _assign_attribute(copied, getattr(owner, name))
        stack.enter_context(mock.patch.object(owner, name, assign))
        if not _HAS_CLASS:
            stack.enter_context(mock.patch.object(owner, _REMEMBERED, {}))
        yield


def run_and_make_leaves(
    run: Callable[..., Any], module: fx.GraphModule, made: set[fx.Node]
) -> Callable[..., Any]:
    """`run`, after which the inputs that stand at the placeholders in `made` are leaves."""
    placeholders = module.graph.find_nodes(op="placeholder")
    positions = [place for place, node in enumerate(placeholders) if node in made]
    if not positions:
        return run

    def run_then_make(*inputs: Any) -> Any:
        leaves: Sequence[torch.Tensor] = [inputs[position] for position in positions]
        result = run(*inputs)
        for leaf in leaves:
            leaf.requires_grad_()
        return result

    return run_then_make


def _require_gradient(made: set[fx.Node], original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def require_gradient(
        self: TensorVariable, tx: Any, requires_grad: bool | VariableTracker = True
    ) -> Any:
        node = self.as_proxy().node
        if not _becomes_a_leaf(self, node, requires_grad):
            return original(self, tx, requires_grad)
        self.proxy = self.call_method(tx, "detach", [], {}).as_proxy()
        source, self.source = self.source, None
        try:
            result = original(self, tx, requires_grad)
        finally:
            self.source = source
        made.add(node)
        return result

    return require_gradient


def _of_graphs_under_way(original: Callable[..., Any]) -> Callable[..., Any]:
    """`original`, which collects leaves for a backward, less those of graphs that are complete."""

    @functools.wraps(original)
    def collect(self: TensorVariable, variables: Iterable[Any], *args: Any, **kwargs: Any) -> Any:
        leaves = original(self, variables, *args, **kwargs)
        graphs = [tracer.graph for tracer in InstructionTranslator.current_tx().output.tracers]
        return leaves and [leaf for leaf in leaves if leaf.as_proxy().node.graph in graphs]

    return collect


def _becomes_a_leaf(
    variable: TensorVariable, node: fx.Node, requires_grad: bool | VariableTracker
) -> bool:
    """Whether a call of `requires_grad_` makes a leaf of an input that is none and no parameter."""
    argument = node.meta.get("grapharg") if node.op == "placeholder" else None
    value = getattr(argument, "example", None)
    if isinstance(requires_grad, VariableTracker):
        requires_grad = requires_grad.as_python_constant()
    return (
        bool(variable.source)
        and bool(requires_grad)
        and isinstance(value, torch.Tensor)
        and not isinstance(value, nn.Parameter)
        and not value.requires_grad
        and value.grad is None
    )


def _assign_attribute(copied: list[CopiedData], original: Callable[..., Any]) -> Callable[..., Any]:
    """`original` but for two attributes of a tensor that are written in place.

    `x.requires_grad = ...` is `x.requires_grad_(...)`. `x.data = value` copies the value, so that
    `x` stays where its home is; stock Dynamo would replace its storage.
    """

    @functools.wraps(original)
    def assign(self: Any, tx: Any, obj: Any, name: Any, value: Any) -> Any:
        realized = getattr(obj, "realize", lambda: obj)()
        attribute = name.as_python_constant() if name.is_python_constant() else None
        if isinstance(realized, TensorVariable):
            if attribute == "requires_grad" and value.is_python_constant():
                realized.call_method(tx, "requires_grad_", [value], {})
                return value
            if attribute == "data" and can_be_copied(realized, value.realize()):
                copy_data(tx, realized, value.realize(), copied)
                return value
        return original(self, tx, obj, name, value)

    return assign


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
