"""Idioms of parameters: constraints, projections, averages and noise after `step`."""

from __future__ import annotations

import torch
from torch import nn

from bench.idioms.registry import Parts, parameter_edit


@parameter_edit
def clamp_at_zero(t: Parts) -> None:
    with torch.no_grad():
        for p in t.parameters:
            p.clamp_(min=0)


@parameter_edit
def wasserstein_clamp(t: Parts) -> None:
    with torch.no_grad():
        for p in t.parameters:
            p.clamp_(-0.1, 0.1)


@parameter_edit
def clamp_through_data(t: Parts) -> None:
    for p in t.parameters:
        p.data.clamp_(-0.1, 0.1)


@parameter_edit
def clamp_with_copy(t: Parts) -> None:
    with torch.no_grad():
        for p in t.parameters:
            p.copy_(p.clamp(-0.2, 0.2))


@parameter_edit
def clamp_biases_only(t: Parts) -> None:
    with torch.no_grad():
        for name, p in t.model.named_parameters():
            if name.endswith("bias"):
                p.clamp_(max=0.05)


@parameter_edit
def relu_of_weights(t: Parts) -> None:
    with torch.no_grad():
        for p in t.parameters:
            torch.relu_(p)


@parameter_edit
def max_norm(t: Parts) -> None:
    with torch.no_grad():
        for p in t.parameters:
            norm = p.norm()
            p.mul_(torch.clamp(0.5 / (norm + 1e-12), max=1.0))


@parameter_edit
def max_norm_of_rows(t: Parts) -> None:
    with torch.no_grad():
        w = t.parameters[0]
        norm = w.norm(dim=1, keepdim=True)
        w.copy_(torch.where(norm > 0.3, w * 0.3 / norm, w))


@parameter_edit
def renorm(t: Parts) -> None:
    with torch.no_grad():
        for p in t.parameters:
            if p.dim() > 1:
                p.copy_(torch.renorm(p, 2, 0, 0.3))


@parameter_edit
def renorm_in_place(t: Parts) -> None:
    with torch.no_grad():
        t.parameters[0].renorm_(2, 0, 0.25)


@parameter_edit
def unit_norm(t: Parts) -> None:
    with torch.no_grad():
        for p in t.parameters:
            p.div_(p.norm())


@parameter_edit
def unit_rows(t: Parts) -> None:
    with torch.no_grad():
        w = t.parameters[0]
        w.copy_(nn.functional.normalize(w, dim=1))


@parameter_edit
def centred_rows(t: Parts) -> None:
    with torch.no_grad():
        w = t.parameters[0]
        w.sub_(w.mean(1, keepdim=True))


@parameter_edit
def symmetric_weight(t: Parts) -> None:
    with torch.no_grad():
        w = t.parameters[0]
        square = w[:, :6]
        w[:6].copy_((square[:6] + square[:6].T) / 2)


@parameter_edit
def lower_triangle(t: Parts) -> None:
    with torch.no_grad():
        t.parameters[0].tril_()


@parameter_edit
def orthogonal_by_one_step(t: Parts) -> None:
    with torch.no_grad():
        w = t.parameters[0]
        w.copy_(1.5 * w - 0.5 * w @ w.T @ w)


@parameter_edit
def orthogonal_by_qr(t: Parts) -> None:
    with torch.no_grad():
        w = t.parameters[0]
        q, _ = torch.linalg.qr(w)
        w.copy_(q)


@parameter_edit
def simplex_by_softmax(t: Parts) -> None:
    with torch.no_grad():
        t.parameters[1].copy_(t.parameters[1].softmax(0))


@parameter_edit
def rounded_weights(t: Parts) -> None:
    with torch.no_grad():
        for p in t.parameters:
            p.copy_(torch.round(p * 256) / 256)


@parameter_edit
def sign_of_weights(t: Parts) -> None:
    with torch.no_grad():
        t.parameters[0].copy_(t.parameters[0].sign() * t.parameters[0].abs().mean())


@parameter_edit
def soft_threshold(t: Parts) -> None:
    with torch.no_grad():
        for p in t.parameters:
            p.copy_(nn.functional.softshrink(p, 0.01))


@parameter_edit
def hard_threshold(t: Parts) -> None:
    with torch.no_grad():
        for p in t.parameters:
            p.mul_(p.abs() > 0.05)


@parameter_edit
def pruning_mask_after_the_step(t: Parts) -> None:
    with torch.no_grad():
        for p, start in zip(t.parameters, t.start, strict=True):
            p.mul_(start.abs() > 0.1)


@parameter_edit
def zeroed_column(t: Parts) -> None:
    with torch.no_grad():
        t.parameters[0][:, 0] = 0


@parameter_edit
def padding_row_stays_zero(t: Parts) -> None:
    with torch.no_grad():
        t.parameters[0][0].fill_(0)


@parameter_edit
def decoupled_decay_by_hand(t: Parts) -> None:
    with torch.no_grad():
        for p in t.parameters:
            p.mul_(1 - 0.02 * 0.1)


@parameter_edit
def decay_towards_the_start(t: Parts) -> None:
    with torch.no_grad():
        for p, start in zip(t.parameters, t.start, strict=True):
            p.lerp_(start, 0.1)


