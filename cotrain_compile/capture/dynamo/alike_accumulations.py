"""Alike accumulations: of leaves that look alike, the first gradient of one is traced into place.

Autograd copies a first gradient into memory laid out as its leaf. Dynamo follows that in Python for
each leaf, though it asks of leaf and gradient nothing but what they look like.

Private torch API used: `TorchInGraphFunctionVariable._get_handlers`, `SideEffects.store_attr` and
`.load_attr`, `TensorVariable.method_backward`, `VariableTracker.clone`. Reason: torch has them
decide how an accumulation is traced. Tried on torch 2.13.0.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.tensor import TensorVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

from cotrain_compile.capture.dynamo.copied_calls import TRIED, TracedCall, look_of, nodes_behind

_ACCUMULATE: Any = torch.ops.inductor.accumulate_grad_.default

Made = dict[object, tuple[TracedCall, Any]]
"""By the look of leaf and gradient, what was traced for the first of them, and its `.grad`."""


@contextmanager
def accumulated_once_a_kind() -> Iterator[None]:
    """Within it, first gradients of leaves that look alike are stored as that of the first is."""
    handlers = TorchInGraphFunctionVariable._get_handlers()
    if _ACCUMULATE not in handlers or not torch.__version__.startswith(TRIED):
        yield
        return
    made: Made = {}
    with ExitStack() as stack:
        once = _once_a_kind(made, handlers[_ACCUMULATE])
        stack.enter_context(mock.patch.dict(handlers, {_ACCUMULATE: once}))
        backward = _anew(made, TensorVariable.method_backward)
        stack.enter_context(mock.patch.object(TensorVariable, "method_backward", backward))
        yield


def _anew(made: Made, original: Callable[..., Any]) -> Callable[..., Any]:
    """`original`, a traced `backward()`, which copies nothing of another one's."""

    @functools.wraps(original)
    def backward(*args: Any, **kwargs: Any) -> Any:
        made.clear()
        return original(*args, **kwargs)

    return backward


def _once_a_kind(made: Made, original: Callable[..., Any]) -> Callable[..., Any]:
    """`original`, which traces an accumulation; copied where one of the same look was traced."""

    @functools.wraps(original)
    def accumulate(self: Any, tx: Any, leaf: Any, gradient: Any, *rest: Any) -> Any:
        leaf, gradient = leaf.realize(), gradient.realize()
        looks = look_of(leaf), look_of(gradient)
        if rest or None in looks or not _is_none(leaf.var_getattr(tx, "grad")):
            return original(self, tx, leaf, gradient, *rest)
        effects, graph = tx.output.side_effects, tx.output.graph
        if looks in made:
            traced, stored = made[looks]
            nodes = traced.inputs_like([leaf, gradient])
            if nodes is not None and traced.graph is graph:
                node = traced.copy_for(nodes)[stored.as_proxy().node]
                proxy = fx.Proxy(node, stored.as_proxy().tracer)
                effects.store_attr(leaf, "grad", stored.clone(proxy=proxy))
                return ConstantVariable.create(None)
        last = next(iter(reversed(graph.nodes)))
        result = original(self, tx, leaf, gradient)
        traced = TracedCall(graph, [leaf, gradient], nodes_behind(graph, last))
        stored = effects.load_attr(leaf, "grad")
        is_made = look_of(stored) is not None and stored.as_proxy().node in traced.made
        if is_made and traced.may_be_copied():
            made[looks] = traced, stored
        return result

    return accumulate


def _is_none(item: Any) -> bool:
    return bool(item.is_python_constant()) and item.as_python_constant() is None
