"""FlashAttention's own package, as a compiler sees it: its ops, by name and schema, on any device.

The package itself needs CUDA when it is imported. Its ops are opaque to a trace: each has a schema,
a function for fake tensors, and Python around it that is differentiated by an `autograd.Function`,
whose backward calls an op that writes into gradients it is given (flash-attn 2.7 and 2.8,
`flash_attn/flash_attn_interface.py`). What they compute is plain attention here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

_WRITTEN = ("dq", "dk", "dv")


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """Of one sequence, (positions, heads, width): what is mixed, and the sums of the weights."""
    scores, mixed_from = _scores(q, k, scale, causal), _for_each_head(v, q)
    mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), mixed_from)
    return mixed.to(q.dtype), scores.logsumexp(-1).float()


def _scores(q: Tensor, k: Tensor, scale: float, causal: bool) -> Tensor:
    scores = torch.einsum("qhd,khd->hqk", q.double(), _for_each_head(k, q)) * scale
    if causal:
        seen = torch.ones(q.shape[0], k.shape[0], dtype=torch.bool, device=q.device)
        scores = scores.masked_fill(~seen.tril(k.shape[0] - q.shape[0]), -torch.inf)
    return scores


def _for_each_head(x: Tensor, q: Tensor) -> Tensor:
    """Heads of the query may share a key and a value."""
    return x.double().repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def _gradients(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool
) -> tuple[Tensor, ...]:
    weights, grad = _scores(q, k, scale, causal).softmax(-1), dout.double()
    of_weights = torch.einsum("qhd,khd->hqk", grad, _for_each_head(v, q))
    of_scores = weights * (of_weights - (weights * of_weights).sum(-1, keepdim=True)) * scale
    dq = torch.einsum("hqk,khd->qhd", of_scores, _for_each_head(k, q))
    dk = torch.einsum("hqk,qhd->khd", of_scores, q.double())
    dv = torch.einsum("hqk,qhd->khd", weights, grad)
    shared = [x.unflatten(1, (k.shape[1], -1)).sum(2) for x in (dk, dv)]
    return tuple(x.to(q.dtype) for x in (dq, *shared))


@torch.library.custom_op("flash_attn::_flash_attn_forward", mutates_args=())
def flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_softmax: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows = [_attend(*each, softmax_scale, causal) for each in zip(q, k, v, strict=True)]
    out, lse = (torch.stack(parts) for parts in zip(*rows, strict=True))
    return out, lse, q.new_empty(0), torch.zeros(2, dtype=torch.int64, device=q.device)


@flash_attn_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, length, heads, _ = q.shape
    lse = q.new_empty((batch, heads, length), dtype=torch.float32)
    return torch.empty_like(q), lse, q.new_empty(0), q.new_empty(2, dtype=torch.int64)


@torch.library.custom_op("flash_attn::_flash_attn_backward", mutates_args=_WRITTEN)
def flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
) -> Tensor:
    assert dq is not None
    assert dk is not None
    assert dv is not None
    for row, each in enumerate(zip(dout, q, k, v, strict=True)):
        dq[row], dk[row], dv[row] = _gradients(*each, softmax_scale, causal)
    batch, length, heads, _ = q.shape
    return q.new_zeros((batch, heads, -(-length // 128) * 128), dtype=torch.float32)


@flash_attn_backward.register_fake
def _(dout: Tensor, q: Tensor, *rest: Any) -> Tensor:
    batch, length, heads, _ = q.shape
    return q.new_empty((batch, heads, -(-length // 128) * 128), dtype=torch.float32)


@torch.library.custom_op("flash_attn::_flash_attn_varlen_forward", mutates_args=())
def flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    block_table: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    zero_tensors: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    out = torch.empty_like(q)
    lse = q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)
    for own, keys in _sequences(cu_seqlens_q, cu_seqlens_k):
        out[own], lse[:, own] = _attend(q[own], k[keys], v[keys], softmax_scale, causal)
    return out, lse, q.new_empty(0), torch.zeros(2, dtype=torch.int64, device=q.device)


@flash_attn_varlen_forward.register_fake
def _(q: Tensor, *rest: Any, **named: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    lse = q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)
    return torch.empty_like(q), lse, q.new_empty(0), q.new_empty(2, dtype=torch.int64)


@torch.library.custom_op("flash_attn::_flash_attn_varlen_backward", mutates_args=_WRITTEN)
def flash_attn_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
    zero_tensors: bool = False,
) -> Tensor:
    assert dq is not None
    assert dk is not None
    assert dv is not None
    for own, keys in _sequences(cu_seqlens_q, cu_seqlens_k):
        grads = _gradients(dout[own], q[own], k[keys], v[keys], softmax_scale, causal)
        dq[own], dk[keys], dv[keys] = grads
    sequences = cu_seqlens_q.numel() - 1
    return q.new_zeros((q.shape[1], q.shape[0] + 128 * sequences), dtype=torch.float32)


@flash_attn_varlen_backward.register_fake
def _(dout: Tensor, q: Tensor, *rest: Any) -> Tensor:
    sequences = rest[7].numel() - 1
    return q.new_empty((q.shape[1], q.shape[0] + 128 * sequences), dtype=torch.float32)


def _sequences(of_q: Tensor, of_k: Tensor) -> Iterator[tuple[slice, slice]]:
    for starts in zip(of_q[:-1], of_q[1:], of_k[:-1], of_k[1:], strict=True):
        a, b, c, d = (int(start) for start in starts)
        yield slice(a, b), slice(c, d)


_ALL = (-1, -1)


class _Dense(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, dropout_p: float, causal: bool, window: Any
    ) -> Tensor:
        settings = (dropout_p, q.shape[-1] ** -0.5, causal, *window, 0.0, None)
        out, lse, _, state = torch.ops.flash_attn._flash_attn_forward(q, k, v, *settings, False)
        ctx.save_for_backward(q, k, v, out, lse, state)
        ctx.settings = (*settings, False)
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        *saved, state = ctx.saved_tensors
        grads = [torch.empty_like(x) for x in saved[:3]]
        given = (dout.contiguous(), *saved, *grads, *ctx.settings)
        torch.ops.flash_attn._flash_attn_backward(*given, rng_state=state)
        return (*grads, None, None, None)


class _Together(torch.autograd.Function):
    """Query, key and value in one tensor, whose gradient is written in three views of one."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, dropout_p: float, causal: bool) -> Tensor:
        settings = (dropout_p, qkv.shape[-1] ** -0.5, causal, *_ALL, 0.0, None)
        q, k, v = (qkv[:, :, number].detach() for number in range(3))
        out, lse, _, state = torch.ops.flash_attn._flash_attn_forward(q, k, v, *settings, False)
        ctx.save_for_backward(q, k, v, out, lse, state)
        ctx.settings = (*settings, False)
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        *saved, state = ctx.saved_tensors
        batch, length, heads, width = saved[0].shape
        grad = saved[0].new_empty((batch, length, 3, heads, width))
        grads = (grad[:, :, number] for number in range(3))
        given = (dout.contiguous(), *saved, *grads, *ctx.settings)
        torch.ops.flash_attn._flash_attn_backward(*given, rng_state=state)
        return grad, None, None


