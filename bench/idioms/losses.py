"""Idioms of losses: what people minimise, and how they write it."""

from __future__ import annotations

import logging
import warnings

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.idioms.registry import classes, loss_idiom


@loss_idiom(classes)
def cross_entropy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


@loss_idiom(classes)
def label_smoothing(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, label_smoothing=0.1)


@loss_idiom(classes)
def class_weights(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, weight=torch.tensor([1.0, 2.0, 0.5, 1.0]).double())


@loss_idiom(classes)
def ignored_classes(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), torch.where(y == 0, -100, y))


@loss_idiom(classes)
def focal_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    each = F.cross_entropy(model(x), y, reduction="none")
    return ((1 - torch.exp(-each)) ** 2 * each).mean()


@loss_idiom(classes)
def negative_log_likelihood(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.nll_loss(F.log_softmax(model(x), -1), y)


@loss_idiom(classes)
def gathered_log_probability(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return -model(x).log_softmax(-1).gather(1, y[:, None]).mean()


@loss_idiom(classes)
def indexed_log_probability(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return -model(x).log_softmax(-1)[torch.arange(len(y)), y].mean()


@loss_idiom(classes)
def multi_margin(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.multi_margin_loss(model(x), y)


@loss_idiom(classes)
def binary_cross_entropy_of_one_hot(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(model(x), F.one_hot(y, 4).double())


@loss_idiom(classes)
def z_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    logits = model(x)
    return F.cross_entropy(logits, y) + 1e-2 * logits.logsumexp(-1).pow(2).mean()


@loss_idiom(classes)
def hard_examples_only(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="none").topk(4).values.mean()


@loss_idiom(classes)
def mixup(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    mixed = 0.7 * x + 0.3 * x.flip(0)
    logits = model(mixed)
    return 0.7 * F.cross_entropy(logits, y) + 0.3 * F.cross_entropy(logits, y.flip(0))


@loss_idiom(classes)
def mixup_with_a_drawn_share(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    share = torch.rand((), dtype=torch.float64)
    order = torch.randperm(x.shape[0])
    logits = model(share * x + (1 - share) * x[order])
    return share * F.cross_entropy(logits, y) + (1 - share) * F.cross_entropy(logits, y[order])


@loss_idiom(classes)
def contrastive_of_two_views(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    a = F.normalize(model(x + 0.1 * torch.randn_like(x)), dim=-1)
    b = F.normalize(model(x + 0.1 * torch.randn_like(x)), dim=-1)
    scores = a @ b.T / 0.5
    return F.cross_entropy(scores, torch.arange(len(x)))


@loss_idiom(classes)
def supervised_contrastive(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    z = F.normalize(model(x), dim=-1)
    scores = (z @ z.T).masked_fill(torch.eye(len(x), dtype=torch.bool), -1e9)
    same = (y[:, None] == y[None]) & ~torch.eye(len(x), dtype=torch.bool)
    return -(scores.log_softmax(-1) * same).sum() / same.sum().clamp(min=1)


@loss_idiom(classes)
def entropy_bonus(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    log_p = model(x).log_softmax(-1)
    return F.nll_loss(log_p, y) + 0.1 * (log_p.exp() * log_p).sum(-1).mean()


@loss_idiom(classes)
def policy_gradient(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    chosen = torch.distributions.Categorical(logits=model(x), validate_args=False).log_prob(y)
    reward = x.sum(-1)
    return -(chosen * (reward - reward.mean())).mean()


@loss_idiom(classes)
def clipped_policy_ratio(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    log_p = model(x).log_softmax(-1).gather(1, y[:, None]).squeeze(1)
    ratio = (log_p - log_p.detach() + 0.1 * x[:, 0]).exp()
    gain = x.sum(-1)
    return -torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()


@loss_idiom(classes)
def preference_optimisation(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    log_p = model(x).log_softmax(-1).gather(1, y[:, None]).squeeze(1)
    chosen, rejected = log_p.chunk(2)
    return -F.logsigmoid(0.5 * (chosen - rejected)).mean()


@loss_idiom(classes)
def gumbel_softmax(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(F.gumbel_softmax(model(x), tau=0.7), F.one_hot(y, 4).double())


@loss_idiom(classes)
def straight_through_argmax(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    p = model(x).softmax(-1)
    hard = F.one_hot(p.argmax(-1), 4).to(p.dtype)
    return F.mse_loss(hard + p - p.detach(), F.one_hot(y, 4).double())


@loss_idiom()
def mean_absolute_error(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.l1_loss(model(x), y)


@loss_idiom()
def huber(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.huber_loss(model(x), y, delta=0.5)


@loss_idiom()
def smooth_l1(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.smooth_l1_loss(model(x), y)


@loss_idiom()
def log_cosh(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return torch.log(torch.cosh(model(x) - y)).mean()


@loss_idiom()
def pinball(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    off = y - model(x)
    return torch.maximum(0.9 * off, -0.1 * off).mean()


@loss_idiom()
def poisson_likelihood(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.poisson_nll_loss(model(x), y.abs())


@loss_idiom()
def divergence_to_a_teacher(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    student = F.log_softmax(model(x) / 2, -1)
    return F.kl_div(student, F.softmax(y / 2, -1), reduction="batchmean") * 4


@loss_idiom()
def distillation_from_itself(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        target = model(x.flip(-1))
    return F.mse_loss(model(x), target) + F.mse_loss(model(x), y)


@loss_idiom()
def cosine_similarity(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return 1 - F.cosine_similarity(model(x), y).mean()


@loss_idiom()
def triplet(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.triplet_margin_loss(model(x), model(x + 0.1), model(x.flip(0)))


@loss_idiom()
def redundancy_reduction(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    a, b = model(x), model(x + 0.1 * y.mean())
    a, b = (a - a.mean(0)) / (a.std(0) + 1e-3), (b - b.mean(0)) / (b.std(0) + 1e-3)
    c = a.T @ b / len(x)
    return (torch.eye(4, dtype=c.dtype) - c).pow(2).sum()


@loss_idiom()
def l1_in_the_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y) + 1e-2 * sum(p.abs().sum() for p in model.parameters())


@loss_idiom()
def l2_in_the_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y) + 1e-2 * sum(p.square().sum() for p in model.parameters())


@loss_idiom()
def group_lasso(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y) + 1e-2 * model[0].weight.norm(dim=1).sum()


@loss_idiom()
def orthogonality_in_the_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    w = model[2].weight
    eye = torch.eye(4, dtype=w.dtype)
    return F.mse_loss(model(x), y) + 0.1 * (w @ w.T - eye).pow(2).sum()


@loss_idiom()
def consistency_under_noise(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    out = model(x)
    return F.mse_loss(out, y) + F.mse_loss(model(x + 0.1 * torch.randn_like(x)), out.detach())


@loss_idiom()
def denoising(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    t = torch.rand(len(x), 1, dtype=x.dtype)
    return F.mse_loss(model(x * (1 - t) + t * torch.randn_like(x)), y)


@loss_idiom()
def sum_reduction(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y, reduction="sum") / len(x)


@loss_idiom()
def weights_for_samples(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    w = x[:, 0].sigmoid()
    return ((model(x) - y).pow(2).mean(-1) * w).sum() / w.sum()


@loss_idiom()
def masked_mean(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    mask = (y > 0).to(x.dtype)
    return ((model(x) - y).pow(2) * mask).sum() / mask.sum().clamp(min=1)


@loss_idiom()
def where_in_the_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    off = model(x) - y
    return torch.where(off > 0, off, -2 * off).mean()


@loss_idiom()
def two_losses_with_learned_like_weights(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    out = model(x)
    first, second = F.mse_loss(out, y), F.l1_loss(out, y)
    return first / first.detach() + second / second.detach()


@loss_idiom()
def loss_clipped_from_below(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (F.mse_loss(model(x), y) - 0.05).abs() + 0.05


@loss_idiom()
def optimal_transport(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    cost = torch.cdist(model(x), y)
    u = torch.zeros(len(x), dtype=x.dtype)
    v = torch.zeros(len(x), dtype=x.dtype)
    for _ in range(3):
        u = -torch.logsumexp(-cost + v[None], 1)
        v = -torch.logsumexp(-cost + u[:, None], 0)
    return (torch.exp(-cost + u[:, None] + v[None]) * cost).sum()


@loss_idiom()
def sorted_outputs(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x).sort(0).values, y.sort(0).values)


@loss_idiom()
def spectrum(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (torch.fft.rfft(model(x)) - torch.fft.rfft(y)).abs().pow(2).mean()


@loss_idiom()
def cumulative_distribution(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(x).softmax(-1).cumsum(-1) - y.softmax(-1).cumsum(-1)).pow(2).mean()


@loss_idiom()
def ordered_pairs(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    s = model(x)[:, 0]
    return F.margin_ranking_loss(s[:-1], s[1:], torch.sign(y[:-1, 0] - y[1:, 0]), margin=0.1)


@loss_idiom()
def listwise_ranking(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return -(F.softmax(y[:, 0], 0) * F.log_softmax(model(x)[:, 0], 0)).sum()


@loss_idiom()
def evidence_lower_bound(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    mean, log_var = model(x).chunk(2, -1)
    z = mean + torch.randn_like(mean) * (0.5 * log_var).exp()
    kl = -0.5 * (1 + log_var - mean.pow(2) - log_var.exp()).mean()
    return F.mse_loss(z, y[:, :2]) + 0.1 * kl


@loss_idiom()
def vector_quantisation(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    z, codes = model(x), model[2].weight[:, :4]
    nearest = codes[torch.cdist(z, codes).argmin(-1)]
    passed = z + (nearest - z).detach()
    return F.mse_loss(passed, y) + F.mse_loss(nearest, z.detach()) + F.mse_loss(z, nearest.detach())


@loss_idiom()
def maximum_mean_discrepancy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    def kernel(a: Tensor, b: Tensor) -> Tensor:
        return torch.exp(-torch.cdist(a, b).pow(2) / 2).mean()

    z = model(x)
    return kernel(z, z) + kernel(y, y) - 2 * kernel(z, y)


@loss_idiom()
def hinge_of_two_halves(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    real, fake = model(x)[:, 0].chunk(2)
    return F.relu(1 - real).mean() + F.relu(1 + fake).mean()


@loss_idiom()
def relative_error(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return ((model(x) - y).norm() / y.norm()).pow(2)


@loss_idiom()
def determinant(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    gram = model[2].weight @ model[2].weight.T + torch.eye(4, dtype=x.dtype)
    return F.mse_loss(model(x), y) - 0.1 * torch.logdet(gram)


@loss_idiom()
def einsum_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return torch.einsum("bi,bj->ij", model(x), y).pow(2).mean()


@loss_idiom()
def reference_in_inference_mode(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.inference_mode():
        before = model(x[:, :])
    return F.mse_loss(model(x), y) + 0.1 * (model(x) - before).square().mean()


@loss_idiom()
def loss_that_logs_and_warns(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    logging.getLogger("an_idiom").debug("rows %d", x.shape[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.warn("as a library does", stacklevel=2)
    return F.mse_loss(model(x), y)
