"""Attention on a card: which kernel `scaled_dot_product_attention` takes there, by its inputs.

The rules are torch's (`aten/src/ATen/native/transformers/cuda/sdp_utils.cpp`, 2.13), as data about
one call in, the number of a `torch.nn.attention.SDPBackend` out. They are needed where a step is
traced for a card that is not there: a build without CUDA does not have them, nor cuDNN, whose
version they ask for.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntEnum

import torch

from cotrain_compile.dataflow import Dataflow

# With it in the environment torch asks cuDNN last, on every card.
DEPRIORITIZED = "TORCH_CUDNN_SDPA_DEPRIORITIZED"
# cuDNN as torch counts its versions: 9.15.0, above which it is asked first on some cards, and one
# that is taken to be there where torch has none. Wheels of torch have newer ones than 9.15.0.
_FIRST_ABOVE, _ASSUMED = 91500, 91900
# Since torch 2.12 cuDNN is not asked for dropout that it would round to sixteenths.
IN_SIXTEENTHS = torch.__version__ >= "2.12"
_CUDNN_OPS = "_scaled_dot_product_cudnn_attention"


class AttentionKernel(IntEnum):
    """As torch numbers them; none of those that are allowed can do it: `NONE`."""

    NONE = -1
    MATH = 0
    FLASH = 1
    EFFICIENT = 2
    CUDNN = 3


# As `c10::ScalarType` numbers them.
HALF, FLOAT, BFLOAT16 = 5, 6, 15
Capability = tuple[int, int]


@dataclass(frozen=True)
class AttentionCall:
    """What decides, in the order in which `absent_card.cpp` tells it.

    `square`: as many queries as keys; `grouped`: key and value have fewer heads; `dense`: elements
    of the last dimension are next to each other; `sixteenths`: dropout is a number of these;
    `deterministic`: the user wants no other algorithms.
    """

    dtype: int
    query_width: int
    key_width: int
    value_width: int
    square: bool
    empty: bool
    grouped: bool
    mask: bool
    mask_grad: bool
    grad: bool
    dropout: bool
    causal: bool
    dense: bool
    sixteenths: bool
    one_query: bool
    one_key: bool
    deterministic: bool

    @property
    def is_half(self) -> bool:
        return self.dtype in (HALF, BFLOAT16)

    @property
    def same_width(self) -> bool:
        return self.query_width == self.key_width == self.value_width


def usual_order(capability: Capability, cudnn: int | None = None) -> list[AttentionKernel]:
    """The order in which torch asks kernels on a card of that compute capability, with that cuDNN.

    It holds until the user sets another: `sdpa_kernel(..., set_priority=True)`.
    """
    others = [AttentionKernel.FLASH, AttentionKernel.EFFICIENT, AttentionKernel.MATH]
    version = cudnn_version() if cudnn is None else cudnn
    first = capability[0] in (9, 10) and version > _FIRST_ABOVE and not _is_deprioritized()
    return [AttentionKernel.CUDNN, *others] if first else [*others, AttentionKernel.CUDNN]


def kernel_of(
    call: AttentionCall, capability: Capability, order: Iterable[int], cudnn: int | None = None
) -> AttentionKernel:
    """The kernel that torch takes on a card of that compute capability: the first that fits.

    `order` has those that the user allows, and negative numbers.
    """
    version = cudnn_version() if cudnn is None else cudnn
    fits: dict[AttentionKernel, Callable[[], bool]] = {
        AttentionKernel.CUDNN: lambda: _cudnn(call, capability, version),
        AttentionKernel.FLASH: lambda: _flash(call, capability),
        AttentionKernel.EFFICIENT: lambda: _efficient(call, capability),
        AttentionKernel.MATH: lambda: True,
    }
    return next(
        (k for k in map(AttentionKernel, order) if k in fits and fits[k]()), AttentionKernel.NONE
    )


def cudnn_version() -> int:
    """That of cuDNN here; where torch has none, that of a card's torch is assumed."""
    found: int | None = torch.backends.cudnn.version()
    return found or _ASSUMED


def assumed(dataflow: Dataflow) -> tuple[str, ...]:
    """In words, what a trace for a card that is not there has taken for granted about attention."""
    count = sum(_CUDNN_OPS in op.target and "backward" not in op.target for op in dataflow.ops)
    if not count:
        return ()
    major, minor, patch = (cudnn_version() // n % 100 for n in (10000, 100, 1))
    return (
        f"{count} attentions are traced as cuDNN's, as with cuDNN {major}.{minor}.{patch}; a card "
        f"whose cuDNN is 9.15.0 or older takes flash attention: trace with {DEPRIORITIZED}=1 "
        "for that, or where it is set there",
    )


def _is_deprioritized() -> bool:
    return os.environ.get(DEPRIORITIZED, "") == "1"  # as `c10::utils::check_env` reads it


def _cudnn(call: AttentionCall, capability: Capability, version: int) -> bool:
    widest = 256 if capability[0] >= 9 and not call.grad else 128
    widths = (call.query_width, call.key_width, call.value_width)
    no_dropout = (
        91100 < version < 91400 or call.one_query or (IN_SIXTEENTHS and not call.sixteenths)
    )
    return (
        call.is_half
        and capability >= (8, 0)
        and all(width <= widest and width % 8 == 0 for width in widths)
        and not (call.empty or call.mask_grad or (call.mask and call.causal))
        and not (call.one_key or call.deterministic or (call.dropout and no_dropout))
        and call.dense
    )


def _flash(call: AttentionCall, capability: Capability) -> bool:
    too_wide = call.grad and (call.query_width > 224 or (call.query_width > 192 and call.dropout))
    small_chip = (8, 6) <= capability <= (8, 9) or capability[0] == 12
    return (
        call.is_half
        and capability >= (8, 0)
        and call.same_width
        and call.query_width <= 256
        and not (call.mask or call.empty or (small_chip and too_wide))
        and (call.square or not call.causal)
        and call.dense
    )


def _efficient(call: AttentionCall, capability: Capability) -> bool:
    alignment = 8 if call.is_half and capability >= (7, 0) else 4 if capability >= (8, 0) else 1
    return (
        (call.dtype in (HALF, FLOAT) or (call.dtype == BFLOAT16 and capability >= (8, 0)))
        and call.query_width == call.key_width
        and call.query_width % alignment == 0
        and call.value_width % alignment == 0
        and not (call.grouped or call.empty or call.mask_grad)
        and call.dense
    )
