"""Recompute values: forward ops run again where the backward needs what the plan does not keep.

    %gelu, ..., %mm_2(%gelu)   ->   %gelu, ..., %gelu_recomputed, %mm_2(%gelu_recomputed)

A view of such a value is made again with it. What the graph becomes is, as data, what
`placement.recompute.rewrite` makes of the step.
"""

from __future__ import annotations

import operator
from dataclasses import replace

from torch import fx

from cotrain_compile.capture.nodes.refake import traced_again
from cotrain_compile.capture.nodes.storages import read_instead
from cotrain_compile.dataflow import Phase
from cotrain_compile.errors import PlanError
from cotrain_compile.extract.extract import buffer_names
from cotrain_compile.graph import StepGraph
from cotrain_compile.placement.recompute.rewrite import again_name
from cotrain_compile.plan import Plan

# What a copied node must not take along: it would be taken for a part of the forward.
_OF_THE_FORWARD = ("nn_module_stack", "recompute", "ac_graph_id")


def recompute_values(step: StepGraph, plan: Plan) -> StepGraph:
    """A step graph in which the values that `plan` names are made again for the backward."""
    names = frozenset(plan.placement.recomputed)
    if not names:
        return step
    copier = _Copier(_made_again(step, names))
    for node in step.nodes:
        if node.op == "call_function" and _phase(step, node) is not Phase.FORWARD:
            copier.use_copies(node)
    step.module.recompile()
    copies = {copy.name: source.name for source, copy in copier.copies.items()}
    modules = {copy: step.modules[name] for copy, name in copies.items() if name in step.modules}
    return replace(
        step,
        phases={**step.phases, **dict.fromkeys(copies, Phase.BACKWARD)},
        modules={**step.modules, **modules},
    )


def _phase(step: StepGraph, node: fx.Node) -> Phase:
    return step.phases.get(node.name, Phase.FORWARD)


def _made_again(step: StepGraph, names: frozenset[str]) -> set[fx.Node]:
    """The nodes of the forward that make the buffers `names`, or show them."""
    buffer_of = buffer_names(step)
    found: set[fx.Node] = set()
    for node in step.nodes:
        if node.op != "call_function" or _phase(step, node) is not Phase.FORWARD:
            continue
        if buffer_of.get(node.name) in names:
            found.add(node)
            if node.target is operator.getitem:  # the op that has several results
                found.add(node.all_input_nodes[0])
    return found


class _Copier:
    """Puts copies of `again` where ops outside the forward first need them."""

    def __init__(self, again: set[fx.Node]) -> None:
        self._again = again
        self.copies: dict[fx.Node, fx.Node] = {}

    def use_copies(self, node: fx.Node) -> None:
        """Let `node` read copies, which are made right before it where there are none yet."""
        for source in node.all_input_nodes:
            if source in self._again:
                read_instead(node, source, self._copy(source, node))

    def _copy(self, node: fx.Node, place: fx.Node) -> fx.Node:
        """The copy of `node`; what it reads is copied first, without recursion: chains are long."""
        waiting = [node]
        while waiting:
            missing = [
                source
                for source in waiting[-1].all_input_nodes
                if source in self._again and source not in self.copies
            ]
            if missing and waiting[-1] not in self.copies:
                waiting += reversed(missing)
                continue
            last = waiting.pop()
            if last not in self.copies:
                self.copies[last] = self._copy_one(last, place)
                # Items are taken at once: a tuple would keep them where a plan sends them away.
                for item in last.users:
                    if item in self._again and item.target is operator.getitem:
                        self.copies[item] = self._copy_one(item, place)
        return self.copies[node]

    def _copy_one(self, node: fx.Node, place: fx.Node) -> fx.Node:
        name = again_name(node.name)
        with place.graph.inserting_before(place):
            copy = place.graph.create_node(
                node.op,
                node.target,
                fx.map_arg(node.args, lambda source: self.copies.get(source, source)),
                fx.map_arg(node.kwargs, lambda source: self.copies.get(source, source)),
                name=name,
            )
        if copy.name != name:
            raise PlanError(
                f"the step has a value called {name}, as {node.name} would be where it is made "
                "again; give it another name, or set recompute='off'"
            )
        copy.meta = {k: v for k, v in node.meta.items() if k not in _OF_THE_FORWARD}
        copy.meta["val"] = traced_again(copy)  # with storages of its own, or of the copies
        return copy
