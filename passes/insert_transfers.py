"""Insert the copies between tiers.

    %h = cotrain.offload(%g, 'offload.g', [])                      a fresh copy on the host
    %d = cotrain.prefetch(%h, 'fetch.g', ['offload.g'])            a fresh copy on the device
    cotrain.offload_into(%m, %m_d, 'store.m', [])                  over the home on the host
    cotrain.prefetch_into(%w, %w_h, 'back.w', ['update.w'])        over the home on the device
    cotrain.prefetch(%w, 'fetch.w', [], ['update.w'])              after a task of the step before

Host regions take the host copies. Everything is put where the plan issues it.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import assert_never

from torch import fx

from cotrain_compile.extract.extract import buffer_names
from cotrain_compile.graph import StepGraph
from cotrain_compile.graph.op_calls import PIECE
from cotrain_compile.passes.gaps import Gaps
from cotrain_compile.passes.views import available_before
from cotrain_compile.plan import HostRegion, Plan, Transfer
from cotrain_compile.runtime.task_nodes import (
    HostCast,
    Offload,
    Prefetch,
    RegionCall,
    insert,
    launch_of,
    view_of,
)


def insert_transfers(step: StepGraph, plan: Plan) -> StepGraph:
    """A step graph with one node per task of `plan`, where it is issued.

    In a gap, prefetches that take memory come last: offloads that free it are waited for first.
    """
    gaps = Gaps(step)
    inserter = _Inserter(step)
    for task in sorted(plan.tasks, key=attrgetter("is_fetch")):  # those alike keep their order
        place = gaps.after(task.issue_after)
        match task:
            case HostRegion():
                inserter.move_region(task, place)
            case Transfer():
                inserter.insert(task, place)
            case _:
                assert_never(task)
    step.module.recompile()
    return step


class _Inserter:
    """Inserts task after task; `host_copy` has what they have left on the host, by buffer."""

    def __init__(self, step: StepGraph) -> None:
        self.graph = step.module.graph
        self.buffer_of = buffer_names(step)
        self.original: dict[str, fx.Node] = {}
        for node in step.nodes:
            if node.name in self.buffer_of:
                self.original.setdefault(self.buffer_of[node.name], node)
        self.regions: Mapping[str, fx.Node] = {
            view.launch.task: node
            for node in step.nodes
            if isinstance(view := view_of(node), RegionCall | HostCast)
        }
        self.host_copy: dict[str, fx.Node] = {}

    def move_region(self, task: HostRegion, place: fx.Node) -> None:
        call = self.regions[task.name]
        if task.makes:
            self.host_copy[task.makes] = call
        for value in call.all_input_nodes:
            if value.op == "get_attr" and not value < place:
                place.prepend(value)  # the region itself, or a constant that it reads
            call.replace_input_with(value, self.host_copy.get(self._buffer(value), value))
        place.prepend(call)

    def _buffer(self, node: fx.Node) -> str:
        return self.buffer_of.get(node.name, "")

    def insert(self, task: Transfer, place: fx.Node) -> None:
        match task.direction:
            case "offload":
                self._insert_offload(task, place)
            case "prefetch":
                self._insert_prefetch(task, place)
            case _:
                assert_never(task.direction)

    def _insert_offload(self, task: Transfer, place: fx.Node) -> None:
        source = available_before(place, self.original[task.buffer])
        launch = launch_of(task, self._part(task) if task.destination else ())
        node = self._insert(Offload(source, launch, self._overwritten(task)), place)
        if not task.destination:
            self.host_copy[task.buffer] = node

    def _insert_prefetch(self, task: Transfer, place: fx.Node) -> None:
        whole = self._whole(task.buffer)
        on_host = self.host_copy.get(whole) or self.original[whole]
        launch = launch_of(task, self._part(task))
        node = self._insert(Prefetch(on_host, launch, self._overwritten(task)), place)
        if launch.part:
            node.meta["val"] = self.original[task.buffer].meta["val"]

    def _overwritten(self, task: Transfer) -> fx.Node | None:
        return self.original[self._whole(task.destination)] if task.destination else None

    def _whole(self, buffer: str) -> str:
        """What on the host has `buffer`: itself, or what it is a piece of."""
        node = self.original.get(buffer)
        return self._buffer(node.all_input_nodes[0]) if node and node.target is PIECE else buffer

    def _part(self, task: Transfer) -> tuple[int, ...]:
        node = self.original.get(task.buffer)
        return tuple(node.args[1:]) if node and node.target is PIECE else ()  # type: ignore[arg-type]

    def _insert(self, copy: Offload | Prefetch, place: fx.Node) -> fx.Node:
        with self.graph.inserting_before(place):
            node = insert(self.graph, copy)
        if copy.destination is None:
            # A fresh copy has the traced value of what it is a copy of: see `views`.
            node.meta["val"] = copy.source.meta["val"]
        return node
