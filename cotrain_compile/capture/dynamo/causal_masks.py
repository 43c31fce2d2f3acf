"""Causal masks: a Hugging Face model gets the attention kernel in the trace that it has in eager.

In eager `transformers` makes no mask where `is_causal` says the same, so that flash attention runs
and shared keys and values are not repeated. While a graph is traced it cannot look at values and
makes the mask: `B * T * T` bytes, and no flash attention. Here what it would look at is known from
the graph: positions that the model itself has counted up hold one sequence a row. Where positions
or a padding mask are inputs of the step, or a window slides, the mask is made as in any trace.

Private API used: `find_packed_sequence_indices` and `_ignore_causal_mask_sdpa` of
`transformers.masking_utils`, tried with transformers 4.57 and 5.23; `tracing_state_functions` of
`torch._dynamo.variables.torch`, `VariableTracker.as_proxy` and `ConstantVariable`. Reason: there is
no argument for it, and a patched function would be another one when Dynamo checks its guards. Tried
on torch 2.13.0; before 2.14 Dynamo may answer `torch.compiler.is_exporting()` by yes.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch._dynamo.variables import ConstantVariable
from torch._dynamo.variables import torch as torch_variables
from torch.fx.experimental.symbolic_shapes import statically_known_true


@contextmanager
def not_exporting() -> Iterator[None]:
    """Within it, a traced function that asks whether it is exported is told that it is not."""
    answers = torch_variables.tracing_state_functions()
    with mock.patch.dict(answers, {torch.compiler.is_exporting: False}):
        yield


def known_in_trace(parent: Any, func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """What a call of a mask's helper returns in eager, as a constant of Dynamo; None: trace it."""
    masking: Any = sys.modules.get("transformers.masking_utils")
    called = getattr(func, "fn", None)
    if masking is None or called is None or kwargs:
        return None
    if called is getattr(masking, "find_packed_sequence_indices", None) and len(args) == 1:
        position_ids = _node(args[0])
        if position_ids is not None and counts_up(position_ids):
            return ConstantVariable.create(None)
    # Up to 4.57 the helper makes a mask in every trace; later ones only to spare padding a look.
    if called is getattr(masking, "is_torchdynamo_compiling", None) and not args:
        helper: Any = getattr(masking, "_ignore_causal_mask_sdpa", None)
        if helper is not None and parent.f_code is helper.__code__:
            padding = parent.symbolic_locals.get("padding_mask")
            if padding is not None and _is_none(padding):
                return ConstantVariable.create(False)
    return None


def counts_up(node: fx.Node) -> bool:
    """Whether each row of an integer tensor of Dynamo's graph grows by one from each to the next.

    Known from the ops that made it; False where that is not certain.
    """
    while node.op in ("call_function", "call_method"):
        if node.target is torch.arange:
            return _is_integer(node) and _step(node) == 1
        source = node.args[0] if node.args else None
        keeps = _KEEPS_ROWS.get(node.target)
        if not isinstance(source, fx.Node) or keeps is None or not keeps(node, source):
            return False
        node = source
    return False


def _step(arange: fx.Node) -> Any:
    return arange.args[2] if len(arange.args) > 2 else arange.kwargs.get("step", 1)


def _is_integer(node: fx.Node) -> bool:
    value = node.meta.get("example_value")
    return isinstance(value, torch.Tensor) and not (
        value.is_floating_point() or value.is_complex() or value.dtype is torch.bool
    )


def _same_rows(node: fx.Node, source: fx.Node) -> bool:
    """Of an op that reorders nothing: the last dimension stays, so every row of it does."""
    shape, before = (n.meta["example_value"].shape for n in (node, source))
    return bool(shape and before and statically_known_true(shape[-1] == before[-1]))


def _shifted(node: fx.Node, source: fx.Node) -> bool:
    """Of a sum: one number is added to all."""
    del source
    other = node.args[1] if len(node.args) == 2 else None
    if isinstance(other, fx.Node):
        other = other.meta.get("example_value")
    is_number = isinstance(other, int | torch.SymInt) and not isinstance(other, bool)
    return is_number and not node.kwargs and _is_integer(node)


def _only_new_dimensions(node: fx.Node, source: fx.Node) -> bool:
    """Of an indexing: everything is taken, dimensions of one are put in front."""
    index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    whole = all(i is None or i is Ellipsis or i == slice(None) for i in index)
    return whole and _same_rows(node, source)


def _cast(node: fx.Node, source: fx.Node) -> bool:
    return _is_integer(node) and _same_rows(node, source)


_KEEPS_ROWS: dict[Any, Callable[[fx.Node, fx.Node], bool]] = {
    **dict.fromkeys(("unsqueeze", "expand", "view", "reshape", "contiguous"), _same_rows),
    **dict.fromkeys((torch.unsqueeze, torch.reshape), _same_rows),
    **dict.fromkeys(("to", "long", "int"), _cast),
    **dict.fromkeys(("add", "sub", torch.add, operator.add, operator.iadd, operator.sub), _shifted),
    operator.getitem: _only_new_dimensions,
}


def _node(variable: Any) -> fx.Node | None:
    """The node of Dynamo's graph behind a tensor; None for anything else."""
    proxy = vars(variable).get("proxy")
    return proxy.node if isinstance(proxy, fx.Proxy) else None


def _is_none(variable: Any) -> bool:
    return bool(variable.is_python_constant()) and variable.as_python_constant() is None