class _Packed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, first: Tensor, second: Tensor, *settings: Any
    ) -> Tensor:
        forward = torch.ops.flash_attn._flash_attn_varlen_forward
        out, lse, _, state = forward(q, k, v, first, second, *settings, 0.0, None, False)
        ctx.save_for_backward(q, k, v, out, lse, first, second, state)
        ctx.settings = (*settings, 0.0, None, False)
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, first, second, state = ctx.saved_tensors
        grads = [torch.empty_like(x) for x in (q, k, v)]
        given = (dout.contiguous(), q, k, v, out, lse, *grads, first, second, *ctx.settings)
        torch.ops.flash_attn._flash_attn_varlen_backward(*given, rng_state=state)
        return (*grads, *(None,) * 9)


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = _ALL,
    deterministic: bool = False,
) -> Tensor:
    """Attention of (batch, positions, heads, width)."""
    return _Dense.apply(q, k, v, dropout_p, causal, window_size)  # type: ignore[no-any-return, no-untyped-call]


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = _ALL,
    deterministic: bool = False,
) -> Tensor:
    """Attention within sequences that lie one after another: (positions of all, heads, width)."""
    settings = (max_seqlen_q, max_seqlen_k, dropout_p, q.shape[-1] ** -0.5, causal, *window_size)
    return _Packed.apply(q, k, v, cu_seqlens_q, cu_seqlens_k, *settings)  # type: ignore[no-any-return, no-untyped-call]


def flash_attn_qkvpacked_func(qkv: Tensor, dropout_p: float = 0.0, causal: bool = False) -> Tensor:
    """The same of one tensor, (batch, positions, 3, heads, width)."""
    return _Together.apply(qkv, dropout_p, causal)  # type: ignore[no-any-return, no-untyped-call]


def flash_attn_with_kvcache(*args: Any, **kwargs: Any) -> Tensor:
    """For inference, which no step here does."""
    raise NotImplementedError


pad_input = unpad_input = flash_attn_with_kvcache
