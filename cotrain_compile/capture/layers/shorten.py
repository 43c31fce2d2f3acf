"""Shorten: Dynamo's graph without the layers that are as the one before them.

Kept are all layers up to the second of those that are alike, and all from the last of them on,
which reads what the second has made in place of what the one before had. All inputs stay, in order.

Private torch API used: `_dynamo_source` of Dynamo's placeholders. Tried on torch 2.13.0.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx._lazy_graph_module import _make_graph_module
from torch.fx.node import map_arg

from cotrain_compile.capture.layers.blocks import (
    Blocks,
    Forms,
    UnlikeError,
    blocks_of,
    follow,
    look_before,
    own_numbers,
    runs_of,
)
from cotrain_compile.capture.layers.labels import (
    Labels,
    Stack,
    entry_read,
    gives_a_list,
    label,
    lists_in,
    of_inputs,
    stacks_in,
)
from cotrain_compile.graph import StepInput

FEWEST_LEFT_OUT = 2
_FEWEST_LAYERS = FEWEST_LEFT_OUT + 5
"""One before, two alike, those left out, one more alike, one behind."""
# What may read a vector with an entry for each of a list: its length decides nothing of the result.
_OF_A_VECTOR = {torch.linalg.vector_norm, torch.linalg.norm, torch.norm, torch.any, torch.all}
_OF_A_VECTOR_BY_NAME = {"norm", "any", "all", "max", "min", "isfinite", "isnan", "isinf"}


@dataclass(frozen=True)
class Shortened:
    """A graph without some layers, and what it takes to have them again."""

    module: fx.GraphModule
    stack: Stack
    template: int  # the layer that those left out are copies of
    left_out: range
    inputs: Sequence[int | None]  # by placeholder, its layer
    text: str  # what was left out, node by node

    @property
    def behind(self) -> int:
        """The first layer that is kept again."""
        return self.left_out.stop


def shortened(module: fx.GraphModule, inputs: Sequence[StepInput]) -> Shortened | None:
    """Dynamo's `module` without what repeats itself; None where too little does.

    `inputs` describe its placeholders.
    """
    graph = module.graph
    for stack in stacks_in(graph, _FEWEST_LAYERS):
        labels = label(graph, stack, of_inputs(graph, stack, inputs))
        found = _alike(graph, stack, labels, inputs)
        if found is not None:
            return found.without(module)
    return None


def _alike(
    graph: fx.Graph, stack: Stack, labels: Labels, inputs: Sequence[StepInput]
) -> _Alike | None:
    """The longest run of layers that are alike, behind the first of which some can be left out."""
    order = sorted(set(labels.layer.values()))
    if len(order) < _FEWEST_LAYERS or not follow(order):
        return None
    runs, own = runs_of(graph, labels), own_numbers(graph, labels)
    described = dict(zip(graph.find_nodes(op="placeholder"), inputs, strict=True))

    def look(node: fx.Node, read: Any) -> object:
        item = described.get(node)
        return look_before(node, read), item and (item.role, item.key)

    best: _Alike | None = None
    start = 0
    while start + _FEWEST_LAYERS <= len(order):
        try:
            blocks = blocks_of(runs, order[start:], least=FEWEST_LEFT_OUT + 3)
        except UnlikeError:
            start += 1
            continue
        forms = Forms(stack, blocks, labels, order, {n: n for n in order}, own, look)
        alike = _last_alike(forms)
        found = _Alike(graph, stack, labels, blocks, range(blocks.first + 2, alike - 1), own)
        if len(found.left_out) > len(best.left_out if best else ()) and found.may_be_left_out():
            best = found
        start = max(start + 1, alike - order[0] - 1)
    return best if best and len(best.left_out) >= FEWEST_LEFT_OUT else None


def _last_alike(forms: Forms) -> int:
    """The first layer that is not as the first of the blocks, or the last of all."""
    blocks = forms.blocks
    try:
        wanted = forms.of(blocks.first)
        for layer in range(blocks.first + 1, blocks.last):
            if forms.of(layer) != wanted:
                return layer
    except UnlikeError:
        return blocks.first
    return blocks.last


@dataclass(frozen=True)
class _Alike:
    """Layers of Dynamo's graph that are alike, `left_out` behind the second of them."""

    graph: fx.Graph
    stack: Stack
    labels: Labels
    blocks: Blocks
    left_out: range
    own: Mapping[fx.Node, int]

    def may_be_left_out(self) -> bool:
        """Whether nobody needs what is left out but its neighbours, and lists of all layers."""
        alike = range(self.blocks.first, self.left_out.stop)
        for node in self.graph.nodes:
            if node in self.labels.gathers:
                if not self._is_even(node):
                    return False
                continue
            layer = self.labels.layer.get(node)
            for read in node.all_input_nodes:
                owner = self.labels.layer.get(read)
                if owner is None:
                    continue
                near = (owner,) if read.op == "placeholder" else (owner - 1, owner, owner + 1)
                if owner in alike and layer not in near:
                    return False
                if owner in self.left_out and layer == owner - 1 and layer not in self.left_out:
                    return False  # the second would read what is left out
        return True

    def _is_even(self, gather: fx.Node) -> bool:
        """Whether a gather has the same of each layer, in turn, and hangs not on how many."""
        if gather.op == "output" or not (gives_a_list(gather) or self._is_vector(gather)):
            return False
        layers = []
        for entries in lists_in(gather):
            described = [
                entry_of(entry, self.labels, self.blocks.place, self.own) for entry in entries
            ]
            layers.append([owner for owner, _ in described])
            if not is_even(described, self.blocks.first, self.left_out):
                return False
        return all(others == layers[0] for others in layers)

    def _is_vector(self, gather: fx.Node) -> bool:
        """Whether a gather makes a vector, of which only some norm and the like is read."""
        value = gather.meta.get("example_value")
        return (
            gather.target is torch.stack
            and isinstance(value, torch.Tensor)
            and value.dim() == 1
            and all(user.target in _OF_A_VECTOR | _OF_A_VECTOR_BY_NAME for user in gather.users)
            and all(user.meta["example_value"].dim() == 0 for user in gather.users)
        )

    def without(self, module: fx.GraphModule) -> Shortened:
        """`module` with what is left out left out."""
        graph = fx.Graph()
        new: dict[fx.Node, fx.Node] = {}
        dropped: list[str] = []
        template = self.blocks.first + 1

        def instead(node: fx.Node) -> fx.Node:
            if node not in new and node in self.blocks.place:
                _, sweep, i = self.blocks.place[node]
                node = self.blocks.runs[template, sweep][i]
            return new[node]

        for node in module.graph.nodes:
            layer = self.labels.layer.get(node)
            if node.op != "placeholder" and layer in self.left_out:
                dropped.append(f"{node.name} {self.blocks.place[node]}")
                continue
            args, kwargs = self._kept_arguments(node)
            new[node] = put_into(graph, node, args, kwargs, instead)
        placeholders = module.graph.find_nodes(op="placeholder")
        layers = [self.labels.layer.get(node) for node in placeholders]
        short = with_graph(module, graph)
        text = f"{self.stack} {self.left_out} {layers} {dropped}"
        return Shortened(short, self.stack, template, self.left_out, layers, text)

    def _kept_arguments(self, node: fx.Node) -> tuple[Any, Any]:
        """The arguments of a node that is kept, without what is not."""
        if (read := entry_read(node)) is not None and read[0] in self.labels.gathers:
            entries = max(lists_in(read[0]), key=len)
            place = sum(not self._is_left_out(entry) for entry in entries[: read[1]])
            return (read[0], place), node.kwargs
        if node not in self.labels.gathers:
            return node.args, node.kwargs

        def kept(argument: Any) -> Any:
            if isinstance(argument, list | tuple):
                left = [entry for entry in argument if not self._is_left_out(entry)]
                return type(argument)(left)
            return argument

        args = tuple(kept(argument) for argument in node.args)
        return args, {name: kept(argument) for name, argument in node.kwargs.items()}

    def _is_left_out(self, entry: object) -> bool:
        return isinstance(entry, fx.Node) and self.labels.layer.get(entry) in self.left_out


