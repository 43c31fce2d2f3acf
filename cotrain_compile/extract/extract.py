"""Extract: StepGraph -> Dataflow. The last place that sees an `fx.Node` on the way down.

Values become buffers by their storages, so views, in-place writes and tied weights need no special
case. An op whose result shares memory in a way its schema does not declare is refused by name.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import sympy
import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from cotrain_compile.capture.nodes.storages import storage_key
from cotrain_compile.dataflow import (
    Buffer,
    Checkpoints,
    Collective,
    Dataflow,
    Op,
    Phase,
    Role,
    SizeExpressions,
)
from cotrain_compile.errors import ExtractError
from cotrain_compile.extract.notes import job_of, masked_attention
from cotrain_compile.extract.op_bytes import nbytes_of
from cotrain_compile.extract.op_costs import scratch_name
from cotrain_compile.extract.regions.find import find_regions
from cotrain_compile.extract.updates import gradients_kept, update_groups
from cotrain_compile.extract.works import Works
from cotrain_compile.graph import StepGraph, returns_argument_memory
from cotrain_compile.graph.collectives import (
    all_ranks,
    awaited_by,
    copies_its_input,
    group_name_of,
    group_numbers,
    is_collective,
    is_wait,
    kind_of,
    ranks_in,
)
from cotrain_compile.graph.op_calls import PIECE, target_of
from cotrain_compile.graph.random_ops import generators_of
from cotrain_compile.graph.user_lines import calling_line
from cotrain_compile.placement.pieces import part_name


def extract(step: StepGraph, *, with_strides: bool = False) -> Dataflow:
    """The step as plain data.

    `with_strides` those of inputs are sizes, too, where they change: code is compiled for them.
    Raises `ExtractError` for an op whose memory effects are unknown.
    """
    reader = _Reader(step)
    for node in step.nodes:
        reader.read(node)
    kept = gradients_kept(step, reader.buffer_of)
    return Dataflow(
        fingerprint=step.fingerprint,
        ops=tuple(reader.ops),
        buffers=tuple(
            replace(buffer, role=Role.GRADIENT, param=kept[buffer.name])
            if buffer.name in kept
            else buffer
            for buffer in reader.buffers.values()
        ),
        updates=update_groups(step, reader.buffer_of),
        symbols=reader.sizes(with_strides=with_strides),
        expressions=reader.expressions(),
        notes=masked_attention(step),
        checkpoints=_checkpoints(step.checkpoints, reader),
        ranks=all_ranks() if any(op.collective for op in reader.ops) else 1,
        job=job_of(step),
        regions=tuple(found.region for found in find_regions(step, reader.buffer_of)),
    )


def _checkpoints(of_nodes: Checkpoints, named: _Namer) -> Checkpoints:
    """The same by buffers of the step's own: a view shows one of them, or an input."""
    shown = dict.fromkeys(named.buffer_of.get(name, "") for name in of_nodes.values)
    own = (n for n in shown if n and named.buffers[n].role is Role.TEMPORARY)
    return replace(of_nodes, values=tuple(own))


def buffer_names(step: StepGraph) -> Mapping[str, str]:
    """The buffer that each single-tensor node shows, by node name."""
    namer = _Namer(step)
    for node in step.nodes:
        namer.read(node)
    return namer.buffer_of


