"""Idioms of gradients: what people do to them between `backward` and `step`."""

from __future__ import annotations

import torch
from torch import nn

from bench.idioms.registry import Parts, gradient_edit


def grads(t: Parts) -> list[torch.Tensor]:
    """The gradients that are there."""
    return [p.grad for p in t.parameters if p.grad is not None]


@gradient_edit
def clip_grad_norm(t: Parts) -> None:
    nn.utils.clip_grad_norm_(t.model.parameters(), 0.1)


@gradient_edit
def clip_grad_norm_infinity(t: Parts) -> None:
    nn.utils.clip_grad_norm_(t.model.parameters(), 0.05, norm_type=float("inf"))


@gradient_edit
def clip_grad_norm_one(t: Parts) -> None:
    nn.utils.clip_grad_norm_(t.model.parameters(), 0.1, norm_type=1.0)


@gradient_edit
def clip_grad_value(t: Parts) -> None:
    nn.utils.clip_grad_value_(t.model.parameters(), 0.01)


@gradient_edit
def clip_each_parameter_by_its_norm(t: Parts) -> None:
    for p in t.parameters:
        nn.utils.clip_grad_norm_([p], 0.05)


@gradient_edit
def clip_only_the_weights(t: Parts) -> None:
    nn.utils.clip_grad_norm_([p for p in t.parameters if p.dim() > 1], 0.05)


@gradient_edit
def clip_by_total_norm_in_two_calls(t: Parts) -> None:
    norm = nn.utils.get_total_norm(grads(t))
    nn.utils.clip_grads_with_norm_(t.model.parameters(), 0.1, norm)


@gradient_edit
def clamp_gradients_in_place(t: Parts) -> None:
    for p in t.parameters:
        p.grad.clamp_(-0.01, 0.02)


@gradient_edit
def clip_by_hand(t: Parts) -> None:
    norm = torch.sqrt(sum((g**2).sum() for g in grads(t)))
    for g in grads(t):
        g.mul_(torch.clamp(0.1 / (norm + 1e-6), max=1.0))


@gradient_edit
def clip_where_the_norm_is_large(t: Parts) -> None:
    for g in grads(t):
        norm = g.norm()
        g.copy_(torch.where(norm > 0.05, g * 0.05 / norm, g))


@gradient_edit
def adaptive_gradient_clipping(t: Parts) -> None:
    for p in t.parameters:
        limit = p.detach().norm().clamp(min=1e-3) * 0.01
        p.grad.mul_((limit / p.grad.norm().clamp(min=1e-6)).clamp(max=1.0))


@gradient_edit
def adaptive_clipping_of_units(t: Parts) -> None:
    for p in t.parameters:
        if p.dim() > 1:
            limit = p.detach().norm(dim=1, keepdim=True).clamp(min=1e-3) * 0.01
            norm = p.grad.norm(dim=1, keepdim=True).clamp(min=1e-6)
            p.grad.copy_(torch.where(norm > limit, p.grad * limit / norm, p.grad))


@gradient_edit
def gradient_noise(t: Parts) -> None:
    for p in t.parameters:
        p.grad.add_(torch.randn_like(p.grad), alpha=0.1)


@gradient_edit
def gradient_noise_relative_to_the_norm(t: Parts) -> None:
    for p in t.parameters:
        p.grad = p.grad + torch.randn_like(p.grad) * p.grad.norm()


@gradient_edit
def uniform_gradient_noise(t: Parts) -> None:
    for p in t.parameters:
        p.grad.add_(torch.rand(p.shape, dtype=p.dtype) - 0.5)


@gradient_edit
def differential_privacy(t: Parts) -> None:
    nn.utils.clip_grad_norm_(t.model.parameters(), 0.5)
    for g in grads(t):
        g.add_(torch.normal(0.0, 0.1, g.shape, dtype=g.dtype)).div_(8)


@gradient_edit
def gradient_dropout(t: Parts) -> None:
    for g in grads(t):
        g.mul_(torch.bernoulli(torch.full_like(g, 0.7)))


@gradient_edit
def gradient_dropout_by_function(t: Parts) -> None:
    for p in t.parameters:
        p.grad = nn.functional.dropout(p.grad, 0.3)


@gradient_edit
def noise_for_one_parameter_only(t: Parts) -> None:
    t.parameters[0].grad.add_(torch.randn_like(t.parameters[0].grad))


