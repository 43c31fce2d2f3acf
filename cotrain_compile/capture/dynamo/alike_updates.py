"""Alike updates: of parameters that look alike, the update of one is traced and the rest copied.

torch's optimizers go through their parameters in a loop, whose body asks of a parameter nothing but
what its tensors look like. Here the body is traced for the first parameter of each look; what it
puts into Dynamo's graph is put there again for the others, in their order.

Private torch API used: `ListVariable`, `LazyVariableTracker`, `TensorVariable`, `ValueMutationNew`,
the `_single_tensor_*` functions of `torch.optim`, `OutputGraph.graph`. Reason: Dynamo follows each
turn of a loop as if it had seen none. Tried on torch 2.13.0.

One group: tensors that are all of one device and type are grouped at once in a trace.

Clipping and optimizers group tensors by device and type, which mostly gives one group. Dynamo
follows a loop over all of them in Python to find that out; here their types are looked at.

Private torch API used: `torch._C._group_tensors_by_device_and_dtype`,
`TorchInGraphFunctionVariable._get_handlers`, `ListVariable`, `TensorVariable`. Reason: torch has
them decide how a call is traced. Tried on torch 2.13.0.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch._dynamo.variables.base import ValueMutationNew, VariableTracker
from torch._dynamo.variables.lazy import LazyVariableTracker
from torch._dynamo.variables.lists import ListVariable
from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

from cotrain_compile.capture.dynamo.copied_calls import (
    TRIED,
    TracedCall,
    look_of,
    look_of_value,
    nodes_behind,
)

# Functions that update parameter after parameter, from lists with an entry for each of them.
_LOOPS = frozenset(
    value
    for name, module in sys.modules.items()
    if name.startswith("torch.optim.")
    for key, value in vars(module).items()
    if key.startswith("_single_tensor_")
)

Trace = Callable[[list[Any]], Any]


def traced_once_a_kind(
    parent: Any, called: object, args: Sequence[Any], kwargs: dict[str, Any], trace: Trace
) -> Any:
    """What `called` returns, if it is an update in a loop that can be traced by kinds; else None.

    `trace` traces it with the arguments that it is given.
    """
    if called not in _LOOPS or not torch.__version__.startswith(TRIED):
        return None
    arguments = [argument.realize() for argument in args]
    lists = [argument for argument in arguments if isinstance(argument, ListVariable)]
    others = [argument for argument in arguments if not isinstance(argument, ListVariable)]
    length = len(lists[0].items) if lists else 0
    if length < 2 or any(len(given.items) not in (0, length) for given in lists):
        return None
    if not all(map(_is_a_setting, [*others, *kwargs.values()])):
        return None
    if _is_set_by_the_first(kwargs) and not _have_one_dtype(lists[0].items):
        return None
    return _trace_columns(parent.output, arguments, trace)


def _is_a_setting(value: Any) -> bool:
    """Whether a value is the same for all parameters, and none that an update could write."""
    value = value.realize()
    return bool(value.is_python_constant()) or isinstance(value, SymNodeVariable)


def _is_set_by_the_first(kwargs: Mapping[str, Any]) -> bool:
    """Whether the first parameter's type decides a setting: Adafactor's epsilon, if not given."""
    epsilon = kwargs.get("eps1")
    return epsilon is not None and epsilon.is_python_constant() and not epsilon.as_python_constant()


def _have_one_dtype(items: Sequence[Any]) -> bool:
    looks = [_look_before(item) for item in items]
    return len({look[2] if isinstance(look, tuple) else None for look in looks}) == 1


def _trace_columns(output: Any, arguments: Sequence[Any], trace: Trace) -> Any:
    """Trace a loop column by column, or copy what a column of the same look has made."""
    made: dict[object, TracedCall] = {}
    result = None
    lists = [given for given in arguments if isinstance(given, ListVariable) and given.items]
    for place, column in enumerate(zip(*(given.items for given in lists), strict=True)):
        look = tuple(map(_look_before, column))
        tensors = [item for item in column if not _is_none(item)]
        if look in made and (nodes := made[look].inputs_like(tensors)) is not None:
            made[look].copy_for(nodes)
            continue
        last = next(iter(reversed(output.graph.nodes)))
        singles = [_single(given, place) for given in arguments]
        result = trace(singles)
        changed = _put_back(output, arguments, singles, place)
        traced = TracedCall(
            output.graph, [item.realize() for item in tensors], nodes_behind(output.graph, last)
        )
        if None not in look and not changed and traced.may_be_copied():
            made[look] = traced
    return result


def _single(argument: Any, place: int) -> Any:
    """An argument for one turn of the loop: of a list the entry there alone."""
    if not isinstance(argument, ListVariable):
        return argument
    return ListVariable(argument.items[place : place + 1], mutation_type=ValueMutationNew())


def _put_back(output: Any, arguments: Sequence[Any], singles: Sequence[Any], place: int) -> bool:
    """Write what a turn has put into its lists into those of all; whether it has."""
    changed = False
    for argument, single in zip(arguments, singles, strict=True):
        if not isinstance(argument, ListVariable) or not argument.items:
            continue
        if single.items[0] is not argument.items[place]:
            output.side_effects.mutation(argument)
            argument.items[place] = single.items[0]
            changed = True
    return changed


def _look_before(item: Any) -> object:
    """What the update may ask of an entry; Dynamo has perhaps not made an input of it yet."""
    if _is_none(item):
        return "none"
    if isinstance(item, LazyVariableTracker) and not item.is_realized():
        return look_of_value(item.peek_value())
    return look_of(item.realize())


def _is_none(item: Any) -> bool:
    """Whether an entry is None: what the update of such a parameter has no use for."""
    if isinstance(item, LazyVariableTracker) and not item.is_realized():
        return item.peek_value() is None
    return bool(item.is_python_constant()) and item.as_python_constant() is None


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
