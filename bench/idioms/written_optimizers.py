"""Idioms of optimizers that people write: a class, a subclass, or lines of the step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bench.idioms.registry import Training, mlp, mse, optimizer_idiom, plain, program, regression


class Written(Optimizer):
    """An optimizer whose update of one parameter is a function of its group and state."""

    def __init__(
        self, params: Any, update: Callable[..., None], states: Iterable[str] = (), **defaults: Any
    ) -> None:
        super().__init__(params, {"lr": 0.02, **defaults})
        self.update, self.states = update, tuple(states)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                for name in self.states:
                    if name not in state:
                        state[name] = torch.zeros_like(p)
                self.update(p, p.grad, state, group)


def _written(update: Callable[..., None], *states: str, **defaults: Any) -> None:
    def make(model: nn.Module) -> Optimizer:
        return Written(model.parameters(), update, states, **defaults)

    make.__name__ = f"own {update.__name__.strip('_')}"
    optimizer_idiom(make)


def _lion(p: Tensor, g: Tensor, s: dict[str, Tensor], group: dict[str, Any]) -> None:
    p.mul_(1 - group["lr"] * 0.1)
    p.add_((s["m"] * 0.9 + g * 0.1).sign(), alpha=-group["lr"])
    s["m"].lerp_(g, 0.01)


def _sign_sgd(p: Tensor, g: Tensor, s: dict[str, Tensor], group: dict[str, Any]) -> None:
    p.sub_(group["lr"] * torch.sign(g))


def _heavy_ball(p: Tensor, g: Tensor, s: dict[str, Tensor], group: dict[str, Any]) -> None:
    s["m"].mul_(0.9).sub_(group["lr"] * g)
    p.add_(s["m"])


def _layerwise_scaled(p: Tensor, g: Tensor, s: dict[str, Tensor], group: dict[str, Any]) -> None:
    ratio = torch.where(g.norm() > 0, p.norm() / (g.norm() + 1e-9), 1.0)
    p.add_(g * ratio, alpha=-group["lr"])


def _lamb(p: Tensor, g: Tensor, s: dict[str, Tensor], group: dict[str, Any]) -> None:
    s["m"].lerp_(g, 0.1)
    s["v"].lerp_(g * g, 0.01)
    u = s["m"] / (s["v"].sqrt() + 1e-6) + 0.01 * p
    p.sub_(group["lr"] * u * (p.norm() / u.norm().clamp(min=1e-9)).clamp(max=10))


def _adam_by_hand(p: Tensor, g: Tensor, s: dict[str, Tensor], group: dict[str, Any]) -> None:
    s["n"].add_(1)
    s["m"].mul_(0.9).add_(g, alpha=0.1)
    s["v"].mul_(0.999).addcmul_(g, g, value=0.001)
    m = s["m"] / (1 - 0.9 ** s["n"])
    v = s["v"] / (1 - 0.999 ** s["n"])
    p.sub_(group["lr"] * m / (v.sqrt() + 1e-8))


def _cautious(p: Tensor, g: Tensor, s: dict[str, Tensor], group: dict[str, Any]) -> None:
    s["m"].lerp_(g, 0.1)
    mask = (s["m"] * g > 0).to(g.dtype)
    p.sub_(group["lr"] * s["m"] * mask / mask.mean().clamp(min=1e-3))


def _yogi(p: Tensor, g: Tensor, s: dict[str, Tensor], group: dict[str, Any]) -> None:
    s["m"].lerp_(g, 0.1)
    s["v"].sub_(0.01 * torch.sign(s["v"] - g * g) * g * g)
    p.sub_(group["lr"] * s["m"] / (s["v"].abs().sqrt() + 1e-3))


def _belief(p: Tensor, g: Tensor, s: dict[str, Tensor], group: dict[str, Any]) -> None:
    s["m"].lerp_(g, 0.1)
    s["v"].mul_(0.99).add_((g - s["m"]) ** 2, alpha=0.01).add_(1e-8)
    p.sub_(group["lr"] * s["m"] / (s["v"].sqrt() + 1e-4))


def _adan(p: Tensor, g: Tensor, s: dict[str, Tensor], group: dict[str, Any]) -> None:
    change = g - s["last"]
    s["m"].lerp_(g, 0.1)
    s["d"].lerp_(change, 0.1)
    s["v"].lerp_((g + 0.9 * change) ** 2, 0.01)
    p.sub_(group["lr"] * (s["m"] + 0.9 * s["d"]) / (s["v"].sqrt() + 1e-3))
    s["last"].copy_(g)


def _orthogonal_momentum(p: Tensor, g: Tensor, s: dict[str, Tensor], group: dict[str, Any]) -> None:
    s["m"].mul_(0.9).add_(g)
    if p.dim() < 2:
        p.sub_(group["lr"] * s["m"])
        return
    x = s["m"] / (s["m"].norm() + 1e-7)
    for _ in range(3):
        x = 1.5 * x - 0.5 * x @ x.T @ x
    p.sub_(group["lr"] * x)


def _sophia_like(p: Tensor, g: Tensor, s: dict[str, Tensor], group: dict[str, Any]) -> None:
    s["m"].lerp_(g, 0.1)
    s["h"].lerp_(g * g * 8, 0.05)
    p.sub_(group["lr"] * (s["m"] / s["h"].clamp(min=1e-3)).clamp(-1, 1))


def _stochastic_rounding(p: Tensor, g: Tensor, s: dict[str, Tensor], group: dict[str, Any]) -> None:
    moved = (p - group["lr"] * g) * 1024
    p.copy_(torch.floor(moved + torch.rand_like(moved)) / 1024)


def _langevin(p: Tensor, g: Tensor, s: dict[str, Tensor], group: dict[str, Any]) -> None:
    p.sub_(group["lr"] * g).add_(torch.randn_like(p), alpha=(2 * group["lr"]) ** 0.5 * 0.1)


def _schedule_free_like(p: Tensor, g: Tensor, s: dict[str, Tensor], group: dict[str, Any]) -> None:
    s["n"].add_(1)
    s["z"].sub_(group["lr"] * g)
    p.lerp_(s["z"], 1 / (s["n"].flatten()[0] + 1))


def _trust_region(p: Tensor, g: Tensor, s: dict[str, Tensor], group: dict[str, Any]) -> None:
    u = group["lr"] * g
    p.sub_(torch.where(u.norm() > 0.01, u * 0.01 / u.norm(), u))


def _diagonal_newton(p: Tensor, g: Tensor, s: dict[str, Tensor], group: dict[str, Any]) -> None:
    s["h"].mul_(0.5).addcmul_(g, g)
    p.addcdiv_(g, s["h"] + 0.1, value=-group["lr"])


def _exponentiated(p: Tensor, g: Tensor, s: dict[str, Tensor], group: dict[str, Any]) -> None:
    p.mul_(torch.exp(-group["lr"] * g * p.sign()))


def _kronecker(p: Tensor, g: Tensor, s: dict[str, Tensor], group: dict[str, Any]) -> None:
    if p.dim() < 2:
        p.sub_(group["lr"] * g)
        return
    left = g @ g.T + 0.1 * torch.eye(len(g), dtype=g.dtype)
    p.sub_(group["lr"] * torch.linalg.solve_ex(left, g)[0])


for _update, _states in (
    (_lion, "m"),
    (_sign_sgd, ""),
    (_heavy_ball, "m"),
    (_layerwise_scaled, ""),
    (_lamb, "m v"),
    (_adam_by_hand, "n m v"),
    (_cautious, "m"),
    (_yogi, "m v"),
    (_belief, "m v"),
    (_adan, "m d v last"),
    (_orthogonal_momentum, "m"),
    (_sophia_like, "m h"),
    (_stochastic_rounding, ""),
    (_langevin, ""),
    (_schedule_free_like, "n z"),
    (_trust_region, ""),
    (_diagonal_newton, "h"),
    (_exponentiated, ""),
    (_kronecker, ""),
):
    _written(_update, *_states.split())


class _Clamped(torch.optim.AdamW):
    """AdamW whose step ends with a clamp."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p.clamp_(-0.3, 0.3)
        return loss


