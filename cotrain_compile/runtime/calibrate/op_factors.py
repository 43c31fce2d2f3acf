"""Op factors: what kinds of ops reach of a device's rates, by measurement.

In: a device at hand and the rates of its products and its memory. Out: how many times its roofline
an op of each kind takes (`machine.op_classes`), as the presets have it from published steps. What
is compiled is not measured here: its kernels would have to be compiled first, so the presets'
factor of what is fused stands for it. So does theirs of a kind whose measurement no device can have
given, with a remark.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from cotrain_compile.machine import TierSpec
from cotrain_compile.machine.op_classes import FUSED, ONE_BY_ONE, RELAYOUT, OpKind
from cotrain_compile.machine.parts import MOST_FACTOR
from cotrain_compile.presets.factors import factors_like
from cotrain_compile.runtime.calibrate.link_bench import Bench, Sizes

# A card is slower when it has been at work for a while than in its first products.
_WARM_UP_S = 0.3
# A card gets several calls at once, so that it has none to wait for once the first has begun.
_CALLS_PER_SAMPLE = 8
# What most steps on a card compute in.
_LOW = torch.bfloat16
# The length of a sequence in many steps. Pieces as long take a fast card 100 microseconds and more,
# far longer than it takes to launch them.
_LONGEST = 1024

# A machine has none below it, see `parts.refuse_factors`.
_LEAST_FACTOR = 1 / MOST_FACTOR
# Beyond it no kernel was measured, but what it took to begin it, or the computer at other work.
_LEAST_BELIEVED, _MOST_BELIEVED = 0.2, 20.0

Work = Callable[[], object]


@dataclass(frozen=True)
class Factors:
    """How many times its roofline an op takes, by kind; and which were assumed for what reason."""

    by_kind: dict[str, float]
    remarks: tuple[str, ...]


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
    return flops / sizes.least_s(partial(bench.seconds, products))


def factors_of(bench: Bench, tier: TierSpec, device: torch.device, sizes: Sizes) -> Factors:
    """The factor of each kind of op that can be measured on `device`, whose rates are `tier`'s.

    Where a layout costs nothing, none is told of what it costs. What is not believed is left at the
    presets' factor for such a card.
    """
    assumed = factors_like(bench.name, tier.capacity_bytes)
    trial = Trial(bench, tier, device, sizes)
    convolution, relayout = _convolutions(trial)
    forward, backward = _attention(trial, has_mask=False)
    masked, masked_backward = _attention(trial, has_mask=True)
    found: dict[str, float] = {
        OpKind.PRODUCT: _products(trial),
        OpKind.BATCHED_PRODUCT: _batched_products(trial),
        OpKind.ATTENTION: forward,
        OpKind.ATTENTION_BACKWARD: backward,
        OpKind.MASKED_ATTENTION: masked,
        OpKind.MASKED_ATTENTION_BACKWARD: masked_backward,
        OpKind.CONVOLUTION: convolution,
        OpKind.CHANNELS_LAST: convolution,
        OpKind.DEPTHWISE: _depthwise(trial),
        ONE_BY_ONE: _one_by_one(trial),
    }
    doubted = {k: f for k, f in found.items() if not _LEAST_BELIEVED <= f <= _MOST_BELIEVED}
    # Any part of the bytes may be laid out anew, down to none of them.
    if relayout > _MOST_BELIEVED:
        doubted[RELAYOUT] = relayout
    elif round(relayout, 3) >= _LEAST_FACTOR:
        found[RELAYOUT] = relayout
    found |= {kind: assumed[kind] for kind in (FUSED, *doubted)}
    return Factors(
        {str(kind): round(factor, 3) for kind, factor in found.items()},
        tuple(
            f"{kind}: measured at {factor:.3g} times what the rates allow, which no device takes; "
            f"{assumed[kind]:.3g} is assumed, as of cards like this one"
            for kind, factor in doubted.items()
        ),
    )


@dataclass(frozen=True)
class Trial:
    """Pieces of work on a device, what they take and what the device's rates allow."""

    bench: Bench
    tier: TierSpec
    device: torch.device
    sizes: Sizes

    @property
    def side(self) -> int:
        """What all shapes follow from."""
        return min(_LONGEST, self.sizes.matmul_side)

    def random(self, *shape: int) -> Tensor:
        """A tensor in the dtype of the trial."""
        return _random(shape, _LOW, self.device)

    def seconds(self, work: Work) -> float:
        """Of one call of `work` among several."""
        calls = _CALLS_PER_SAMPLE if self.device.type == "cuda" else 1

        def several() -> None:
            for _ in range(calls):
                work()

        return self.sizes.least_s(partial(self.bench.seconds, several)) / calls

    def roofline_s(self, flops: float, nbytes: float) -> float:
        """Seconds by the rates alone, as `analysis.costs` has them."""
        compute_s = flops / self.tier.flops_per_s[name_of(_LOW)]
        return max(compute_s, nbytes / self.tier.bytes_per_s)


