"""Op factors: what kinds of ops reach of a card's rates, by measurement.

In: a card at hand and the rates of its products and its memory. Out: how many times its roofline
an op of each kind takes (`machine.op_classes`), as the presets have it from published steps. What
is compiled is not measured here: its kernels would have to be compiled first, so the presets'
factor of what is fused stands for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from cotrain_compile.machine import TierSpec
from cotrain_compile.machine.op_classes import FUSED, ONE_BY_ONE, RELAYOUT, OpKind
from cotrain_compile.presets.factors import CONSTANTS
from cotrain_compile.runtime.calibrate.link_bench import Bench, Sizes

# A card is slower when it has been at work for a while than in its first products.
_WARM_UP_S = 0.3
_LOW = torch.bfloat16


def name_of(dtype: torch.dtype) -> str:
    """The name that a machine file has for `dtype`."""
    return str(dtype).removeprefix("torch.")


def product_flops_per_s(
    bench: Bench, device: torch.device, dtype: torch.dtype, side: int, sizes: Sizes
) -> float:
    """Of products of random numbers in the shapes of a training step.

    One is square; one is that of a layer four times as narrow; one is the gradient of a weight,
    whose sums run over all positions. Numbers that are all equal would heat no card.
    """
    narrow = max(1, side // 4)
    shapes = ((side, side, side), (2 * side, narrow, side), (narrow, 2 * side, side))
    pairs = [
        (_random((rows, inner), dtype, device), _random((inner, columns), dtype, device))
        for rows, inner, columns in shapes
    ]

    def products() -> None:
        for a, b in pairs:
            torch.mm(a, b)

    _warm_up(bench, products, device)
    flops = sum(2 * math.prod(shape) for shape in shapes)
    return flops / sizes.median_s(partial(bench.seconds, products))


def factors_of(
    bench: Bench, tier: TierSpec, device: torch.device, sizes: Sizes
) -> Mapping[str, float]:
    """The factor of each kind of op that can be measured on `device`, whose rates are `tier`'s."""
    rate = tier.flops_per_s[name_of(_LOW)]
    forward, backward = _attention(bench, rate, device, sizes)
    convolution, relayout = _convolutions(bench, tier, device, sizes)
    found: dict[str, float] = {
        OpKind.PRODUCT: 1.0,
        OpKind.BATCHED_PRODUCT: 1.0,
        OpKind.ATTENTION: forward,
        OpKind.ATTENTION_BACKWARD: backward,
        OpKind.CONVOLUTION: convolution,
        OpKind.CHANNELS_LAST: convolution,
        OpKind.DEPTHWISE: _depthwise(bench, tier, device, sizes),
        ONE_BY_ONE: _one_by_one(bench, tier, device, sizes),
        FUSED: CONSTANTS["memory, fused"],
        RELAYOUT: relayout,
    }
    told = {str(kind): round(factor, 3) for kind, factor in found.items()}
    return {kind: factor for kind, factor in told.items() if factor}  # no layout that costs: none


def _attention(
    bench: Bench, rate: float, device: torch.device, sizes: Sizes
) -> tuple[float, float]:
    """Forward and backward of causal attention; heads of 64 and of 128."""
    batch, length = 4, sizes.matmul_side
    forward_s = backward_s = flops = 0.0
    for heads, width in ((16, 64), (8, 128)):
        shape = (batch, heads, length, width)
        q, k, v = (_random(shape, _LOW, device).requires_grad_() for _ in range(3))
        gradient = _random(shape, _LOW, device)

        def attend(q: Tensor = q, k: Tensor = k, v: Tensor = v) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        def both(attend: Callable[[], Tensor] = attend, gradient: Tensor = gradient) -> None:
            attend().backward(gradient)

        once_s = sizes.median_s(partial(bench.seconds, attend))
        forward_s += once_s
        backward_s += sizes.median_s(partial(bench.seconds, both)) - once_s
        # Two products over half of the square, the half that a causal mask leaves.
        flops += 2 * 2 * batch * heads * length * (length + 1) / 2 * width
    # The backward has five products where the forward has two.
    return forward_s * rate / flops, backward_s * rate / (2.5 * flops)


def _convolutions(
    bench: Bench, tier: TierSpec, device: torch.device, sizes: Sizes
) -> tuple[float, float]:
    """Of a 3 × 3 convolution that is channels last; how often its bytes are laid out anew if not.

    The second is in passes over what it reads and writes, see `op_classes.RELAYOUT`.
    """
    batch, channels, side = 32, 256, max(8, sizes.matmul_side // 36)
    weight = _random((channels, channels, 3, 3), _LOW, device)
    image = _random((batch, channels, side, side), _LOW, device)
    last = torch.channels_last

    def seconds(image: Tensor, weight: Tensor) -> float:
        work = partial(F.conv2d, image, weight, padding=1)
        return sizes.median_s(partial(bench.seconds, work))

    last_s = seconds(image.contiguous(memory_format=last), weight.contiguous(memory_format=last))
    first_s = seconds(image, weight)
    flops = 2 * image.numel() * 9 * channels
    nbytes = 2 * image.nbytes + weight.nbytes
    roofline_s = max(flops / tier.flops_per_s[name_of(_LOW)], nbytes / tier.bytes_per_s)
    return last_s / roofline_s, max(0.0, (first_s - last_s) * tier.bytes_per_s / nbytes)


def _depthwise(bench: Bench, tier: TierSpec, device: torch.device, sizes: Sizes) -> float:
    batch, channels, side = 32, 256, max(8, sizes.matmul_side // 36)
    image = _random((batch, channels, side, side), _LOW, device)
    image = image.contiguous(memory_format=torch.channels_last)
    weight = _random((channels, 1, 3, 3), _LOW, device)
    work = partial(F.conv2d, image, weight, padding=1, groups=channels)
    seconds = sizes.median_s(partial(bench.seconds, work))
    nbytes = 2 * image.nbytes + weight.nbytes
    flops = 2 * image.numel() * 9
    return seconds / max(flops / tier.flops_per_s[name_of(_LOW)], nbytes / tier.bytes_per_s)


def _one_by_one(bench: Bench, tier: TierSpec, device: torch.device, sizes: Sizes) -> float:
    """Of ops between the products of a transformer, as eager runs them."""
    rows, width = 4 * sizes.matmul_side, 2 * sizes.matmul_side
    low = _random((rows, width), _LOW, device)
    wide, scale = low.float(), torch.ones(width, device=device)
    # What each reads and writes, in bytes an element.
    ops: tuple[tuple[Callable[[], Tensor], int], ...] = (
        (lambda: F.gelu(low), 4),
        (lambda: low + low, 6),
        (lambda: low.float(), 6),
        (lambda: wide.to(_LOW), 6),
        (lambda: F.layer_norm(wide, (width,), scale, scale), 8),
        (lambda: torch.softmax(wide, -1), 8),
    )
    seconds = sum(sizes.median_s(partial(bench.seconds, op)) for op, _ in ops)
    nbytes = sum(each for _, each in ops) * low.numel()
    return seconds * tier.bytes_per_s / nbytes


def _random(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(shape, dtype=torch.float32, device=device).to(dtype)


def _warm_up(bench: Bench, work: Callable[[], None], device: torch.device) -> None:
    """Let a card reach the clocks that it keeps; a processor needs no more than one run."""
    once_s = bench.seconds(work)
    if device.type == "cpu":
        return
    for _ in range(min(1000, int(_WARM_UP_S / max(once_s, 1e-6)))):
        work()
