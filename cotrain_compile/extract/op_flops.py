"""Flops of ops for which torch's registry has no formula, or one that counts something else.

A multiply-add is two. Each function gets the arguments by name and the result, with fake tensors;
sizes may be symbolic. Where torch's formulas are not taken: attention that is causal skips what is
above the diagonal (all fused kernels do), the registry counts the full square; the kernels below
the public ones have heads behind positions; a grouped convolution's backward would count each
group's channels as often as there are groups.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import log2, prod
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

Bound = Mapping[str, Any]
FlopsOf = Callable[[Bound, Any], Any]


def _first(args: Bound, count: int) -> list[torch.Tensor]:
    found = [value for value in args.values() if isinstance(value, torch.Tensor)]
    return found[:count]


# Products.


def _product(args: Bound, out: Any) -> Any:
    """Of two matrices, or of two stacks of them: each element of the first meets every column."""
    del out
    left, right = _first(args, 2)
    return 2 * left.numel() * right.shape[-1]


def _added_product(args: Bound, out: Any) -> Any:
    """The same after a tensor that is added to it."""
    del out
    _, left, right = _first(args, 3)
    return 2 * left.numel() * right.shape[-1]


def _vector_product(args: Bound, out: Any) -> Any:
    del out
    return 2 * max((t.numel() for t in _first(args, 3) if t.dim() == 2), default=_numel(args))


def _numel(args: Bound) -> Any:
    return _first(args, 1)[0].numel()


def _linear(args: Bound, out: Any) -> Any:
    del out
    return 2 * args["input"].numel() * args["weight"].shape[0]


def _grouped(args: Bound, out: Any) -> Any:
    """Groups of rows, each with a matrix of its own: how they are split changes no count."""
    del out
    left, right = _first(args, 2)
    if left.dim() == 3 and right.dim() == 2:  # the columns are in groups: each meets one matrix
        return 2 * left.shape[1] * left.shape[2] * right.shape[1]
    return 2 * left.numel() * right.shape[-1]


def _grouped_twice(args: Bound, out: Any) -> Any:
    """Both gradients of a grouped product, as many flops each as the product."""
    return 2 * _grouped(args, out)


# Convolutions.


def _convolution(args: Bound, out: Any) -> Any:
    x, weight = _first(args, 2)
    pairs = (x if args.get("transposed") else out).numel()
    return 2 * pairs * prod(weight.shape[1:])


def _convolution_backward(args: Bound, out: Any) -> Any:
    """As much for the gradient of the input, and of the weight, as the forward takes."""
    x, grad, needed = args["input"], args["grad_output"], args["output_mask"]
    forward = _convolution({"input": x, **args, "grad_output": None}, grad)
    return forward * (int(needed[0]) + int(needed[1]))


# Attention.


def _attention(args: Bound, out: Any) -> Any:
    del out
    query, key, value = _shapes(args)
    return _kept(sdpa_flop_count(query, key, value), args, query, key)


def _attention_backward(args: Bound, out: Any) -> Any:
    del out
    grad = next(args[name] for name in ("grad_out", "grad_out_", "grad_output") if name in args)
    query, key, value = _shapes(args)
    return _kept(sdpa_backward_flop_count(grad.shape, query, key, value), args, query, key)


def _shapes(args: Bound) -> tuple[Any, Any, Any]:
    """Of query, key and value, as if no heads shared a key: torch 2.11 counts none that do."""
    query, key, value = (args[name].shape for name in ("query", "key", "value"))
    heads = query[1]
    return query, (key[0], heads, *key[2:]), (value[0], heads, *value[2:])


def _kept(full: Any, args: Bound, query: Any, key: Any) -> Any:
    """The share of `full` that a causal kernel computes: row i has i + 1 of all columns.

    Where it sees a window of `left` columns behind its own, row i has no more than `left + 1`.
    """
    rows, columns = query[2], key[2]
    if args.get("is_causal") is not True or not statically_known_true(rows <= columns):
        return full
    seen, left = rows + 1, args.get("window_size_left")
    if isinstance(left, int) and left >= 0 and statically_known_true(left < rows):
        return full * ((left + 1) * (2 * rows - left)) // (2 * rows * columns)
    return full * seen // (2 * columns)


def _positions_first(flops_of: FlopsOf) -> FlopsOf:
    """For kernels whose tensors are (batch, positions, heads, width); packed rows stay as counted.

    Of packed sequences the trace knows no lengths: each is taken to be as long as the longest.
    """

    def flops(args: Bound, out: Any) -> Any:
        offsets = next((args[n] for n in ("cum_seq_q", "cu_seqlens_q") if n in args), None)
        names = [n for n in ("query", "key", "value", "grad_out", "grad_out_") if n in args]
        if offsets is None:
            turned = {n: args[n].transpose(1, 2) for n in names}
        else:
            turned = {n: _longest(args, n, offsets.shape[0] - 1) for n in names}
        causal = args.get("is_causal") is True or args.get("custom_mask_type") == 1
        grad = turned.pop("grad_out_", None)
        told = {"is_causal": causal, "window_size_left": args.get("window_size_left")}
        return flops_of({**turned, **({"grad_out": grad} if grad is not None else {}), **told}, out)

    return flops


_SHORT = {"q": "query", "k": "key", "v": "value", "dout": "grad_out", "causal": "is_causal"}


def _of_package(flops_of: FlopsOf) -> FlopsOf:
    """For ops of FlashAttention's own package, whose arguments have short names."""

    def flops(args: Bound, out: Any) -> Any:
        return flops_of({_SHORT.get(name, name): value for name, value in args.items()}, out)

    return flops


