"""Op costs: flops and bytes of one op of the graph, and whether anybody knows its flops.

In: a node with its fake values. Out: an `OpCost`. Flops are those of matrix products, convolutions,
attention and transforms, by torch's registry where its formula is right, else by one of ours; any
other known op is limited by the bytes it moves. Unknown is the work of an op that is not torch's
own and has no formula, and of the few of torch's that compute much and have none (`linalg_*`,
recurrent networks of cuDNN). Users give theirs one by `torch.utils.flop_counter`.

Scratch is memory that kernels of a card take while they run, which no tensor of the graph shows.
The backwards of flash and memory-efficient attention add up the gradient of the query in float32,
whatever they compute in: `dq_accum` and `grad_q` of torch's
`aten/src/ATen/native/transformers/cuda`. Their kernels for the CPU have other names and none. Those
of FlashAttention's own package do the same (`dq_accum` of `csrc/flash_attn/flash_api.cpp`), and
where heads share a key, they make a gradient of key and value for each (`dk_expanded`).

What kind of work a node is (`kind_of_op`) follows from its fake values and its flops: see
`machine.op_classes`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

from cotrain_compile.extract.op_bytes import bytes_formula, nbytes_of
from cotrain_compile.extract.op_flops import flops_formula
from cotrain_compile.graph.op_calls import arguments_of, target_of
from cotrain_compile.machine.op_classes import OpKind

Bound = Mapping[str, Any]


@dataclass(frozen=True)
class OpCost:
    """`flops` and `bytes_moved` may be symbolic; where not `is_known`, `flops` is 0."""

    flops: Any
    bytes_moved: Any
    is_known: bool = True


def cost_of(node: fx.Node) -> OpCost:
    """What a call that writes something costs."""
    target, args = target_of(node), _arguments(node)
    name, out = op_name(target), node.meta.get("val")
    bytes_of = bytes_formula(name)
    moved = bytes_of(args, out) if bytes_of else _all_bytes(node)
    flops_of = flops_formula(name)
    if flops_of is not None:
        return OpCost(flops_of(args, out), moved)
    formula = flop_registry.get(getattr(target, "overloadpacket", target))
    if formula is not None:
        positional, named = (node.args, node.kwargs) if target is node.target else ((), args)
        positional, named = tree_map(_value, (positional, named))
        return OpCost(formula(*positional, **named, out_val=out), moved)
    return OpCost(0, moved, _is_limited_by_memory(target, name))


def op_name(target: Any) -> str:
    """As "aten::mm": without the overload, which says nothing about cost."""
    schema = getattr(target, "_schema", None)
    return str(schema.name if schema is not None else getattr(target, "_name", target))


def computing_dtype(node: fx.Node, flops: Any) -> str:
    """The dtype in which an op computes: of a product that of its factors, else of its result.

    On a card float32 factors are cut to "tfloat32" where torch's switches allow it.
    """
    from_factors = isinstance(flops, torch.SymInt) or flops > 0
    for value in _tensors(_arguments(node) if from_factors else node.meta.get("val")):
        is_cut = from_factors and value.dtype is torch.float32 and value.device.type == "cuda"
        if is_cut and _allows_tf32(op_name(target_of(node))):
            return "tfloat32"
        return str(value.dtype).removeprefix("torch.")
    return "float32"


def _allows_tf32(name: str) -> bool:
    """What `set_float32_matmul_precision` and the switches of `torch.backends` say."""
    switches: Any = torch.backends
    switch = switches.cudnn.conv if "conv" in name else switches.cuda.matmul
    return bool(switch.fp32_precision == "tf32")


# torch's own ops; ours only move what is there.
_OWN = ("aten", "prims", "cotrain")
# One of these words in its name, and the op computes more than it reads and writes.
_HARD = frozenset(
    [
        *("mm", "addmm", "bmm", "baddbmm", "addbmm", "hspmm", "sspaddmm", "matmul", "linear"),
        *("einsum", "trilinear", "attention", "transformer", "rnn", "lstm", "gru", "ctc"),
        *("linalg", "cholesky", "lu", "lstsq", "geqrf", "ormqr", "triangular", "svd", "spsolve"),
    ]
)
# Of these the hard word says whose they are: norms, a product of three, what follows a product.
_EASY = frozenset(
    [
        *("aten::linalg_vector_norm", "aten::linalg__powsum", "aten::linalg_cross"),
        *("aten::_thnn_fused_lstm_cell", "aten::_thnn_fused_lstm_cell_backward_impl"),
        *("aten::_thnn_fused_gru_cell", "aten::_thnn_fused_gru_cell_backward"),
    ]
)


def _is_limited_by_memory(target: Any, name: str) -> bool:
    if torch.Tag.pointwise in getattr(target, "tags", ()) or name in _EASY:
        return True
    namespace, _, plain = name.partition("::")
    words = plain.split("_")
    return namespace in _OWN and not any(w in _HARD or w.startswith("conv") for w in words)


def _arguments(node: fx.Node) -> Bound:
    """Values of the arguments, by the names of the schema."""
    return {name: tree_map(_value, argument) for name, argument in arguments_of(node).items()}


def _all_bytes(node: fx.Node) -> Any:
    """The elements of tensor arguments and results, each once."""
    total: Any = 0
    for source in node.all_input_nodes:
        total += sum(map(nbytes_of, _tensors(source.meta.get("val"))))
    return total + sum(map(nbytes_of, _tensors(node.meta.get("val"))))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


def _value(argument: Any) -> Any:
    return argument.meta.get("val") if isinstance(argument, fx.Node) else argument


_aten = torch.ops.aten
_SUMS_IN_FLOAT32 = {
    getattr(_aten, name).default
    for name in (
        "_scaled_dot_product_flash_attention_backward",
        "_scaled_dot_product_efficient_attention_backward",
        "_flash_attention_backward",
        "_efficient_attention_backward",
    )
    if hasattr(_aten, name)
}
# Of FlashAttention's package, in whatever namespace.
_ADDING_UP = frozenset(("_flash_attn_backward", "_flash_attn_varlen_backward"))
_FLOAT32_BYTES = 4
_QUERY = 1  # behind the gradient of the result


def scratch_name(node: fx.Node) -> str:
    """What the buffer of the memory is called that an op takes beside its results."""
    return f"{node.name}.scratch"


def scratch_bytes(node: fx.Node) -> Any:
    """Bytes, a symbol where sizes are dynamic; None for a kernel that is not known to take any."""
    if op_name(target_of(node)).partition("::")[2] in _ADDING_UP:
        return _of_package(arguments_of(node))
    if node.target not in _SUMS_IN_FLOAT32:
        return None
    query: Any = node.args[_QUERY]
    value = query.meta["val"]
    # In float32 the sum is the gradient itself.
    return value.numel() * _FLOAT32_BYTES if value.dtype != torch.float32 else None


def _of_package(args: Mapping[str, Any]) -> Any:
    query, key = (args[name].meta["val"] for name in ("q", "k"))
    shared = query.shape[-2] // key.shape[-2]
    expanded = 2 * key.numel() * shared * key.element_size() if shared > 1 else 0
    return query.numel() * _FLOAT32_BYTES + expanded


# Each filter of a depthwise convolution has a channel or few; the matrix units want 16 and more.
_FEW_CHANNELS = 8

# Torch does not tag these as pointwise.
_POINTWISE = frozenset(
    f"aten::{name}"
    for name in (
        *("_to_copy", "copy_", "copy", "native_dropout", "native_dropout_backward", "fill_"),
        *("constant_pad_nd", "full", "zeros", "ones", "full_like", "zeros_like", "ones_like"),
        *("bernoulli", "rand_like", "zero_", "slice_backward", "select_backward", "arange"),
        *("fill", "cat", "stack", "nll_loss_backward", "nll_loss2d_backward"),
    )
)
# As a compiler has it: a row's element is read where the sum is made.
_SUMS = frozenset({"aten::nll_loss_forward", "aten::nll_loss2d_forward"})
# How attention calls what it adds to its scores.
_MASKS = ("attn_bias", "attn_mask", "bias")
_NORM_WORDS = ("norm", "softmax")
_TABLE_WORDS = ("embedding", "index", "gather", "scatter", "take", "sort", "topk")


def kind_of_op(node: fx.Node, flops: Any) -> OpKind:
    """The kind of a call that writes something."""
    target = target_of(node)
    name = op_name(target)
    plain = name.partition("::")[2]
    if isinstance(flops, torch.SymInt) or flops > 0:
        return _computing(node, plain)
    tags = getattr(target, "tags", ())
    if torch.Tag.pointwise in tags or name in _POINTWISE:
        return OpKind.POINTWISE
    if any(word in plain for word in _TABLE_WORDS):
        return OpKind.TABLE
    if any(word in plain for word in _NORM_WORDS):
        return OpKind.NORM
    is_sum = torch.Tag.reduction in tags or name in _SUMS
    return OpKind.REDUCTION if is_sum else OpKind.OTHER


def _computing(node: fx.Node, plain: str) -> OpKind:
    if "attention" in plain or "flash_attn" in plain:
        arguments = arguments_of(node)
        if any(arguments.get(name) is not None for name in _MASKS):
            masked = OpKind.MASKED_ATTENTION, OpKind.MASKED_ATTENTION_BACKWARD
            return masked["backward" in plain]
        return OpKind.ATTENTION_BACKWARD if "backward" in plain else OpKind.ATTENTION
    if "conv" in plain:
        return _convolution(node)
    return OpKind.BATCHED_PRODUCT if "bmm" in plain else OpKind.PRODUCT


def _convolution(node: fx.Node) -> OpKind:
    """By its filters, (out, in of a group, ...), and by how its input lies."""
    arguments = arguments_of(node)
    values = [v for a in arguments.values() for v in _tensors_in(a)]
    wide = [v for v in values if v.dim() >= 3]
    weight, groups = arguments.get("weight"), arguments.get("groups")
    filters = next(_tensors_in(weight), None) if weight is not None else None
    if filters is not None and groups not in (None, 1) and filters.shape[1] <= _FEW_CHANNELS:
        return OpKind.DEPTHWISE
    if any(v.dim() == 4 and _lies_last(v) for v in wide):
        return OpKind.CHANNELS_LAST
    return OpKind.CONVOLUTION


def _lies_last(value: torch.Tensor) -> bool:
    """Whether its channels are next to each other, and it has some and some places."""
    channels, places = value.stride()[1], value.stride()[-1]
    return value.shape[1] > 1 and value.shape[-1] > 1 and channels == 1 and places != 1


def _tensors_in(argument: Any) -> Any:
    for leaf in tree_leaves(argument):
        value = leaf.meta.get("val") if isinstance(leaf, fx.Node) else leaf
        if isinstance(value, torch.Tensor):
            yield value
