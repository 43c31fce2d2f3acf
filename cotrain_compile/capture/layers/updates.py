"""Updates: which nodes of a graph update which parameter, and whether two updates are alike.

An update is all that the optimizer does with one parameter. Two are alike if their nodes are the
same calls of the same things of their own parameter, with results that look the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from cotrain_compile.capture.layers.labels import phase_of
from cotrain_compile.dataflow import Role
from cotrain_compile.graph import StepInput

Key = tuple[Role, str]
"""What an input is to its parameter: that itself, its gradient, a state by its name."""
_COPY = torch.ops.aten.copy_.default


@dataclass(frozen=True)
class Update:
    """The nodes that update one parameter, and its inputs by what they are to it."""

    tensors: Mapping[Key, fx.Node]
    nodes: Sequence[fx.Node]

    @property
    def param(self) -> fx.Node:
        return self.tensors[Role.PARAM, ""]

    @property
    def place(self) -> dict[fx.Node, object]:
        """What each of its inputs and nodes is to it."""
        inputs: dict[fx.Node, object] = {node: key for key, node in self.tensors.items()}
        return inputs | {node: i for i, node in enumerate(self.nodes)}

    def stands_alone(self) -> bool:
        """Whether its nodes follow each other, and nobody else reads what they make."""
        mine = {*self.nodes}
        return all(a.next is b for a, b in pairwise(self.nodes)) and all(
            user in mine or user.target is _COPY for node in self.nodes for user in node.users
        )


def keys_of(inputs: Sequence[StepInput]) -> list[tuple[str, Key] | None]:
    """By placeholder: the parameter that it is, or belongs to, and what it is to that."""
    return [
        (item.param, (item.role, item.key))
        if item.param
        else (item.name, (item.role, ""))
        if item.role is Role.PARAM
        else None
        for item in inputs
    ]


def updates_of(graph: fx.Graph, keys: Sequence[tuple[str, Key] | None]) -> dict[str, Update]:
    """The updates in `graph` by their parameter; `keys` are of its placeholders.

    What reads tensors of one parameter only is of its update, and so is what only that reads.
    """
    tensors: dict[str, dict[Key, fx.Node]] = {}
    owner: dict[fx.Node, str] = {}
    for node, key in zip(graph.find_nodes(op="placeholder"), keys, strict=True):
        if key is not None:
            tensors.setdefault(key[0], {})[key[1]] = node
            owner[node] = key[0]
    calls = [node for node in graph.nodes if _is_in_an_update(node)]
    for node in calls:
        owners = {owner[read] for read in node.all_input_nodes if read in owner}
        if len(owners) == 1:
            owner[node] = owners.pop()
    for node in reversed(calls):
        users = {owner.get(user) for user in node.users}
        if node not in owner and len(users) == 1 and None not in users:
            owner[node] = users.pop()  # type: ignore[assignment]
    nodes: dict[str, list[fx.Node]] = {}
    for node in calls:
        if node in owner:
            nodes.setdefault(owner[node], []).append(node)
    return {
        name: Update(tensors[name], mine)
        for name, mine in nodes.items()
        if (Role.PARAM, "") in tensors[name]
    }


def _is_in_an_update(node: fx.Node) -> bool:
    is_call = node.op in ("call_function", "call_method") and node.target is not _COPY
    return is_call and phase_of(node)[2] == "optimizer"


def form_of(
    update: Update, look: Callable[[fx.Node], object]
) -> tuple[list[object], list[fx.Node]]:
    """The form of an update, node by node, and what it reads of others, in turn.

    Forms of updates that are alike are equal; `look` is what the result of a node looks like.
    """
    known = update.place
    outside: dict[fx.Node, int] = {}

    def read(other: Any) -> object:
        if not isinstance(other, fx.Node):
            return type(other), other
        if other in known:
            return known[other]
        return "outside", outside.setdefault(other, len(outside))

    nodes = [
        (
            node.op,
            node.target,
            map_aggregate(node.args, read),  # type: ignore[arg-type]
            map_aggregate(node.kwargs, read),  # type: ignore[arg-type]
            node.meta.get("stack_trace"),
            node.meta.get("custom"),
            look(node),
        )
        for node in update.nodes
    ]
    shown = [(key, look(node)) for key, node in update.tensors.items()]
    return [*shown, *nodes, *(look(node) for node in outside)], list(outside)
