"""Use the fetched copies: from the wait for a prefetch on, ops use the copy it made.

    %d = cotrain.prefetch(%h, 'fetch.w', [])          %d = cotrain.prefetch(%h, 'fetch.w', [])
    cotrain.wait(['fetch.w'], [])                 ->  cotrain.wait(['fetch.w'], [%d])
    %mm(%x, %t(%w))                                   %mm(%x, %t_1(%d))

A view made before the wait and used after it is made again from the copy; an item of a tuple that
is taken after it becomes a view of the copy. A write goes to the copy; so do offloads. A wait holds
the memory on the device that its copies read or write, so that it is not freed before, and that of
an offload not later. What the step returns of a buffer at home on the host shows the home: the
user's tensor, or the copy there of a gradient that the step makes.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field, replace
from typing import assert_never

import torch
from torch import fx

from cotrain_compile.graph import StepGraph, shape
from cotrain_compile.graph.collectives import is_wait
from cotrain_compile.graph.op_calls import PIECE
from cotrain_compile.passes.views import is_write, storage, viewed, written_by
from cotrain_compile.plan import Plan
from cotrain_compile.runtime.task_nodes import (
    HostCast,
    Offload,
    Prefetch,
    RegionCall,
    Wait,
    WaitPrevious,
    rewrite,
    view_of,
)

ALIAS = torch.ops.aten.alias.default


def use_fetched_copies(step: StepGraph, plan: Plan) -> StepGraph:
    """A step graph in which every op uses the copy that is current where it runs."""
    placement = plan.placement
    hosted = [
        node
        for node in step.module.graph.find_nodes(op="placeholder")
        if placement.is_off_device(step.input_of_node[node.name].name)
    ]
    rests = {t.name for t in plan.transfers if placement.is_off_device(t.buffer)}
    walk = _Walk(hosted, rests)
    for node in step.nodes:
        walk.visit(node)
    _erase_views_of_passes(step)
    step.module.recompile()
    return step


def _erase_views_of_passes(step: StepGraph) -> None:
    """Take out the views that a pass has made for an op which has the same of a copy now.

    They would keep alive what they show, and no plan knows of them.
    """
    for node in reversed(step.module.graph.nodes):
        is_view = node.op == "call_function" and not is_write(node) and viewed(node)
        if (is_view or node.target is PIECE) and not node.users and node.name not in step.phases:
            step.module.graph.erase_node(node)


@dataclass
class _Copy:
    """The current copy of a buffer: `node` has made it, `shown` what values look like on it."""

    node: fx.Node
    shown: dict[fx.Node, fx.Node] = field(default_factory=dict)


class _Walk:
    """Visits the nodes of a graph in order, with the copy of each buffer that is current."""

    def __init__(self, homes: list[fx.Node], to_homes: Set[str]) -> None:
        self.homes = homes
        self.to_homes = to_homes  # tasks that move what is at home on the host
        self.on_host = set(homes)
        self.copies: dict[object, _Copy] = {}  # by storage
        self.fetched: dict[str, fx.Node] = {}  # by task
        self.offloaded: dict[str, fx.Node] = {}

    def visit(self, node: fx.Node) -> None:
        view = view_of(node)
        match view:
            case Wait():
                self._wait(node, view)
            case Prefetch():
                if view.destination is None:
                    self.fetched[view.launch.task] = node
            case Offload():
                self._offload(node, view)
            case HostCast():
                self.on_host.add(node)
            case RegionCall() | WaitPrevious():
                pass
            case None:
                self._op(node)
            case _:
                assert_never(view)

    def _op(self, node: fx.Node) -> None:
        if node.op == "output":
            self.copies |= {storage(home): _Copy(home) for home in self.homes}
            self._update_inputs(node)
        elif node.op == "call_function":
            self._update_inputs(node)
            self._check_inputs(node)
            if storage(node) in self.copies:
                self._show(node, self.copies[storage(node)])

    def _show(self, node: fx.Node, copy: _Copy) -> None:
        """What `node` is on `copy`, which is there already.

        An item of a tuple may be taken that late; as it is, it would keep the first one alive.
        """
        if viewed(node) is None:
            node.args = (self._current(node, node),)
            node.target = ALIAS
        copy.shown[node] = node

    def _wait(self, node: fx.Node, wait: Wait) -> None:
        copied = self.offloaded | self.fetched
        rewrite(node, replace(wait, kept=[copied[t] for t in wait.tasks if t in copied]))
        for task in wait.tasks:
            if task in self.fetched:
                self.copies[storage(self.fetched[task])] = _Copy(self.fetched[task])

    def _offload(self, node: fx.Node, offload: Offload) -> None:
        task, source = offload.launch.task, self._current(offload.source, node)
        rewrite(node, replace(offload, source=source))
        self.offloaded[task] = source
        if offload.destination is None:
            self.on_host.add(node)
            if task in self.to_homes:
                self.homes.append(node)  # a gradient that the step makes and keeps there

    def _update_inputs(self, node: fx.Node) -> None:
        for value in node.all_input_nodes:
            node.replace_input_with(value, self._current(value, node))

    def _current(self, value: fx.Node, place: fx.Node) -> fx.Node:
        """What `value` is on the current copy, made again before `place` if need be."""
        copy = self.copies.get(storage(value))
        if copy is None:
            return value
        if value not in copy.shown:
            copy.shown[value] = self._made_again(value, copy, place)
        return copy.shown[value]

    def _made_again(self, value: fx.Node, copy: _Copy, place: fx.Node) -> fx.Node:
        if is_write(value):
            return self._current(written_by(value), place)
        if is_wait(value):  # what was copied is there
            return self._current(value.all_input_nodes[0], place)
        if viewed(value) is None:
            assert shape(value) == shape(copy.node), f"{value} shows a part of {copy.node}"
            return copy.node
        with place.graph.inserting_before(place):
            return place.graph.node_copy(value, lambda node: self._current(node, place))

    def _check_inputs(self, node: fx.Node) -> None:
        """The device reads no memory of the host; a view does not read."""
        if (viewed(node) is not None and not is_write(node)) or node.target is PIECE:
            return
        for value in node.all_input_nodes:
            origin = value
            while (base := viewed(origin)) is not None:
                origin = base
            assert origin not in self.on_host, f"{node} reads {origin}, which is on the host"
