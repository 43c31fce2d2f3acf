"""Idioms of loops: accumulation, schedules, second orders, several models, what a step returns."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.idioms.registry import (
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
def cleared_at_the_end() -> Training:
    model = mlp()
    optimizer = adamw(model)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = mse(model, x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Training(step, regression(), [model, optimizer])


@program("loops")
def cleared_by_the_model() -> Training:
    model = mlp()
    optimizer = sgd(model)

    def step(x: Tensor, y: Tensor) -> Tensor:
        model.zero_grad()
        loss = mse(model, x, y)
        loss.backward()
        optimizer.step()
        return loss

    return Training(step, regression(), [model, optimizer])


@program("loops")
def cleared_by_hand() -> Training:
    model = mlp()
    optimizer = adam(model)

    def step(x: Tensor, y: Tensor) -> Tensor:
        for p in model.parameters():
            p.grad = None
        loss = mse(model, x, y)
        loss.backward()
        optimizer.step()
        return loss

    return Training(step, regression(), [model, optimizer])


@program("loops")
def zeroed_in_place() -> Training:
    model = mlp()
    optimizer = adamw(model)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = mse(model, x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return loss

    return Training(step, regression(), [model, optimizer])


@program("loops")
def micro_batches_in_a_loop() -> Training:
    model = mlp()
    optimizer = adamw(model)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        total = torch.zeros((), dtype=x.dtype)
        for a, b in zip(x.chunk(4), y.chunk(4), strict=True):
            loss = mse(model, a, b) / 4
            loss.backward()
            total += loss.detach()
        optimizer.step()
        return total

    return Training(step, regression(), [model, optimizer])


@program("loops")
def micro_batches_as_lists() -> Training:
    model = mlp()
    optimizer = sgd(model)

    def step(batch: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
        optimizer.zero_grad()
        losses = []
        for x, y in batch:
            loss = mse(model, x, y)
            (loss / len(batch)).backward()
            losses.append(loss.detach())
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return losses

    batches = [([(x[:4], y[:4]), (x[4:], y[4:])],) for x, y in regression()]
    return Training(step, batches, [model, optimizer])


@program("loops")
def two_losses_two_backwards() -> Training:
    model = mlp()
    optimizer = adamw(model)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        out = model(x)
        first, second = F.mse_loss(out, y), F.l1_loss(out, y)
        first.backward(retain_graph=True)
        second.backward()
        optimizer.step()
        return first + second

    return Training(step, regression(), [model, optimizer])


@program("loops")
def backward_with_a_gradient() -> Training:
    model = mlp()
    optimizer = sgd(model)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        out = model(x)
        out.backward(gradient=(out - y).detach() / 10)
        optimizer.step()
        return out.detach().sum()

    return Training(step, regression(), [model, optimizer])


@program("loops")
def autograd_backward_of_two() -> Training:
    model = mlp()
    optimizer = adam(model)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        a, b = mse(model, x, y), mse(model, -x, y)
        torch.autograd.backward([a, b])
        optimizer.step()
        return a + b

    return Training(step, regression(), [model, optimizer])


@program("loops")
def gradients_by_autograd_grad() -> Training:
    model = mlp()
    optimizer = adamw(model)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = mse(model, x, y)
        params = list(model.parameters())
        for p, g in zip(params, torch.autograd.grad(loss, params), strict=True):
            p.grad = g
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Training(step, regression(), [model, optimizer])