def entry_of(
    entry: object,
    labels: Labels,
    place: Mapping[fx.Node, tuple[int, ...]],
    own: Mapping[fx.Node, int],
) -> tuple[int | None, object]:
    """The layer of an entry of a list, and what of it: its place, or its number among its own."""
    if not isinstance(entry, fx.Node):
        return None, entry
    layer = labels.layer.get(entry)
    return layer, place[entry][1:] if entry in place else own.get(entry, entry.name)


def is_even(entries: Sequence[tuple[int | None, object]], first: int, left_out: range) -> bool:
    """Whether a list has the same of each layer from `first` to the last one left out, in turn.

    An entry is a layer and what of it.
    """
    alike = range(first, left_out.stop)
    found: dict[int, list[object]] = {}
    turn: list[int | None] = []
    for layer, what in entries:
        if not turn or turn[-1] != layer:
            turn.append(layer)
        if layer is not None and layer in alike:
            found.setdefault(layer, []).append(what)
    if not found:
        return True
    ordered = list(alike)
    places = [i for i, layer in enumerate(turn) if layer in alike]
    stretch = [turn[i] for i in places]
    together = places == list(range(places[0], places[0] + len(places)))
    same = all(what == found[first] for what in found.values()) if first in found else False
    return together and same and stretch in (ordered, ordered[::-1])


def put_into(
    graph: fx.Graph, node: fx.Node, args: Any, kwargs: Any, new: Callable[[fx.Node], fx.Node]
) -> fx.Node:
    """A copy of `node` in `graph`, which is called with what is `new` in place of `args`."""
    read = map_arg((args, kwargs), new)
    made = graph.create_node(node.op, node.target, *read, node.name, node.type)
    made.meta = copy.copy(node.meta)
    if hasattr(node, "_dynamo_source"):
        made._dynamo_source = node._dynamo_source
    return made


def with_graph(module: fx.GraphModule, graph: fx.Graph) -> fx.GraphModule:
    """`module` with all that Dynamo has noted on it, and another graph."""
    made = _make_graph_module(module, graph)  # as Dynamo makes it: nobody runs its code
    for name, value in vars(module).items():
        if name not in vars(made):
            setattr(made, name, value)
    made.meta = copy.copy(module.meta)
    return made
