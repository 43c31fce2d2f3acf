"""Gradient part: what a host region does to a gradient before the optimizer's own ops.

In: a region, with what its inputs are. Out: these ops in two parts, so that the arithmetic on each
element of the gradient (widening, clipping) can be done a piece at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from cotrain_compile.graph import returns_argument_memory
from cotrain_compile.graph.random_ops import has_random_tag
from cotrain_compile.machine import Tier
from cotrain_compile.runtime.host.match_update import ancestors
from cotrain_compile.runtime.meter import MeteredGraph

# A piece stays in the caches of the cores that share it until the fused loop reads it. The memory
# for a whole gradient at once costs several times the update: bench/runtime/host_update.py.
# For each thread: all of them meet at the end of each op, and on a busy computer a meeting takes as
# long as the last of them waits for its core. What is cast to float32 stays below the 32 MiB from
# which on glibc gives memory back to the system after every piece.
PIECE_ELEMENTS = 1 << 18
_MOST_THREADS = 16

# What computes something in a graph; a constant is fetched by an op of its own.
OPS = ("call_function", "get_attr")

# Arithmetic on each element by itself, though torch's tag does not say so.
_ELEMENTWISE = frozenset({torch.ops.aten._to_copy.default})


@dataclass(frozen=True)
class GradientPart:
    """The ops before the optimizer's own.

    `begin` gets the region's inputs; it returns a tensor of the parameter's shape and the small
    values that the rest needs. `finish` turns that tensor, or some of its rows, into the gradient,
    with `ops` ops. `shown` is the position of the input whose memory that tensor shows, row by row,
    and with which `begin` does nothing else; None where there is none.
    """

    begin: MeteredGraph
    finish: MeteredGraph
    ops: int
    shown: int | None


def gradient_part(region: fx.GraphModule, gradient: fx.Node) -> GradientPart:
    """What `region` computes `gradient` from: its values before any write, and its own ops."""
    before = ancestors(gradient)
    source, chain = _elementwise_chain(gradient)
    needed = [source, *(value for op in chain for value in op.all_input_nodes)]
    given = [value for value in dict.fromkeys(needed) if value not in chain]
    inputs_of_region = region.graph.find_nodes(op="placeholder")
    first = [node for node in region.graph.nodes if node in before and node.op in OPS]
    begin = graph_of(region, inputs_of_region, first, given)
    return GradientPart(
        begin=MeteredGraph(begin, Tier.HOST),
        finish=MeteredGraph(graph_of(region, given, chain, [gradient]), Tier.HOST),
        ops=len(chain),
        shown=_shown(begin.graph) if source.meta["val"].is_contiguous() else None,
    )


def piece_elements() -> int:
    """How many elements stay in the caches of as many cores as the calling thread computes on."""
    return PIECE_ELEMENTS * min(torch.get_num_threads(), _MOST_THREADS)


def is_one_piece(source: Tensor) -> bool:
    """Whether it stays in the caches as a whole."""
    return source.numel() <= piece_elements()


def cache_rows(source: Tensor) -> int:
    """How many rows of `source` stay in the caches until the fused loop reads them."""
    return max(1, piece_elements() * source.shape[0] // source.numel()) if source.numel() else 1


def in_pieces(
    tensors: Mapping[str, Tensor], source: Tensor, rows: int
) -> Iterator[tuple[Mapping[str, Tensor], Tensor]]:
    """The same `rows` rows of `tensors` and `source`, piece by piece.

    A tensor without rows (a step counter) is a copy in each piece but the last, which has itself:
    what counts once in each piece has counted once in the end.
    """
    if not source.dim() or source.shape[0] <= rows:
        yield tensors, source
        return
    count = source.shape[0]
    for start in range(0, count, rows):
        here, is_last = slice(start, start + rows), start + rows >= count
        piece = {
            name: tensor[here] if tensor.dim() else tensor if is_last else tensor.clone()
            for name, tensor in tensors.items()
        }
        yield piece, source[here]


def _elementwise_chain(gradient: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    """The ops that end in `gradient`, each arithmetic on the one before, and where they begin."""
    chain: list[fx.Node] = []
    node = gradient
    while is_elementwise(node) and (large := _large_input(node)) is not None:
        chain.insert(0, node)
        node = large
    return node, chain


def has_ops(graph: fx.Graph) -> bool:
    """Whether `graph` computes or writes anything."""
    return any(node.op == "call_function" for node in graph.nodes)


def is_elementwise(node: fx.Node) -> bool:
    """Whether each element of the result follows from the same elements of the inputs."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.target._schema.is_mutable:
        return False
    is_tagged = torch.Tag.pointwise in node.target.tags and not has_random_tag(node)
    return node.target in _ELEMENTWISE or is_tagged


def _large_input(node: fx.Node) -> fx.Node | None:
    """The input of the same shape, None where there is not one, with all others single values."""
    shape = node.meta["val"].shape
    large = [n for n in node.all_input_nodes if not is_single(n)]
    return large[0] if len(large) == 1 and large[0].meta["val"].shape == shape else None


def is_single(node: fx.Node) -> bool:
    """Whether a value is a single number."""
    value = node.meta.get("val")
    return not isinstance(value, Tensor) or value.numel() == 1


def _shown(begin: fx.Graph) -> int | None:
    """The position of the input that the first result of `begin` shows, if only views read it."""
    (output,) = begin.find_nodes(op="output")
    results: Any = output.args[0]
    node = results[0]
    while node.op == "call_function" and returns_argument_memory(node):
        node = node.all_input_nodes[0]
    inputs = list(begin.find_nodes(op="placeholder"))
    return inputs.index(node) if node in inputs and _is_only_viewed(node) else None


def _is_only_viewed(node: fx.Node) -> bool:
    return all(
        user.op == "output" or (returns_argument_memory(user) and _is_only_viewed(user))
        for user in node.users
    )


def graph_of(
    root: fx.GraphModule,
    inputs: Sequence[fx.Node],
    ops: Iterable[fx.Node],
    results: Sequence[fx.Node],
) -> fx.GraphModule:
    """`ops` of `root` alone, from `inputs` to `results`; those that nobody needs are left out."""
    graph = fx.Graph()
    values = {node: graph.placeholder(node.name) for node in inputs}
    for node in inputs:
        values[node].meta = dict(node.meta)
    for node in ops:
        values[node] = graph.node_copy(node, values.__getitem__)
    graph.output(tuple(values[node] for node in results))
    graph.eliminate_dead_code()
    return fx.GraphModule(root, graph, "Gradient")
