"""Idioms of second orders: losses and steps that depend on a gradient."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

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
def gradient_penalty() -> Training:
    model = mlp()
    optimizer = adamw(model)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        x = x.clone().requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), (x,), create_graph=True)
        loss = F.mse_loss(out, y) + (slope.norm(dim=1) - 1).pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Training(step, regression(), [model, optimizer])


@program("loops")
def gradient_penalty_of_one_tensor() -> Training:
    model = mlp()
    optimizer = adamw(model)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        x = x.clone().requires_grad_()
        out = model(x)
        slope = torch.autograd.grad(out.sum(), x, create_graph=True)[0]
        loss = F.mse_loss(out, y) + slope.pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Training(step, regression(), [model, optimizer])


@program("loops")
def physics_informed_residual() -> Training:
    model = mlp()
    optimizer = adam(model)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        x = x.clone().requires_grad_(True)
        u = model(x)[:, 0]
        du = torch.autograd.grad(u, x, torch.ones_like(u), create_graph=True)[0]
        ddu = torch.autograd.grad(du[:, 0], x, torch.ones_like(u), create_graph=True)[0]
        loss = (ddu[:, 0] + u - y[:, 0]).pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Training(step, regression(), [model, optimizer])


@program("loops")
def forces_from_an_energy() -> Training:
    model = mlp()
    optimizer = adamw(model)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        x = x.clone().requires_grad_(True)
        energy = model(x).sum()
        force = -torch.autograd.grad(energy, x, create_graph=True)[0]
        loss = (force[:, :4] - y).pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Training(step, regression(), [model, optimizer])


@program("loops")
def adversarial_examples() -> Training:
    model = mlp()
    optimizer = sgd(model)

    def step(x: Tensor, y: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(mse(model, x, y), (x,))
        optimizer.zero_grad()
        loss = mse(model, (x + 0.1 * slope.sign()).detach(), y)
        loss.backward()
        optimizer.step()
        return loss

    return Training(step, regression(), [model, optimizer])


@program("loops")
def sharpness_aware_minimisation() -> Training:
    model = mlp()
    optimizer = sgd(model)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = mse(model, x, y)
        loss.backward()
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        moved = []
        with torch.no_grad():
            for p in model.parameters():
                e = 0.05 * p.grad / (norm + 1e-12)
                p.add_(e)
                moved.append(e)
        optimizer.zero_grad()
        mse(model, x, y).backward()
        with torch.no_grad():
            for p, e in zip(model.parameters(), moved, strict=True):
                p.sub_(e)
        optimizer.step()
        return loss

    return Training(step, regression(), [model, optimizer])


@program("loops")
def meta_learning_inner_step() -> Training:
    model = mlp()
    optimizer = adam(model)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        params = dict(model.named_parameters())
        inner = F.mse_loss(torch.func.functional_call(model, params, (x[:4],)), y[:4])
        slopes = torch.autograd.grad(inner, list(params.values()), create_graph=True)
        fast = {k: p - 0.1 * g for (k, p), g in zip(params.items(), slopes, strict=True)}
        loss = F.mse_loss(torch.func.functional_call(model, fast, (x[4:],)), y[4:])
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Training(step, regression(), [model, optimizer])


@program("loops")
def gradients_by_torch_func() -> Training:
    model = mlp()
    optimizer = adamw(model)

    def step(x: Tensor, y: Tensor) -> Tensor:
        def loss_of(params: dict[str, Tensor]) -> Tensor:
            return F.mse_loss(torch.func.functional_call(model, params, (x,)), y)

        params = {k: p.detach() for k, p in model.named_parameters()}
        slopes, loss = torch.func.grad_and_value(loss_of)(params)
        for name, p in model.named_parameters():
            p.grad = slopes[name]
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Training(step, regression(), [model, optimizer])
