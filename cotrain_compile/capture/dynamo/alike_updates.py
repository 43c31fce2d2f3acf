"""Alike updates: of parameters that look alike, the update of one is traced and the rest copied.

torch's Adam and AdamW go through their parameters in a loop, whose body asks of a parameter nothing
but what its tensors look like. Here the body is traced for the first parameter of each look; what
it puts into Dynamo's graph is put there again for the others, in their order.

Private torch API used: `ListVariable`, `LazyVariableTracker`, `TensorVariable`, `ValueMutationNew`,
`FakeTensor`, `torch.optim.adam._single_tensor_adam`, `no_dispatch`, `OutputGraph.graph`. Reason:
Dynamo follows each turn of a loop as if it had seen none. Tried on torch 2.13.0.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx
from torch._dynamo.variables.base import ValueMutationNew
from torch._dynamo.variables.lazy import LazyVariableTracker
from torch._dynamo.variables.lists import ListVariable
from torch._dynamo.variables.tensor import TensorVariable
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.node import map_arg
from torch.optim import adam
from torch.utils._mode_utils import no_dispatch

TRIED = ("2.13.",)
# Lists with an entry for each parameter, which the loop only reads.
_LOOPS = {adam._single_tensor_adam: 6}

Trace = Callable[[list[Any]], Any]


def traced_once_a_kind(
    parent: Any, called: object, args: Sequence[Any], kwargs: dict[str, Any], trace: Trace
) -> Any:
    """What `called` returns, if it is an update in a loop that can be traced by kinds; else None.

    `trace` traces it with the arguments that it is given.
    """
    count = _LOOPS.get(called) if torch.__version__.startswith(TRIED) else None  # type: ignore[call-overload]
    if count is None or _asks_for_more(kwargs) or len(args) != count:
        return None
    lists = [_entries_of(argument) for argument in args]
    length = len(lists[0] or ())
    if length < 2 or any(items is None or len(items) not in (0, length) for items in lists):
        return None
    return _trace_columns(parent.output.graph, lists, trace)


def _asks_for_more(kwargs: dict[str, Any]) -> bool:
    """Whether an update writes its lists, or reads tensors that are not in them."""
    values = {name: value.realize() for name, value in kwargs.items()}
    amsgrad = values.get("amsgrad")
    constant = all(value.is_python_constant() for value in values.values())
    return not constant or amsgrad is None or amsgrad.as_python_constant()


def _entries_of(argument: Any) -> list[Any] | None:
    """The entries of a list in the trace; None where it is anything else."""
    argument = argument.realize()
    return list(argument.items) if isinstance(argument, ListVariable) else None


def _trace_columns(graph: fx.Graph, lists: Sequence[Any], trace: Trace) -> Any:
    """Trace a loop column by column, or copy what a column of the same look has made."""
    made: dict[object, _Traced] = {}
    result = None
    for column in zip(*filter(None, lists), strict=True):
        look = tuple(map(_look_before, column))
        if look in made and (nodes := made[look].inputs_like(column)) is not None:
            made[look].copy_for(nodes)
            continue
        last = next(iter(reversed(graph.nodes)))
        entries = iter(column)
        arguments = [
            ListVariable([next(entries)] if items else [], mutation_type=ValueMutationNew())
            for items in lists
        ]
        result = trace(arguments)
        traced = _Traced(graph, [item.realize() for item in column], _behind(graph, last))
        if None not in look and traced.may_be_copied():
            made[look] = traced
    return result


def _look_before(item: Any) -> object:
    """What the update may ask of an entry; Dynamo has perhaps not made an input of it yet."""
    if isinstance(item, LazyVariableTracker) and not item.is_realized():
        return _look(item.peek_value())
    item = item.realize()
    return _look(_value(item)) if type(item) is TensorVariable else None


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
    """The update of one parameter: entries of the lists, and the nodes `made` of them."""

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
            if node.op not in ("call_function", "call_method") or type(value) is not FakeTensor:
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
            value = node.meta["example_value"]
            if id(value) not in values:
                values[id(value)] = _like(value)
            added.meta["example_value"] = values[id(value)]
            new[node] = added


def _behind(graph: fx.Graph, last: fx.Node) -> list[fx.Node]:
    new: list[fx.Node] = []
    for node in reversed(graph.nodes):
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
