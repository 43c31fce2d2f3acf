"""Labels: to which layer of a stack of modules each node of a graph belongs, if to any.

A stack is a run of numbered modules, such as `model.layers.0`, `model.layers.1`. A node of the
forward belongs to the layer that called it, a subgraph (as of a checkpoint) to that of the nodes in
it; a node of the backward to that whose values it reads, in the order in which the backward comes
to them; one of the updates to that whose parameter it reads.
"""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator

from cotrain_compile.capture.nodes.phases import PHASE_ANNOTATION
from cotrain_compile.graph import StepInput

_NUMBERED = re.compile(r"(.*)\.(\d+)")
_MOST_MODULES_A_LAYER = 4


@dataclass(frozen=True)
class Stack:
    """A run of numbered modules: the path of their parent, and how many of them are one layer."""

    path: str
    modules_a_layer: int = 1

    def layer_of(self, node: fx.Node) -> int | None:
        """The layer that called `node`, as the trace has noted it; or that of all of a subgraph."""
        for path, _ in (node.meta.get("nn_module_stack") or {}).values():
            numbered = _NUMBERED.fullmatch(path)
            if numbered is not None and numbered[1] == self.path:
                return int(numbered[2]) // self.modules_a_layer
        if (called := subgraph_of(node)) is not None:
            calls = [inner for inner in called.graph.nodes if inner.op != "placeholder"]
            inside = {self.layer_of(inner) for inner in calls} - {None}
            return inside.pop() if len(inside) == 1 else None
        parts = _of_a_subgraph(node)
        return self.layer_of(parts) if parts is not None else None

    def named_anew(self, path: str, layers: int) -> str:
        """`path` as it is in the layer that comes so many `layers` later."""
        head = f"{self.path}."
        if not path.startswith(head):
            return path
        number, dot, rest = path[len(head) :].partition(".")
        return f"{head}{int(number) + layers * self.modules_a_layer}{dot}{rest}"


def subgraph_of(node: fx.Node) -> fx.GraphModule | None:
    """The graph that a `get_attr` node names."""
    if node.op != "get_attr":
        return None
    found = attrgetter(str(node.target))(node.graph.owning_module)
    return found if isinstance(found, fx.GraphModule) else None


def _of_a_subgraph(node: fx.Node) -> fx.Node | None:
    """The `get_attr` node whose graph `node` calls, or of whose call it is one of the results."""
    call = node.args[0] if node.target is operator.getitem else node
    if not isinstance(call, fx.Node) or not isinstance(call.target, HigherOrderOperator):
        return None
    return next((n for n in call.all_input_nodes if subgraph_of(n) is not None), None)


def _all_nodes(graph: fx.Graph) -> Iterator[fx.Node]:
    """The nodes of `graph` and of the graphs in it."""
    for node in graph.nodes:
        yield node
        if (called := subgraph_of(node)) is not None:
            yield from _all_nodes(called.graph)


def stacks_in(graph: fx.Graph, fewest: int) -> list[Stack]:
    """All stacks of at least `fewest` layers that call nodes of `graph`, those of most nodes first.

    A layer may be several modules: every second one is another kind, say.
    """
    called: dict[str, Counter[int]] = {}
    for node in _all_nodes(graph):
        for path, _ in (node.meta.get("nn_module_stack") or {}).values():
            if node.op != "placeholder" and (numbered := _NUMBERED.fullmatch(path)) is not None:
                called.setdefault(numbered[1], Counter())[int(numbered[2])] += 1
    most_first = sorted(called, key=lambda path: -called[path].total())
    return [
        Stack(path, modules)
        for path in most_first
        for modules in range(1, _MOST_MODULES_A_LAYER + 1)
        if len(called[path]) >= fewest * modules
    ]


@dataclass
class Labels:
    """The layer of each node; `gathers` are those that read a list with nodes of several layers."""

    layer: dict[fx.Node, int]
    gathers: dict[fx.Node, None] = field(default_factory=dict)


def phase_of(node: fx.Node) -> tuple[object, ...]:
    """What tells nodes of the forward, the backward and the updates apart, before they have one."""
    noted = node.meta.get("custom") or {}
    is_input = node.op == "placeholder"
    return is_input, bool(node.meta.get("autograd_backward")), noted.get(PHASE_ANNOTATION)


