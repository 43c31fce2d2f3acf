"""StepGraph: a whole training step as one ATen graph, with what each input and node is.

Made by `capture`; passes return new ones. The graph is functional but for the `copy_` nodes that
write a new value into a parameter or state, and for the tasks that passes insert.

Lazy modules: a graph as a module whose Python source is generated when it is first called.

Most graphs are rewritten, interpreted or handed to Inductor, and never called as they are. Writing
and compiling their source would be a third of the time that a placed step takes to rewrite.

Private torch API used: `torch.fx._lazy_graph_module._LazyGraphModule`, an `fx.GraphModule` that
does this. Tried on torch 2.11.0, 2.13.0 and 2.15.0.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx, nn
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.node import map_aggregate

from cotrain_compile.dataflow import Checkpoints, Phase, Role
from cotrain_compile.graph.collectives import group_numbers, is_collective, is_wait

_CARD = re.compile(r"device\(type='cuda', index=\d+\)")
# Return their argument's memory though their schemas do not say so.
_UNDECLARED_VIEWS = frozenset(
    {
        torch.ops.aten._unsafe_view.default,
        torch.ops.aten.unsafe_split.Tensor,
        torch.ops.aten.unsafe_split_with_sizes.default,
    }
)


@dataclass(frozen=True)
class StepInput:
    """A placeholder of the step graph: `name` is the user's word for it, `node` the graph's.

    `param` is the parameter that an optimizer state or a gradient belongs to, "" for all else.
    `key` is what the optimizer calls a state (`exp_avg`) or a setting (`lr`, `betas.0`).
    """

    node: str
    name: str
    role: Role
    param: str = ""
    key: str = ""


@dataclass(frozen=True)
class OptimizerRule:
    """By which optimizer a parameter is updated: the exact class and its group's settings."""

    optimizer: type[torch.optim.Optimizer]
    settings: Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class StepGraph:
    """The step: `module.graph` with one `StepInput` per placeholder, in order.

    `phases` and `modules` (dotted path of the calling module) are by node name; nodes that passes
    add have neither. `rules` says by parameter name which optimizer updates it; host kernels are
    chosen from it. `kept` says by the name of a returned node in which parameter's `.grad` it is
    kept. `checkpoints` has names of nodes.
    """

    module: fx.GraphModule
    inputs: tuple[StepInput, ...]
    phases: Mapping[str, Phase]
    modules: Mapping[str, str] = field(default_factory=dict)
    rules: Mapping[str, OptimizerRule] = field(default_factory=dict)
    kept: Mapping[str, str] = field(default_factory=dict)
    checkpoints: Checkpoints = field(default_factory=Checkpoints)

    @property
    def nodes(self) -> list[fx.Node]:
        return list(self.module.graph.nodes)

    @cached_property
    def input_of_node(self) -> Mapping[str, StepInput]:
        return {item.node: item for item in self.inputs}

    def copy(self) -> StepGraph:
        """A step graph whose nodes can be changed without touching this one's.

        Constants and submodules are shared, tensors are never copied.
        """
        graph = fx.Graph()
        values: dict[fx.Node, fx.Node] = {}
        output = graph.graph_copy(self.module.graph, values)
        if output is not None:
            graph.output(output)
            old = next(node for node in self.module.graph.nodes if node.op == "output")
            new = next(node for node in graph.nodes if node.op == "output")
            new.meta = copy.copy(old.meta)
        renamed = [(old.name, new.name) for old, new in values.items() if old.name != new.name]
        assert not renamed, f"copying changed node names: {renamed[:3]}"
        return replace(self, module=graph_module(self.module, graph))

    def verify(self) -> StepGraph:
        """Check that the graph is sound and every placeholder is described; returns itself."""
        self.module.graph.lint()
        placeholders = [node.name for node in self.nodes if node.op == "placeholder"]
        described = [item.node for item in self.inputs]
        assert placeholders == described, f"inputs {described} do not match {placeholders}"
        names = [item.name for item in self.inputs]
        twice = [name for name, count in Counter(names).items() if count > 1]
        assert not twice, f"two inputs share the name {twice[0]}"
        return self

    def text(self) -> str:
        """The graph as readable Python source, with shapes."""
        header = "\n".join(f"# {i.node}: {i.role.value} {i.name}" for i in self.inputs)
        return header + "\n" + str(self.module.print_readable(print_output=False))

    @cached_property
    def fingerprint(self) -> str:
        """Identifies the step: its ops, shapes and input names, not the values of its inputs.

        Nor those of fractions that are constants, a learning rate, say: no plan hangs on them.
        `MODEL-STEP`: the first half alone is of all that optimizers do not compute, and says
        nothing of names that the graph chose (`entry/choose_plan.py` reads it).
        """
        digest = hashlib.sha256()
        for item in self.inputs:
            digest.update(f"{item.node} {item.name} {item.role.value}\n".encode())
        groups = group_numbers(self.module.graph.nodes)
        for node in self.module.graph.nodes:
            digest.update(_line(node, node.name, node.args, node.kwargs, groups))
        return f"{self._of_model()}-{digest.hexdigest()[:8]}"

    def _of_model(self) -> str:
        digest, told, numbers = hashlib.sha256(), dict[fx.Node, str](), itertools.count()
        by_node = {item.node: item for item in self.inputs}
        groups = group_numbers(self.module.graph.nodes)
        for node in self.module.graph.nodes:
            item = by_node.get(node.name)
            is_update = self.phases.get(node.name) is Phase.OPTIMIZER
            if is_update or (item is not None and item.role is Role.HYPERPARAMETER):
                told[node] = "updates"
                continue
            told[node] = f"%{next(numbers)}" if item is None else f"{item.role.value} {item.name}"
            args, kwargs = fx.map_arg((node.args, node.kwargs), told.__getitem__)
            digest.update(_line(node, told[node], args, kwargs, groups))
        return digest.hexdigest()[:8]


