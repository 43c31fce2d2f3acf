"""Segments: each stretch of a placed graph becomes a graph of its own, called by one node.

    %mm, %add, %copy_(%w, %add)   ->   %seg = segment_0(%x, %w), %getitem(%seg, 0)

A segment is functional but for the writes into its inputs, which stand at its end. Only values with
memory of their own cross its border: views are made again where they are needed, so that no two
inputs share memory. Equal segments have equal `key`s whatever their layers are called.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from cotrain_compile.backends.inductor.partition import LayerOps, base_of, is_shown
from cotrain_compile.graph import StepGraph, graph_module, shape
from cotrain_compile.passes.views import COPY

aten = torch.ops.aten

Sizes = Mapping[str, int]


@dataclass(frozen=True, eq=False)
class Segment:
    """One stretch as a graph: `ops` by name, `inputs` as fake tensors of the sizes to compile for.

    `strides` are those that others read its results with, `written` are the positions of the inputs
    that it writes, `stack_trace` is where in the user's code its first op comes from.
    """

    name: str
    module: fx.GraphModule
    inputs: tuple[Any, ...]
    strides: tuple[tuple[int, ...], ...]
    written: tuple[int, ...]
    ops: tuple[str, ...]
    stack_trace: str

    @property
    def key(self) -> str:
        """Equal for segments that compile to the same code: what comes in and goes out."""
        shapes = [f"{v.dtype} {tuple(v.shape)} {v.stride()} {v.device}" for v in self.inputs]
        return "\n".join([*shapes, str(self.strides), str(self.module.graph)])


@dataclass(frozen=True, eq=False)
class SegmentedStep:
    """A placed step in which `call_module` nodes call the `segments`, by the name of the module."""

    step: StepGraph
    segments: Mapping[str, Segment]


def segmented(
    placed: StepGraph, stretches: Sequence[LayerOps], sizes: Sizes, mode: Any
) -> SegmentedStep:
    """`placed` with a call of a segment in the place of each stretch.

    `sizes` are the values of dynamic dimensions, by symbol; `mode` is the fake mode for inputs.
    """
    joiner = _Joiner(placed, stretches, sizes, mode)
    for node in placed.nodes:
        joiner.visit(node)
    module = graph_module(
        {**_attributes(placed), **{n: s.module for n, s in joiner.segments.items()}}, joiner.graph
    )
    step = replace(placed, module=module)
    return SegmentedStep(step.verify(), joiner.segments)


def _attributes(placed: StepGraph) -> dict[str, Any]:
    nodes = placed.module.graph.find_nodes(op="get_attr")
    return {str(node.target): getattr(placed.module, str(node.target)) for node in nodes}


class _Joiner:
    """Builds the graph around the segments, node by node of the placed graph."""

    def __init__(
        self, placed: StepGraph, stretches: Sequence[LayerOps], sizes: Sizes, mode: Any
    ) -> None:
        self.graph = fx.Graph()
        self.segments: dict[str, Segment] = {}
        self._sizes, self._mode = sizes, mode
        self._stretch_of = {op: stretch for stretch in stretches for op in stretch.ops}
        self._values: dict[fx.Node, fx.Node] = {}
        self._needed = _needed_outside(placed.module.graph, self._stretch_of)

    def visit(self, node: fx.Node) -> None:
        stretch = self._stretch_of.get(node)
        if stretch is not None:
            if node is stretch.ops[-1]:
                self._call(stretch)
        elif node.op == "output":
            self.graph.output(fx.map_arg(node.args[0], self._value))
            next(iter(reversed(self.graph.nodes))).meta = node.meta
        elif not (node.op == "call_function" and is_shown(node)):
            self._value(node)

    def _value(self, node: fx.Node) -> fx.Node:
        """`node` in the graph around the segments; views are made where they are first needed."""
        if node.target is COPY and node in self._stretch_of:
            return self._value(base_of(node))
        if node not in self._values:
            self._values[node] = self.graph.node_copy(node, self._value)
        return self._values[node]

    def _call(self, stretch: LayerOps) -> None:
        builder = _Builder(stretch, self._sizes)
        results = [n for op in stretch.ops for n in self._needed.get(op, ())]
        module = builder.finish(results)
        name = f"segment_{len(self.segments)}"
        self.segments[name] = Segment(
            stretch.name,
            module,
            tuple(concrete(node.meta["val"], self._sizes, self._mode) for node in builder.inputs),
            tuple(_strides(result.meta["val"], self._sizes) for result in results),
            tuple(position for position, n in enumerate(builder.inputs) if n in builder.written),
            tuple(op.name for op in stretch.ops),
            stretch.ops[0].stack_trace or "",
        )
        call = self.graph.call_module(name, tuple(map(self._value, builder.inputs)))
        call.meta["stack_trace"] = stretch.ops[0].stack_trace
        for index, result in enumerate(results):
            item = self.graph.call_function(operator.getitem, (call, index))
            item.meta = dict(result.meta)
            self._values[result] = item


class _Builder:
    """Builds the graph of one segment."""

    def __init__(self, stretch: LayerOps, sizes: Sizes) -> None:
        self.graph = fx.Graph()
        self.inputs: list[fx.Node] = []
        self.written: dict[fx.Node, fx.Node] = {}  # the value each input gets
        self._sizes = sizes
        self._ops = set(stretch.ops)
        self._values: dict[fx.Node, fx.Node] = {}
        self._shown: dict[fx.Node, list[fx.Node]] = {}  # views with a value here, by their base
        self._placeholders: dict[fx.Node, fx.Node] = {}
        for op in stretch.ops:
            if op.target is COPY:
                self._write(op)
            else:
                self._values[op] = self._copy(op)

    def finish(self, results: Sequence[fx.Node]) -> fx.GraphModule:
        """The segment that returns `results`, with placeholders first and writes last."""
        outputs = [self._in_traced_dtype(result) for result in results]
        for base, value in self.written.items():
            self.graph.call_function(COPY, (self._placeholders[base], value))
        self.graph.output(tuple(outputs))
        return graph_module({}, self.graph)

    def _in_traced_dtype(self, result: fx.Node) -> fx.Node:
        """What others get of `result`: Inductor may make norms from ops that keep another dtype."""
        dtype = result.meta["val"].dtype
        return self.graph.call_function(aten.to.dtype, (self._value(result), dtype))

    def _write(self, op: fx.Node) -> None:
        base, value = op.args[:2]
        assert isinstance(base, fx.Node) and isinstance(value, fx.Node)
        old, new = self._value(base), self._value(value)
        if shape(base) != shape(value):
            new = self.graph.call_function(aten.copy.default, (old, new))
        self.written[base] = new
        # From here on, what shows the written memory shows the new value.
        for shown in self._shown.pop(base, ()):
            del self._values[shown]
        self._values[base] = new

    def _value(self, node: fx.Node) -> Any:
        size = node.meta.get("val")
        if isinstance(size, torch.SymInt | int):
            return concrete_size(size, self._sizes)
        if node.target is COPY:
            return self._value(base_of(node))
        if node not in self._values:
            is_item = node.target is operator.getitem and node.args[0] in self._ops
            base = base_of(node)
            is_copied = is_item or base is not node
            self._values[node] = self._copy(node) if is_copied else self._input(node)
            if base is not node:
                self._shown.setdefault(base, []).append(node)
        return self._values[node]

    def _copy(self, node: fx.Node) -> fx.Node:
        args, kwargs = fx.map_arg((node.args, node.kwargs), self._value)
        made = self.graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
        made.meta["stack_trace"] = node.stack_trace
        return made

    def _input(self, node: fx.Node) -> fx.Node:
        assert base_of(node) is node, f"{node} shows the memory of {base_of(node)}"
        last = self._placeholders[self.inputs[-1]] if self.inputs else None
        with self.graph.inserting_after(last):
            placeholder = self.graph.placeholder(f"input_{len(self.inputs)}")
        self.inputs.append(node)
        self._placeholders[node] = placeholder
        return placeholder


def _needed_outside(
    graph: fx.Graph, stretch_of: Mapping[fx.Node, LayerOps]
) -> dict[fx.Node, list[fx.Node]]:
    """For each op of a stretch, those of its results with a use outside: itself or its items."""
    needed: dict[fx.Node, list[fx.Node]] = {}
    for op, stretch in stretch_of.items():
        if op.target is COPY:
            continue
        items = [u for u in op.users if u.target is operator.getitem]
        for result in items if isinstance(op.meta.get("val"), list | tuple) else [op]:
            if any(stretch_of.get(user) is not stretch for user in _uses(result)):
                needed.setdefault(op, []).append(result)
    return needed


def _uses(node: fx.Node) -> Iterator[fx.Node]:
    """The ops, tasks and outputs that use `node` or a view of it."""
    for user in node.users:
        if user.op == "call_function" and is_shown(user):
            yield from _uses(user)
        else:
            yield user


def concrete(value: torch.Tensor, sizes: Sizes, mode: Any) -> torch.Tensor:
    """A fake tensor like `value`, with numbers for its dynamic dimensions."""
    lengths, strides = [concrete_size(n, sizes) for n in value.shape], _strides(value, sizes)
    with mode:
        return torch.empty_strided(lengths, strides, dtype=value.dtype, device=value.device)


def _strides(value: torch.Tensor, sizes: Sizes) -> tuple[int, ...]:
    return tuple(concrete_size(stride, sizes) for stride in value.stride())


def concrete_size(size: Any, sizes: Sizes) -> int:
    """The number of a size that may be symbolic."""
    if isinstance(size, int):
        return size
    expression = size.node.shape_env.simplify(size.node.expr)
    return int(expression.subs({s: sizes[str(s)] for s in expression.free_symbols}))
