"""Split ops: the regions that a plan has in parts, part after part.

    %mm, %_log_softmax, ..., %mm_1(%_log_softmax_backward)
    ->   %mm_1 = zeros, %mm_part0(%x[:n]), ..., %mm_1 += %mm_1_part0, %mm_part1(%x[n:]), ...

What the rest of the step reads of a region stays the node that it was, which makes room for it. A
part reads its rows of what is outside as views. What the graph becomes is, as data, what
`placement.split` makes of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from cotrain_compile.capture.nodes.storages import is_view, traced_again
from cotrain_compile.dataflow import Phase
from cotrain_compile.dataflow.regions import (
    Collected,
    Ends,
    collect_name,
    counts_name,
    ends_name,
    part_name,
    part_rows,
    shifted_name,
    sum_name,
)
from cotrain_compile.errors import PlanError
from cotrain_compile.extract.extract import buffer_names
from cotrain_compile.extract.regions.find import find_regions
from cotrain_compile.extract.regions.rows import Rows, part_shape
from cotrain_compile.extract.regions.told import LIKELIHOOD_LOSSES, FoundRegion, in_memory
from cotrain_compile.graph import StepGraph
from cotrain_compile.graph.op_calls import arguments_of
from cotrain_compile.passes.views import ADD_IN_PLACE, COPY, GIVEN, base_of
from cotrain_compile.plan import Plan

aten = torch.ops.aten
_SHAPED = frozenset(
    {
        aten.view.default,
        aten._unsafe_view.default,
        aten.reshape.default,
        aten.expand.default,
        aten.slice_backward.default,
    }
)
# Which argument is the number of samples.
_SAMPLES = {aten.native_group_norm.default: 3, aten.native_group_norm_backward.default: 5}
_FILLS = {"aten.ones_like.default": 1, "aten.zeros_like.default": 0}
_SUM = 2  # of `reduction`


def split_ops(step: StepGraph, plan: Plan) -> StepGraph:
    """A step graph in which the regions that `plan` has in parts run so."""
    splits = {name: parts for name, parts in plan.placement.splits.items() if parts > 1}
    if not splits:
        return step
    found = {each.region.name: each for each in find_regions(step, buffer_names(step))}
    for name in sorted(splits):
        if name not in found:
            raise PlanError(
                f"the plan has {name} in parts, which this step has not; make a new one"
            )
        step = _Splitting(step, found[name], splits[name]).run()
    step.module.recompile()
    return step


class _Splitting:
    def __init__(self, step: StepGraph, found: FoundRegion, parts: int) -> None:
        self.step, self.grown = step, found.grown
        self.region = found.region
        self.window, *_ = self.windows = found.region.windows
        # What a part has, by what the whole step has: values, and its rows of values from outside.
        self.own: dict[int, dict[fx.Node, fx.Node]] = {}
        # Values with the rows that a part takes of them.
        self.taken = dict(self.grown.needs)
        self.rows = part_rows(found.region.length, parts)
        self.length = found.region.length
        self.graph = step.module.graph
        self.node = {node.name: node for node in self.graph.nodes}
        # As they were: what is collected becomes the room for it.
        self.calls = {n: (n.target, n.args, n.kwargs) for n in self.grown.ops}
        self.reads = {n: n.all_input_nodes for n in self.grown.ops}
        self.phases, self.modules = dict(step.phases), dict(step.modules)
        self.flat: dict[fx.Node, fx.Node] = {}

    def run(self) -> StepGraph:
        if len(self.rows) < 2:
            return self.step
        for window, nodes in zip(self.windows, self.grown.windows, strict=True):
            self.window = window
            self._run_window(nodes)
        self._erase()
        return replace(self.step, phases=self.phases, modules=self.modules)

    def _run_window(self, nodes: Sequence[fx.Node]) -> None:
        last = nodes[-1]
        for name in reversed(self.window.later):
            last.append(self.node[name])
        place = last.next
        for name in self.window.unread:
            self._fill(self.node[name])
        for counted in self.window.counted:
            self._count(self.node[counted.value], self.node[counted.op])
        with self.graph.inserting_before(place):
            rooms = [(result, self._room(result, place)) for result in self.window.collected]
            for _, room in rooms:
                base_of(room).meta[GIVEN] = True
            start = 0
            for part, count in enumerate(self.rows):
                self._part(nodes, part, start, count, rooms)
                start += count
            for result, room in rooms:
                if result.sum_nbytes:
                    self._rounded(result, room, place)
        for result in self.window.collected:
            self._is_outside(self.node[result.value])

    def _is_outside(self, node: fx.Node) -> None:
        """From here on parts take their rows of the whole that is collected in `node`."""
        if node in self.grown.rows:
            self.taken[node] = self.grown.rows[node]
        for own in self.own.values():
            own.pop(node, None)

    # What is there before the parts.

    def _fill(self, node: fx.Node) -> None:
        """`node` without what it has looked at the shape of."""
        value = node.meta["val"]
        fill = _FILLS.get(str(node.target), arguments_of(node).get("fill_value"))
        node.target, node.args = aten.full.default, (list(value.shape), fill)
        node.kwargs = {"dtype": value.dtype, "device": value.device, "pin_memory": False}

    def _count(self, node: fx.Node, loss: fx.Node) -> None:
        """How many rows of a loss count: `node` becomes the sum of what says so of each."""
        arguments = arguments_of(loss)
        with self.graph.inserting_before(loss):
            flags = self._made(
                counts_name(node.name),
                aten.ne.Scalar,
                (arguments["target"], arguments.get("ignore_index", -100)),
                of=node,
            )
        value = node.meta["val"]
        dims = list(range(flags.meta["val"].dim()))
        node.target, node.args = aten.sum.dim_IntList, (flags, dims)
        node.kwargs = {"dtype": value.dtype}
        flags.append(node)
        self._join(node)

    def _room(self, result: Collected, place: fx.Node) -> fx.Node:
        """What there is before the first part, with its dimensions in memory as the value's."""
        node: fx.Node = self.node[result.value]
        value = node.meta["val"]
        dtype = torch.float32 if result.sum_nbytes else value.dtype
        target = aten.zeros.default if result.is_sum else aten.empty.memory_format
        kwargs = {"dtype": dtype, "device": value.device, "pin_memory": False}
        order = in_memory(value)
        sizes = [value.shape[dim] for dim in order]
        back = [order.index(dim) for dim in range(len(order))]
        if not result.sum_nbytes and not result.permuted:
            node.target, node.args, node.kwargs = target, (sizes,), kwargs
        else:
            name = sum_name(node.name) if result.sum_nbytes else result.room
            made = self._made(name, target, (sizes,), kwargs, of=node)
            if not result.sum_nbytes:
                made.meta["val"] = value.permute(order)  # the memory that views of the value show
                node.target, node.args, node.kwargs = aten.permute.default, (made, back), {}
            elif result.permuted:
                return self._view(f"{node.name}_laid", aten.permute.default, (made, back))
            else:
                return made
        self._join(node)
        place.prepend(node)
        return node

    def _rounded(self, result: Collected, room: fx.Node, place: fx.Node) -> None:
        node = self.node[result.value]
        if result.divided_by:
            node.target, node.args = aten.div.Tensor, (room, self.node[result.divided_by])
            node.kwargs = {}
        else:
            node.target, node.args = aten._to_copy.default, (room,)
            node.kwargs = {"dtype": node.meta["val"].dtype}
        self._join(node)
        place.prepend(node)

    # A part.

    def _part(
        self,
        nodes: Sequence[fx.Node],
        part: int,
        start: int,
        count: int,
        rooms: Sequence[tuple[Collected, fx.Node]],
    ) -> None:
        own = self.own.setdefault(part, {})
        read = {source for node in nodes for source in self.reads[node]}
        for node, rows in self.taken.items():
            if node in read and node not in own:
                name = f"{part_name(node.name, part)}_rows"
                own[node] = self._taken(node, rows, name, start, count)
                own[node].meta[GIVEN] = True
        for op in nodes:
            for ends in self.region.ends:
                if ends.op == op.name:
                    own[self.node[ends.value]] = self._ends_of(ends, part, start, count, op)
            target, args, kwargs = self._call(op, count)
            args, kwargs = fx.map_arg((args, kwargs), lambda node: own.get(node, node))
            copy = self._copy(part_name(op.name, part), target, args, kwargs, op)
            own[op] = copy
            for result, room in rooms:
                if result.value == op.name and not result.at_end:
                    self._collect(result, room, copy, part, start, count)
        for result, room in rooms:
            if result.at_end:
                self._collect(result, room, own[self.node[result.value]], part, start, count)

    def _ends_of(self, ends: Ends, part: int, start: int, count: int, of: fx.Node) -> fx.Node:
        """Where groups of rows end in a part: from its first row on, and within its rows."""
        value = self.node[ends.value]
        shifted = shifted_name(ends.value, part)
        from_start = self._made(shifted, aten.sub.Tensor, (value, start), of=of)
        from_start.meta[GIVEN] = True  # where a part begins is the number that its code has not
        name = ends_name(ends.value, part)
        return self._made(name, aten.clamp.default, (from_start, 0, count), of=of)

    def _call(self, op: fx.Node, count: int) -> tuple[Any, Any, Any]:
        """What a part of so many rows calls in place of `op`."""
        target, args, kwargs = self.calls[op]
        if target in _SHAPED:
            shape = part_shape(op.meta["val"].shape, self.grown.rows[op], self.length, count)
            args = (args[0], list(shape), *args[2:])
        elif target in LIKELIHOOD_LOSSES and args[3] == 1:
            args = (*args[:3], _SUM, *args[4:])
        elif target in _SAMPLES:
            at = _SAMPLES[target]
            samples: Any = args[at]
            args = (*args[:at], samples // self.length * count, *args[at + 1 :])
        return target, args, kwargs

    def _taken(self, node: fx.Node, rows: Rows, name: str, start: int, count: int) -> fx.Node:
        """The rows of `node` from outside that a part needs, as a view."""
        shape = node.meta["val"].shape
        each = 1
        for dim in rows.dims:
            each *= shape[dim]
        each //= self.length
        source, dim = node, rows.first
        if rows.first != rows.last:
            source = self._flat(node, rows)
        span = (dim, start * each, (start + count) * each)
        joined = rows.first != rows.last
        made = self._view(f"{name}_flat" if joined else name, aten.slice.Tensor, (source, *span))
        if joined:
            sizes = list(part_shape(shape, rows, self.length, count))
            made = self._view(name, aten.view.default, (made, sizes))
        return made

    def _flat(self, node: fx.Node, rows: Rows) -> fx.Node:
        """`node` with the dimensions of its rows as one."""
        if node not in self.flat:
            shape = list(node.meta["val"].shape)
            sizes = [*shape[: rows.first], -1, *shape[rows.last + 1 :]]
            self.flat[node] = self._view(f"{node.name}_rows", aten.view.default, (node, sizes))
        return self.flat[node]

    def _collect(
        self, result: Collected, room: fx.Node, value: fx.Node, part: int, start: int, count: int
    ) -> None:
        name = collect_name(result.value, part)
        of = self.node[result.value]
        if result.is_sum:
            self._made(name, ADD_IN_PLACE, (room, value), of=of)
            return
        rows = self.grown.rows[of]
        place = self._taken(room, rows, f"{name}_into", start, count)
        self._made(name, COPY, (place, value), of=of)

    # Nodes.

    def _copy(self, name: str, target: Any, args: Any, kwargs: Any, op: fx.Node) -> fx.Node:
        copy = self._named(name, target, args, kwargs)
        copy.meta = {key: value for key, value in op.meta.items() if key != "val"}
        copy.meta["val"] = traced_again(copy)
        if not is_view(op):
            self._tell(name, op)
        return copy

    def _made(
        self, name: str, target: Any, args: Any, kwargs: Any = None, *, of: fx.Node
    ) -> fx.Node:
        made = self._named(name, target, args, kwargs or {})
        made.meta = {key: value for key, value in of.meta.items() if key == "stack_trace"}
        made.meta["val"] = (
            traced_again(made)
            if args and isinstance(args[0], fx.Node)
            else _like(of.meta["val"], made)
        )
        self._tell(name, of)
        return made

    def _view(self, name: str, target: Any, args: Any) -> fx.Node:
        # Two regions may have rows of one value: the graph then tells their views apart.
        view = self.graph.create_node("call_function", target, args, {}, name=name)
        view.meta["val"] = traced_again(view)
        return view

    def _named(self, name: str, target: Any, args: Any, kwargs: Any) -> fx.Node:
        node = self.graph.create_node("call_function", target, args, kwargs, name=name)
        if node.name != name:
            raise PlanError(
                f"the step has a value called {name}, as a part would be; give it another name, or "
                "set split='off'"
            )
        return node

    def _tell(self, name: str, of: fx.Node) -> None:
        """The phase and the module of what a part does, which are those of `of`."""
        phase = self.step.phases.get(of.name, Phase.FORWARD)
        self.phases[name] = Phase.BACKWARD if self.window.joined else phase
        if of.name in self.step.modules:
            self.modules[name] = self.step.modules[of.name]

    def _join(self, node: fx.Node) -> None:
        if self.window.joined:
            self.phases[node.name] = Phase.BACKWARD

    def _erase(self) -> None:
        """Take out the ops that ran whole; a view that others read shows the room."""
        for node in reversed(self.grown.ops):
            if not node.users and node.target is self.calls[node][0]:
                self.graph.erase_node(node)


def _like(value: torch.Tensor, node: fx.Node) -> torch.Tensor:
    """What a node makes that has no argument but sizes: on the device of `value`."""
    sizes: Any = node.args[0]
    dtype: Any = node.kwargs["dtype"]
    return value.new_empty(sizes, dtype=dtype)
