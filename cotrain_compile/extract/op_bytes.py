"""Bytes that an op reads and writes, where that is not each argument and each result once.

An op that looks up rows reads those, not the table; one that scatters copies what it writes into; a
sort goes through its keys many times. Each function gets the arguments by name and the result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

Bound = Mapping[str, Any]
BytesOf = Callable[[Bound, Any], Any]

# Digits of a radix sort, as CUB's.
_BITS = 8


def nbytes_of(value: torch.Tensor) -> Any:
    """Bytes of the elements that a tensor shows; of an expanded dimension one."""
    elements: Any = 1
    for size, stride in zip(value.shape, value.stride(), strict=True):
        if stride != 0:
            elements = elements * size
    return elements * value.element_size()


def _indices(args: Bound) -> list[torch.Tensor]:
    given = next(args[n] for n in ("indices", "index") if n in args)
    items = given if isinstance(given, list | tuple) else [given]
    return [item for item in items if isinstance(item, torch.Tensor)]


def _index_bytes(args: Bound) -> Any:
    return sum(map(nbytes_of, _indices(args)))


def _nothing(args: Bound, out: Any) -> int:
    """Memory is taken, and nothing is written."""
    del args, out
    return 0


def _looked_up(args: Bound, out: Any) -> Any:
    """Indices, and each element of the result read and written."""
    return _index_bytes(args) + 2 * nbytes_of(out)


def _picked(args: Bound, out: Any) -> Any:
    """Of each row its class and the element of that, and the results, which are a few numbers."""
    return 2 * nbytes_of(args["target"]) + sum(map(nbytes_of, out))


def _picked_gradient(args: Bound, out: Any) -> Any:
    """All of the result is written; what the forward picked from is asked for its shape alone."""
    read = (args["target"], args["grad_output"], args["total_weight"])
    return sum(map(nbytes_of, read)) + nbytes_of(out)


def _table_gradient(args: Bound, out: Any) -> Any:
    """Zeros for the whole table; each row of the gradient read, and added to one of it."""
    return _index_bytes(args) + 3 * nbytes_of(args["grad_output"]) + nbytes_of(out)


def _scattered(touches: int, *, in_place: bool = False) -> BytesOf:
    """A copy of what is written into, and each written element: `touches` 2, or 3 where it adds."""

    def moved(args: Bound, out: Any) -> Any:
        each = 3 if args.get("accumulate") is True else touches
        written = _written(args) * out.element_size()
        copied = 0 if in_place else 2 * nbytes_of(out)
        return copied + _index_bytes(args) + each * written

    return moved


def _written(args: Bound) -> Any:
    """How many elements a scatter writes: as many as its source has, at most one an index."""
    source = next((args[n] for n in ("values", "src", "source") if n in args), None)
    sizes = [i.numel() for i in _indices(args)]
    if isinstance(source, torch.Tensor) and source.dim() > 0:
        # `scatter` takes of its source what it has indices for; `index_put` and others all of it.
        return sizes[0] if "src" in args else source.numel()
    return max(sizes) if len(sizes) == 1 else torch.broadcast_shapes(*_shapes(args)).numel()


def _shapes(args: Bound) -> list[torch.Size]:
    return [index.shape for index in _indices(args)]


def _sorted(args: Bound, out: Any) -> Any:
    """In each pass of a radix sort keys and positions are read and written."""
    del out
    keys = args["self"]
    passes = -(-8 * keys.element_size() // _BITS)
    return passes * 2 * keys.numel() * (keys.element_size() + 8)


def _twice(*names: str) -> BytesOf:
    """All arguments and results once, these arguments twice: their sums come before the rest."""

    def moved(args: Bound, out: Any) -> Any:
        results = out if isinstance(out, list | tuple) else [out]
        every = [v for v in (*args.values(), *results) if isinstance(v, torch.Tensor)]
        again = [args[n] for n in names if isinstance(args.get(n), torch.Tensor)]
        return sum(map(nbytes_of, (*every, *again)))

    return moved


def _without(*names: str) -> BytesOf:
    """All arguments and results once, but not what these arguments had before they are written."""

    def moved(args: Bound, out: Any) -> Any:
        results = out if isinstance(out, list | tuple) else [out]
        read = [value for name, value in args.items() if name not in names]
        return sum(nbytes_of(v) for v in (*read, *results) if isinstance(v, torch.Tensor))

    return moved


_EMPTY = (
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "empty_permuted",
)
_LOOK_UPS = ("embedding", "index", "_unsafe_index", "index_select", "gather", "take")
_LOSSES = ("nll_loss", "nll_loss2d")
_SCATTERS = ("scatter", "index_put", "_unsafe_index_put", "index_copy", "index_fill")
_ADDS = ("scatter_add", "scatter_reduce", "index_add", "index_reduce")
_NORMS = (
    *("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_functional"),
    *("_batch_norm_with_update", "_batch_norm_with_update_functional", "cudnn_batch_norm"),
)
_NORM_BACKWARDS = ("native_batch_norm_backward", "batch_norm_backward", "cudnn_batch_norm_backward")

BYTES_OF: Mapping[str, BytesOf] = {
    **{f"aten::{name}": _nothing for name in _EMPTY},
    **{f"aten::{name}": _looked_up for name in _LOOK_UPS},
    "aten::embedding_dense_backward": _table_gradient,
    **{f"aten::{name}_forward": _picked for name in _LOSSES},
    **{f"aten::{name}_backward": _picked_gradient for name in _LOSSES},
    **{f"aten::{name}": _scattered(2) for name in _SCATTERS},
    **{f"aten::{name}": _scattered(3) for name in _ADDS},
    **{f"aten::{name}_": _scattered(2, in_place=True) for name in _SCATTERS},
    **{f"aten::{name}_": _scattered(3, in_place=True) for name in _ADDS},
    "aten::sort": _sorted,
    **{f"aten::{name}": _twice("input") for name in _NORMS},
    **{f"aten::{name}": _twice("grad_out", "grad_output", "input") for name in _NORM_BACKWARDS},
}

# Ops of FlashAttention's package, by their own names, as in `op_flops`.
_OF_PACKAGE: Mapping[str, BytesOf] = {
    f"_flash_attn{kind}_backward": _without("dq", "dk", "dv") for kind in ("", "_varlen")
}


def bytes_formula(name: str) -> BytesOf | None:
    """What counts the bytes that the op called `name` moves, where it is not each tensor once."""
    return BYTES_OF.get(name) or _OF_PACKAGE.get(name.partition("::")[2])
