"""Op classes: the kinds of work that a processor does at different parts of its rates. No torch.

What an op is, its `Op.kind` says; `extract.op_costs` finds it. A step that was made by hand may
leave it out: its class then follows from its target and its flops. A machine may have constants for
finer classes than kinds: by what an op calls, whether it is a backward, and its dtype.
"""

from __future__ import annotations

from enum import StrEnum
from functools import lru_cache


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

# Of what is limited by memory, what computes much for each element, or reads it in another order.
RANDOM, TRANSCENDENTAL, SOFTMAX, SAFE_SOFTMAX = (
    "random",
    "transcendental",
    "softmax",
    "safe_softmax",
)
BATCH_NORM, LAYOUT = "batch_norm", "layout"
# A call that computes nothing, and one of a row of updates in lock step: they have a start alone.
VIEW, IN_A_ROW = "view", "in_a_row"
# What is made in a row is smaller: an op on so many bytes takes about as long as the call of it.
SMALL_BYTES = 64 << 10

_CALLS = {
    RANDOM: ("native_dropout", "bernoulli", "rand", "randn", "rand_like", "randn_like"),
    TRANSCENDENTAL: (
        *("gelu", "silu", "mish", "elu", "softplus", "sigmoid", "tanh", "erf", "exp", "expm1"),
        *("log", "log1p", "log_sigmoid_forward", "log_sigmoid", "sin", "cos"),
    ),
    SOFTMAX: ("_softmax", "_log_softmax"),
    SAFE_SOFTMAX: ("_safe_softmax",),
    BATCH_NORM: ("_native_batch_norm_legit_functional", "native_batch_norm"),
    LAYOUT: ("clone", "_to_copy", "cat", "stack", "slice", "select", "constant_pad_nd"),
}
_CLASS = {call: name for name, calls in _CALLS.items() for call in calls}
_BACKWARD = "_backward"
# Those whose backward has constants of its own.
_BOTH_WAYS = (
    *(kind.value for kind in (OpKind.CONVOLUTION, OpKind.CHANNELS_LAST, OpKind.DEPTHWISE)),
    *(RANDOM, TRANSCENDENTAL, SOFTMAX, BATCH_NORM, OpKind.NORM.value),
)
# Of machines that were measured before masks were.
_PLAIN = {
    OpKind.MASKED_ATTENTION: OpKind.ATTENTION,
    OpKind.MASKED_ATTENTION_BACKWARD: OpKind.ATTENTION_BACKWARD,
}
_UNMARKED = "float32"

# What a machine may have a constant for, also of a dtype alone: "softmax:bfloat16".
FACTORS = (
    *(kind.value for kind in OpKind if kind),
    *_CALLS,
    *(name + _BACKWARD for name in _BOTH_WAYS),
    *(FUSED, ONE_BY_ONE, RELAYOUT, VIEW, IN_A_ROW),
)


@lru_cache(maxsize=4096)
def classes_of(kind: OpKind, target: str, dtype: str, *, computes: bool) -> tuple[str, ...]:
    """The classes of a call of `target`, finest first; `computes`: it has flops."""
    calls = target.split(".")[1] if "." in target else target
    forward, backward, _ = calls.partition(_BACKWARD)
    own = kind.value if computes else _CLASS.get(forward, kind.value)
    names = [own + _BACKWARD] if backward and own in _BOTH_WAYS else []
    names += dict.fromkeys((own, _PLAIN.get(kind, kind).value))
    if dtype != _UNMARKED:
        names = [f"{name}:{dtype}" for name in names] + names
    return (*names,) if computes else (*names, ONE_BY_ONE)