def of_inputs(graph: fx.Graph, stack: Stack, inputs: Sequence[StepInput]) -> dict[fx.Node, int]:
    """The layer of each placeholder that only one layer calls with; states have their parameter's.

    `inputs` describe the placeholders of Dynamo's `graph`.
    """
    placeholders = graph.find_nodes(op="placeholder")
    found: dict[fx.Node, int] = {}
    by_name: dict[str, int] = {}
    for node, item in zip(placeholders, inputs, strict=True):
        layers = {stack.layer_of(user) for user in node.users} - {None}
        if len(layers) == 1:
            found[node] = by_name[item.name] = next(iter(layers))  # type: ignore[assignment]
    for node, item in zip(placeholders, inputs, strict=True):
        if item.param in by_name:
            found[node] = by_name[item.param]
    return found


def label(graph: fx.Graph, stack: Stack, inputs: Mapping[fx.Node, int]) -> Labels:
    """The layer of each node of Dynamo's or an ATen graph, whose placeholders have `inputs`'."""
    labels = Labels(dict(inputs))
    forward: set[fx.Node] = set()
    reached: int | None = None  # of the backward that goes on
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        in_backward = _in_backward(node)
        layer = stack.layer_of(node)
        if layer is not None:
            forward.add(node)
        elif gives_a_list(node) and _reads_several(node, labels.layer):
            labels.gathers[node] = None
        elif in_backward:
            read = [labels.layer[n] for n in node.all_input_nodes if n in labels.layer]
            layer = min([*read, *([] if reached is None else [reached])], default=None)
        elif _reads_several(node, labels.layer):
            labels.gathers[node] = None
        elif (entry := entry_of_gather(node, labels)) is not None:
            layer = labels.layer.get(entry)
        else:
            layer = _of_an_update(node, labels.layer, forward)
        reached = layer if in_backward else None
        if layer is not None:
            labels.layer[node] = layer
    _fill_gaps(list(graph.nodes), labels)
    return labels


def _in_backward(node: fx.Node) -> bool:
    """Whether autograd ran a node, or the backward of a function of the user's has it."""
    return bool(node.meta.get("autograd_backward")) or phase_of(node)[2] == "function"


def _of_an_update(node: fx.Node, layer: Mapping[fx.Node, int], forward: set[fx.Node]) -> int | None:
    """What a node outside of layers has from what it reads, gradients last."""
    read = [n for n in node.all_input_nodes if n in layer and n not in forward]
    own = [layer[n] for n in read if not _in_backward(n)]
    return max(own or [layer[n] for n in read], default=None)


def lists_in(node: fx.Node) -> Iterable[Sequence[Any]]:
    """The lists of nodes among the arguments of `node`."""
    for argument in (*node.args, *node.kwargs.values()):
        if isinstance(argument, list | tuple) and any(isinstance(n, fx.Node) for n in argument):
            yield argument


def _reads_several(node: fx.Node, layer: Mapping[fx.Node, int]) -> bool:
    return any(len({layer[n] for n in nodes if n in layer}) > 1 for nodes in lists_in(node))


def gives_a_list(node: fx.Node) -> bool:
    """Whether a gather gives one result for each entry of its list, as the gradients of all."""
    return node.target is torch.autograd.grad or getattr(node.target, "__name__", "").startswith(
        "_foreach_"
    )


def entry_read(node: fx.Node) -> tuple[fx.Node, int] | None:
    """The gather whose result `node` takes out of its list, and the place there."""
    if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        gather, place = node.args[0], node.args[1]
        if gives_a_list(gather) and isinstance(place, int):
            return gather, place
    return None


def entry_of_gather(node: fx.Node, labels: Labels) -> fx.Node | None:
    """What `node` takes the result for out of the list that a gather gives, if it does."""
    read = entry_read(node)
    if read is None or read[0] not in labels.gathers:
        return None
    entries = max(lists_in(read[0]), key=len)
    entry = entries[read[1]]
    return entry if isinstance(entry, fx.Node) else None


def _fill_gaps(nodes: Sequence[fx.Node], labels: Labels) -> None:
    """What stands within a layer, or behind it and before the next, is of that one."""
    layer = labels.layer
    last, gap = None, []
    for node in nodes:
        if node not in layer:
            gap.append(node)
            continue
        if last is not None and gap and abs(layer[last] - layer[node]) <= 1:
            phases = {phase_of(n) for n in (last, *gap, node)}
            if len(phases) == 1 and not any(n in labels.gathers for n in gap):
                layer.update(dict.fromkeys(gap, layer[last]))
        last, gap = node, []