@parameter_edit
def constrained_distance_from_the_start(t: Parts) -> None:
    with torch.no_grad():
        for p, start in zip(t.parameters, t.start, strict=True):
            away = p - start
            p.copy_(start + away * torch.clamp(0.02 / (away.norm() + 1e-12), max=1.0))


@parameter_edit
def clamped_distance_from_the_start(t: Parts) -> None:
    with torch.no_grad():
        for p, start in zip(t.parameters, t.start, strict=True):
            p.copy_(torch.max(torch.min(p, start + 0.01), start - 0.01))


@parameter_edit
def langevin_noise(t: Parts) -> None:
    with torch.no_grad():
        for p in t.parameters:
            p.add_(torch.randn_like(p), alpha=0.01)


@parameter_edit
def weight_noise_in_place(t: Parts) -> None:
    with torch.no_grad():
        for p in t.parameters:
            p.mul_(torch.empty_like(p).uniform_(0.99, 1.01))


@parameter_edit
def moving_average(t: Parts) -> None:
    with torch.no_grad():
        for p, ema in zip(t.parameters, t.extra, strict=True):
            ema.mul_(0.9).add_(p, alpha=0.1)


@parameter_edit
def moving_average_by_lerp(t: Parts) -> None:
    with torch.no_grad():
        for p, ema in zip(t.parameters, t.extra, strict=True):
            ema.lerp_(p, 0.1)


@parameter_edit
def moving_average_through_data(t: Parts) -> None:
    for p, ema in zip(t.parameters, t.extra, strict=True):
        ema.data = 0.9 * ema.data + 0.1 * p.data


@parameter_edit
def moving_average_by_foreach(t: Parts) -> None:
    with torch.no_grad():
        torch._foreach_mul_(t.extra, 0.9)
        torch._foreach_add_(t.extra, [p.detach() for p in t.parameters], alpha=0.1)


@parameter_edit
def weights_pulled_to_their_average(t: Parts) -> None:
    with torch.no_grad():
        for p, ema in zip(t.parameters, t.extra, strict=True):
            ema.lerp_(p, 0.5)
            p.lerp_(ema, 0.2)


@parameter_edit
def lookahead_every_step(t: Parts) -> None:
    with torch.no_grad():
        for p, slow in zip(t.parameters, t.extra, strict=True):
            slow.add_(p - slow, alpha=0.5)
            p.copy_(slow)


@parameter_edit
def running_sum_of_weights(t: Parts) -> None:
    with torch.no_grad():
        for p, total in zip(t.parameters, t.extra, strict=True):
            total += p


@parameter_edit
def largest_weights_so_far(t: Parts) -> None:
    with torch.no_grad():
        for p, most in zip(t.parameters, t.extra, strict=True):
            most.copy_(torch.maximum(most, p.abs()))


@parameter_edit
def copied_first_layer(t: Parts) -> None:
    with torch.no_grad():
        t.extra[0].copy_(t.parameters[0])


@parameter_edit
def tied_by_averaging(t: Parts) -> None:
    with torch.no_grad():
        mean = (t.parameters[1][:4] + t.parameters[3]) / 2
        t.parameters[1][:4] = mean
        t.parameters[3].copy_(mean)


@parameter_edit
def balanced_layers(t: Parts) -> None:
    with torch.no_grad():
        first, second = t.parameters[0], t.parameters[2]
        ratio = (second.norm() / first.norm()).sqrt()
        first.mul_(ratio)
        second.div_(ratio)


@parameter_edit
def spectral_limit(t: Parts) -> None:
    with torch.no_grad():
        w = t.parameters[0]
        w.div_(torch.clamp(torch.linalg.matrix_norm(w, 2), min=0.5))


@parameter_edit
def step_undone_where_a_weight_is_large(t: Parts) -> None:
    with torch.no_grad():
        for p, start in zip(t.parameters, t.start, strict=True):
            p.copy_(torch.where(p.abs() > 0.3, start, p))


@parameter_edit
def gradients_scaled_after_the_step(t: Parts) -> None:
    for p in t.parameters:
        p.grad.mul_(0.5)


@parameter_edit
def gradients_kept_in_a_buffer(t: Parts) -> None:
    with torch.no_grad():
        for p, kept in zip(t.parameters, t.extra, strict=True):
            kept.copy_(p.grad)


@parameter_edit
def low_precision_shadow(t: Parts) -> None:
    with torch.no_grad():
        for p, shadow in zip(t.parameters, t.extra, strict=True):
            shadow.copy_(p.bfloat16())


@parameter_edit
def momentum_reset_where_it_points_away(t: Parts) -> None:
    with torch.no_grad():
        for p in t.parameters:
            for value in t.optimizer.state[p].values():
                if torch.is_tensor(value) and value.shape == p.shape:
                    value.mul_((value * p.grad > 0) | (value == 0))


@parameter_edit
def momentum_halved(t: Parts) -> None:
    for p in t.parameters:
        for value in t.optimizer.state[p].values():
            if torch.is_tensor(value) and value.shape == p.shape:
                value.mul_(0.5)
