"""Hooks on the gradients of leaves in the trace, which autograd runs where it accumulates these.

`p.register_hook` changes a gradient before it is added to `p.grad`, and
`p.register_post_accumulate_grad_hook` works on `p.grad` right after: with an optimizer for each
parameter it is that one's update. A traced `backward()` is one call of `torch.autograd.grad` and
one accumulation for each leaf. Here each accumulation calls the hooks of its leaf, and they come in
the order of autograd's engine, which is asked for it on the tensors of the trace.

A trace holds as long as its leaves have the hooks that they had: two guards for each parameter, at
0.03 us a parameter and call (100 parameters without hooks: a call's guards take 54.3 us with them
and 51.5 us without, the least of 200 times on one core).

Private torch API used: `TorchInGraphFunctionVariable._get_handlers`,
`TensorVariable._collect_backward_inputs`, `Tensor._backward_hooks` and
`._post_accumulate_grad_hooks`, `SideEffects.tensor_hooks`, `GradModeVariable`, the sources and
guards of Dynamo. Reason: stock Dynamo skips such hooks. Tried on torch 2.13.0; where a torch has no
such methods, hooks are refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn
from unittest import mock

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.exc import unimplemented
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.source import AttrSource, DictGetItemSource
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.ctx_manager import GradModeVariable
from torch._dynamo.variables.tensor import TensorVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable
from torch.fx.traceback import annotate, preserve_node_meta

from cotrain_compile.capture.dynamo.session import Session
from cotrain_compile.capture.nodes.phases import PHASE_ANNOTATION

# How they are registered, and where they are found: before an accumulation, and after it.
_BEFORE = ("register_hook", "_backward_hooks")
_AFTER = ("register_post_accumulate_grad_hook", "_post_accumulate_grad_hooks")
_ACCUMULATE = torch.ops.inductor.accumulate_grad_.default


def can_be_traced() -> bool:
    """Whether this torch accumulates gradients where a trace can call hooks."""
    return (
        hasattr(TensorVariable, "_collect_backward_inputs")
        and hasattr(TorchInGraphFunctionVariable, "_get_handlers")
        and _ACCUMULATE in TorchInGraphFunctionVariable._get_handlers()
    )


@contextmanager
def backward_traced(session: Session) -> Iterator[None]:
    """Within it, a traced `backward()` is marked, and calls the hooks of the leaves in order."""
    with ExitStack() as stack:
        backward = _marked(session, TensorVariable.method_backward)
        stack.enter_context(mock.patch.object(TensorVariable, "method_backward", backward))
        if can_be_traced():
            handlers = TorchInGraphFunctionVariable._get_handlers()
            changed = {
                _ACCUMULATE: _with_hooks(session, handlers[_ACCUMULATE]),
                torch.autograd.grad: _without_hooks(session, handlers[torch.autograd.grad]),
            }
            stack.enter_context(mock.patch.dict(handlers, changed))
            collect = _in_order_of_autograd(TensorVariable._collect_backward_inputs)
            stack.enter_context(
                mock.patch.object(TensorVariable, "_collect_backward_inputs", collect)
            )
        yield


def _marked(session: Session, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def backward(*args: Any, **kwargs: Any) -> Any:
        session.differentiates_backward = True
        with preserve_node_meta(), annotate({PHASE_ANNOTATION: "backward"}):
            return original(*args, **kwargs)

    return backward


def _with_hooks(session: Session, original: Callable[..., Any]) -> Callable[..., Any]:
    """`original`, which traces an accumulation, between the hooks of the leaf."""

    @functools.wraps(original)
    def accumulate(self: Any, tx: Any, leaf: Any, gradient: Any, *rest: Any) -> Any:
        leaf = leaf.realize()
        before, after = _hooks(tx, leaf, _BEFORE), _hooks(tx, leaf, _AFTER)
        if rest or not gradient.is_tensor():  # without a gradient, autograd calls no hook
            return original(self, tx, leaf, gradient, *rest)
        if (before or after) and gradient.requires_grad:
            _refuse(session, _DIFFERENTIATED)
        with annotate({PHASE_ANNOTATION: "hook"}):
            for hook in before:
                changed = hook.call_function(tx, [gradient], {})
                gradient = changed if changed.is_tensor() else gradient
        with _grad_mode(tx, gradient.requires_grad):
            result = original(self, tx, leaf, gradient)
        with annotate({PHASE_ANNOTATION: "hook"}):
            for hook in after:
                hook.call_function(tx, [leaf], {})
        return result

    return accumulate


@contextmanager
def _grad_mode(tx: Any, enabled: bool) -> Iterator[None]:
    """Within it, the trace differentiates as autograd does while it accumulates a gradient.

    With `create_graph`, `p.grad` can be differentiated itself. Dynamo would make it a constant.
    """
    if not enabled:
        yield
        return
    mode = GradModeVariable.create(tx, True, initialized=True)
    mode.enter(tx)
    yield
    mode.exit(tx)


def _without_hooks(session: Session, original: Callable[..., Any]) -> Callable[..., Any]:
    """`original`, which traces `torch.autograd.grad`, refused where a hook would change a result.

    A traced `backward()` calls it, too, and hooks only where it accumulates.
    """

    @functools.wraps(original)
    def differentiate(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        of_backward, session.differentiates_backward = session.differentiates_backward, False
        if not of_backward:
            inputs = args[1] if len(args) > 1 else kwargs["inputs"]
            inputs = inputs.realize()
            leaves = [inputs] if inputs.is_tensor() else inputs.unpack_var_sequence(tx)
            if any(leaf.is_tensor() and _hooks(tx, leaf.realize(), _BEFORE) for leaf in leaves):
                _refuse(session, _GRADIENT_ALONE)
        return original(self, tx, *args, **kwargs)

    return differentiate


def _refuse(session: Session, message: str) -> NoReturn:
    session.refuse(message)
    unimplemented(gb_type="cotrain", context="hooks", explanation=message, hints=[])


_DIFFERENTIATED = (
    "a parameter has a gradient hook, and backward(create_graph=True) would differentiate through "
    "it; remove the hook and do its work in the step, after backward(), on p.grad"
)
_GRADIENT_ALONE = (
    "torch.autograd.grad() of a tensor with a hook (register_hook), which a captured step would "
    "skip; remove the hook and do its work in the step, on the gradient that is returned"
)


def _in_order_of_autograd(original: Callable[..., Any]) -> Callable[..., Any]:
    """`original`, which collects leaves to accumulate in, in the order in which eager does.

    It matters to hooks alone: an accumulation touches nothing but its own leaf.
    """

    @functools.wraps(original)
    def collect(self: TensorVariable, variables: Iterable[Any], *args: Any, **kwargs: Any) -> Any:
        leaves = original(self, variables, *args, **kwargs)
        tx = InstructionTranslator.current_tx()
        if not any(_hooks(tx, leaf, kind) for leaf in leaves or () for kind in (_BEFORE, _AFTER)):
            return leaves
        ranks = _ranks(_traced(self), [_traced(leaf) for leaf in leaves])
        return [leaves[place] for place in sorted(range(len(leaves)), key=ranks.__getitem__)]

    return collect


def _ranks(output: Any, leaves: list[torch.Tensor]) -> list[int]:
    """When the backward of `output` has the gradient of each of `leaves`; the last for none."""
    ranks = [len(leaves)] * len(leaves)
    order = iter(range(len(leaves)))

    def note(place: int, gradient: torch.Tensor) -> None:
        ranks[place] = next(order)

    handles = [leaf.register_hook(functools.partial(note, at)) for at, leaf in enumerate(leaves)]
    try:
        with output.fake_mode, enable_python_dispatcher():
            start = torch.ones_like(output)
            torch.autograd.grad(output, leaves, start, retain_graph=True, allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
    return ranks


def _hooks(tx: Any, leaf: TensorVariable, kind: tuple[str, str]) -> list[VariableTracker]:
    """The hooks of `leaf`: those that it has, then those that the step has registered on it.

    The trace holds as long as it has these, also where it has none.
    """
    register, attribute = kind
    node = leaf.as_proxy().node
    found = []
    if leaf.source and "grapharg" in node.meta:
        source = AttrSource(leaf.source, attribute)
        hooks = getattr(node.meta["grapharg"].example, attribute)
        kind_of_guard = GuardBuilder.NONE_MATCH if hooks is None else GuardBuilder.SEQUENCE_LENGTH
        install_guard(source.make_guard(kind_of_guard))
        found = [
            VariableTracker.build(tx, hook, DictGetItemSource(source, key))
            for key, hook in (hooks or {}).items()
        ]
    registered = tx.output.side_effects.tensor_hooks.values()
    return [
        *found,
        *(
            hook
            for owner, hook, _, name in registered
            if name == register and owner.as_proxy().node is node
        ),
    ]


def _traced(variable: TensorVariable) -> Any:
    """The tensor that stands for `variable` in the trace."""
    return variable.as_proxy().node.meta["example_value"]
