"""Idioms of several models in one step: critics, teachers, target networks, layers in turn."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.idioms.registry import (
    OUT,
    WIDTH,
    Training,
    adam,
    adamw,
    mlp,
    mse,
    program,
    regression,
    sgd,
)


@program("loops")
def generator_and_critic() -> Training:
    maker = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, OUT)).double()
    critic = nn.Sequential(nn.Linear(OUT, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    first, second = adam(maker), adam(critic)

    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        second.zero_grad()
        fake = maker(x).detach()
        critic_loss = F.softplus(-critic(y)).mean() + F.softplus(critic(fake)).mean()
        critic_loss.backward()
        second.step()
        first.zero_grad()
        maker_loss = F.softplus(-critic(maker(x))).mean()
        maker_loss.backward()
        first.step()
        return critic_loss.detach(), maker_loss.detach()

    return Training(step, regression(), [maker, critic, first, second])


@program("loops")
def wasserstein_critic_with_clamp() -> Training:
    critic = nn.Sequential(nn.Linear(OUT, 8), nn.ReLU(), nn.Linear(8, 1)).double()
    optimizer = torch.optim.RMSprop(critic.parameters(), lr=0.01)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = critic(x[:, :4]).mean() - critic(y).mean()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for p in critic.parameters():
                p.clamp_(-0.05, 0.05)
        return loss

    return Training(step, regression(), [critic, optimizer])


@program("loops")
def student_and_average_teacher() -> Training:
    model = mlp()
    teacher = copy.deepcopy(model).requires_grad_(False)
    optimizer = adamw(model)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        with torch.no_grad():
            target = teacher(x)
        loss = F.mse_loss(model(x), target) + mse(model, x, y)
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for a, b in zip(teacher.parameters(), model.parameters(), strict=True):
                a.mul_(0.9).add_(b, alpha=0.1)
        return loss

    return Training(step, regression(), [model, teacher, optimizer])


@program("loops")
def target_network_copied_softly() -> Training:
    model = mlp()
    target = copy.deepcopy(model)
    for p in target.parameters():
        p.requires_grad = False
    optimizer = adam(model)

    def step(x: Tensor, y: Tensor) -> Tensor:
        value = y[:, 0] + 0.9 * target(x).max(-1).values
        loss = F.smooth_l1_loss(model(x)[:, 0], value)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for p, q in zip(target.parameters(), model.parameters(), strict=True):
            p.data.copy_(0.95 * p.data + 0.05 * q.data)
        return loss

    return Training(step, regression(), [model, target, optimizer])


@program("loops")
def actor_and_two_critics() -> Training:
    actor, critics = mlp(), nn.ModuleList(nn.Linear(WIDTH + OUT, 1) for _ in range(2)).double()
    first, second = adam(actor), adam(critics)

    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        def values(action: Tensor) -> list[Tensor]:
            return [c(torch.cat([x, action], -1)) for c in critics]

        critic_loss = sum(F.mse_loss(v, y[:, :1]) for v in values(y))
        second.zero_grad()
        critic_loss.backward()
        second.step()
        actor_loss = -torch.min(*values(torch.tanh(actor(x)))).mean()
        first.zero_grad()
        actor_loss.backward()
        first.step()
        return critic_loss.detach(), actor_loss.detach()

    return Training(step, regression(), [actor, critics, first, second])


@program("loops")
def alternating_layers_in_one_call() -> Training:
    model = mlp()
    a, b = sgd(model[0]), sgd(model[2])

    def step(x: Tensor, y: Tensor) -> Tensor:
        for optimizer in (a, b):
            model.zero_grad()
            loss = mse(model, x, y)
            loss.backward()
            optimizer.step()
        return loss

    return Training(step, regression(), [model, a, b])