def _products(trial: Trial) -> float:
    """Of products as layers of two widths have them, with the gradients of input and of weight."""
    taken_s = roofline_s = 0.0
    for width, rows in ((3 * trial.side // 4, 16 * trial.side), (2 * trial.side, 8 * trial.side)):
        x, weight, y = (
            trial.random(*shape) for shape in ((rows, width), (4 * width, width), (rows, 4 * width))
        )
        nbytes = x.nbytes + weight.nbytes + y.nbytes
        for a, b in ((x, weight.t()), (y, weight), (y.t(), x)):
            taken_s += trial.seconds(partial(torch.mm, a, b))
            roofline_s += trial.roofline_s(2 * a.numel() * b.shape[1], nbytes)
    return taken_s / roofline_s


def _batched_products(trial: Trial) -> float:
    """Of attention by hand: scores, and what they pick."""
    heads, length, width = 3 * trial.side // 4, trial.side // 2, 64
    q, scores = trial.random(heads, length, width), trial.random(heads, length, length)
    taken_s = trial.seconds(partial(torch.bmm, q, q.transpose(1, 2)))
    taken_s += trial.seconds(partial(torch.bmm, scores, q))
    flops = 2 * scores.numel() * width
    return taken_s / sum(trial.roofline_s(flops, scores.nbytes + 2 * q.nbytes) for _ in range(2))


def _attention(trial: Trial, *, has_mask: bool) -> tuple[float, float]:
    """Forward and backward of attention: two lengths, heads of 64 and of 128.

    It is causal, or reads a mask that says so, and computes all of the square.
    """
    forward_s = backward_s = forward_allowed_s = backward_allowed_s = 0.0
    for length in (trial.side, 2 * trial.side):
        for heads, width in ((16, 64), (8, 128)):
            shape = (32 * trial.side // length, heads, length, width)
            q, k, v = (trial.random(*shape).requires_grad_() for _ in range(3))
            gradient = trial.random(*shape)
            mask = trial.random(length, length).tril() if has_mask else None
            attend = partial(
                F.scaled_dot_product_attention, q, k, v, attn_mask=mask, is_causal=mask is None
            )
            out = attend()
            back = partial(torch.autograd.grad, out, (q, k, v), gradient, retain_graph=True)
            forward_s += trial.seconds(attend)
            backward_s += trial.seconds(back)
            # Two products over the half of the square that is left, or over all of it.
            flops = 2 * 2 * q.numel() * (length if has_mask else (length + 1) / 2)
            mask_bytes = mask.nbytes if mask is not None else 0
            forward_allowed_s += trial.roofline_s(flops, 4 * q.nbytes + mask_bytes)
            # The backward has five products where the forward has two.
            backward_allowed_s += trial.roofline_s(2.5 * flops, 8 * q.nbytes + mask_bytes)
    return forward_s / forward_allowed_s, backward_s / backward_allowed_s


def _convolutions(trial: Trial) -> tuple[float, float]:
    """Of 3 × 3 convolutions, forward and backward, that are channels last; and of others.

    The second says how often their bytes are laid out anew, see `op_classes.RELAYOUT`.
    """
    last_s = first_s = roofline_s = bytes_s = 0.0
    for channels, part in ((64, 4), (256, 8)):
        batch, places = trial.side // part, max(8, 14 * trial.side // (64 * part))
        image = trial.random(batch, channels, places, places)
        weight = trial.random(channels, channels, 3, 3)
        first_s += _both_passes_s(trial, image, weight)
        last_s += _both_passes_s(trial, *map(_last, (image, weight)))
        flops = 2 * image.numel() * 9 * channels
        forward_bytes = 2 * image.nbytes + weight.nbytes
        backward_bytes = 3 * image.nbytes + 2 * weight.nbytes
        roofline_s += trial.roofline_s(flops, forward_bytes)
        roofline_s += trial.roofline_s(2 * flops, backward_bytes)
        bytes_s += (forward_bytes + backward_bytes) / trial.tier.bytes_per_s
    return last_s / roofline_s, (first_s - last_s) / bytes_s


def _both_passes_s(trial: Trial, image: Tensor, weight: Tensor) -> float:
    """Forward, and the gradients of image and weight."""
    inputs = image.requires_grad_(), weight.requires_grad_()
    convolve = partial(F.conv2d, *inputs, padding=1)
    out = convolve()
    gradient = torch.ones_like(out)
    back = partial(torch.autograd.grad, out, inputs, gradient, retain_graph=True)
    return trial.seconds(convolve) + trial.seconds(back)


def _depthwise(trial: Trial) -> float:
    channels, places = 256, max(8, 56 * trial.side // _LONGEST)
    image = _last(trial.random(trial.side // 8, channels, places, places))
    weight = trial.random(channels, 1, 3, 3)
    seconds = trial.seconds(partial(F.conv2d, image, weight, padding=1, groups=channels))
    return seconds / trial.roofline_s(2 * image.numel() * 9, 2 * image.nbytes + weight.nbytes)


def _one_by_one(trial: Trial) -> float:
    """Of ops between the products of a transformer, as eager runs them."""
    rows, width = 32 * trial.side, 4 * trial.side
    low, other = trial.random(rows, width), trial.random(rows, width)
    wide, scale = low.float(), torch.ones(width, device=trial.device)
    # What each reads and writes, in bytes an element.
    ops: tuple[tuple[Work, int], ...] = (
        (lambda: F.gelu(low), 4),
        (lambda: low + other, 6),
        (lambda: low.float(), 6),
        (lambda: wide.to(_LOW), 6),
        (lambda: F.layer_norm(wide, (width,), scale, scale), 8),
        (lambda: torch.softmax(wide, -1), 8),
    )
    seconds = sum(trial.seconds(op) for op, _ in ops)
    nbytes = sum(each for _, each in ops) * low.numel()
    return seconds * trial.tier.bytes_per_s / nbytes


def _last(image: Tensor) -> Tensor:
    return image.contiguous(memory_format=torch.channels_last)


def _random(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(shape, dtype=torch.float32, device=device).to(dtype)


def _warm_up(bench: Bench, work: Work, device: torch.device) -> None:
    """Let a card reach the clocks that it keeps; a processor needs no more than one run."""
    once_s = bench.seconds(work)
    if device.type == "cpu":
        return
    for _ in range(min(1000, int(_WARM_UP_S / max(once_s, 1e-6)))):
        work()
