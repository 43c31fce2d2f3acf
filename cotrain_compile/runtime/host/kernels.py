"""Host kernels: what runs a host region.

A fused loop of ATen's, where every op between the gradient and the new parameter and states is
accounted for by the rule that the loop computes (`match_update`): the ops before and behind run as
captured. Else the captured ops, in parts that stay in the cache if they can (`captured_kernels`).

After the update: what a host region does beside its optimizer, once that is done.

In: a region and the match of its update. Out: the captured ops behind it (a clamp, a projection,
another write), as a graph of the same inputs, which hold the new values by then.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import fx

from cotrain_compile.dataflow import Role
from cotrain_compile.extract.optimizer_loops import NARROW, has_loop
from cotrain_compile.graph import OptimizerRule, StepGraph, StepInput, writes
from cotrain_compile.graph.random_ops import has_random_tag
from cotrain_compile.machine import Tier
from cotrain_compile.runtime.host.captured_kernels import CapturedKernel, chunked_kernel
from cotrain_compile.runtime.host.fused_kernel import FusedKernel, HostKernel
from cotrain_compile.runtime.host.fused_loops import FUSED_LOOPS
from cotrain_compile.runtime.host.gradient_prologue import OPS, gradient_part, has_ops
from cotrain_compile.runtime.host.live_settings import live_settings, value_of
from cotrain_compile.runtime.host.match_update import (
    COPY,
    Match,
    ancestors,
    match_update,
)
from cotrain_compile.runtime.host.smaller_region import smaller_region
from cotrain_compile.runtime.host.speculation import speculative_kernels
from cotrain_compile.runtime.host.trial import NEVER_NEGATIVE, agree, rounds_once
from cotrain_compile.runtime.host.update_bundles import bundle_kernels
from cotrain_compile.runtime.meter import MeteredGraph
from cotrain_compile.runtime.task_nodes import RegionCall, region_calls


def host_kernels(
    placed: StepGraph, choice: str, guesses_below: float = math.inf
) -> dict[str, HostKernel]:
    """A kernel for every host region of `placed`, by task name, and for every bundle of them.

    `choice` is "fused" (as the module says) or "captured" (the captured ops as they are). What is
    to be done on guesses is, while less than `guesses_below` of the steps of late prove them wrong.
    """
    kernels: dict[str, HostKernel] = {}
    checked: dict[object, bool] = {}
    for call in _smallest_first(placed):
        region = call.subgraph(placed.module)
        found: HostKernel = CapturedKernel(MeteredGraph(region, Tier.HOST))
        if choice == "fused":
            found = _fast(region, _described_inputs(region, placed), placed, checked) or found
        kernels[call.launch.task] = found
    kernels |= bundle_kernels(placed, kernels)
    return {**kernels, **speculative_kernels(placed, kernels, guesses_below)}


def _fast(
    region: fx.GraphModule,
    inputs: Sequence[StepInput | None],
    placed: StepGraph,
    checked: dict[object, bool],
) -> HostKernel | None:
    """A fused kernel, if the region's update is one, else captured ops in parts.

    `checked` has which kinds of kernels have passed their trial, each on its smallest region.
    """
    rule = _rule(inputs, placed.rules)
    fused = _fused(region, inputs, rule) if rule is not None else None
    if rule is not None and fused is not None:
        kind = _kind(region, rule)
        if kind not in checked:
            checked[kind] = _passes_trial(*_small(region, inputs, rule) or (region, fused))
        if checked[kind]:
            return fused
    return chunked_kernel(region)


def _smallest_first(placed: StepGraph) -> list[RegionCall]:
    """Region calls by size: the trial of a kind then runs on its smallest parameter."""

    def size(call: tuple[fx.Node, RegionCall]) -> int:
        values = [n.meta.get("val") for n in call[0].all_input_nodes]
        return sum(int(v.numel()) for v in values if isinstance(v, torch.Tensor))

    calls = [call for call in region_calls(placed.module.graph) if not call[1].guesses]
    return [view for _, view in sorted(calls, key=size)]


def _described_inputs(region: fx.GraphModule, placed: StepGraph) -> list[StepInput | None]:
    """For each input of the region the step input it is, None for what the step computed."""
    names = [node.name for node in region.graph.find_nodes(op="placeholder")]
    return [placed.input_of_node.get(name) for name in names]


def _rule(
    inputs: Sequence[StepInput | None], rules: Mapping[str, OptimizerRule]
) -> OptimizerRule | None:
    param = next((i.name for i in inputs if i is not None and i.role is Role.PARAM), "")
    return rules.get(param)


def _fused(
    region: fx.GraphModule, inputs: Sequence[StepInput | None], rule: OptimizerRule
) -> FusedKernel | None:
    """A fused kernel for the region, None where some op of it is not accounted for."""
    positions = {
        "param" if item.role is Role.PARAM else item.key: position
        for position, item in enumerate(inputs)
        if item is not None and item.role in (Role.PARAM, Role.OPTIMIZER_STATE)
    }
    nodes = list(region.graph.find_nodes(op="placeholder"))
    tensors = {name: nodes[position] for name, position in positions.items()}
    if not has_loop(rule, {name: node.meta["val"].dtype for name, node in tensors.items()}):
        return None
    live = live_settings(inputs, rule.settings)
    if live is None or not _are_alike(tensors):
        return None
    settings = {name: nodes[position] for name, position in live.items()}
    match = match_update(region, rule, tensors, settings)
    after = after_update(region, match) if match is not None else None
    if match is None or after is None:
        return None
    is_narrow = tensors["param"].meta["val"].dtype in NARROW
    if is_narrow and match.skip is not None:
        return None  # eager's own loop takes the scale off the gradient inside, and rounds once
    return FusedKernel(
        gradient_part(region, match.gradient),
        rule.optimizer,
        FUSED_LOOPS[rule.optimizer](rule.settings),
        positions,
        rule.settings,
        live,
        nodes.index(match.skip) if match.skip is not None else None,
        MeteredGraph(after, Tier.HOST) if has_ops(after.graph) else None,
    )


def _are_alike(tensors: Mapping[str, fx.Node]) -> bool:
    """Whether a loop through memory in order meets the same element of all, and no gaps.

    A step count has one element and is no part of the loop.
    """
    param = tensors["param"].meta["val"]
    own = [node.meta["val"] for name, node in tensors.items() if name != "step"]
    same = all((v.dtype, v.shape, v.stride()) == _layout(param) for v in own)
    return same and _is_dense(param)


def _layout(value: torch.Tensor) -> tuple[torch.dtype, torch.Size, tuple[int, ...]]:
    return value.dtype, value.shape, value.stride()


def _is_dense(value: torch.Tensor) -> bool:
    """Whether the elements lie side by side in some order of the dimensions."""
    expected = 1
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size != 1 and stride != expected:
            return not value.numel()
        expected *= size
    return True


def _kind(region: fx.GraphModule, rule: OptimizerRule) -> object:
    """Kernels of one kind run the same loop with the same settings, between the same ops."""
    ops = tuple(str(node.target) for node in region.graph.nodes if node.op == "call_function")
    values = [node.meta.get("val") for node in region.graph.find_nodes(op="placeholder")]
    layouts = tuple(_traits(value) if isinstance(value, torch.Tensor) else None for value in values)
    return ops, layouts, rule.optimizer, str(sorted(rule.settings.items()))


def _traits(value: torch.Tensor) -> object:
    """Equal for tensors that a loop goes through alike: of any size where they are contiguous."""
    return str(value.dtype) if value.is_contiguous() else str(_layout(value))


def _small(
    region: fx.GraphModule, inputs: Sequence[StepInput | None], rule: OptimizerRule
) -> tuple[fx.GraphModule, FusedKernel] | None:
    """The same update of a smaller parameter, with its kernel; None where there is none."""
    smaller = smaller_region(region)
    fused = _fused(smaller, inputs, rule) if smaller is not None else None
    return (smaller, fused) if smaller is not None and fused is not None else None


def _passes_trial(region: fx.GraphModule, fused: FusedKernel) -> bool:
    own = {name: _placeholder(region, place) for name, place in fused.positions.items()}
    if own["param"].dtype in NARROW and not rounds_once(
        fused.update, {name: value.dtype for name, value in own.items()}, fused.settings
    ):
        return False
    captured = CapturedKernel(MeteredGraph(region, Tier.HOST))
    # Settings are of the size they have, and not as they were when the step was traced.
    settings = {
        position: torch.tensor(0.7 * value_of(fused.settings, name), dtype=torch.float64)
        for name, position in fused.live.items()
    }
    squares = [place for name, place in fused.positions.items() if name in NEVER_NEGATIVE]
    return agree(
        region,
        captured,
        fused,
        param=fused.positions["param"],
        fixed=settings,
        never_negative=squares,
        skip=fused.skip,
    )


def _placeholder(region: fx.GraphModule, position: int) -> torch.Tensor:
    value = region.graph.find_nodes(op="placeholder")[position].meta["val"]
    assert isinstance(value, torch.Tensor)
    return value


def after_update(region: fx.GraphModule, match: Match) -> fx.GraphModule | None:
    """The ops of `region` that neither are the update nor come before it.

    None where they cannot run after it: they read an old value that the update has overwritten.
    """
    before = ancestors(match.gradient)
    done = before.union(match.new, *map(ancestors, match.new))
    left = [node for node in region.graph.nodes if node.op in OPS and node not in done]
    if _any_random(left) and _any_random(before):
        return None  # which of them draws first may change
    try:
        return _Behind(region, match, before).graph_of(left)
    except _ReadsOldValue:
        return None


class _ReadsOldValue(Exception):
    """An op behind the update needs what is there no longer."""


class _Behind:
    """Builds the graph; what its ops share with those before them is computed again."""

    def __init__(self, region: fx.GraphModule, match: Match, before: set[fx.Node]) -> None:
        self._region, self._match = region, match
        self._graph = fx.Graph()
        inputs = region.graph.find_nodes(op="placeholder")
        self._values = {node: self._graph.placeholder(node.name) for node in inputs}
        written = list(writes(region.graph))
        self._written = {to for _, to, _ in written}
        # By the time these ops run.
        self._overwritten = {to for write, to, _ in written if write in before}
        self._overwritten |= set(match.new.values())

    def graph_of(self, left: Iterable[fx.Node]) -> fx.GraphModule:
        for node in left:
            if node.target is COPY:
                to, value = node.all_input_nodes
                self._values[node] = self._graph.call_function(
                    COPY, (self._values[to], self._new(value))
                )
            else:
                self._values[node] = self._graph.node_copy(node, self._new)
        self._graph.output(())
        self._graph.eliminate_dead_code()
        return fx.GraphModule(self._region, self._graph, "AfterUpdate")

    def _new(self, node: fx.Node) -> fx.Node:
        """The value that an op behind the update takes for `node`."""
        if node in self._match.new:
            return self._values[self._match.new[node]]
        if node in self._overwritten:
            raise _ReadsOldValue
        if node not in self._values:
            if has_random_tag(node):
                raise _ReadsOldValue  # it would draw twice
            self._values[node] = self._graph.node_copy(node, self._again)
        return self._values[node]

    def _again(self, node: fx.Node) -> fx.Node:
        """The same for what is computed once more, from inputs that nothing writes."""
        is_new = node in self._match.new
        if not is_new and (node in self._written or node.target is COPY):
            raise _ReadsOldValue
        return self._new(node)


def _any_random(nodes: Iterable[fx.Node]) -> bool:
    return any(has_random_tag(node) for node in nodes)