@optimizer_idiom
def subclass_that_clamps(model: nn.Module) -> Optimizer:
    return _Clamped(model.parameters(), lr=0.02)


class _Noisy(torch.optim.SGD):
    """SGD that adds noise to gradients first."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.add_(torch.randn_like(p), alpha=0.1)
        return super().step(closure)


@optimizer_idiom
def subclass_with_noise(model: nn.Module) -> Optimizer:
    return _Noisy(model.parameters(), lr=0.05, momentum=0.9)


class _Centralised(torch.optim.Adam):
    """Adam on centralised gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.dim() > 1:
                    p.grad.sub_(p.grad.mean(1, keepdim=True))
        return super().step(closure)


@optimizer_idiom
def subclass_that_centralises(model: nn.Module) -> Optimizer:
    return _Centralised(model.parameters(), lr=0.02)


@program("optimizers")
def two_optimizers() -> Training:
    model = mlp()
    first = torch.optim.AdamW(model[0].parameters(), lr=0.02)
    second = torch.optim.SGD(model[2].parameters(), lr=0.05, momentum=0.9)

    def step(x: Tensor, y: Tensor) -> Tensor:
        first.zero_grad()
        second.zero_grad()
        loss = mse(model, x, y)
        loss.backward()
        first.step()
        second.step()
        return loss

    return Training(step, regression(), [model, first, second])


