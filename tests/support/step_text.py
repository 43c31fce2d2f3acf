"""A step graph as lines for people: short steps are written down, not captured.

    x = batch(float32[2, 4])
    w = param(float32[4, 4], by=SGD, lr=0.1)
    forward:
    h = aten.mm(x, w)
    return(h)

In: such lines. Out: a `StepGraph` whose values are fake tensors, so that views share memory as they
do in a captured step. `lines` writes the lines of any step graph, one a node, without its phases.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.node import map_arg
from torch.utils.checkpoint import CheckpointPolicy

from cotrain_compile.capture.nodes.phases import PHASE_ANNOTATION
from cotrain_compile.dataflow import Phase, Role
from cotrain_compile.graph import OptimizerRule, StepGraph, StepInput, graph_module
from tests.support.calls import Call, Shape, Word, read_line

# What a trace notes at the nodes of a stretch, by its heading. Gradients are accumulated in the
# backward, but not by autograd; a checkpoint is a part of the forward.
_HEADINGS: Mapping[str, tuple[Phase, Mapping[str, Any]]] = {
    "forward": (Phase.FORWARD, {}),
    "checkpoint": (Phase.FORWARD, {"recompute": CheckpointPolicy.PREFER_RECOMPUTE}),
    "backward": (Phase.BACKWARD, {"autograd_backward": True}),
    "accumulation": (Phase.BACKWARD, {"custom": {PHASE_ANNOTATION: "backward"}}),
    "optimizer": (Phase.OPTIMIZER, {"custom": {PHASE_ANNOTATION: "optimizer"}}),
}
_ROLES = {role.value: role for role in Role}


def parse(text: str) -> StepGraph:
    """The step of `text`; a ValueError names the line that is wrong."""
    builder = _Builder()
    for line in text.splitlines():
        if line.strip():
            builder.add(line.strip())
    return builder.step()


class _Builder:
    def __init__(self) -> None:
        self.graph, self.mode = fx.Graph(), FakeTensorMode()
        self.nodes: dict[str, fx.Node] = {}
        self.inputs: list[StepInput] = []
        self.phases: dict[str, Phase] = {}
        self.modules: dict[str, str] = {}
        self.rules: dict[str, OptimizerRule] = {}
        self.kept: dict[str, str] = {}
        self.heading = "forward"

    def step(self) -> StepGraph:
        module = graph_module(torch.nn.Module(), self.graph)
        inputs = tuple(self.inputs)
        step = StepGraph(module, inputs, self.phases, self.modules, self.rules, self.kept)
        return step.verify()

    def add(self, line: str) -> None:
        if line.endswith(":"):
            self.heading = line.removesuffix(":")
        elif line.startswith("return("):
            _, call = read_line(f"output = {line.replace('return', 'output', 1)}")
            self.graph.output([self._node(value) for value in call.args])
            self.kept = {str(node): str(param) for param, node in call.kwargs.items()}
        else:
            self._value(*read_line(line.partition("  # ")[0]), line.partition("  # in ")[2])

    def _value(self, name: str, call: Call, module: str) -> None:
        if call.name in _ROLES:
            self._input(name, _ROLES[call.name], call)
            return
        phase, noted = _HEADINGS[self.heading]
        args, kwargs = self._node(list(call.args)), self._node(call.kwargs)
        target = _target(call.name)
        node = self.graph.create_node("call_function", target, tuple(args), kwargs, name)
        shown = map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
        with self.mode:
            value = target(*shown[0], **shown[1])
        node.meta = {**noted, "val": value}
        self._named(name, node)
        self.phases[name] = phase
        if module:
            self.modules[name] = module

    def _input(self, name: str, role: Role, call: Call) -> None:
        settings = dict(call.kwargs)
        param, key = (str(settings.pop(word, "")) for word in ("of", "key"))
        node = self.graph.create_node("placeholder", name, (), {}, name)
        (shape,) = call.args
        with self.mode:
            node.meta["val"] = torch.empty(shape.sizes, dtype=getattr(torch, shape.dtype))
        self.inputs.append(StepInput(name, name, role, param, key))
        if by := settings.pop("by", None):
            optimizer = getattr(torch.optim, by)
            (group,) = optimizer([torch.zeros(1)], **settings).param_groups
            self.rules[name] = OptimizerRule(
                optimizer, {key: value for key, value in group.items() if key != "params"}
            )
        self._named(name, node)

    def _named(self, name: str, node: fx.Node) -> None:
        assert node.name == name, f"{name} is taken, or no name that a graph may have"
        self.nodes[name] = node

    def _node(self, value: Any) -> Any:
        match value:
            case Word() if value.startswith("torch."):
                return getattr(torch, value.removeprefix("torch."))
            case Word():
                return self.nodes[value]
            case list():
                return [self._node(item) for item in value]
            case dict():
                return {key: self._node(item) for key, item in value.items()}
            case Shape():
                raise ValueError(f"{value} is the shape of an input")
        return value


def _target(name: str) -> Any:
    """The overload of ATen that `aten.mm` or `aten.add.Tensor` names, or `getitem`."""
    if name == "getitem":
        return operator.getitem
    found: Any = torch.ops
    for part in name.split("."):
        found = getattr(found, part)
    return found if isinstance(found, torch._ops.OpOverload) else found.default


def lines(step: StepGraph) -> list[str]:
    """One line a node, in order; of what the host runs, its own lines behind the call."""
    return list(_lines(step.module, step.module.graph, step.input_of_node))


def _lines(
    root: fx.GraphModule, graph: fx.Graph, inputs: Mapping[str, StepInput], indent: str = ""
) -> Iterator[str]:
    shown: dict[Any, str] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            role = inputs[node.name].role.value if node.name in inputs else "given"
            yield f"{indent}{node.name} = {role}({_shape(node.meta.get('val'))})"
        elif node.op == "get_attr":
            part = getattr(root, str(node.target), None)
            if isinstance(part, fx.GraphModule) and node.target not in shown:
                yield f"{indent}{node.name}:"
                yield from _lines(part, part.graph, {}, indent + "    ")
            else:
                yield f"{indent}{node.name}: as {shown.get(node.target, node.target)}"
            shown.setdefault(node.target, node.name)
        elif node.op == "output":
            if node.all_input_nodes:
                yield f"{indent}return({', '.join(map(_shown, _flat(node.args[0])))})"
        else:
            yield f"{indent}{node.name} = {_call(node)}"


def _call(node: fx.Node) -> str:
    arguments = [*map(_shown, node.args), *(f"{k}={_shown(v)}" for k, v in node.kwargs.items())]
    name = str(node.target).removesuffix(".default")
    if not isinstance(node.target, torch._ops.OpOverload):
        name = getattr(node.target, "__name__", name)
    return f"{name}({', '.join(arguments)})"


def _shown(argument: object) -> str:
    if isinstance(argument, (list, tuple)):
        return f"[{', '.join(map(_shown, argument))}]"
    return argument.name if isinstance(argument, fx.Node) else str(argument)


def _shape(value: object) -> str:
    if not isinstance(value, FakeTensor):
        return ""
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"


def _flat(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else [value]
