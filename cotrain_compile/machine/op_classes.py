"""Op classes: the kinds of work that a processor does at different parts of its rates. No torch.

What an op is, its `Op.kind` says; `extract.op_costs` finds it. A step that was made by hand may
leave it out: its class then follows from its target and its flops.
"""

from __future__ import annotations

from enum import StrEnum


class OpKind(StrEnum):
    """What an op is.

    A NORM has a result as large as what it reads, which depends on sums of that: layer norms and
    soft maxima. A REDUCTION has a smaller one. A TABLE reads or writes rows by an index. Attention
    is MASKED where it reads a mask, be that causal. A convolution is CHANNELS_LAST where its
    tensors lie so, and DEPTHWISE where each channel, or few of them, has a filter of its own. OTHER
    is limited by memory and a kernel by itself.
    """

    UNSAID = ""
    PRODUCT = "product"
    BATCHED_PRODUCT = "batched_product"
    ATTENTION = "attention"
    ATTENTION_BACKWARD = "attention_backward"
    MASKED_ATTENTION = "masked_attention"
    MASKED_ATTENTION_BACKWARD = "masked_attention_backward"
    CONVOLUTION = "convolution"
    CHANNELS_LAST = "channels_last"
    DEPTHWISE = "depthwise"
    POINTWISE = "pointwise"
    NORM = "norm"
    REDUCTION = "reduction"
    TABLE = "table"
    OTHER = "other"


ATTENTION = frozenset(
    {
        *(OpKind.ATTENTION, OpKind.ATTENTION_BACKWARD),
        *(OpKind.MASKED_ATTENTION, OpKind.MASKED_ATTENTION_BACKWARD),
    }
)
# What a compiler makes one kernel of, with its neighbours.
FUSIBLE = frozenset({OpKind.POINTWISE, OpKind.NORM, OpKind.REDUCTION})

# What is limited by memory alone: in one kernel with its neighbours, or each op by itself.
FUSED, ONE_BY_ONE = "fused", "one_by_one"
# How often the bytes of a convolution that is not channels last go through memory once more: the
# matrix units want them last.
RELAYOUT = "relayout"
# What a machine may have a factor for.
FACTORS = (*(kind.value for kind in OpKind if kind), FUSED, ONE_BY_ONE, RELAYOUT)
