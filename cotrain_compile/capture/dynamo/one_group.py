"""One group: tensors that are all of one device and type are grouped at once in a trace.

Clipping and optimizers group tensors by device and type, which mostly gives one group. Dynamo
follows a loop over all of them in Python to find that out; here their types are looked at.

Private torch API used: `torch._C._group_tensors_by_device_and_dtype`,
`TorchInGraphFunctionVariable._get_handlers`, `ListVariable`, `TensorVariable`. Reason: torch has
them decide how a call is traced. Tried on torch 2.13.0.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.lists import ListVariable
from torch._dynamo.variables.tensor import TensorVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

_GROUP: Any = torch._C._group_tensors_by_device_and_dtype


@contextmanager
def grouped_at_once() -> Iterator[None]:
    """Within it, the grouping of tensors that are alike is traced as one call."""
    handlers = TorchInGraphFunctionVariable._get_handlers()
    if _GROUP not in handlers:
        yield
        return
    with mock.patch.dict(handlers, {_GROUP: _at_once(handlers[_GROUP])}):
        yield


def _at_once(original: Callable[..., Any]) -> Callable[..., Any]:
    """`original`, which traces a grouping, for tensors that are not all of one kind."""

    @functools.wraps(original)
    def group(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        if not args or not _are_one_group(args[0].realize()):
            return original(self, tx, *args, **kwargs)
        return tx.inline_user_function_return(
            VariableTracker.build(tx, _one_group), list(args), kwargs
        )

    return group


def _one_group(lists: Sequence[Sequence[Any]], with_indices: bool = False) -> Any:
    first = lists[0][0]
    indices = list(range(len(lists[0]))) if with_indices else []
    return {(first.device, first.dtype): ([list(entries) for entries in lists], indices)}


def _are_one_group(lists: Any) -> bool:
    """Whether the first of `lists` has tensors of one device and type, and the others as many."""
    if not isinstance(lists, ListVariable) or not lists.items:
        return False
    each: list[Any] = [entries.realize() for entries in lists.items]
    if not all(isinstance(entries, ListVariable) for entries in each):
        return False
    if len({len(entries.items) for entries in each}) != 1:
        return False
    # In this order, which is the loop's, they become inputs of the graph.
    tensors = [entry.realize() for entry in each[0].items]
    if not tensors or not all(type(tensor) is TensorVariable for tensor in tensors):
        return False
    values = [tensor.as_proxy().node.meta["example_value"] for tensor in tensors]
    return len({(value.device, value.dtype) for value in values}) == 1