def _line(node: fx.Node, name: str, args: Any, kwargs: Any, groups: Mapping[str, int]) -> bytes:
    """What a fingerprint takes of a node. Which card of a computer is no part of what it does.

    Nor are the names of `groups`, which have their numbers instead.
    """
    target = name if node.op == "placeholder" else node.target
    args, kwargs = map_aggregate((args, kwargs), _without_fraction)
    if is_collective(node):
        args, kwargs = map_aggregate((args, kwargs), lambda own: _numbered(own, groups))
    line = f"{name} {node.op} {target} {args} {kwargs} {shape(node)}\n"
    return _CARD.sub("device(type='cuda')", line).encode()


def _without_fraction(argument: Any) -> Any:
    return float if type(argument) is float else argument


def _numbered(argument: Any, groups: Mapping[str, int]) -> Any:
    return str(groups.get(argument, argument)) if isinstance(argument, str) else argument


def writes(graph: fx.Graph) -> Iterator[tuple[fx.Node, fx.Node, fx.Node]]:
    """Each `copy_` node of `graph` with its destination and the value it writes there."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
        destination, value = node.args[:2]
        assert isinstance(destination, fx.Node) and isinstance(value, fx.Node)
        yield node, destination, value


def returned_values(step: StepGraph) -> list[Any]:
    """What the step returns, in order: nodes, and what is none."""
    (output,) = step.module.graph.find_nodes(op="output")
    returned: Any = output.args[0]
    return list(returned)


def returns_argument_memory(node: fx.Node) -> bool:
    """Whether the result of a node's op is known to share memory with an argument."""
    if node.target in _UNDECLARED_VIEWS or is_wait(node):
        return True
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(r.alias_info is not None for r in schema.returns)


def shape(node: fx.Node) -> str:
    """Dtype, shape and strides of a node's value, as text; "" for what is not a tensor."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return ""
    return f"{value.dtype}{tuple(value.shape)}{tuple(value.stride())}"


def graph_module(root: nn.Module | Mapping[str, Any], graph: fx.Graph) -> fx.GraphModule:
    """`graph` as a module with what it names of `root`: attributes and submodules."""
    return _LazyGraphModule(root, graph)  # type: ignore[arg-type]