@gradient_edit
def centralised_gradients(t: Parts) -> None:
    for p in t.parameters:
        if p.dim() > 1:
            p.grad.sub_(p.grad.mean(dim=tuple(range(1, p.dim())), keepdim=True))


@gradient_edit
def normalised_gradients(t: Parts) -> None:
    for g in grads(t):
        g.div_(g.norm() + 1e-12)


@gradient_edit
def standardised_gradients(t: Parts) -> None:
    for g in grads(t):
        g.copy_((g - g.mean()) / (g.std(unbiased=False) + 1e-8))


@gradient_edit
def sign_of_gradients(t: Parts) -> None:
    for g in grads(t):
        g.sign_()


@gradient_edit
def ternary_gradients(t: Parts) -> None:
    for g in grads(t):
        g.copy_(torch.where(g.abs() > g.abs().mean(), g.sign(), torch.zeros_like(g)))


@gradient_edit
def top_k_gradients(t: Parts) -> None:
    for g in grads(t):
        kept = g.abs().flatten().topk(2).values[-1]
        g.mul_(g.abs() >= kept)


@gradient_edit
def error_feedback_of_compressed_gradients(t: Parts) -> None:
    for g, left in zip(grads(t), t.extra, strict=True):
        whole = g + left
        sent = torch.round(whole * 64) / 64
        left.copy_(whole - sent)
        g.copy_(sent)


@gradient_edit
def quantised_gradients(t: Parts) -> None:
    for g in grads(t):
        scale = g.abs().max() / 127
        g.copy_((g / scale).round().clamp(-128, 127) * scale)


@gradient_edit
def half_precision_round_trip(t: Parts) -> None:
    for g in grads(t):
        g.copy_(g.bfloat16().double())


@gradient_edit
def nan_to_num(t: Parts) -> None:
    for g in grads(t):
        torch.nan_to_num_(g, nan=0.0, posinf=1.0, neginf=-1.0)


@gradient_edit
def skip_where_a_gradient_is_not_finite(t: Parts) -> None:
    finite = torch.stack([g.isfinite().all() for g in grads(t)]).all()
    for g in grads(t):
        g.copy_(torch.where(finite, g, torch.zeros_like(g)))


@gradient_edit
def hand_written_l2(t: Parts) -> None:
    for p in t.parameters:
        p.grad.add_(p.detach(), alpha=0.1)


@gradient_edit
def hand_written_l1(t: Parts) -> None:
    for p in t.parameters:
        p.grad.add_(p.detach().sign(), alpha=0.01)


@gradient_edit
def l2_towards_the_start(t: Parts) -> None:
    for p, start in zip(t.parameters, t.start, strict=True):
        p.grad.add_(p.detach() - start, alpha=0.5)


@gradient_edit
def l2_without_biases(t: Parts) -> None:
    for name, p in t.model.named_parameters():
        if not name.endswith("bias"):
            p.grad = p.grad + 0.1 * p.data


@gradient_edit
def proximal_term(t: Parts) -> None:
    for p, start in zip(t.parameters, t.start, strict=True):
        p.grad.data.add_(0.3 * (p.data - start))


@gradient_edit
def scale_by_depth(t: Parts) -> None:
    for i, p in enumerate(t.parameters):
        p.grad.mul_(0.5**i)


@gradient_edit
def scale_biases(t: Parts) -> None:
    for name, p in t.model.named_parameters():
        if "bias" in name:
            p.grad *= 2


@gradient_edit
def divide_by_the_number_of_rows(t: Parts) -> None:
    for g in grads(t):
        g /= 8


@gradient_edit
def reversed_gradients_of_one_layer(t: Parts) -> None:
    t.parameters[0].grad.neg_()


@gradient_edit
def frozen_rows(t: Parts) -> None:
    t.parameters[0].grad[:2] = 0


@gradient_edit
def frozen_column(t: Parts) -> None:
    t.parameters[0].grad[:, 0].zero_()


@gradient_edit
def pruning_mask(t: Parts) -> None:
    for p, start in zip(t.parameters, t.start, strict=True):
        p.grad.mul_(start.abs() > 0.1)


@gradient_edit
def masked_fill(t: Parts) -> None:
    for p in t.parameters:
        p.grad.masked_fill_(p.detach() < 0, 0.0)


@gradient_edit
def no_gradient_for_a_layer(t: Parts) -> None:
    t.parameters[0].grad = None


@gradient_edit
def zeros_for_a_layer(t: Parts) -> None:
    t.parameters[1].grad = torch.zeros_like(t.parameters[1])
