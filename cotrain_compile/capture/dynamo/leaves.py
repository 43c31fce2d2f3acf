"""Leaves that the step makes: `x.requires_grad_()` in the step.

Stock Dynamo cannot change whether an input requires a gradient. Here the trace reads a detached
alias of the input from then on, which it can make a leaf; the user's tensor is made one when the
step has run. Parameters are left to the user: what an optimizer updates must stay itself.

The backward of an `autograd.Function` that differentiates for itself makes leaves, too. They
belong to its own graph; stock Dynamo would ask the step's `backward()` for their gradients.

Private torch API used: `TensorVariable.method_requires_grad_` and `_collect_backward_inputs`,
`OutputGraph.tracers`, and what traces `setattr`. Reason: there is no public way to change how a
tensor's method or attribute is traced. Tried on torch 2.13.0.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import fx, nn
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.variables import builtin
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.tensor import TensorVariable

from cotrain_compile.capture.dynamo.data_writes import CopiedData, can_be_copied, copy_data

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
