"""States that an optimizer makes in its first step from ops without arguments, and views of them.

As GaLore, PSGD and Shampoo do. Under `streamed` every update moves to where its gradient is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cotrain_compile
from cotrain_compile.passes import run_passes
from cotrain_compile.passes.find_accesses import find_race_in
from cotrain_compile.placement.check.check import check
from cotrain_compile.placement.policies import resident
from cotrain_compile.placement.schedule.schedule import schedule
from cotrain_compile.plan import UpdateMode
from tests.support.captured_steps import Training, captured_training, differences, place_step
from tests.support.steps import Case

ROWS = 32


class Projected(torch.optim.Optimizer):
    """Momentum in a projection of the gradient."""

    def __init__(self, params: Iterator[nn.Parameter]) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            if not state:
                state["basis"] = torch.eye(param.shape[0], 4)
                state["mean"] = torch.zeros_like(state["basis"].T @ param.grad)
            state["mean"].lerp_(state["basis"].T @ param.grad, 0.1)
            param.sub_(1e-3 * (state["basis"] @ state["mean"]))


class Weighed(Projected):
    """Each element of the gradient has a weight of its own, of which only the update has a view."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            if not state:
                state["weight"] = torch.linspace(0, 1, param.numel()).view_as(param.mT).mT
            param.sub_(1e-3 * state["weight"] * param.grad)


def trained(optimizer: type[Projected], compiled: bool) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(ROWS, ROWS, bias=False) for _ in range(3)))
    rule = optimizer(model.parameters())

    def step(batch: Tensor) -> Tensor:
        rule.zero_grad()
        loss: Tensor = model(batch).square().mean()
        loss.backward()
        rule.step()
        return loss

    run: Callable[[Tensor], Tensor] = step
    if compiled:
        options: dict[str, Any] = {"policy": "streamed", "quiet": True}
        run = torch.compile(step, backend="cotrain", options=options)
    for _ in range(2):
        run(torch.randn(8, ROWS))
    cotrain_compile.synchronize()
    return [param.detach() for param in model.parameters()]


@pytest.mark.parametrize("optimizer", [Projected, Weighed])
def test_updates_that_move_find_what_was_made_for_them(optimizer: type[Projected]) -> None:
    torch.testing.assert_close(trained(optimizer, True), trained(optimizer, False))


class SharedBasis(Projected):
    """Every update reads one basis, which each step makes anew of nothing."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        basis = torch.eye(ROWS, 4) * 0.5
        for param in self.param_groups[0]["params"]:
            param.sub_(1e-3 * (basis @ (basis.T @ param.grad)))


def test_an_update_makes_anew_what_follows_from_no_tensor_though_a_copy_is_on_the_host() -> None:
    """The basis leaves between two updates on the device; one on the host does not wait for it."""

    def make_model() -> nn.Module:
        return nn.Sequential(*(nn.Linear(ROWS, ROWS, bias=False) for _ in range(4)))

    def make_batch() -> tuple[Tensor, ...]:
        return (torch.randn(8, ROWS),)

    def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
        loss: Tensor = model(batch).square().mean()
        return loss

    case = Case(make_model, make_batch, loss_of)
    step = captured_training(Training(case, lambda model: [SharedBasis(model.parameters())]))
    problem, updates = step.problem(), step.dataflow.updates
    kept = resident(step.dataflow)
    placement = replace(
        kept,
        updates={
            **kept.updates,
            updates[1].param: UpdateMode.HOST,
            updates[2].param: UpdateMode.HOST,
        },
        offloaded=("mul_7",),
    )
    plan = schedule(problem, placement)
    check(problem, plan)
    names = [task.name for task in plan.tasks]
    assert "offload.mul_7" in names
    assert not any("offload.mul_7" in region.after for region in plan.host_regions)
    placed = run_passes(step.step, plan)
    assert find_race_in(placed) is None
    expected = step.train(lambda inputs: step.step.module(*inputs))
    assert not differences(step.train(place_step(step, plan)), expected)
