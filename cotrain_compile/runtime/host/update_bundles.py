"""Update bundles: the updates of many small parameters as one task of the host.

In: a placed graph and the kernels of its regions. Out: a kernel for each bundle of regions. Members
whose fused loops are alike go through one call of the loop, and what happens to their gradients
before it through one call for each op; the others run one after the other. What is made for the
loop is there for all members at once, as the plan counts it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import fx

from cotrain_compile.graph import StepGraph
from cotrain_compile.machine import Tier
from cotrain_compile.runtime.bound_ops import ListOp, list_op
from cotrain_compile.runtime.course import WHOLE, Course
from cotrain_compile.runtime.host.fused_kernel import FusedKernel, HostKernel, laid_out_as
from cotrain_compile.runtime.host.live_settings import with_settings
from cotrain_compile.runtime.meter import MemoryMeter
from cotrain_compile.runtime.ops import name_of_bundle
from cotrain_compile.runtime.task_nodes import RegionCall, region_calls


@dataclass(frozen=True)
class BundleKernel:
    """Runs the members of a bundle; each of `parts` has its own, by their places among all."""

    parts: Sequence[tuple[Sequence[int], HostKernel | ListKernel]]

    def __call__(
        self, inputs: Sequence[Sequence[Any]], meter: MemoryMeter, course: Course = WHOLE
    ) -> None:
        for places, kernel in self.parts:
            if isinstance(kernel, ListKernel):
                kernel([inputs[place] for place in places], meter)
            else:
                kernel(inputs[places[0]], meter)


@dataclass(frozen=True)
class ListKernel:
    """Fused kernels that are alike, in one loop for all of them."""

    kernels: Sequence[FusedKernel]
    finish: _Chain

    def __call__(self, inputs: Sequence[Sequence[Any]], meter: MemoryMeter) -> None:
        first = self.kernels[0]
        if first.skip is not None and bool(inputs[0][first.skip]):
            return
        members = list(zip(self.kernels, inputs, strict=True))
        begun = [kernel.gradient.begin(given, meter) for kernel, given in members]
        tensors = [{name: given[at] for name, at in k.positions.items()} for k, given in members]
        live = {name: float(inputs[0][position]) for name, position in first.live.items()}
        settings = with_settings(first.settings, live) if live else first.settings
        gradients, held_bytes = self.finish.run(begun, meter)
        try:
            ready = [laid_out_as(t["param"], g) for t, g in zip(tensors, gradients, strict=True)]
            first.update(tensors, ready, settings)
        finally:
            meter.hold(-held_bytes, Tier.HOST, "updates in a bundle")


class _Chain:
    """The elementwise ops in which many gradients end, each once for all of them."""

    def __init__(self, graphs: Sequence[fx.Graph]) -> None:
        inputs = [node for node in graphs[0].nodes if node.op == "placeholder"]
        place = {node: number for number, node in enumerate(inputs)}
        self._ops: list[tuple[ListOp, list[tuple[bool, Any]], str]] = []
        for nodes in zip(*(_computing(graph) for graph in graphs), strict=True):
            given = [(v in place, place[v]) if v in place else (False, v) for v in nodes[0].args]
            self._ops.append((list_op(nodes), given, nodes[0].name))
            place[nodes[0]] = len(place)

    def run(self, begun: Sequence[Sequence[Any]], meter: MemoryMeter) -> tuple[Sequence[Any], int]:
        """The gradients, and what they are counted with until the meter is told otherwise."""
        made: list[Any] = [list(column) for column in zip(*begun, strict=True)]
        found, held_bytes = made[0], 0
        for compute, arguments, name in self._ops:
            results = compute(*(made[v] if is_made else v for is_made, v in arguments))
            nbytes = sum(value.nbytes for value in results)
            meter.hold(nbytes, Tier.HOST, name)
            if held_bytes:  # the op before is used by this one alone
                meter.hold(-held_bytes, Tier.HOST, name)
                made[-1] = None
            held_bytes, found = nbytes, results
            made.append(results)
        return found, held_bytes


def bundle_kernels(placed: StepGraph, kernels: Mapping[str, HostKernel]) -> dict[str, BundleKernel]:
    """A kernel for every bundle of regions of `placed`, by its name; `kernels` are by task."""
    calls = [call for _, call in region_calls(placed.module.graph) if call.launch.bundle]
    found: dict[str, BundleKernel] = {}
    for _, members in groupby(calls, lambda call: call.launch.bundle):
        own = list(members)
        parts = _parts(own, [kernels[call.launch.task] for call in own])
        found[name_of_bundle([call.launch for call in own])] = BundleKernel(list(parts))
    return found


def _parts(
    calls: Sequence[RegionCall], kernels: Sequence[HostKernel]
) -> Iterator[tuple[Sequence[int], HostKernel | ListKernel]]:
    alike: dict[object, list[int]] = {}
    for place, (call, kernel) in enumerate(zip(calls, kernels, strict=True)):
        is_listed = isinstance(kernel, FusedKernel) and kernel.after is None
        kind = _kind(call, kernel) if is_listed and isinstance(kernel, FusedKernel) else place
        alike.setdefault(kind, []).append(place)
    for places in alike.values():
        fused = [k for k in (kernels[place] for place in places) if isinstance(k, FusedKernel)]
        if len(places) == 1:
            yield places, kernels[places[0]]
        else:
            yield places, ListKernel(fused, _Chain([k.gradient.finish.graph for k in fused]))


def _kind(call: RegionCall, kernel: FusedKernel) -> object:
    """Equal for members that one loop updates: with the same settings, also of the step at hand."""
    settings = tuple((name, call.inputs[place]) for name, place in kernel.live.items())
    return (
        kernel.optimizer,
        str(sorted(kernel.settings.items())),
        tuple(sorted(kernel.positions)),
        settings,
        call.inputs[kernel.skip] if kernel.skip is not None else None,
        kernel.skip,
        tuple(kernel.live.items()),
        _told(kernel.gradient.finish.graph),
        call.inputs[kernel.positions["param"]].meta["val"].dtype,
    )


def _told(graph: fx.Graph) -> object:
    """Equal for chains whose ops are alike one by one, and use each other's results alike."""
    place = {node: number for number, node in enumerate(graph.nodes)}

    def told(value: Any) -> object:
        return place[value] if isinstance(value, fx.Node) else repr(value)

    return len(place), tuple(
        (
            str(node.target),
            *map(told, node.args),
            *sorted((name, told(value)) for name, value in node.kwargs.items()),
            *(_dtype(value) for value in (node, *node.all_input_nodes)),
        )
        for node in _computing(graph)
    )


def _dtype(node: fx.Node) -> torch.dtype | None:
    value = node.meta.get("val")
    return value.dtype if isinstance(value, torch.Tensor) else None


def _computing(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "call_function"]
