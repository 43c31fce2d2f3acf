"""Gradient part: what a host region does to a gradient before the optimizer's own ops.

In: a region, with what its inputs are. Out: these ops in two parts, so that the arithmetic on each
element of the gradient (widening, clipping) can be done a piece at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from cotrain_compile.capture.phases import PHASE_ANNOTATION
from cotrain_compile.graph import StepInput, writes
from cotrain_compile.machine import Tier
from cotrain_compile.runtime.metered import MeteredGraph

# A piece stays in the cache until the fused loop reads it. The memory for a whole gradient at once
# costs several times the update: bench/host_update.py.
# Twice as many in float32 are 2 MiB, which glibc gives back to the system after every piece.
PIECE_ELEMENTS = 1 << 18

# Arithmetic on each element by itself, though torch's tag does not say so.
_TO_COPY = torch.ops.aten._to_copy.default


@dataclass(frozen=True)
class GradientPart:
    """The ops before the optimizer's own.

    `begin` gets the region's inputs; it returns a tensor of the parameter's shape and the small
    values that the rest needs. `finish` turns that tensor, or some of its rows, into the gradient,
    with `ops` ops.
    """

    begin: MeteredGraph
    finish: MeteredGraph
    ops: int


def gradient_part(
    region: fx.GraphModule, inputs: Sequence[StepInput | None]
) -> GradientPart | None:
    """That part of `region`, None where it does not end in one tensor of the parameter's size.

    The optimizer's own are the ops traced in its step and those that depend on the parameter, a
    state or a hyper-parameter; before them a gradient may be viewed, widened or clipped.
    """
    before = _before_the_optimizer(region, inputs)
    crossing = {
        source
        for node in region.graph.nodes
        if node.op == "call_function" and node not in before
        for source in node.all_input_nodes
        if source in before and source.meta["val"].numel() == _elements(region)
    }
    if len(crossing) != 1:
        return None
    (gradient,) = crossing
    source, chain = _elementwise_chain(gradient)
    needed = [source, *(value for op in chain for value in op.all_input_nodes)]
    given = [value for value in dict.fromkeys(needed) if value not in chain]
    inputs_of_region = region.graph.find_nodes(op="placeholder")
    first = [node for node in region.graph.nodes if node in before and node.op == "call_function"]
    return GradientPart(
        begin=_graph_of(region, inputs_of_region, first, given),
        finish=_graph_of(region, given, chain, [gradient]),
        ops=len(chain),
    )


def in_pieces(
    tensors: Mapping[str, Tensor], source: Tensor
) -> Iterator[tuple[Mapping[str, Tensor], Tensor]]:
    """The same rows of `tensors` and `source`, piece by piece.

    A tensor without rows (a step counter) is a copy in each piece but the last, which has itself:
    what counts once in each piece has counted once in the end.
    """
    if source.numel() <= PIECE_ELEMENTS:
        yield tensors, source
        return
    count = source.shape[0]
    rows = max(1, PIECE_ELEMENTS * count // source.numel())
    for start in range(0, count, rows):
        here, is_last = slice(start, start + rows), start + rows >= count
        piece = {
            name: tensor[here] if tensor.dim() else tensor if is_last else tensor.clone()
            for name, tensor in tensors.items()
        }
        yield piece, source[here]


def _before_the_optimizer(
    region: fx.GraphModule, inputs: Sequence[StepInput | None]
) -> set[fx.Node]:
    own: set[fx.Node] = set()
    before: set[fx.Node] = set()
    described = iter(inputs)
    for node in region.graph.nodes:
        if node.op == "placeholder":
            (before if next(described) is None else own).add(node)
        elif node.op == "call_function":
            optimizers = _traced_in_step(node) or any(n in own for n in node.all_input_nodes)
            (own if optimizers else before).add(node)
    return before


def _traced_in_step(node: fx.Node) -> bool:
    return (node.meta.get("custom") or {}).get(PHASE_ANNOTATION) == "optimizer"


def _elements(region: fx.GraphModule) -> int:
    """Elements of what the region writes: those of its parameter."""
    return max(int(to.meta["val"].numel()) for _, to, _ in writes(region.graph))


def _elementwise_chain(gradient: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    """The ops that end in `gradient`, each arithmetic on the one before, and where they begin."""
    chain: list[fx.Node] = []
    node = gradient
    while _is_elementwise(node) and (large := _large_input(node)) is not None:
        chain.insert(0, node)
        node = large
    return node, chain


def _is_elementwise(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and (
        node.target is _TO_COPY or torch.Tag.pointwise in node.target.tags
    )


def _large_input(node: fx.Node) -> fx.Node | None:
    """The input of the same shape, None where there is not one, with all others single values."""
    shape = node.meta["val"].shape
    large = [n for n in node.all_input_nodes if n.meta["val"].numel() != 1]
    return large[0] if len(large) == 1 and large[0].meta["val"].shape == shape else None


def _graph_of(
    root: fx.GraphModule,
    inputs: Sequence[fx.Node],
    ops: Iterable[fx.Node],
    results: Sequence[fx.Node],
) -> MeteredGraph:
    graph = fx.Graph()
    values = {node: graph.placeholder(node.name) for node in inputs}
    for node in ops:
        values[node] = graph.node_copy(node, values.__getitem__)
    graph.output(tuple(values[node] for node in results))
    graph.eliminate_dead_code()
    return MeteredGraph(fx.GraphModule(root, graph, "Gradient"), Tier.HOST)