@dataclass
class _Namer:
    """Walks the graph once, naming a buffer for every new storage."""

    step: StepGraph
    buffers: dict[str, Buffer] = field(default_factory=dict)
    buffer_of: dict[str, str] = field(default_factory=dict)
    symbols: dict[str, int] = field(default_factory=dict)
    nbytes_expressions: dict[str, sympy.Expr] = field(default_factory=dict)
    _by_storage: dict[object, str] = field(default_factory=dict)

    @cached_property
    def _groups(self) -> dict[str, int]:
        return group_numbers(self.step.nodes)

    def read(self, node: fx.Node) -> None:
        if node.op == "placeholder":
            item = self.step.input_of_node[node.name]
            if isinstance(node.meta.get("val"), torch.Tensor):
                self._name_input(node, node.meta["val"], item.name, item.role)
            elif isinstance(size := node.meta.get("val"), torch.SymInt):
                self.symbols[str(size.node.expr)] = int(size.node.hint)
        elif node.op == "get_attr":
            value = node.meta.get("val", getattr(self.step.module, str(node.target), None))
            if isinstance(value, torch.Tensor):
                node.meta.setdefault("val", value)
                self._name_input(node, value, node.name, Role.CONSTANT)
        elif node.op == "call_function":
            self.read_call(node)
        elif node.op == "output":
            for name in self._buffers_in(node):
                held = self.buffers[name]
                self.buffers[name] = replace(held, is_output=True)

    def read_call(self, node: fx.Node) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The buffers that an op reads and writes."""
        ordered = [self._name_order("generator", d, Role.RNG) for d in generators_of(node)]
        held = _held_until(node)
        if is_collective(node):
            number = str(self._groups[group_name_of(node)])
            ordered.append(self._name_order("group", number, Role.GROUP))
        read = [name for source in (node, *held) for name in self._buffers_in(source)]
        reads = tuple(dict.fromkeys([*read, *ordered]))
        written = [*self._written_arguments(node), *ordered]
        for suffix, value in _tensors(node.meta.get("val")):
            known = self._by_storage.get(value.untyped_storage()._cdata)
            name = known or self._name_storage(value, self._called(node, suffix), Role.TEMPORARY)
            if known is None:
                written.append(name)
            elif known in reads and known not in written:
                _refuse_undeclared_view(node)
            if not suffix:
                self.buffer_of[node.name] = name
        return reads, tuple(dict.fromkeys(written))

    def _called(self, node: fx.Node, suffix: str) -> str:
        if node.target is not PIECE:
            return node.name + suffix
        (source,), (_, begin, end) = node.all_input_nodes, node.args
        return part_name(self.buffer_of[source.name], begin, end)  # type: ignore[arg-type]

    def _name_order(self, kind: str, which: str, role: Role) -> str:
        """What keeps ops in order, as a buffer that each of them reads and writes.

        It has none of the step's bytes, and is the user's afterwards.
        """
        key = kind, which
        if key not in self._by_storage:
            name = self._new_name(f"{kind}.{which}")
            self._by_storage[key] = name
            self.buffers[name] = Buffer(name, 0, role, is_input=True, is_output=True)
        return self._by_storage[key]

    def _name_input(self, node: fx.Node, value: torch.Tensor, name: str, role: Role) -> None:
        known = self._by_storage.get(value.untyped_storage()._cdata)
        self.buffer_of[node.name] = known or self._name_storage(value, name, role, is_input=True)

    def _name_storage(
        self, value: torch.Tensor, name: str, role: Role, is_input: bool = False
    ) -> str:
        name = self._new_name(name)
        storage = value.untyped_storage()
        # A batch is often a slice of a data set; what it is a slice of is not the step's memory.
        nbytes = nbytes_of(value) if role is Role.BATCH else storage.nbytes()
        size = _integer(self.nbytes_expressions, name, nbytes)
        self._by_storage[storage._cdata] = name
        self.buffers[name] = Buffer(name, size, role, is_input)
        return name

    def _new_name(self, name: str) -> str:
        while name in self.buffers:  # a node may be called like a user's parameter
            name += "~"
        return name

    def _buffers_in(self, node: fx.Node) -> Iterator[str]:
        # Of a tuple, an item reads its own tensor only.
        sources = [node] if node.target is operator.getitem else node.all_input_nodes
        for source in sources:
            for _, value in _tensors(source.meta.get("val")):
                name = self._by_storage.get(value.untyped_storage()._cdata)
                if name is not None:
                    yield name

    def _written_arguments(self, node: fx.Node) -> list[str]:
        if is_wait(node):  # until then a collective is still writing its result
            return [self.buffer_of[n.name] for n in node.all_input_nodes]
        schema = getattr(node.target, "_schema", None)
        if schema is None or not schema.is_mutable:
            return []
        written = []
        for argument, value in zip(schema.arguments, node.args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written += [self.buffer_of[n.name] for n in _nodes_in(value)]
        return written


@dataclass
class _Reader(_Namer):
    """Reads every op as well, with its flops and the bytes that it moves."""

    ops: list[Op] = field(default_factory=list)
    works: Works = field(default_factory=Works)
    flops_expressions: dict[str, sympy.Expr] = field(default_factory=dict)
    moved_expressions: dict[str, sympy.Expr] = field(default_factory=dict)

    def expressions(self) -> SizeExpressions:
        """Sizes over the inputs' symbols alone: an input that is a view into something larger has
        that one's size as its storage, which no input of the step tells."""
        known = self.symbols.keys()

        def over_inputs(table: Mapping[str, sympy.Expr]) -> dict[str, str]:
            return {
                name: str(expression)
                for name, expression in table.items()
                if {str(symbol) for symbol in expression.free_symbols} <= known
            }

        tables = (self.nbytes_expressions, self.flops_expressions, self.moved_expressions)
        return SizeExpressions(*map(over_inputs, tables))

    def sizes(self, *, with_strides: bool) -> dict[str, int]:
        """The symbols that some size depends on: a count of steps in an int is none."""
        tables = [self.nbytes_expressions, self.flops_expressions, self.moved_expressions]
        if with_strides:
            tables.append(_stride_expressions(self.step))
        used = {str(s) for t in tables for e in t.values() for s in e.free_symbols}
        return {name: value for name, value in self.symbols.items() if name in used}

    def _scratch(self, node: fx.Node, nbytes: Any) -> Iterator[str]:
        """What a kernel takes while it runs, as a buffer that nobody else touches."""
        if nbytes is not None:
            name = scratch_name(node)
            size = _integer(self.nbytes_expressions, name, nbytes)
            self.buffers[name] = Buffer(name, size, Role.WORKSPACE)
            yield name

    def read_call(self, node: fx.Node) -> tuple[tuple[str, ...], tuple[str, ...]]:
        reads, writes = super().read_call(node)
        # A view, which writes nothing, costs nothing; a wait is part of its collective.
        work = self.works.of(node, is_free=not writes or is_wait(node))
        cost = work.cost
        writes = (*writes, *self._scratch(node, work.scratch))
        self.ops.append(
            Op(
                name=node.name,
                target=str(target_of(node)),
                phase=self.step.phases.get(node.name, Phase.FORWARD),
                reads=reads,
                writes=writes,
                flops=_integer(self.flops_expressions, node.name, cost.flops),
                bytes_moved=_integer(self.moved_expressions, node.name, cost.bytes_moved),
                dtype=work.dtype,
                cost_is_known=cost.is_known,
                collective=_collective(node) if is_collective(node) else None,
                awaits=begun.name if (begun := awaited_by(node)) else "",
                module=self.step.modules.get(node.name, ""),
                line=calling_line(node.meta.get("stack_trace")),
                kind=work.kind,
            )
        )
        return reads, writes


