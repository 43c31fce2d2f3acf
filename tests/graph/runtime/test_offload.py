"""A step that rests on the host between two calls leaves the card, comes back, and stays exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cotrain_compile
from cotrain_compile.backends.lifecycle.compiled_step import CompiledStep
from cotrain_compile.dataflow import Role
from cotrain_compile.errors import CotrainError
from cotrain_compile.machine import Tier
from tests.graph.runtime.test_cuda_runtime import Placed, plan_of, streamed_plan
from tests.support.captured_steps import captured, differences, reference

Resting = list[tuple[Tier, list[Tensor]]]


def resting_between(placed: Placed, name: str) -> tuple[Callable[[list[Any]], Any], list[int]]:
    """The step, after each call of which all that it keeps goes to the host, half comes back."""
    kept = [i for i, one in enumerate(captured(name).step.inputs) if one.role is not Role.BATCH]
    moved = []

    def run(inputs: list[Any]) -> Any:
        results = placed.step(inputs)
        tensors = [inputs[i] for i in kept if isinstance(inputs[i], Tensor)]
        gone = placed.step.rest_on(Tier.HOST, tensors)
        assert all(placed.pool.holds(each) for each in tensors)
        assert not placed.step.rest_on(Tier.HOST, tensors)
        back = placed.step.rest_on(Tier.DEVICE, gone[::2])
        assert not any(placed.pool.holds(each) for each in back)
        moved.append(len(gone))
        return results

    return run, moved


@pytest.mark.parametrize("seed", range(2))
def test_a_step_that_rests_on_the_host_between_calls_is_exact(seed: int) -> None:
    name = "clipped"
    plan = plan_of(name, seed) if seed else streamed_plan(name)
    placed = Placed(name, plan, seed)
    run, moved = resting_between(placed, name)
    assert not differences(captured(name).train(run), reference(name))
    assert not placed.card.faults
    assert all(moved)
    assert placed.card.given_back == 2 * len(moved)


def trained() -> tuple[Callable[[Tensor], Tensor], nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    compiled = cotrain_compile.compile(step, quiet=True)
    compiled(torch.ones(3, 4))
    return compiled, model, optimizer


def test_what_a_step_keeps_is_what_goes_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    step, model, optimizer = trained()
    assert cotrain_compile.offload(step) == cotrain_compile.reload(step) == 0  # emulated
    before = step(torch.ones(3, 4))
    assert step(torch.ones(3, 4)) < before
    moves: Resting = []

    def note(_: CompiledStep, tier: Tier, tensors: list[Tensor]) -> list[Tensor]:
        moves.append((tier, tensors))
        return tensors

    monkeypatch.setattr(CompiledStep, "rest_on", note)
    states = [state["momentum_buffer"] for state in optimizer.state.values()]
    of_model = [*model.parameters(), *model.buffers()]
    assert cotrain_compile.offload(step, keep_parameters=True) == nbytes(states)
    assert cotrain_compile.offload(step) == nbytes([*of_model, *states])
    assert cotrain_compile.reload(step) == nbytes([*of_model, *states])
    assert cotrain_compile.reload(step) == 0
    tiers = [tier for tier, _ in moves]
    assert tiers == [Tier.HOST, Tier.HOST, Tier.DEVICE, Tier.DEVICE]
    assert identities(moves[0][1]) == identities(states)
    assert identities(moves[1][1]) == identities(moves[2][1]) == identities([*of_model, *states])
    assert not moves[3][1]


def nbytes(tensors: list[Tensor]) -> int:
    return sum(each.nbytes for each in tensors)


def identities(tensors: list[Tensor]) -> list[int]:
    return sorted(map(id, tensors))


def test_a_step_that_was_never_called_is_refused() -> None:
    with pytest.raises(CotrainError, match="has not been compiled yet"):
        cotrain_compile.offload(lambda: None)
