"""Idioms of gradients: momenta, projections and other directions than that of the gradient."""

from __future__ import annotations

import torch
from torch import nn

from bench.idioms.gradients import grads
from bench.idioms.registry import Parts, gradient_edit


@gradient_edit
def momentum_by_hand(t: Parts) -> None:
    for g, m in zip(grads(t), t.extra, strict=True):
        m.mul_(0.9).add_(g)
        g.copy_(m)


@gradient_edit
def smoothed_gradients(t: Parts) -> None:
    for g, m in zip(grads(t), t.extra, strict=True):
        m.lerp_(g, 0.3)
        g.copy_(m)


@gradient_edit
def amplified_slow_gradients(t: Parts) -> None:
    for p, m in zip(t.parameters, t.extra, strict=True):
        m.mul_(0.98).add_(p.grad, alpha=0.02)
        p.grad = p.grad + 2.0 * m


@gradient_edit
def gradient_difference_from_the_last_step(t: Parts) -> None:
    for g, last in zip(grads(t), t.extra, strict=True):
        now = g.clone()
        g.add_(g - last, alpha=0.5)
        last.copy_(now)


@gradient_edit
def projection_onto_the_tangent_space(t: Parts) -> None:
    for p in t.parameters:
        w = p.detach()
        p.grad.sub_(w * (w * p.grad).sum() / (w * w).sum())


@gradient_edit
def projection_of_conflicting_gradients(t: Parts) -> None:
    first, second = t.parameters[0].grad, t.parameters[0].detach()
    dot = (first * second).sum()
    first.sub_(torch.where(dot < 0, dot / (second**2).sum(), torch.zeros_like(dot)) * second)


@gradient_edit
def newton_schulz(t: Parts) -> None:
    for p in t.parameters:
        if p.dim() == 2:
            x = p.grad / (p.grad.norm() + 1e-7)
            for _ in range(3):
                x = 1.5 * x - 0.5 * x @ x.T @ x
            p.grad.copy_(x)


@gradient_edit
def whitened_gradients(t: Parts) -> None:
    g = t.parameters[0].grad
    u, _, v = torch.linalg.svd(g, full_matrices=False)
    g.copy_(u @ v)


@gradient_edit
def gradients_through_a_flat_vector(t: Parts) -> None:
    flat = torch.cat([g.flatten() for g in grads(t)])
    flat = flat / flat.norm()
    at = 0
    for p in t.parameters:
        p.grad.copy_(flat[at : at + p.numel()].view_as(p))
        at += p.numel()


@gradient_edit
def gradients_by_parameters_to_vector(t: Parts) -> None:
    vector = nn.utils.parameters_to_vector(grads(t)) * 0.5
    for p, part in zip(t.parameters, vector.split([p.numel() for p in t.parameters]), strict=True):
        p.grad = part.view_as(p)


@gradient_edit
def largest_gradient_rules_all(t: Parts) -> None:
    largest = torch.stack([g.abs().max() for g in grads(t)]).max()
    for g in grads(t):
        g.div_(largest)


@gradient_edit
def log_compressed_gradients(t: Parts) -> None:
    for g in grads(t):
        g.copy_(g.sign() * torch.log1p(g.abs()))


@gradient_edit
def power_of_gradients(t: Parts) -> None:
    for g in grads(t):
        g.copy_(g.sign() * g.abs().pow(0.5))


@gradient_edit
def softly_clipped_gradients(t: Parts) -> None:
    for g in grads(t):
        g.tanh_()


@gradient_edit
def huge_gradients(t: Parts) -> None:
    for g in grads(t):
        g.mul_(1e30)


@gradient_edit
def tiny_gradients(t: Parts) -> None:
    for g in grads(t):
        g.mul_(1e-30)


@gradient_edit
def gradients_of_either_sign(t: Parts) -> None:
    for g in grads(t):
        g.abs_()


@gradient_edit
def foreach_scaling(t: Parts) -> None:
    torch._foreach_mul_(grads(t), 0.5)


@gradient_edit
def foreach_weight_decay(t: Parts) -> None:
    torch._foreach_add_(grads(t), [p.detach() for p in t.parameters], alpha=0.1)


@gradient_edit
def cumulative_sums_of_gradients(t: Parts) -> None:
    for g in grads(t):
        g.copy_(g.cumsum(0))


@gradient_edit
def sorted_gradients(t: Parts) -> None:
    g = t.parameters[1].grad
    g.copy_(g.sort().values)


@gradient_edit
def rolled_gradients(t: Parts) -> None:
    t.parameters[0].grad = t.parameters[0].grad.roll(1, 0)


@gradient_edit
def transposed_gradient_copy(t: Parts) -> None:
    g = t.parameters[0].grad
    g.copy_(g.t().contiguous().t() * 2)
