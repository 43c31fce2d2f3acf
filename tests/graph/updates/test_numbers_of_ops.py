"""Optimizers that give a count of steps and a rate to ops of a library: compiled for no value."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters, disable_cache_limit

STEPS = 6
RATES = [1e-2 / (1 + step) for step in range(STEPS)]


def update(
    p: Tensor, g: Tensor, momentum: Tensor, step: int, lr: float = 1.0, *, beta: float = 0.0
) -> None:
    momentum.mul_(beta).add_(g, alpha=1 - beta)
    p.sub_(momentum, alpha=lr / (1 - beta**step))


@pytest.fixture(scope="module", autouse=True)
def library() -> Iterator[None]:
    """An op with numbers in its schema, as bitsandbytes has for its optimizers."""
    with torch.library._scoped_library("kernels_of_a_test", "DEF") as kernels:
        kernels.define(
            "update(Tensor(a!) p, Tensor(b!) g, Tensor(c!) momentum, int step, float lr=1.0, *, "
            "float beta=0.0) -> ()"
        )
        kernels.impl("update", update, "CompositeExplicitAutograd")
        torch.library.register_fake("kernels_of_a_test::update", lambda *_, **__: None, lib=kernels)
        yield


class ByKernel(torch.optim.Optimizer):
    """Its state is made in its first step, and counts in a whole number, as bitsandbytes' does."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        del closure
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["count"], state["momentum"] = 0, torch.zeros_like(p)
                state["count"] += 1
                torch.ops.kernels_of_a_test.update(
                    p, p.grad, state["momentum"], state["count"], group["lr"], beta=0.9
                )


def train(options: dict[str, Any] | None, rates: list[float]) -> tuple[list[Tensor], int]:
    """The parameters and states after the steps, and how many graphs these took."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    counters.clear()
    net = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8))
    net[0].bias.requires_grad_(False)
    optimizer = ByKernel([{"params": [p]} for p in net.parameters()], rates[0])

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = net(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    run = step if options is None else torch.compile(step, backend="cotrain", options=options)
    for rate in rates:
        for group in optimizer.param_groups:
            group["lr"] = rate
        run(torch.randn(4, 16))
    states = [state["momentum"] for state in optimizer.state.values()]
    assert {state["count"] for state in optimizer.state.values()} == {len(rates)}
    return [*net.parameters(), *states], int(counters["stats"]["unique_graphs"])


@pytest.mark.parametrize(
    "policy",
    [*(pytest.param(p, marks=pytest.mark.long) for p in ("resident", "streamed")), "zero-offload"],
)
def test_a_count_and_a_rate_in_an_op_of_a_library_are_compiled_for_no_value(policy: str) -> None:
    expected, _ = train(None, RATES)
    found, graphs = train({"policy": policy}, RATES)
    for value, other in zip(found, expected, strict=True):
        torch.testing.assert_close(value, other, rtol=1e-6, atol=1e-9)
    assert graphs <= 3  # states are made, a first count, and the count as an input


def test_a_rate_that_stays_is_a_constant_of_the_op() -> None:
    expected, _ = train(None, [0.01] * 4)
    found, graphs = train({"policy": "zero-offload"}, [0.01] * 4)
    assert all(map(torch.equal, found, expected))
    assert graphs <= 3


class WithoutLimit(torch.optim.SGD):
    """Steps as torchao's optimizers do, which compile the update of each shape."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        with disable_cache_limit():
            super().step(closure)


def test_a_step_within_disable_cache_limit_is_captured() -> None:
    trained = []
    for compiles in (False, True):
        torch._dynamo.reset()
        weight = nn.Parameter(torch.ones(8))
        optimizer = WithoutLimit([weight], lr=0.5)

        def step(weight: Tensor = weight, optimizer: WithoutLimit = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = weight.square().sum()
            loss.backward()
            optimizer.step()
            return loss.detach()

        run = torch.compile(step, backend="cotrain") if compiles else step
        run()
        trained.append(weight.detach().clone())
    assert torch.equal(*trained)
