"""Recompute values: forward ops run again where the backward needs what the plan does not keep.

    %gelu, ..., %mm_2(%gelu)   ->   %gelu, ..., %gelu_recomputed, %mm_2(%gelu_recomputed)

A view of such a value is made again with it. What is made apart has copies of its own of what it is
made of. A gather is made again with its wait: it begins before the wait for the one before it. A
dropout draws once: what it drops from is multiplied again by its mask. What the graph becomes is,
as data, what `placement.recompute.rewrite` makes of the step.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from itertools import pairwise

import torch
from torch import fx

from cotrain_compile.capture.nodes.copies import Copier
from cotrain_compile.dataflow import Phase
from cotrain_compile.errors import PlanError
from cotrain_compile.extract.extract import buffer_names
from cotrain_compile.graph import StepGraph
from cotrain_compile.graph.collectives import is_wait
from cotrain_compile.passes.views import viewed
from cotrain_compile.placement.recompute.rewrite import again_name
from cotrain_compile.plan import Plan

_DROPOUT = torch.ops.aten.native_dropout.default


def recompute_values(step: StepGraph, plan: Plan) -> StepGraph:
    """A step graph in which the values that `plan` names are made again for the backward."""
    names = frozenset(plan.placement.recomputed)
    if not names:
        return step
    # Items are taken at once: a tuple would keep them where a plan offloads them.
    copier = _Copier(_made_again(step, names), again_name, items_at_once=True)
    copier.apart = _makers(step, frozenset(plan.placement.recomputed_apart))
    for node in step.nodes:
        if node.op == "call_function" and _phase(step, node) is not Phase.FORWARD:
            copier.use_copies(node)
    _check_names(copier.copies)
    _gather_ahead(step, set(copier.copies.values()))
    step.module.recompile()
    made = [*copier.copies.items()]
    for last, copies in copier.own.items():
        _check_names(copies, last.name)
        made += copies.items()
    names_of = {copy.name: source.name for source, copy in made}
    modules = {copy: step.modules[name] for copy, name in names_of.items() if name in step.modules}
    ops = [copy.name for _, copy in made if _is_op(copy)]
    return replace(
        step,
        phases={**step.phases, **dict.fromkeys(ops, Phase.BACKWARD)},
        modules={**step.modules, **modules},
    )


class _Copier(Copier):
    """Copies, of a dropout its product by the mask that it has drawn.

    Of nodes that are `apart`, `own` has by node the copies that nobody else reads.
    """

    apart: Collection[fx.Node] = ()

    def __init__(
        self, again: Set[fx.Node], name_of: Callable[[str], str], *, items_at_once: bool
    ) -> None:
        super().__init__(again, name_of, items_at_once=items_at_once)
        self.own: dict[fx.Node, Mapping[fx.Node, fx.Node]] = {}

    def _missing(self, node: fx.Node) -> list[fx.Node]:
        return [] if node in self.apart else super()._missing(node)

    def _make_apart(self, node: fx.Node, place: fx.Node) -> None:
        """Copies `node`, and what that needs for it alone; but gathers, first, for all."""
        for wait in self._waits_before(node):
            self._make(wait, place)
        shared = self.copies
        alone = _Copier(self._again, partial(again_name, last=node.name), items_at_once=True)
        alone.copies = dict(shared)
        for source in alone._missing(node):
            alone._make(source, place)
        self.own[node] = {n: copy for n, copy in alone.copies.items() if n not in shared}
        self.copies = alone.copies
        self._make_whole(node, place)
        self.copies = {n: copy for n, copy in self.copies.items() if n not in self.own[node]}

    def _waits_before(self, node: fx.Node) -> Sequence[fx.Node]:
        """The waits for gathers that `node` needs, of what is not made again yet."""
        found, waiting = dict[fx.Node, None](), [node]
        while waiting:
            missing = super()._missing(waiting.pop())
            waiting += reversed([source for source in missing if source not in found])
            found |= dict.fromkeys(missing)
        return [source for source in found if is_wait(source)]

    def _make_one(self, node: fx.Node, place: fx.Node) -> None:
        if node in self.apart:
            self._make_apart(node, place)
        else:
            self._make_whole(node, place)

    def _make_whole(self, node: fx.Node, place: fx.Node) -> None:
        if node.target is not _DROPOUT:
            super()._make_one(node, place)
            return
        product, mask = (next(u for u in node.users if u.args == (node, i)) for i in range(2))
        source = node.all_input_nodes[0]
        with place.graph.inserting_before(place):
            copy = place.graph.create_node(
                "call_function",
                torch.ops.aten.native_dropout_backward.default,
                (self.copies.get(source, source), mask, _scale(node)),
                name=self._name_of(node.name),
            )
        self._note(node, copy)
        self.copies[node] = self.copies[product] = copy


def _scale(dropout: fx.Node) -> float:
    """What its kernel multiplies by: 1 / (1 - p), on a card as a float where it computes in one."""
    probability, trains = dropout.args[1:3]
    assert isinstance(probability, float | int)
    kept = 1.0 - probability
    if trains is False or not kept:
        return float(trains is False)
    value = dropout.all_input_nodes[0].meta["val"]
    if value.device.type != "cpu" and value.dtype is not torch.float64:
        kept = torch.tensor(kept, dtype=torch.float32).item()
    return 1.0 / kept


def _is_op(copy: fx.Node) -> bool:
    """Whether the plan knows `copy` as an op: views and items of a tuple are made again without.

    They get no phase, so that what is one gap of the plan stays one in the graph: a wait for an
    offload would else stand behind a view, and the fetch that takes the memory before it.
    """
    return is_wait(copy) or (copy.target is not operator.getitem and viewed(copy) is None)


def _gather_ahead(step: StepGraph, copies: set[fx.Node]) -> None:
    """Let each gather that runs again begin before the wait for the one before it."""
    waits = [node for node in step.nodes if node in copies and is_wait(node)]
    for before, wait in pairwise(waits):
        (begin,) = wait.all_input_nodes
        if copies.isdisjoint(begin.all_input_nodes):
            before.prepend(begin)


def _check_names(copies: Mapping[fx.Node, fx.Node], last: str = "") -> None:
    """The plan knows the copies by their names."""
    named: dict[fx.Node, fx.Node] = {}  # by copy, the op before what shows it
    for node, copy in copies.items():
        name = again_name(named.setdefault(copy, node).name, last)
        if copy.name != name:
            raise PlanError(
                f"the step has a value called {name}, as {node.name} would be where it is "
                "recomputed; give it another name, or set recompute='off'"
            )


def _phase(step: StepGraph, node: fx.Node) -> Phase:
    return step.phases.get(node.name, Phase.FORWARD)


def _makers(step: StepGraph, names: frozenset[str]) -> set[fx.Node]:
    """The ops that make the buffers `names`."""
    return {
        node.all_input_nodes[0] if node.target is operator.getitem else node
        for node in _made_again(step, names)
        if viewed(node) is None
    }


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
