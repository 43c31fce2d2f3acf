"""Op pieces: calls of ATen's ops as training steps have them, in several sizes.

In: a device and a dtype. Out: for each op the arguments of its calls. What a step has not touched
for a while, as weights, states and what the forward has saved, comes from a pool that no cache
holds; the rest is the same in each call. What a call computes and moves, and its class, is found as
for an op of a traced step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_map

from cotrain_compile.extract.op_costs import computing_dtype, cost_of, kind_of_op
from cotrain_compile.machine.op_classes import classes_of

aten = torch.ops.aten
# In torch 2.13 what is captured of addcmul.
_fma = getattr(torch.ops.prims, "fma", None)

# In a batch.
_IMAGES = 8
# More than the caches of a core or of a card.
POOL_BYTES = 64 << 20
_DRAWN = 1 << 16


@dataclass(frozen=True)
class OpCalls:
    """Calls of an op: `arguments` of the next one, and `named` ones that all have.

    `size` is the same of all pieces that were made together.
    """

    op: Any
    arguments: Callable[[], Sequence[Any]]
    named: Mapping[str, Any] = field(default_factory=dict)
    size: object = None


@dataclass(frozen=True)
class CallWork:
    """What a call is for a planner."""

    classes: tuple[str, ...]
    flops: float
    nbytes: float
    dtype: str


def work_of(piece: OpCalls) -> CallWork:
    """What a step would say of a call of `piece`, which is run once."""
    arguments = piece.arguments()
    graph = fx.Graph()

    def given(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        node = graph.placeholder("given")
        node.meta["val"] = value
        return node

    node = graph.call_function(piece.op, tuple(tree_map(given, arguments)), dict(piece.named))
    node.meta["val"] = piece.op(*arguments, **piece.named)
    cost = cost_of(node)
    dtype = computing_dtype(node, cost.flops)
    kind = kind_of_op(node, cost.flops)
    classes = classes_of(kind, str(piece.op), dtype, computes=cost.flops > 0)
    return CallWork(classes, cost.flops, cost.bytes_moved, dtype)


class Operands:
    """Random tensors of a dtype on a device: the same in each call, or the next of the pool."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device, self._dtype = device, dtype
        drawn = self.new(_DRAWN)  # and repeated: no cache knows, and to draw all takes seconds
        self._pool = drawn.repeat(POOL_BYTES // (dtype.itemsize * _DRAWN))
        self._at = 0

    def new(self, *shape: int) -> Tensor:
        """One more tensor."""
        return torch.randn(shape, dtype=torch.float32, device=self._device).to(self._dtype)

    def cold(self, *shape: int) -> Tensor:
        """One that has not been touched for as long as the pool allows."""
        count = math.prod(shape)
        if self._at + count > self._pool.numel():
            self._at = 0
        found = self._pool[self._at : self._at + count].view(shape)
        self._at += count
        return found

    def rows_of_table(self, table: int, count: int) -> Tensor:
        """Indices of so many of its rows."""
        return torch.randint(0, table, (count,), device=self._device)


def memory_pieces(values: Operands, rows: int, width: int) -> Iterator[OpCalls]:
    """What is limited by memory."""
    x, y = values.new(rows, width), values.new(rows, width)
    cold = partial(values.cold, rows, width)
    yield from _element_by_element(x, y, cold)
    for op in (aten.gelu.default, aten.silu.default):
        yield OpCalls(op, lambda: (cold(),))
    for op in (aten.gelu_backward.default, aten.silu_backward.default):
        yield OpCalls(op, lambda: (y, cold()))
    yield OpCalls(aten.native_dropout.default, lambda: (cold(), 0.1, True))
    kept = x > 0
    yield OpCalls(aten.native_dropout_backward.default, lambda: (y, kept, 1.1))
    yield from _norms(values, x, y, cold)
    yield from _batch_norms(values, rows * width)
    yield OpCalls(aten.sum.dim_IntList, lambda: (cold(), [0], True))
    yield OpCalls(aten.mean.dim, lambda: (cold(), [-1], True))
    heads = rows // 32, 32, 4, width // 4
    yield OpCalls(
        aten.clone.default,
        lambda: (cold().view(heads).transpose(1, 2),),
        {"memory_format": torch.contiguous_format},
    )
    yield OpCalls(aten.cat.default, lambda: ([cold(), y], -1))
    other = torch.float32 if x.dtype is not torch.float32 else torch.bfloat16
    yield OpCalls(aten._to_copy.default, lambda: (cold(),), {"dtype": other})
    table, index = max(rows, 4096), values.rows_of_table(max(rows, 4096), rows)
    yield OpCalls(aten.embedding.default, lambda: (values.cold(table, width), index))
    yield OpCalls(aten.embedding_dense_backward.default, lambda: (x, index, table, -1, False))


def _element_by_element(x: Tensor, y: Tensor, cold: Callable[[], Tensor]) -> Iterator[OpCalls]:
    """Half as in layers, half as in an update."""
    positive = x.abs()
    yield OpCalls(aten.relu.default, lambda: (x,))
    yield OpCalls(aten.threshold_backward.default, lambda: (y, cold(), 0))
    yield OpCalls(aten.add.Tensor, lambda: (x, y))
    yield OpCalls(aten.mul.Tensor, lambda: (x, y))
    yield OpCalls(aten.mul.Tensor, lambda: (cold(), 0.9))
    yield OpCalls(aten.lerp.Scalar, lambda: (cold(), cold(), 0.1))
    yield OpCalls(aten.copy_.default, lambda: (cold(), x))
    yield OpCalls(aten.sqrt.default, lambda: (positive,))
    yield OpCalls(aten.div.Tensor, lambda: (x, positive))
    if _fma is not None:
        yield OpCalls(_fma.default, lambda: (x, y, cold()))
    yield OpCalls(aten.hardtanh_backward.default, lambda: (y, cold(), 0.0, 6.0))


def _norms(values: Operands, x: Tensor, y: Tensor, cold: Callable[[], Tensor]) -> Iterator[OpCalls]:
    for op in (aten._softmax.default, aten._log_softmax.default):
        yield OpCalls(op, lambda: (cold(), -1, False))
    yield OpCalls(aten._safe_softmax.default, lambda: (cold(), -1))
    for op in (aten._softmax_backward_data.default, aten._log_softmax_backward_data.default):
        yield OpCalls(op, lambda: (y, cold(), -1, x.dtype))
    width = x.shape[1]
    scale, bias = values.new(width), values.new(width)
    yield OpCalls(aten.native_layer_norm.default, lambda: (cold(), [width], scale, bias, 1e-5))
    _, mean, deviation = aten.native_layer_norm.default(x, [width], scale, bias, 1e-5)
    yield OpCalls(
        aten.native_layer_norm_backward.default,
        lambda: (y, cold(), [width], mean, deviation, scale, bias, [True, True, True]),
    )


def _batch_norms(values: Operands, elements: int) -> Iterator[OpCalls]:
    """Of images of as many elements."""
    places = 16 if elements > 1 << 12 else 4
    channels = min(64, elements // places**2)
    count = elements // (channels * places**2)
    image, gradient = (values.new(count, channels, places, places) for _ in range(2))
    scale, bias, mean = (values.new(channels).float() for _ in range(3))
    deviation = mean.abs() + 1
    norm = aten._native_batch_norm_legit_functional.default
    yield OpCalls(
        norm, lambda: (values.cold(*image.shape), scale, bias, mean, deviation, True, 0.1, 1e-5)
    )
    yield OpCalls(
        aten.native_batch_norm_backward.default,
        lambda: (
            *(gradient, values.cold(*image.shape), scale, mean, deviation, mean, deviation),
            *(True, 1e-5, [True, True, True]),
        ),
    )


def product_pieces(values: Operands, rows: int, inputs: int, outputs: int) -> Iterator[OpCalls]:
    """A layer: forward, and the gradients of what it reads and of its weight."""
    x, y, bias = values.new(rows, inputs), values.new(rows, outputs), values.new(outputs)
    yield OpCalls(aten.addmm.default, lambda: (bias, x, values.cold(outputs, inputs).t()))
    yield OpCalls(aten.mm.default, lambda: (y, values.cold(outputs, inputs)))
    yield OpCalls(aten.mm.default, lambda: (y.t(), x))


def attention_pieces(values: Operands, heads: int, length: int, width: int) -> Iterator[OpCalls]:
    """Of four sequences: by hand, and in one op of a processor."""
    q, k, v, gradient = (values.new(4, heads, length, width) for _ in range(4))
    one, scores = q.flatten(0, 1), values.new(4 * heads, length, length)
    yield OpCalls(aten.bmm.default, lambda: (one, one.transpose(1, 2)))
    yield OpCalls(aten.bmm.default, lambda: (scores, one))
    if q.device.type != "cpu":
        return
    mask = values.new(4, 1, length, length)
    attend = aten._scaled_dot_product_flash_attention_for_cpu.default
    back = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    for is_causal, named in ((True, {}), (False, {"attn_mask": mask})):
        yield OpCalls(attend, partial(_given, q, k, v, 0.0, is_causal), named)
        out, sums = attend(q, k, v, 0.0, is_causal, **named)
        yield OpCalls(back, partial(_given, gradient, q, k, v, out, sums, 0.0, is_causal), named)


def _given(*arguments: Any) -> Sequence[Any]:
    return arguments


def convolution_pieces(
    values: Operands, channels: int, outputs: int, side: int, places: int
) -> Iterator[OpCalls]:
    """Of eight images: both passes and layouts.

    With filters of a negative `side` each channel has its own.
    """
    groups, side = (channels, -side) if side < 0 else (1, side)
    weight = values.new(outputs, channels // groups, side, side)
    how = ([1, 1], [side // 2, side // 2], [1, 1], False, [0, 0], groups)
    for is_last in (False, True)[: 1 if groups > 1 else 2]:
        x = partial(_image, values, channels, places, is_last)
        y = partial(_image, values, outputs, places, is_last)
        layout = torch.channels_last if is_last else torch.contiguous_format
        w = weight.contiguous(memory_format=layout)
        yield OpCalls(aten.convolution.default, partial(_called, (x, w, None, *how)))
        both = (y, x, w, None, *how, [True, True, False])
        yield OpCalls(aten.convolution_backward.default, partial(_called, both))


def _image(values: Operands, channels: int, places: int, is_last: bool) -> Tensor:
    if is_last:
        return values.cold(_IMAGES, places, places, channels).permute(0, 3, 1, 2)
    return values.cold(_IMAGES, channels, places, places)


def _called(arguments: Sequence[Any]) -> Sequence[Any]:
    """`arguments` with the tensors that they make."""
    return [
        each() if callable(each) and not isinstance(each, Tensor) else each for each in arguments
    ]