def _integer(expressions: dict[str, sympy.Expr], name: str, size: Any) -> int:
    """`size` as a number for the traced shapes; a symbolic one is noted under `name`."""
    if isinstance(size, int):
        return size
    # Sizes that the trace found equal (two inputs of one batch) are one symbol from then on.
    expression = size.node.shape_env.simplify(size.node.expr)
    if not expression.is_number:
        expressions[name] = expression
    return int(size.node.hint)


def _stride_expressions(step: StepGraph) -> dict[str, sympy.Expr]:
    """The strides of inputs that are symbolic."""
    found: dict[str, sympy.Expr] = {}
    for node in step.module.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            for dimension, stride in enumerate(value.stride()):
                _integer(found, f"{node.name}.{dimension}", stride)
    return found


def _tensors(value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a node's value, each with a suffix that tells several apart."""
    if isinstance(value, torch.Tensor):
        yield "", value
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            if isinstance(item, torch.Tensor):
                yield f".{index}", item


def _collective(node: fx.Node) -> Collective:
    """What `node` exchanges; of dynamic sizes those of the trace."""
    given = [value for n in node.all_input_nodes for _, value in _tensors(n.meta.get("val"))]
    made = [value for _, value in _tensors(node.meta.get("val"))]
    nbytes = max(sum(_integer({}, "", nbytes_of(v)) for v in values) for values in (given, made))
    return Collective(kind_of(node), ranks_in(node), nbytes)


def _held_until(node: fx.Node) -> list[fx.Node]:
    """The exchange that `node` waits for, where that reads what it was given until then."""
    exchanges = [node.args[0]] if is_wait(node) else []
    return [e for e in exchanges if isinstance(e, fx.Node) and not copies_its_input(e)]


def _nodes_in(argument: Any) -> list[fx.Node]:
    return [leaf for leaf in tree_leaves(argument) if isinstance(leaf, fx.Node)]


def _refuse_undeclared_view(node: fx.Node) -> None:
    if hasattr(node.target, "_schema") and not returns_argument_memory(node):
        raise ExtractError(
            f"op {node.target} (node {node.name}) returns memory of its input though its schema "
            "says it does not, so its effects on memory are unknown. Declare the alias in the "
            "op's schema, or return a copy."
        )


__all__ = ["buffer_names", "extract", "storage_key"]
