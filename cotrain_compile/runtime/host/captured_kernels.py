"""Captured kernels: the captured ops of a host region, on whole tensors or on parts of them.

Arithmetic on each element gives the same elements whichever part of a tensor it is done on. So a
region that does nothing else with its large tensors runs from end to end on a part that stays in
the cache, then on the next: the same ops on the same numbers, with most of the memory traffic gone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from cotrain_compile.graph import writes
from cotrain_compile.machine import Tier
from cotrain_compile.runtime.course import WHOLE, Course
from cotrain_compile.runtime.host.gradient_prologue import OPS, graph_of, is_elementwise, is_single
from cotrain_compile.runtime.host.match_update import COPY, reads_what_is_overwritten
from cotrain_compile.runtime.meter import MemoryMeter, MeteredGraph

# Results of this size stay in the cache, and their memory is used again from op to op; with smaller
# parts the time that it takes to call an op shows. It is a multiple of every vector's length, so
# that no element falls to the loop over the rest that did not before: that may round otherwise.
CHUNK_ELEMENTS = 1 << 18


@dataclass(frozen=True)
class CapturedKernel:
    """Runs the captured ops one by one."""

    ops: MeteredGraph

    def __call__(self, inputs: Sequence[Any], meter: MemoryMeter, course: Course = WHOLE) -> None:
        for _ in course.pieces():
            self.ops(inputs, meter)


@dataclass(frozen=True)
class ChunkedKernel:
    """Runs captured ops that make the values of `body` once, then `body` on part after part.

    `begin` gets the region's inputs; `is_large` says which of its results are cut.
    """

    begin: MeteredGraph
    body: MeteredGraph
    is_large: tuple[bool, ...]

    def __call__(self, inputs: Sequence[Any], meter: MemoryMeter, course: Course = WHOLE) -> None:
        for _ in course.pieces():
            given = self.begin(inputs, meter)
            flat = [_flat(v, large) for v, large in zip(given, self.is_large, strict=True)]
            for part in _parts(flat, self.is_large):
                self.body(part, meter)


def chunked_kernel(region: fx.GraphModule) -> ChunkedKernel | None:
    """A kernel that goes through the large tensors of `region` in parts, None where it cannot.

    It can where each op on them is arithmetic on each element, all have one shape and lie in order,
    and nothing else waits for its results.
    """
    written = [to for _, to, _ in writes(region.graph)]
    whole = max(written, key=lambda to: int(to.meta["val"].numel()), default=None)
    if whole is None or whole.meta["val"].numel() <= CHUNK_ELEMENTS:
        return None
    if reads_what_is_overwritten(region.graph):
        return None
    shape = whole.meta["val"].shape
    body: list[fx.Node] = []
    for node in region.graph.nodes:
        if node.op != "call_function":
            continue
        if _works_on_parts(node, shape):
            body.append(node)
        elif not set(body).isdisjoint(node.all_input_nodes):
            return None
    given = list(dict.fromkeys(n for op in body for n in op.all_input_nodes if n not in set(body)))
    inside = set(body)
    first = [node for node in region.graph.nodes if node.op in OPS and node not in inside]
    if not body or {op.args[0] for op in first if op.target is COPY} & set(given):
        return None  # what comes first would overwrite what the body is to read
    inputs = region.graph.find_nodes(op="placeholder")
    return ChunkedKernel(
        MeteredGraph(graph_of(region, inputs, first, given), Tier.HOST),
        MeteredGraph(graph_of(region, given, body, []), Tier.HOST),
        tuple(_is_whole(node, shape) for node in given),
    )


def _works_on_parts(node: fx.Node, shape: torch.Size) -> bool:
    if node.target is COPY:
        if node.args[0].op != "placeholder":  # type: ignore[union-attr]
            return False
    elif not is_elementwise(node) or node.kwargs.get("memory_format") is not None:
        return False
    return _is_whole(node, shape) and all(
        _is_whole(source, shape) or is_single(source) for source in node.all_input_nodes
    )


def _is_whole(node: fx.Node, shape: torch.Size) -> bool:
    """Whether a value has `shape`, its elements in order."""
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.shape == shape and value.is_contiguous()


def _flat(value: Any, is_large: bool) -> Any:
    """A tensor in one dimension; what has none keeps to that, since it decides about dtypes."""
    if is_large or (isinstance(value, Tensor) and value.dim()):
        return value.reshape(-1)  # a view: of what is written, the trace has said that it can be
    return value


def _parts(values: Sequence[Any], is_large: Sequence[bool]) -> Iterator[list[Any]]:
    elements = next(len(v) for v, large in zip(values, is_large, strict=True) if large)
    for start in range(0, elements, CHUNK_ELEMENTS):
        here = slice(start, start + CHUNK_ELEMENTS)
        yield [v[here] if large else v for v, large in zip(values, is_large, strict=True)]
