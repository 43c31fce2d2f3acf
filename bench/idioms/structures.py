"""Idioms of models put together in other ways than layer after layer."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bench.idioms.models import Wrap, stack
from bench.idioms.registry import OUT, WIDTH, model_idiom


@model_idiom()
def low_rank_adapter() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.base(x) + m.up(m.down(x)) * 2  # type: ignore[no-any-return]

    model = Wrap(
        forward, base=nn.Linear(6, 4), down=nn.Linear(6, 2), up=nn.Linear(2, 4, bias=False)
    )
    model.base.requires_grad_(False)
    return model


@model_idiom()
def layer_used_twice() -> nn.Module:
    return Wrap(
        lambda m, x: m.head(m.body(torch.tanh(m.body(x)))),
        body=nn.Linear(6, 6),
        head=nn.Linear(6, 4),
    )


@model_idiom()
def weight_used_transposed() -> nn.Module:
    return Wrap(
        lambda m, x: m.head(torch.tanh(m.body(x)) @ m.body.weight),
        body=nn.Linear(6, 8),
        head=nn.Linear(6, 4),
    )


@model_idiom()
def running_average_in_a_buffer() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            m.mean.lerp_(x.mean(0), 0.1)
        return m.head(x - m.mean)  # type: ignore[no-any-return]

    model = Wrap(forward, head=nn.Linear(6, 4))
    model.register_buffer("mean", torch.zeros(6))
    return model


@model_idiom()
def counter_in_a_buffer() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        m.calls += 1
        return m.head(x) / m.calls  # type: ignore[no-any-return]

    model = Wrap(forward, head=nn.Linear(6, 4))
    model.register_buffer("calls", torch.zeros(()))
    return model


@model_idiom()
def codebook_by_moving_average() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        z = m.body(x)
        near = torch.cdist(z, m.codes).argmin(-1)
        with torch.no_grad():
            hot = F.one_hot(near, 5).to(x.dtype)
            m.codes.mul_(0.9).add_(hot.T @ z, alpha=0.1)
        return m.head(z + (m.codes[near] - z).detach())  # type: ignore[no-any-return]

    model = Wrap(forward, body=nn.Linear(6, 3), head=nn.Linear(3, 4))
    model.register_buffer("codes", torch.randn(5, 3))
    return model


@model_idiom()
def mixture_of_experts_weighted() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        w = m.gate(x).softmax(-1)
        return torch.stack([e(x) for e in m.experts], -1).mul(w[:, None]).sum(-1)

    return Wrap(
        forward, gate=nn.Linear(6, 3), experts=nn.ModuleList(nn.Linear(6, 4) for _ in range(3))
    )


@model_idiom()
def mixture_of_experts_top_one_masked() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        w = m.gate(x).softmax(-1)
        best = w.argmax(-1)
        out = [(best == i)[:, None] * w[:, i : i + 1] * e(x) for i, e in enumerate(m.experts)]
        return sum(out)  # type: ignore[return-value]

    return Wrap(
        forward, gate=nn.Linear(6, 3), experts=nn.ModuleList(nn.Linear(6, 4) for _ in range(3))
    )


@model_idiom()
def hypernetwork() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        w = m.maker(x.mean(0)).view(OUT, WIDTH)
        return F.linear(x, w)

    return Wrap(forward, maker=nn.Linear(WIDTH, OUT * WIDTH))


@model_idiom()
def deep_equilibrium_unrolled() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        z = torch.zeros_like(x)
        for _ in range(4):
            z = torch.tanh(m.body(z) + x)
        return m.head(z)  # type: ignore[no-any-return]

    return Wrap(forward, body=nn.Linear(6, 6), head=nn.Linear(6, 4))


@model_idiom()
def neural_differential_equation() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        for _ in range(3):
            k1 = torch.tanh(m.field(x))
            k2 = torch.tanh(m.field(x + 0.1 * k1))
            x = x + 0.05 * (k1 + k2)
        return m.head(x)  # type: ignore[no-any-return]

    return Wrap(forward, field=nn.Linear(6, 6), head=nn.Linear(6, 4))


@model_idiom()
def checkpointed_block() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.head(checkpoint(m.body, x, use_reentrant=False))  # type: ignore[no-any-return]

    return Wrap(forward, body=stack(nn.GELU()), head=nn.Linear(4, 4))


@model_idiom()
def checkpointed_dropout() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.head(checkpoint(m.body, x, use_reentrant=False))  # type: ignore[no-any-return]

    return Wrap(forward, body=stack(nn.Dropout(0.3)), head=nn.Linear(4, 4))


@model_idiom()
def complex_weights() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        z = torch.view_as_complex(torch.stack([m.real(x), m.imaginary(x)], -1))
        return (z * z).abs()

    return Wrap(forward, real=nn.Linear(6, 4), imaginary=nn.Linear(6, 4))


@model_idiom()
def fourier_layer() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(x) * m.filter
        return m.head(torch.fft.irfft(spectrum, n=WIDTH))  # type: ignore[no-any-return]

    model = Wrap(forward, head=nn.Linear(6, 4))
    model.filter = nn.Parameter(torch.rand(4))
    return model


@model_idiom()
def bilinear_layer() -> nn.Module:
    return Wrap(lambda m, x: m.pair(x, x), pair=nn.Bilinear(6, 6, 4))


class _Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -0.5 * gradient


@model_idiom()
def gradient_reversal() -> nn.Module:
    return Wrap(
        lambda m, x: m.head(_Reverse.apply(m.body(x))), body=nn.Linear(6, 6), head=nn.Linear(6, 4)
    )


class _Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * (x.abs() < 2)


@model_idiom()
def quantisation_aware_layer() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        return F.linear(x, _Round.apply(m.body.weight * 8) / 8, m.body.bias)

    return Wrap(forward, body=nn.Linear(6, 4))


class _MadeAgain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        with torch.no_grad():
            return torch.tanh(x @ weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = (saved.detach().requires_grad_() for saved in ctx.saved_tensors)
        with torch.enable_grad():
            out = torch.tanh(x @ weight)
        return torch.autograd.grad(out, (x, weight), gradient)


@model_idiom()
def checkpoint_written_as_a_function() -> nn.Module:
    return Wrap(lambda m, x: _MadeAgain.apply(x, m.body.weight.t()), body=nn.Linear(6, 4))
