"""Extend: the ATen graph of all layers, made of that in which some were left out.

The layer before those left out and the one behind it have to be alike, node for node; then so are
all that follow, since Dynamo's graph repeats itself there and lowering looks at nothing else. What
is made for a layer is a copy of that one, which reads its neighbours in place of the copied one's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg
from torch.fx.passes.shape_prop import _extract_tensor_metadata
from torch.utils._pytree import tree_leaves

from cotrain_compile.capture.layers.blocks import (
    Blocks,
    Forms,
    UnlikeError,
    blocks_of,
    look_of_tensor,
    own_numbers,
    runs_of,
)
from cotrain_compile.capture.layers.checkpoints import LayerCheckpoints
from cotrain_compile.capture.layers.labels import Labels, label, lists_in, phase_of, subgraph_of
from cotrain_compile.capture.layers.memory import (
    is_plain,
    of_tensors,
    same_storage,
    shown_in,
    storages,
    tell_of_writes,
)
from cotrain_compile.capture.layers.shorten import Shortened, entry_of, is_even, put_into
from cotrain_compile.capture.nodes.storages import traced_again

aten = torch.ops.aten
_VECTORS = {aten.stack.default, aten.cat.default}
_OF_A_VECTOR = {
    aten.linalg_vector_norm.default,
    aten.isfinite.default,
    aten.isnan.default,
    aten.isinf.default,
    aten.any.default,
    aten.all.default,
    aten.max.default,
    aten.min.default,
    aten.amax.default,
    aten.unsqueeze.default,
    aten.abs.default,
    aten.ne.Scalar,
    aten.eq.Scalar,
    aten.logical_not.default,
    aten.bitwise_not.default,
    aten.detach.default,
}


def extend(module: fx.GraphModule, short: Shortened) -> None:
    """Put the layers that `short` has left out into the ATen graph of the others, in place.

    Raises `UnlikeError` where that graph does not repeat itself; nothing is changed then.
    """
    extension = _Extension(module.graph, short)
    extension.check()
    extension.make()
    module.recompile()
    tell_of_writes(module.graph, extension.like())


class _Extension:
    """An ATen graph with what is known of its layers, while others are added."""

    def __init__(self, graph: fx.Graph, short: Shortened) -> None:
        self.graph, self.short = graph, short
        self.placeholders = graph.find_nodes(op="placeholder")
        if len(self.placeholders) != len(short.inputs):
            raise UnlikeError("AOTAutograd has put inputs together")
        layers = dict(zip(self.placeholders, short.inputs, strict=True))
        inputs = {node: layer for node, layer in layers.items() if layer is not None}
        self.labels: Labels = label(graph, short.stack, inputs)
        self.template, self.behind = short.template, short.behind
        order = sorted(
            layer for layer in set(self.labels.layer.values()) if layer not in short.left_out
        )
        self.rank = {layer: i for i, layer in enumerate(order)}
        start = self.rank[self.template - 2]
        calls = Labels({n: k for n, k in self.labels.layer.items() if n.op != "placeholder"})
        runs = [run for run in runs_of(graph, calls) if run.nodes[0].op != "placeholder"]
        self.blocks: Blocks = blocks_of(runs, order[start : start + 4])
        self.own = own_numbers(graph, self.labels)
        self.input_of = {(layers[n], self.own[n]): n for n in self.placeholders}
        self.owner: dict[int, fx.Node] = {}  # by storage, who made it
        for node in graph.nodes:
            for storage in storages(node):
                self.owner.setdefault(storage, node)
        self.checkpoints = LayerCheckpoints(graph)
        self.made: dict[tuple[int, int, int], fx.Node] = {}  # by layer, sweep and place
        self.memory: dict[tuple[int, int], torch.UntypedStorage] = {}  # by template's, and layer

    def check(self) -> None:
        """Raise where the two layers before those left out are not alike, or others read them."""
        blocks, template = self.blocks, self.template
        order = list(self.rank)
        forms = Forms(self.short.stack, blocks, self.labels, order, self.rank, self.own, self._look)
        if forms.of(template - 1) != forms.of(template):
            raise UnlikeError("two layers that are alike are not lowered to the same ops")
        self.checkpoints.check(self.labels, {template - 1, template, self.behind})
        for node in self.graph.nodes:
            if subgraph_of(node) is not None:
                raise UnlikeError(f"{node.name} is a graph of its own")
            if node in self.labels.gathers:
                self._check_gather(node)
                continue
            memory = [self.owner[storage] for storage in storages(node)]
            for read in {*node.all_input_nodes, *memory} - {node}:
                self._check_neighbour(node, read)
        for value in tree_leaves([n.meta.get("val") for n in self.graph.nodes]):
            if isinstance(value, torch.Tensor) and not is_plain(value):
                raise UnlikeError("a value is no plain tensor")

    def _check_neighbour(self, node: fx.Node, read: fx.Node) -> None:
        """Raise where what a node reads, or shares memory with, is of a layer too far away."""
        layer, owner = self.labels.layer.get(node), self.labels.layer.get(read)
        near = {
            self.template - 1: (self.template - 2, self.template - 1, self.template),
            self.template: (self.template - 1, self.template, self.behind),
        }
        if owner in self.short.left_out:
            raise UnlikeError(f"{read.name} is of a layer that was left out")
        if owner in near and layer not in near[owner]:
            raise UnlikeError(f"{node.name} reads {read.name}, of layer {owner}")

    def _look(self, node: fx.Node, read: Callable[[fx.Node], object]) -> object:
        """What of a node's value and notes decides what later stages make of it."""
        leaves = tree_leaves(node.meta.get("val"))
        shown = [look_of_tensor(leaf) for leaf in leaves]
        memory = [
            None if self.owner[storage] is node else read(self.owner[storage])
            for storage in storages(node)
        ]
        first = self.checkpoints.first_of(node)
        in_checkpoint = None if first is None else first is node or read(first)
        return shown, memory, phase_of(node), in_checkpoint

    def _check_gather(self, node: fx.Node) -> None:
        if node.target not in _VECTORS:
            raise UnlikeError(f"{node.name} reads several layers")
        for entries in lists_in(node):
            described = [
                entry_of(entry, self.labels, self.blocks.place, self.own) for entry in entries
            ]
            if not is_even(described, self.template - 1, range(self.template, self.template + 1)):
                raise UnlikeError(f"{node.name} has not the same of each layer")

    def make(self) -> None:
        """Add the nodes of all layers, and let those there are read them."""
        originals = list(self.graph.nodes)
        for sweep, step in enumerate(self.blocks.steps):
            run = self.blocks.runs[self.template, sweep]
            layers = self.short.left_out if step > 0 else reversed(self.short.left_out)
            point = run[-1].next if step > 0 else run[0]
            with self.graph.inserting_before(point):
                for layer in layers:
                    for place, node in enumerate(run):
                        self.made[layer, sweep, place] = self._copied(node, layer)
        for node in originals:
            own = self.labels.layer.get(node)
            if own is not None and own in (self.template, self.behind) and _is_call(node):
                self._read_anew(node, own)
        for node in self.labels.gathers:
            self._gather_anew(node)
        self._look_anew()

    def _copied(self, node: fx.Node, layer: int) -> fx.Node:
        """A node of the template as it is in another layer."""

        def read(other: fx.Node) -> fx.Node:
            return self._in(other, layer)

        made = put_into(self.graph, node, node.args, node.kwargs, read)
        self.checkpoints.number_anew(made, layer)
        if stack := node.meta.get("nn_module_stack"):
            made.meta["nn_module_stack"] = self._stack(stack, layer)
        if "val" in node.meta:
            made.meta["val"] = of_tensors(lambda value: self._value(value, layer), node.meta["val"])
        return made

    def _in(self, node: fx.Node, layer: int) -> fx.Node:
        """What stands for `node`, which the template reads, in another layer."""
        owner = self.labels.layer.get(node)
        if owner is None or owner not in (self.template - 1, self.template, self.behind):
            return node
        target = layer + self.rank[owner] - self.rank[self.template]
        if node.op == "placeholder":
            return self._input(target, node)
        if node not in self.blocks.place:
            return node
        _, sweep, place = self.blocks.place[node]
        if target in self.short.left_out:
            return self.made[target, sweep, place]
        return self.blocks.runs[target, sweep][place]

    def _input(self, layer: int, like: fx.Node) -> fx.Node:
        """The input of a layer that is to it what `like` is to its own."""
        found: fx.Node = self.input_of[layer, self.own[like]]
        return found

    def _stack(self, stack: Mapping[str, Any], layer: int) -> dict[str, Any]:
        rename = self.short.stack.named_anew
        distance = layer - self.template
        return {key: (rename(path, distance), kind) for key, (path, kind) in stack.items()}

    def _value(self, value: torch.Tensor, layer: int) -> torch.Tensor:
        """A value of the template as it is in another layer: in memory of that one's own."""
        storage = value.untyped_storage()
        owner = self.owner[storage._cdata]
        if self.labels.layer.get(owner) == self.template and owner.op != "placeholder":
            return shown_in(self._memory(storage, layer), value)
        return shown_in(same_storage(storage, owner, self._in(owner, layer)), value)

    def _memory(self, storage: torch.UntypedStorage, layer: int) -> torch.UntypedStorage:
        key = (storage._cdata, layer)
        if key not in self.memory:
            self.memory[key] = torch.UntypedStorage(storage.nbytes(), device="meta")
        return self.memory[key]

    def _read_anew(self, node: fx.Node, layer: int) -> None:
        """Let a node at the border of the new layers read those in place of the one beyond."""

        def read(other: fx.Node) -> fx.Node:
            return self._beyond(other, layer)

        if any(read(other) is not other for other in node.all_input_nodes):
            node.args, node.kwargs = map_arg(node.args, read), map_arg(node.kwargs, read)

        def shown(value: torch.Tensor) -> torch.Tensor:
            storage = value.untyped_storage()
            owner = self.owner[storage._cdata]
            if (instead := read(owner)) is owner:
                return value
            return shown_in(same_storage(storage, owner, instead), value)

        if "val" in node.meta:
            node.meta["val"] = of_tensors(shown, node.meta["val"])

    def _beyond(self, node: fx.Node, layer: int) -> fx.Node:
        """What a node of the template or of the layer behind reads in place of the other's."""
        instead = {
            (self.template, self.behind): self.template + 1,
            (self.behind, self.template): self.behind - 1,
        }.get((layer, self.labels.layer.get(node, -1)))
        if instead is None:
            return node
        if node.op == "placeholder":
            return self._input(instead, node)
        _, sweep, place = self.blocks.place[node]
        return self.made[instead, sweep, place]

    def _gather_anew(self, gather: fx.Node) -> None:
        """Have the new layers in the list that a node reads."""

        def longer(argument: Any) -> Any:
            if not isinstance(argument, list | tuple):
                return argument
            ofs = [self.labels.layer.get(n) if isinstance(n, fx.Node) else None for n in argument]
            if self.template not in ofs:
                return argument
            start = ofs.index(self.template)
            count = ofs.count(self.template)
            mine = argument[start : start + count]
            up = start > 0 and self.template - 1 in ofs[:start]
            layers = self.short.left_out if up else reversed(self.short.left_out)
            new = [self._in(node, layer) for layer in layers for node in mine]
            at = start + count if up else start
            return type(argument)([*argument[:at], *new, *argument[at:]])

        gather.args = tuple(longer(argument) for argument in gather.args)
        gather.kwargs = {name: longer(argument) for name, argument in gather.kwargs.items()}

    def like(self) -> dict[fx.Node, fx.Node]:
        """The inputs of layers that were left out, and those of the template's."""
        return {
            node: self.input_of[self.template, number]
            for (layer, number), node in self.input_of.items()
            if layer in self.short.left_out
        }

    def _look_anew(self) -> None:
        """Give vectors of all layers their new length, and what reads them."""
        changed = dict(self.labels.gathers)
        for node in list(self.graph.nodes):
            if node not in changed:
                continue
            before, now = node.meta["val"], traced_again(node)
            if before.shape == now.shape:
                continue
            node.meta["val"] = now
            node.meta["tensor_meta"] = _extract_tensor_metadata(now)
            for user in node.users:
                if user.target not in _OF_A_VECTOR:
                    raise UnlikeError(f"{user.name} reads a vector of all layers")
                changed[user] = None


def _is_call(node: fx.Node) -> bool:
    return node.op not in ("placeholder", "output")
