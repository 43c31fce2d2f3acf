"""Idioms of loops: accumulation, schedules, second orders, several models, what a step returns."""

from __future__ import annotations

import copy
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
