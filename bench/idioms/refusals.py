"""Idioms that may be refused: each with words of the advice, and the program that follows it."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.idioms.registry import Training, adamw, mlp, mse, refused, regression, sgd


def followed(
    loss_of: Any = mse,
    *,
    after_backward: Any = None,
    make_model: Any = mlp,
    make_optimizer: Any = adamw,
) -> Any:
    """A program with a plain step that differs in its loss or its gradients."""

    def make() -> Training:
        model = make_model()
        optimizer = make_optimizer(model)

        def step(x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, x, y)
            loss.backward()
            if after_backward is not None:
                after_backward(model)
            optimizer.step()
            return loss.detach()

        return Training(step, regression(), [model, optimizer])

    return make


def _masked(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    keep = (y[:, 0] > 0)[:, None]
    return torch.where(keep, (model(x) - y).pow(2), 0.0).sum() / (keep.sum() * 4).clamp(min=1)


@refused(r"torch\.where", followed(_masked))
def rows_chosen_by_a_mask() -> Training:
    return followed(lambda m, x, y: F.mse_loss(m(x)[y[:, 0] > 0], y[y[:, 0] > 0]))()


@refused(r"torch\.where", followed(_masked))
def rows_chosen_by_nonzero() -> Training:
    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        rows = torch.nonzero(y[:, 0] > 0).squeeze(1)
        return F.mse_loss(m(x)[rows], y[rows])

    return followed(loss)()


@refused(r"torch\.where", followed(_masked))
def masked_select() -> Training:
    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return (m(x) - y).pow(2).masked_select(y > 0).mean()

    return followed(loss)()


@refused(r"torch\.where", followed(_masked))
def rows_counted_by_data() -> Training:
    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        count = int((y[:, 0] > 0).sum())
        return F.mse_loss(m(x)[:count], y[:count])

    return followed(loss)()


def _where_large(model: nn.Module) -> None:
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    for p in model.parameters():
        p.grad.copy_(torch.where(norm > 0.5, p.grad / norm, p.grad))


@refused(r"torch\.where", followed(after_backward=_where_large))
def branch_on_a_norm() -> Training:
    def edit(model: nn.Module) -> None:
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        if norm > 0.5:
            for p in model.parameters():
                p.grad.div_(norm)

    return followed(after_backward=edit)()


@refused(r"torch\.where|decide outside", followed())
def loss_item_that_decides() -> Training:
    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        value = mse(m, x, y)
        if value.item() > 1e6:
            return value * 0
        return value

    return followed(loss)()


@refused(r"print|return", followed())
def print_in_the_step() -> Training:
    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        value = mse(m, x, y)
        print("loss", value)
        return value

    return followed(loss)()


@refused(r"in the step|hook", followed())
def full_backward_hook() -> Training:
    def make_model() -> nn.Module:
        model = mlp()
        model[0].register_full_backward_hook(lambda m, i, o: None)
        return model

    return followed(make_model=make_model)()


@refused(r"step\(\)|closure", followed(make_optimizer=sgd))
def closure() -> Training:
    model = mlp()
    optimizer = sgd(model)

    def step(x: Tensor, y: Tensor) -> Tensor:
        def evaluate() -> Tensor:
            optimizer.zero_grad()
            loss = mse(model, x, y)
            loss.backward()
            return loss

        return optimizer.step(evaluate)

    return Training(step, regression(), [model, optimizer])


@refused(r"LBFGS|another optimizer", followed())
def lbfgs() -> Training:
    model = mlp()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)

    def step(x: Tensor, y: Tensor) -> Tensor:
        def evaluate() -> Tensor:
            optimizer.zero_grad()
            loss = mse(model, x, y)
            loss.backward()
            return loss

        return optimizer.step(evaluate)

    return Training(step, regression(), [model, optimizer])


def _drawn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return mse(model, x * torch.rand((), dtype=x.dtype), y)


@refused(r"torch\.rand", followed(_drawn))
def python_random_numbers() -> Training:
    return followed(lambda m, x, y: mse(m, x * random.random(), y))()


@refused(r"torch", followed(_drawn))
def numpy_random_numbers() -> Training:
    return followed(lambda m, x, y: mse(m, x * float(np.random.rand()), y))()


@refused(r"torch|detach", followed())
def numpy_in_the_loss() -> Training:
    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        scale = float(np.mean(x.numpy()) * 0 + 1)
        return mse(m, x, y) * scale

    return followed(loss)()


def _tokens(sparse: bool) -> Any:
    def make() -> Training:
        model = nn.Sequential(nn.Embedding(16, 8, sparse=sparse), nn.Linear(8, 4)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

        def step(x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            return loss

        batches = [(torch.randint(0, 16, (8,)), torch.randint(0, 4, (8,))) for _ in range(4)]
        return Training(step, batches, [model, optimizer])

    return make


@refused(r"sparse=False|sparse", _tokens(sparse=False))
def sparse_embedding() -> Training:
    return _tokens(sparse=True)()


@refused(r"freeze|between steps", followed())
def frozen_in_the_step() -> Training:
    model = mlp()
    optimizer = adamw(model)

    def step(x: Tensor, y: Tensor) -> Tensor:
        model[0].requires_grad_(False)
        optimizer.zero_grad()
        loss = mse(model, x, y)
        loss.backward()
        optimizer.step()
        model[0].requires_grad_(True)
        return loss

    return Training(step, regression(), [model, optimizer])


@refused(r"detach", followed())
def outputs_with_their_history() -> Training:
    model = mlp()
    optimizer = adamw(model)

    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        optimizer.zero_grad()
        loss = mse(model, x, y)
        loss.backward()
        optimizer.step()
        return loss, model(x)

    return Training(step, regression(), [model, optimizer])


@refused(r"step|hook", followed())
def optimizer_step_hook() -> Training:
    def make_optimizer(model: nn.Module) -> Any:
        optimizer = adamw(model)
        optimizer.register_step_post_hook(lambda *_: None)
        return optimizer

    return followed(make_optimizer=make_optimizer)()


@refused(r"before|outside|between", followed())
def scheduler_in_the_step() -> Training:
    model = mlp()
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = mse(model, x, y)
        loss.backward()
        optimizer.step()
        scheduler.step()
        return loss

    return Training(step, regression(), [model, optimizer])


@refused(r"torch\.|meta|anomaly|outside", followed())
def anomaly_detection() -> Training:
    model = mlp()
    optimizer = adamw(model)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        with torch.autograd.detect_anomaly():
            loss = mse(model, x, y)
            loss.backward()
        optimizer.step()
        return loss

    return Training(step, regression(), [model, optimizer])


@refused(r"saved|hooks|offload", followed())
def saved_tensors_hooks() -> Training:
    model = mlp()
    optimizer = adamw(model)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        with torch.autograd.graph.save_on_cpu():
            loss = mse(model, x, y)
        loss.backward()
        optimizer.step()
        return loss

    return Training(step, regression(), [model, optimizer])


@refused(r"reentrant", followed())
def reentrant_checkpoint() -> Training:
    from torch.utils.checkpoint import checkpoint

    return followed(
        lambda m, x, y: F.mse_loss(checkpoint(m, x.clone().requires_grad_(), use_reentrant=True), y)
    )()
