"""Attention on a card: which kernel `scaled_dot_product_attention` takes there, by its inputs.

The rules are torch's (`aten/src/ATen/native/transformers/cuda/sdp_utils.cpp`, 2.13), as data about
one call in, the number of a `torch.nn.attention.SDPBackend` out. They are needed where a step is
traced for a card that is not there: a build without CUDA does not have them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Kernel(IntEnum):
    """As torch numbers them."""

    MATH = 0
    FLASH = 1
    EFFICIENT = 2
    CUDNN = 3


# As `c10::ScalarType` numbers them.
HALF, FLOAT, BFLOAT16 = 5, 6, 15
Capability = tuple[int, int]


@dataclass(frozen=True)
class Call:
    """What decides, in the order in which `absent_card.cpp` tells it.

    `square`: as many queries as keys; `grouped`: key and value have fewer heads; `dense`: elements
    of the last dimension are next to each other.
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

    @property
    def is_half(self) -> bool:
        return self.dtype in (HALF, BFLOAT16)

    @property
    def same_width(self) -> bool:
        return self.query_width == self.key_width == self.value_width


def kernel_of(call: Call, capability: Capability) -> Kernel:
    """The kernel that torch takes on a card of that compute capability."""
    order = [Kernel.FLASH, Kernel.EFFICIENT]
    if capability[0] in (9, 10):
        order.insert(0, Kernel.CUDNN)
    fits = {Kernel.CUDNN: _cudnn, Kernel.FLASH: _flash, Kernel.EFFICIENT: _efficient}
    return next((k for k in order if fits[k](call, capability)), Kernel.MATH)


def _cudnn(call: Call, capability: Capability) -> bool:
    widest = 256 if capability[0] >= 9 and not call.grad else 128
    widths = (call.query_width, call.key_width, call.value_width)
    return (
        call.is_half
        and capability >= (8, 0)
        and all(width <= widest and width % 8 == 0 for width in widths)
        and not (call.empty or call.mask_grad or (call.mask and call.causal))
        and call.dense
    )


def _flash(call: Call, capability: Capability) -> bool:
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


def _efficient(call: Call, capability: Capability) -> bool:
    alignment = 8 if call.is_half and capability >= (7, 0) else 4 if capability >= (8, 0) else 1
    return (
        (call.dtype in (HALF, FLOAT) or (call.dtype == BFLOAT16 and capability >= (8, 0)))
        and call.query_width == call.key_width
        and call.query_width % alignment == 0
        and call.value_width % alignment == 0
        and not (call.grouped or call.empty or call.mask_grad)
        and call.dense
    )
