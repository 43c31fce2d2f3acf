"""Update in pieces: large updates that are streamed run as one update for each piece.

    %lerp(%m, %g), %copy_(%m, %lerp)   ->   %lerp_piece_0(%m[0:n], %g[0:n]), ..., %lerp_piece_1, ...

A piece of what is fetched is a `cotrain.piece` until the copy that a task makes is used for it; of
what lies on the device as a whole it is a view. What the graph becomes is, as data, what
`placement.pieces` makes of the step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

import torch
from torch import fx

from cotrain_compile.capture.nodes.storages import traced_again
from cotrain_compile.dataflow import Phase
from cotrain_compile.errors import PlanError
from cotrain_compile.extract.extract import buffer_names, extract
from cotrain_compile.extract.updates import by_element
from cotrain_compile.graph import StepGraph
from cotrain_compile.graph.op_calls import PIECE
from cotrain_compile.placement.pieces import Pieced, piece_name, pieces_under
from cotrain_compile.plan import Placement, Plan, UpdateMode

aten = torch.ops.aten


def update_in_pieces(step: StepGraph, plan: Plan) -> StepGraph:
    """A step graph in which the updates run in the pieces that the placement of `plan` has."""
    if not _has_large(step, plan.placement):
        return step
    dataflow = extract(step)
    pieces = pieces_under(dataflow, plan.placement)
    nodes = {node.name: node for node in step.nodes}
    buffers = buffer_names(step)
    names: dict[str, str] = {}
    for pieced in pieces:
        members = [nodes[name] for name in dataflow.update[pieced.param].ops]
        names |= _Pieces(step, members, pieced, buffers).run()
    step.module.recompile()
    modules = {new: step.modules[old] for new, old in names.items() if old in step.modules}
    return replace(
        step,
        phases={**step.phases, **dict.fromkeys(names, Phase.OPTIMIZER)},
        modules={**step.modules, **modules},
    )


def _has_large(step: StepGraph, placement: Placement) -> bool:
    """Whether a parameter whose update is streamed is larger than a piece: in most steps none."""
    streamed = {n for n, how in placement.updates.items() if how is UpdateMode.STREAMED}
    values = (n.meta["val"] for n in _inputs(step) if step.input_of_node[n.name].name in streamed)
    return bool(placement.piece_bytes) and any(v.nbytes > placement.piece_bytes for v in values)


class _Pieces:
    """One update: `members` are its nodes, `buffers` says what each node shows."""

    def __init__(
        self,
        step: StepGraph,
        members: list[fx.Node],
        pieced: Pieced,
        buffers: Mapping[str, str],
    ) -> None:
        self.graph, self.pieced, self.buffers = step.module.graph, pieced, buffers
        param = next(n for n in _inputs(step) if buffers.get(n.name) == pieced.param)
        self.full = by_element(step, members, param)
        self.inside, self.place = set(self.full), self.full[-1]

    def run(self) -> dict[str, str]:
        """Insert the pieces, take out the whole; the names of the new ops with those before."""
        names: dict[str, str] = {}
        for number, (begin, end) in enumerate(pairwise(self.pieced.bounds)):
            names |= self._piece(number, begin, end)
        for node in reversed(self.full):
            self.graph.erase_node(node)
        return names

    def _piece(self, number: int, begin: int, end: int) -> dict[str, str]:
        made: dict[fx.Node, fx.Node] = {}
        names = {}
        for node in self.full:
            for value in node.all_input_nodes:
                if value not in self.inside and value not in made:
                    made[value] = self._part(value, begin, end)
            with self.graph.inserting_before(self.place):
                name = piece_name(node.name, number)
                copy = self.graph.create_node(
                    node.op,
                    node.target,
                    *fx.map_arg((node.args, node.kwargs), made.__getitem__),
                    name=name,
                )
            if copy.name != name:
                raise PlanError(
                    f"the step has a value called {name}, as {node.name} would be in pieces; give "
                    "it another name"
                )
            copy.meta["val"] = self._traced(copy)
            made[node], names[name] = copy, node.name
        return names

    def _part(self, value: fx.Node, begin: int, end: int) -> fx.Node:
        """Elements of an input of the update; a single number is the same for all."""
        shown = value.meta.get("val")
        if not isinstance(shown, torch.Tensor) or shown.numel() <= 1:
            return value
        with self.graph.inserting_before(self.place):
            if self.buffers[value.name] in self.pieced.fetched:
                part = self.graph.call_function(PIECE, (value, begin, end))
            else:
                row = self.graph.call_function(aten.view.default, (value, [-1]))
                row.meta["val"] = traced_again(row)
                part = self.graph.call_function(aten.slice.Tensor, (row, 0, begin, end))
        part.meta["val"] = traced_again(part)
        return part

    def _traced(self, copy: fx.Node) -> object:
        if copy.target is aten.copy_.default:
            destination = copy.args[0]
            assert isinstance(destination, fx.Node)
            return destination.meta["val"]
        return traced_again(copy)


def _inputs(step: StepGraph) -> list[fx.Node]:
    return [*step.module.graph.find_nodes(op="placeholder")]