@program("optimizers")
def two_optimizers_in_a_list() -> Training:
    model = mlp()
    optimizers = [torch.optim.Adagrad(m.parameters(), lr=0.05) for m in (model[0], model[2])]

    def step(x: Tensor, y: Tensor) -> Tensor:
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        loss = mse(model, x, y)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        return loss

    return Training(step, regression(), [model, *optimizers])


@program("optimizers")
def an_optimizer_for_each_parameter() -> Training:
    model = mlp()
    optimizers = {p: torch.optim.SGD([p], lr=0.05) for p in model.parameters()}

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = mse(model, x, y)
        loss.backward()
        for optimizer in optimizers.values():
            optimizer.step()
            optimizer.zero_grad()
        return loss

    return Training(step, regression(), [model, *optimizers.values()])


@program("optimizers")
def plain_descent_without_an_optimizer() -> Training:
    model = mlp()

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = mse(model, x, y)
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
                p.grad = None
        return loss

    return Training(step, regression(), [model])


@program("optimizers")
def descent_by_functional_gradients() -> Training:
    model = mlp()

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = mse(model, x, y)
        params = list(model.parameters())
        with torch.no_grad():
            for p, g in zip(params, torch.autograd.grad(loss, params), strict=True):
                p.sub_(g, alpha=0.1)
        return loss.detach()

    return Training(step, regression(), [model])


@program("optimizers")
def momentum_in_tensors_of_the_user() -> Training:
    model = mlp()
    momenta = [torch.zeros_like(p) for p in model.parameters()]

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = mse(model, x, y)
        loss.backward()
        with torch.no_grad():
            for p, m in zip(model.parameters(), momenta, strict=True):
                m.mul_(0.9).add_(p.grad)
                p.add_(m, alpha=-0.05)
                p.grad = None
        return loss

    return Training(step, regression(), [model, *momenta])


@program("optimizers")
def optimizer_stepped_twice() -> Training:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = mse(model, x, y)
        loss.backward()
        optimizer.step()
        optimizer.step()
        return loss

    return Training(step, regression(), [model, optimizer])


@program("optimizers")
def gradients_of_two_losses_in_two_steps() -> Training:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def step(x: Tensor, y: Tensor) -> Tensor:
        for target in (y, -y):
            optimizer.zero_grad()
            loss = mse(model, x, target)
            loss.backward()
            optimizer.step()
        return loss

    return Training(step, regression(), [model, optimizer])


@program("optimizers")
def float32_masters_of_low_precision_weights() -> Training:
    model = mlp().bfloat16()
    masters = [p.detach().float().clone().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=0.02)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = mse(model, x.bfloat16(), y.bfloat16())
        loss.backward()
        for p, q in zip(model.parameters(), masters, strict=True):
            q.grad = p.grad.float()
            p.grad = None
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for p, q in zip(model.parameters(), masters, strict=True):
                p.copy_(q)
        return loss

    return Training(step, regression(), [model, optimizer, *masters])


@program("optimizers")
def decay_by_a_multi_tensor_op() -> Training:
    model = mlp()

    def decay(t: Any) -> None:
        with torch.no_grad():
            torch._foreach_mul_([p.data for p in t.parameters], 0.99)

    return plain(model, torch.optim.SGD(model.parameters(), lr=0.05), after_step=decay)
