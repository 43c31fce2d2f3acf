"""Optimizers that are not torch's: plain subclasses go through capture, or fail with a reason."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.optim import Optimizer

import cotrain_compile
from cotrain_compile.errors import CaptureError
from cotrain_compile.machine import Tier
from cotrain_compile.plan import UpdateMode
from tests.support.captured_steps import make_two_layers
from tests.support.loops import EACH_POLICY
from tests.support.steps import SEED, Step, all_tensors, cotrain, cross_entropy, make_step, vectors

STEPS = 8


class SignDescent(Optimizer):
    """Steps by the sign of a momentum, as Lion does; its state is made in the first step."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            first, second = group["betas"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["average"] = torch.zeros_like(param)
                average = state["average"]
                update = average.mul(first).add(param.grad, alpha=1 - first).sign_()
                param.add_(update, alpha=-group["lr"])
                average.mul_(second).add_(param.grad, alpha=1 - second)


class WarmedMomentum(Optimizer):
    """Momentum that grows with the number of steps, which it keeps as a Python float."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["steps"] = 0.0
                    state["velocity"] = torch.zeros_like(param)
                state["steps"] += 1.0
                momentum = 0.9 * state["steps"] / (state["steps"] + 3.0)
                state["velocity"].mul_(momentum).add_(param.grad)
                param.add_(state["velocity"], alpha=-group["lr"])


class ScheduleFree(Optimizer):
    """Keeps what changes in every step among its settings, as optimizers without schedules do.

    The rate is 0 in the first two steps, whose mean has then no weights.
    """

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr, "k": 0, "weights": 0.0, "largest": -1.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            rate = group["lr"] * (1 - 0.9 ** (group["k"] - 1)) if group["k"] > 1 else 0.0
            group["largest"] = max(rate, group["largest"])
            weight = (group["k"] + 1) / 2 * group["largest"] ** 2.0
            group["weights"] = group["weights"] + weight
            try:
                share = weight / group["weights"]
            except ZeroDivisionError:
                share = 0
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    if "z" not in state:
                        state["z"] = torch.clone(param)
                    param.lerp_(state["z"], weight=share)
                    param.add_(param.grad, alpha=rate * (0.9 * (1 - share) - 1))
                    state["z"].sub_(param.grad, alpha=rate)
            group["k"] += 1


class Lookahead(Optimizer):
    """Around another optimizer, with its groups; never calls `super().__init__()`."""

    def __init__(self, params: Any) -> None:
        self.optimizer = torch.optim.SGD(params, lr=0.05, momentum=0.9, foreach=True)
        self.param_groups = self.optimizer.param_groups
        self.state = defaultdict(dict)
        for group in self.param_groups:
            group["counter"] = 0

    def zero_grad(self) -> None:  # type: ignore[override]
        self.optimizer.zero_grad()

    def state_dict(self) -> Any:
        slow = [self.state[param]["slow"] for param in self.param_groups[0]["params"]]
        return {**self.optimizer.state_dict(), "slow": slow}

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.optimizer.step(closure)
        for group in self.param_groups:
            if group["counter"] == 0:
                for param in group["params"]:
                    self.pull(param)
            group["counter"] = (group["counter"] + 1) % 3

    def pull(self, param: Any) -> None:
        if "slow" not in self.state[param]:
            self.state[param]["slow"] = param.data.clone()
        slow = self.state[param]["slow"]
        slow += (param.data - slow) * 0.5
        param.data.copy_(slow)


class CountingSteps(Optimizer):
    """Keeps the number of steps as a Python int, as many do."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    state["step"] = state.get("step", 0) + 1
                    param.add_(param.grad / (1 + state["step"]), alpha=-group["lr"])


class ThroughData(Optimizer):
    """Reads and writes parameters by one view of them, from which it makes its state, too.

    As RAdam does in torch_optimizer: in the first step, what the update reads of the parameter is
    made outside of it, and so is the state that it goes by. Later ones assign the state to itself.
    """

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                weights, state = param.data.to(param.dtype), self.state[param]
                if not state:
                    state["average"] = torch.zeros_like(weights)
                else:
                    state["average"] = state["average"].type_as(weights)
                state["average"].mul_(0.9).add_(param.grad.data)
                weights.add_(state["average"], alpha=-group["lr"])
                param.data.copy_(weights)


def lion(params: Any) -> Optimizer:
    package = pytest.importorskip("lion_pytorch")
    made: Optimizer = package.Lion(params, lr=1e-3, weight_decay=0.01)
    return made


def train(
    make_optimizer: Callable[[Any], Optimizer], compile_with: Callable[[Step], Step]
) -> tuple[list[Any], Any]:
    torch.manual_seed(SEED)
    model = make_two_layers().double()
    optimizer = make_optimizer(model.parameters())
    step = compile_with(make_step(model, [optimizer], cross_entropy))
    losses = []
    for _ in range(STEPS):
        x, y = vectors()
        losses.append(step(x.double(), y))
    return losses, all_tensors(model, [optimizer])