def _longest(args: Bound, name: str, sequences: Any) -> torch.Tensor:
    """As many sequences of the greatest length; (rows, heads, width) of all, one after another."""
    packed: torch.Tensor = args[name].flatten(0, -3)
    long = "k" if name in ("key", "value") else "q"
    length = next(args[n] for n in (f"max_{long}", f"max_seqlen_{long}") if n in args)
    long_as = packed[:1].unsqueeze(0).expand(sequences, length, -1, -1)
    return long_as.transpose(1, 2)


# Transforms and distances.


def _transform(args: Bound, out: Any) -> Any:
    """5 n log2(n) of a complex transform of n elements, half of it of a real one."""
    x = args["self"]
    real = isinstance(out, torch.Tensor) and not (x.is_complex() and out.is_complex())
    full = out if x.is_complex() and not out.is_complex() else x  # c2r reads half a spectrum
    length = prod(hint(full.shape[dim]) for dim in args["dim"])
    depth = round(5 * log2(max(2, length)))
    return full.numel() * depth // (2 if real else 1)


def _distances(args: Bound, out: Any) -> Any:
    """Difference, power and sum in each dimension of each pair."""
    return 3 * out.numel() * _first(args, 1)[0].shape[-1]


def _distances_backward(args: Bound, out: Any) -> Any:
    del out
    return 4 * args["grad"].numel() * args["x1"].shape[-1]


def hint(size: Any) -> int:
    """A size for the traced shapes, without fixing a dynamic one."""
    return int(size.node.hint) if isinstance(size, torch.SymInt) else int(size)


_PUBLIC = (
    *(f"_scaled_dot_product_{kind}_attention" for kind in ("efficient", "flash", "cudnn")),
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_fused_attention_overrideable",
)
_BELOW = ("_flash_attention", "_efficient_attention")
_CONVOLUTIONS = (
    *("convolution", "_convolution", "convolution_overrideable", "cudnn_convolution"),
    *("_slow_conv2d_forward", "slow_conv3d_forward", "_conv_depthwise2d", "conv_depthwise3d"),
)

# Ops of FlashAttention's package, by their own names: its second and third version and the builds
# that Hugging Face's kernels fetch have each a namespace of its own.
_OF_PACKAGE: Mapping[str, FlopsOf] = {
    f"_flash_attn{kind}_{way}": _of_package(_positions_first(flops_of))
    for kind in ("", "_varlen")
    for way, flops_of in (("forward", _attention), ("backward", _attention_backward))
}


def flops_formula(name: str) -> FlopsOf | None:
    """What counts the flops of the op called `name`, as "aten::mm"; None where none here does."""
    return FLOPS_OF.get(name) or _OF_PACKAGE.get(name.partition("::")[2])


FLOPS_OF: Mapping[str, FlopsOf] = {
    **dict.fromkeys(("aten::_int_mm", "aten::_scaled_mm_v2"), _product),
    **dict.fromkeys(("aten::_addmm_activation", "aten::addbmm"), _added_product),
    **dict.fromkeys(("aten::mv", "aten::addmv", "aten::dot", "aten::vdot"), _vector_product),
    "aten::linear": _linear,
    **{
        f"aten::{n}": _grouped
        for n in ("_grouped_mm", "_scaled_grouped_mm", "_scaled_grouped_mm_v2")
    },
    # What transformers runs where torch's own grouped product cannot be compiled.
    "transformers::grouped_mm_fallback": _grouped,
    "transformers::grouped_mm_fallback_backward": _grouped_twice,
    **{f"aten::{name}": _convolution for name in _CONVOLUTIONS},
    "aten::convolution_backward": _convolution_backward,
    "aten::convolution_backward_overrideable": _convolution_backward,
    **{f"aten::{name}": _attention for name in _PUBLIC},
    **{f"aten::{name}_backward": _attention_backward for name in _PUBLIC},
    **{f"aten::{name}_forward": _positions_first(_attention) for name in _BELOW},
    **{f"aten::{name}_backward": _positions_first(_attention_backward) for name in _BELOW},
    **{f"aten::_fft_{kind}": _transform for kind in ("c2c", "r2c", "c2r")},
    **dict.fromkeys(("aten::_cdist_forward", "aten::_euclidean_dist"), _distances),
    "aten::_pdist_forward": _distances,
    "aten::_cdist_backward": _distances_backward,
}
