"""Alike updates: of parameters that look alike, the update of one is traced and the rest copied.

torch's optimizers go through their parameters in a loop, whose body asks of a parameter nothing but
what its tensors look like. Here the body is traced for the first parameter of each look; what it
puts into Dynamo's graph is put there again for the others, in their order.

Private torch API used: `ListVariable`, `LazyVariableTracker`, `TensorVariable`, `ValueMutationNew`,
`FakeTensor`, the `_single_tensor_*` functions of `torch.optim`, `no_dispatch`,
`OutputGraph.graph`. Reason: Dynamo follows each turn of a loop as if it had seen none. Tried on
torch 2.13.0.

One group: tensors that are all of one device and type are grouped at once in a trace.

Clipping and optimizers group tensors by device and type, which mostly gives one group. Dynamo
follows a loop over all of them in Python to find that out; here their types are looked at.

Private torch API used: `torch._C._group_tensors_by_device_and_dtype`,
`TorchInGraphFunctionVariable._get_handlers`, `ListVariable`, `TensorVariable`. Reason: torch has
them decide how a call is traced. Tried on torch 2.13.0.
"""

from __future__ import annotations

import copy
import functools
import operator
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch._dynamo.variables.base import ValueMutationNew, VariableTracker
from torch._dynamo.variables.lazy import LazyVariableTracker
from torch._dynamo.variables.lists import ListVariable
from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.node import map_arg
from torch.utils._mode_utils import no_dispatch

TRIED = ("2.13.",)
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
    made: dict[object, _Traced] = {}
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
        traced = _Traced(output.graph, [item.realize() for item in tensors], _behind(output, last))
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
        return _look(item.peek_value())
    item = item.realize()
    return _look(_value(item)) if type(item) is TensorVariable else None


def _is_none(item: Any) -> bool:
    """Whether an entry is None: what the update of such a parameter has no use for."""
    if isinstance(item, LazyVariableTracker) and not item.is_realized():
        return item.peek_value() is None
    return bool(item.is_python_constant()) and item.as_python_constant() is None


def _look(value: object) -> object:
    """What the update may ask of a tensor; None of what is no plain one."""
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return None
    if any(not isinstance(size, int) for size in value.shape):
        return None
    return (
        value.shape,
        value.stride(),
        value.dtype,
        value.device,
        value.requires_grad,
        value.is_conj(),
        value.is_neg(),
    )


def _value(variable: Any) -> Any:
    return variable.as_proxy().node.meta["example_value"]


@dataclass(frozen=True)
class _Traced:
    """The update of one parameter: its tensors in the lists, and the nodes `made` of them."""

    graph: fx.Graph
    column: Sequence[Any]
    made: Sequence[fx.Node]

    @cached_property
    def order(self) -> Sequence[int]:
        """The entries in the order in which they became inputs of the graph."""
        place = {node: i for i, node in enumerate(self.graph.find_nodes(op="placeholder"))}
        mine = [item.as_proxy().node for item in self.column]
        return sorted(range(len(mine)), key=lambda i: place.get(mine[i], -1))

    def inputs_like(self, column: Sequence[Any]) -> list[fx.Node] | None:
        """The nodes of other entries, made inputs in the order of these; None if they differ."""
        realized = {i: column[i].realize() for i in self.order}
        mine = [item.as_proxy().node for item in self.column]
        others = [realized[i] for i in range(len(mine))]
        if any(type(item) is not TensorVariable for item in others):
            return None
        nodes = [item.as_proxy().node for item in others]
        looks = ([_look(n.meta["example_value"]) for n in some] for some in (mine, nodes))
        same = next(looks) == next(looks)
        return nodes if same and len(set(nodes)) == len(nodes) else None

    def may_be_copied(self) -> bool:
        """Whether what was made are calls, in memory of their own or all of that of an input."""
        if any(type(item) is not TensorVariable for item in self.column):
            return False
        values = [_value(item) for item in self.column]
        given, memory = {id(value) for value in values}, {_storage(value) for value in values}
        for node in self.made:
            value = node.meta.get("example_value")
            if node.op not in ("call_function", "call_method"):
                return False
            if node.target is operator.setitem or _is_of_settings(node):
                continue
            if type(value) is not FakeTensor:
                return False
            if _storage(value) in memory and id(value) not in given:
                return False
        return len(memory) == len(values)

    def copy_for(self, inputs: Sequence[fx.Node]) -> None:
        """Add the nodes that were made to the graph again, of other `inputs`."""
        of = [item.as_proxy().node for item in self.column]
        new = dict(zip(of, inputs, strict=True))
        values = {id(a.meta["example_value"]): b.meta["example_value"] for a, b in new.items()}
        for node in self.made:
            added = self.graph.create_node(
                node.op,
                node.target,
                map_arg(node.args, lambda n: new.get(n, n)),
                map_arg(node.kwargs, lambda n: new.get(n, n)),
                node.name.rstrip("0123456789").rstrip("_") or node.name,
                node.type,
            )
            added.meta = copy.copy(node.meta)
            value = node.meta.get("example_value")
            if isinstance(value, FakeTensor):
                if id(value) not in values:
                    values[id(value)] = _like(value)
                added.meta["example_value"] = values[id(value)]
            new[node] = added


def _is_of_settings(node: fx.Node) -> bool:
    """Whether `node` computes with numbers alone: the same for all, as `-lr`, and no `p.item()`."""
    numbers = [n.meta.get("example_value") for n in (node, *node.all_input_nodes)]
    return all(isinstance(value, torch.SymFloat | torch.SymInt) for value in numbers)


def _behind(output: Any, last: fx.Node) -> list[fx.Node]:
    new: list[fx.Node] = []
    for node in reversed(output.graph.nodes):
        if node is last:
            break
        new.append(node)
    return new[::-1]


def _storage(value: torch.Tensor) -> int:
    address: int = value.untyped_storage()._cdata
    return address


def _like(value: FakeTensor) -> torch.Tensor:
    """A fake tensor that looks the same, in memory of its own."""
    with no_dispatch():
        bare = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        return FakeTensor(value.fake_mode, bare, value.device)


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