@pytest.mark.parametrize("policy", EACH_POLICY)
@pytest.mark.parametrize(
    ("make_optimizer", "graphs"),
    # State that the first step makes is there in the second one, which is then another graph. A
    # Python number that is written back becomes an input with the third. The rate that is first 0
    # is one more.
    [
        pytest.param(SignDescent, 2, marks=pytest.mark.long),
        pytest.param(CountingSteps, 3, marks=pytest.mark.long),
        pytest.param(WarmedMomentum, 3, marks=pytest.mark.long),
        (ScheduleFree, 4),
        pytest.param(Lookahead, 3, marks=pytest.mark.long),
        pytest.param(ThroughData, 2, marks=pytest.mark.long),
        pytest.param(lion, 2, marks=pytest.mark.long),
    ],
)
def test_a_plain_subclass_is_captured(
    make_optimizer: Callable[[Any], Optimizer], graphs: int, policy: str
) -> None:
    ours = train(make_optimizer, cotrain(policy=policy))
    torch.testing.assert_close(ours, train(make_optimizer, lambda step: step))
    assert counters["stats"]["unique_graphs"] == graphs


@pytest.mark.parametrize("share", [0.6, pytest.param(0.8, marks=pytest.mark.long)])
def test_state_that_the_first_update_makes_is_placed_within_a_budget(share: float) -> None:
    """What is made of a parameter outside of its update was once copied from the wrong tier."""
    resident: list[Any] = []

    def keep(step: Step) -> Step:
        placed: Step = cotrain(policy="resident")(step)
        resident.append(placed)
        return placed

    expected = train(ThroughData, keep)
    peak_bytes = cotrain_compile.inspect(resident[0]).predicted.peak_bytes[Tier.DEVICE]
    torch._dynamo.reset()
    budget = int(share * peak_bytes)
    for policy in ("auto", "ilp"):
        torch.testing.assert_close(
            train(ThroughData, cotrain(policy=policy, memory_budget=budget)), expected
        )
        torch._dynamo.reset()


def test_a_state_that_is_assigned_to_itself_is_updated_on_the_host() -> None:
    inspected: list[Step] = []

    def compile_with(step: Step) -> Step:
        inspected.append(cotrain(policy="zero-offload")(step))
        return inspected[0]

    train(ThroughData, compile_with)
    placement = cotrain_compile.inspect(inspected[0]).plan.placement
    names = ("0.weight", "0.bias", "2.weight")
    assert placement.updates == dict.fromkeys(names, UpdateMode.HOST_STREAMED)


SCRIPT = """
def step(x):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()
"""


def test_a_count_of_steps_is_an_input_where_the_optimizer_is_a_global() -> None:
    """As in a script: Dynamo takes whole numbers that it finds by way of globals for constants."""
    model = nn.Linear(4, 2)
    names: dict[str, Any] = {"model": model, "optimizer": CountingSteps(model.parameters())}
    exec(SCRIPT, names)
    step = cotrain()(names["step"])
    for _ in range(6):
        step(torch.ones(3, 4))
    assert counters["stats"]["unique_graphs"] == 3


def test_a_count_of_steps_needs_no_new_plan() -> None:
    plans = []
    inspected: list[Step] = []

    def compile_with(step: Step) -> Step:
        inspected.append(cotrain()(step))

        def run(*batch: Any) -> Any:
            result = inspected[0](*batch)
            plans.append(cotrain_compile.inspect(inspected[0]))
            return result

        return run

    train(CountingSteps, compile_with)
    assert len(set(map(id, plans))) == 3


class AskingTheDevice(SignDescent):
    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        super().step()
        if self.param_groups[0]["params"][0].norm() > 1:
            self.param_groups[0]["lr"] *= 0.5


def test_one_that_decides_by_data_is_refused_with_a_reason() -> None:
    model: nn.Module = make_two_layers()
    step = make_step(model, [AskingTheDevice(model.parameters())], cross_entropy)
    with pytest.raises(CaptureError, match=r"norm\(\) > 1.*torch.where"):
        cotrain()(step)(*vectors())


def test_states_that_start_from_new_parameters_share_no_memory_with_them() -> None:
    model = make_two_layers()
    optimizer = Lookahead(model.parameters())
    cotrain()(make_step(model, [optimizer], cross_entropy))(*vectors())
    for param in model.parameters():
        assert optimizer.state[param]["slow"].data_ptr() != param.data_ptr()
        assert torch.equal(optimizer.state[param]["slow"], param)


def test_a_wrapper_leaves_the_flags_of_the_groups_it_shares() -> None:
    model = make_two_layers()
    optimizer = Lookahead(model.parameters())
    cotrain()(make_step(model, [optimizer], cross_entropy))(*vectors())
    assert optimizer.param_groups[0]["foreach"] is True
