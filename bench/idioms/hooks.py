"""Idioms of hooks on the gradients of parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bench.idioms.registry import Parts, Training, mlp, mse, plain, program, regression, sgd

Hook = Callable[[nn.Parameter, Any], None]


def hooked(register: Callable[[nn.Module], Any]) -> Training:
    """A plain step of a model on whose parameters `register` puts hooks."""
    model = mlp()
    register(model)
    return plain(model, sgd(model))


def updated_in_backward(optimizer_of: Callable[..., Any], edit: Hook | None = None) -> Training:
    """An optimizer for each parameter, which steps in a hook, when `edit` has been at it."""
    model = mlp()
    optimizers = {p: optimizer_of([p]) for p in model.parameters()}

    def update(p: nn.Parameter) -> None:
        if edit is not None:
            edit(p, optimizers[p])
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(update)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = mse(model, x, y)
        loss.backward()
        return loss

    return Training(step, regression(), [model, *optimizers.values()])


@program("hooks")
def gradient_hooks() -> Training:
    return hooked(lambda m: [p.register_hook(lambda g: g * 2) for p in m.parameters()])


@program("hooks")
def gradient_hooks_that_clamp() -> Training:
    return hooked(
        lambda m: [p.register_hook(lambda g: g.clamp(-0.01, 0.01)) for p in m.parameters()]
    )


@program("hooks")
def gradient_hooks_with_noise() -> Training:
    def noisy(gradient: Tensor) -> Tensor:
        return gradient + 0.01 * torch.randn_like(gradient)

    return hooked(lambda m: [p.register_hook(noisy) for p in m.parameters()])


@program("hooks")
def gradient_hook_that_masks() -> Training:
    def register(model: nn.Module) -> None:
        for p in model.parameters():
            mask = (p.detach() > 0).to(p.dtype)
            p.register_hook(lambda g, mask=mask: g * mask)

    return hooked(register)


@program("hooks")
def gradient_hook_in_the_step() -> Training:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        value = mse(model, x, y)
        handle = model[0].weight.register_hook(lambda g: g / 2)
        value.backward(retain_graph=True)
        handle.remove()
        return value

    model = mlp()
    return plain(model, sgd(model), loss=loss)


@program("hooks")
def norms_added_up_in_hooks() -> Training:
    model = mlp()
    total = torch.zeros((), dtype=torch.float64)

    def add_up(p: nn.Parameter) -> None:
        total.mul_(0.9).add_(p.grad.norm())

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(add_up)

    def divide(t: Parts) -> None:
        for p in t.parameters:
            p.grad.div_(1 + total)

    training = plain(model, sgd(model), after_backward=divide)
    training.watched.append(total)
    return training


@program("hooks")
def optimizer_in_backward_hooks() -> Training:
    return updated_in_backward(lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9))


@program("hooks")
def adamw_in_backward_hooks() -> Training:
    return updated_in_backward(lambda p: torch.optim.AdamW(p, lr=0.02))


@program("hooks")
def clipping_and_optimizer_in_backward_hooks() -> Training:
    def clip(p: nn.Parameter, optimizer: Any) -> None:
        nn.utils.clip_grad_norm_([p], 0.05)

    return updated_in_backward(lambda p: torch.optim.SGD(p, lr=0.05), clip)


@program("hooks")
def written_update_in_backward_hooks() -> Training:
    model = mlp()

    def update(p: nn.Parameter) -> None:
        p.data.add_(p.grad.sign(), alpha=-0.01)
        p.grad = None

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(update)

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2).double())], lr=0.1)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = mse(model, x, y)
        loss.backward()
        optimizer.step()
        return loss

    return Training(step, regression(), [model, optimizer])


@program("hooks")
def checkpoint_and_optimizer_in_backward_hooks() -> Training:
    training = updated_in_backward(lambda p: torch.optim.Adagrad(p, lr=0.05))
    model = training.watched[0]

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = (checkpoint(model, x, use_reentrant=False) - y).square().mean()
        loss.backward()
        return loss

    return Training(step, training.batches, training.watched)
