"""Idioms of results: what a step returns, what it keeps in tensors, and how it is called."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.idioms.registry import (
    CALLS,
    OUT,
    ROWS,
    WIDTH,
    Training,
    adam,
    adamw,
    classes,
    mlp,
    mse,
    program,
    regression,
    sgd,
)


@program("loops")
def validation_in_the_step() -> Training:
    model = mlp()
    optimizer = adamw(model)

    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        optimizer.zero_grad()
        loss = mse(model, x, y)
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            after = mse(model, x, y)
        return loss, after

    return Training(step, regression(), [model, optimizer])


@program("loops")
def statistics_are_returned() -> Training:
    model = mlp()
    optimizer = adamw(model)

    def step(x: Tensor, y: Tensor) -> dict[str, Any]:
        optimizer.zero_grad()
        out = model(x)
        loss = F.mse_loss(out, y)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return {"loss": loss.detach(), "norm": norm, "mean": out.detach().mean(), "rows": len(x)}

    return Training(step, regression(), [model, optimizer])


@program("loops")
def loss_as_a_number() -> Training:
    model = mlp()
    optimizer = adamw(model)

    def step(x: Tensor, y: Tensor) -> float:
        optimizer.zero_grad()
        loss = mse(model, x, y)
        loss.backward()
        optimizer.step()
        return loss.item()

    return Training(step, regression(), [model, optimizer])


@program("loops")
def nothing_is_returned() -> Training:
    model = mlp()
    optimizer = adamw(model)

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        mse(model, x, y).backward()
        optimizer.step()

    return Training(step, regression(), [model, optimizer])


@program("loops")
def accuracy_beside_the_loss() -> Training:
    model = mlp()
    optimizer = adam(model)

    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        optimizer.zero_grad()
        logits = model(x)
        loss = F.cross_entropy(logits, y)
        loss.backward()
        optimizer.step()
        return loss.detach(), (logits.argmax(-1) == y).float().mean()

    return Training(step, classes(), [model, optimizer])


@program("loops")
def running_loss_in_a_tensor() -> Training:
    model = mlp()
    optimizer = adamw(model)
    running = torch.zeros((), dtype=torch.float64)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = mse(model, x, y)
        loss.backward()
        optimizer.step()
        running.mul_(0.9).add_(loss.detach(), alpha=0.1)
        return running.clone()

    return Training(step, regression(), [model, optimizer, running])


@program("loops")
def batch_as_a_dictionary() -> Training:
    model = mlp()
    optimizer = adamw(model)

    def step(batch: dict[str, Tensor]) -> Tensor:
        optimizer.zero_grad()
        loss = mse(model, batch["inputs"], batch["targets"])
        loss.backward()
        optimizer.step()
        return loss

    return Training(
        step, [({"inputs": x, "targets": y},) for x, y in regression()], [model, optimizer]
    )


@program("loops")
def method_of_a_trainer() -> Training:
    class Trainer:
        def __init__(self) -> None:
            self.model = mlp()
            self.optimizer = adamw(self.model)

        def step(self, x: Tensor, y: Tensor) -> Tensor:
            self.optimizer.zero_grad()
            loss = mse(self.model, x, y)
            loss.backward()
            self.optimizer.step()
            return loss

    trainer = Trainer()
    return Training(trainer.step, regression(), [trainer.model, trainer.optimizer])


@program("loops")
def gradients_go_through_a_list() -> Training:
    model = mlp()
    optimizer = sgd(model)

    def step(x: Tensor, y: Tensor) -> Tensor:
        gathered: list[list[Tensor]] = []
        for part, target in ((x[:4], y[:4]), (x[4:], y[4:])):
            optimizer.zero_grad()
            mse(model, part, target).backward()
            gathered.append([p.grad.clone() for p in model.parameters()])
        for p, a, b in zip(model.parameters(), *gathered, strict=True):
            p.grad = torch.where(a * b > 0, a + b, 0.0)
        optimizer.step()
        return gathered[0][0].norm()

    return Training(step, regression(), [model, optimizer])


@program("loops")
def per_sample_clipping_by_vmap() -> Training:
    model = mlp()
    optimizer = sgd(model)

    def step(x: Tensor, y: Tensor) -> Tensor:
        params = {k: p.detach() for k, p in model.named_parameters()}

        def loss_of(params: dict[str, Tensor], a: Tensor, b: Tensor) -> Tensor:
            return F.mse_loss(torch.func.functional_call(model, params, (a[None],)), b[None])

        each = torch.func.vmap(torch.func.grad(loss_of), (None, 0, 0))(params, x, y)
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in each.values()]).norm(dim=0)
        scale = (0.5 / norms).clamp(max=1.0)
        for name, p in model.named_parameters():
            p.grad = torch.einsum("b,b...->...", scale, each[name]) / len(x)
        optimizer.step()
        optimizer.zero_grad()
        return norms.mean()

    return Training(step, regression(), [model, optimizer])


@program("loops")
def loss_scaled_by_hand() -> Training:
    model = mlp()
    optimizer = adamw(model)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = mse(model, x, y)
        (loss * 1024).backward()
        for p in model.parameters():
            p.grad.div_(1024)
        optimizer.step()
        return loss

    return Training(step, regression(), [model, optimizer])


@program("loops")
def dynamic_loss_scale_by_hand() -> Training:
    model = mlp()
    optimizer = sgd(model)
    scale = torch.full((), 2.0**20, dtype=torch.float64)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = mse(model, x, y)
        (loss * scale).backward()
        finite = torch.stack([p.grad.isfinite().all() for p in model.parameters()]).all()
        for p in model.parameters():
            p.grad.copy_(torch.where(finite, p.grad / scale, 0.0))
        optimizer.step()
        scale.mul_(torch.where(finite, 2.0, 0.5))
        return loss

    return Training(step, regression(), [model, optimizer, scale])


@program("loops")
def flag_that_decides_the_clipping() -> Training:
    model = mlp()
    optimizer = adamw(model)
    clip = True

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = mse(model, x, y)
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        return loss

    return Training(step, regression(), [model, optimizer])


@program("loops")
def weight_of_a_loss_as_an_argument() -> Training:
    model = mlp()
    optimizer = adamw(model)

    def step(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = mse(model, x, y) + weight * model(x).abs().mean()
        loss.backward()
        optimizer.step()
        return loss

    weights = [torch.tensor(0.1 * i).double() for i in range(CALLS)]
    return Training(
        step,
        [(x, y, w) for (x, y), w in zip(regression(), weights, strict=True)],
        [model, optimizer],
    )


@program("loops")
def gradients_of_inputs_are_returned() -> Training:
    model = mlp()
    optimizer = adamw(model)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        seen = x.detach().clone().requires_grad_()
        loss = mse(model, seen, y)
        loss.backward()
        optimizer.step()
        return seen.grad

    return Training(step, regression(), [model, optimizer])


@program("loops")
def learned_inputs() -> Training:
    prompt = nn.Parameter(torch.zeros(WIDTH, dtype=torch.float64))
    model = mlp().requires_grad_(False)
    optimizer = torch.optim.Adam([prompt], lr=0.05)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = mse(model, x + prompt, y)
        loss.backward()
        optimizer.step()
        return loss

    return Training(step, regression(), [model, optimizer, prompt])


@program("loops")
def image_that_is_optimised() -> Training:
    image = torch.zeros(ROWS, WIDTH, dtype=torch.float64, requires_grad=True)
    model = mlp().requires_grad_(False)
    optimizer = torch.optim.Adam([image], lr=0.05)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = mse(model, image, y) + 1e-2 * image.diff(dim=1).abs().mean()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            image.clamp_(-0.1, 0.1)
        return loss

    return Training(step, regression(), [optimizer, image])


@program("loops")
def memory_bank_of_features() -> Training:
    model = mlp()
    optimizer = sgd(model)
    bank = torch.randn(16, OUT, dtype=torch.float64)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        z = F.normalize(model(x), dim=-1)
        scores = torch.cat([(z * F.normalize(y, dim=-1)).sum(-1, keepdim=True), z @ bank.T], -1)
        loss = F.cross_entropy(scores / 0.5, torch.zeros(len(x), dtype=torch.long))
        loss.backward()
        optimizer.step()
        bank.copy_(torch.cat([z.detach(), bank[: -len(x)]]))
        return loss

    return Training(step, regression(), [model, optimizer, bank])


@program("loops")
def autocast_forward() -> Training:
    model = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, OUT))
    optimizer = sgd(model)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x.float())
        loss = F.mse_loss(out.float(), y.float())
        loss.backward()
        optimizer.step()
        return loss

    return Training(step, regression(), [model, optimizer])


@program("loops")
def frozen_while_the_head_warms_up() -> Training:
    model = mlp()
    optimizer = adamw(model)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        with torch.no_grad():
            features = model[1](model[0](x))
        loss = F.mse_loss(model[2](features), y)
        loss.backward()
        optimizer.step()
        return loss

    return Training(step, regression(), [model, optimizer])


@program("loops")
def truncated_backpropagation() -> Training:
    cell, head = nn.GRUCell(WIDTH, 5).double(), nn.Linear(5, OUT).double()
    model = nn.ModuleList([cell, head])
    optimizer = adam(model)
    state = torch.zeros(ROWS, 5, dtype=torch.float64)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        h = state.detach()
        loss = 0.0
        for _ in range(2):
            h = cell(x, h)
            loss = loss + F.mse_loss(head(h), y)
        loss.backward()
        optimizer.step()
        state.copy_(h.detach())
        return loss.detach()

    return Training(step, regression(), [model, optimizer, state])
