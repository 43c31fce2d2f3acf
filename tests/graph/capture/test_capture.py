"""What a training step may look like: each way of writing one gives eager's numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

import cotrain_compile
from tests.support.loops import (
    EACH_POLICY,
    MakeStep,
    adamw,
    assert_as_eager,
    graphs,
    loss_of,
    make_clearing_last,
    run,
    sgd,
)
from tests.support.steps import (
    OPTIMIZERS,
    SEED,
    Step,
    all_tensors,
    check_peak,
    cotrain,
    make_mlp,
    make_step,
    vectors,
)

EACH_OPTIMIZER = [("resident", "adamw"), *(("zero-offload", name) for name in OPTIMIZERS)]


@pytest.mark.parametrize(
    "result_of",
    [
        lambda loss: loss,
        lambda loss: loss.item(),
        lambda loss: {"loss": loss.detach(), "double": loss * 2, "all": (loss, loss.item(), 3)},
    ],
    ids=["tensor", "item", "dict"],
)
def test_a_step_returns_what_it_does_in_eager(result_of: Callable[[Tensor], Any]) -> None:
    def make(model: nn.Module, optimizer: Optimizer) -> Step:
        def step(x: Tensor, y: Tensor) -> Any:
            loss = loss_of(model, x, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return result_of(loss)

        return step

    assert_as_eager(make)


@pytest.mark.parametrize("policy", ["zero-offload", pytest.param("coarse", marks=pytest.mark.long)])
def test_two_optimizers_take_turns_in_one_step(policy: str) -> None:
    """The second half reads what the first has just updated, as with a GAN."""

    def train(compile_with: Callable[[Step], Step]) -> tuple[list[Any], dict[str, Tensor]]:
        torch.manual_seed(0)
        maker, judge = (nn.Sequential(nn.Linear(4, width), nn.Tanh()) for width in (4, 1))
        optimizers = [torch.optim.Adam(m.parameters(), foreach=False) for m in (maker, judge)]

        def plain(real: Tensor, noise: Tensor) -> Tensor:
            optimizers[1].zero_grad()
            judged = F.softplus(-judge(real)) + F.softplus(judge(maker(noise).detach()))
            judged.mean().backward()
            optimizers[1].step()
            optimizers[0].zero_grad()
            made = F.softplus(-judge(maker(noise))).mean()
            made.backward()
            optimizers[0].step()
            return made.detach()

        step = compile_with(plain)
        results = []
        for _ in range(4):
            results.append(step(torch.randn(8, 4), torch.randn(8, 4)))
            if step is not plain:
                check_peak(step)
        return results, all_tensors(nn.ModuleList([maker, judge]), optimizers)

    expected = train(lambda step: step)
    torch.testing.assert_close(train(cotrain(policy=policy)), expected)


def test_autocast_to_bfloat16() -> None:
    def in_bfloat16(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return loss_of(model, x, y)

    def make(model: nn.Module, optimizer: Optimizer) -> Step:
        # In bfloat16 eager's dropout rounds 1 / (1 - p), the captured one does not.
        model[3].p = 0.0  # type: ignore[index]
        return make_clearing_last(model, optimizer, in_bfloat16)

    assert_as_eager(make)


def test_dropout_drops_the_same_elements_as_in_eager() -> None:
    def make(model: nn.Module, optimizer: Optimizer) -> Step:
        model[3].p = 0.5  # type: ignore[index]
        return make_clearing_last(model, optimizer)

    assert_as_eager(make)


@pytest.mark.parametrize(
    ("policy", "optimizer"),
    [
        pytest.param(*each, marks=() if each[1] == "muon" else pytest.mark.long)
        for each in EACH_OPTIMIZER
    ],
)
def test_learning_rate_schedules_compile_at_most_once_more(policy: str, optimizer: str) -> None:
    def train_with_schedule(compile_with: Callable[[Step], Step]) -> dict[str, Tensor]:
        torch.manual_seed(SEED)
        model = make_mlp()
        optimizers = OPTIMIZERS[optimizer](model)
        schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in optimizers]
        step = compile_with(make_step(model, optimizers, loss_of))
        for _ in range(5):
            step(*vectors())
            for schedule in schedules:
                schedule.step()
        return all_tensors(model, optimizers)

    eager = train_with_schedule(lambda step: step)
    ours = train_with_schedule(cotrain(policy=policy))
    torch.testing.assert_close(ours, eager)
    assert graphs() <= 2


class WithUnusedLayer(nn.Module):
    """A layer in use, and one that no step ever reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(12, 4)
        self.unused = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("policy", EACH_POLICY)
def test_state_dicts_between_steps_are_those_of_eager(policy: str) -> None:
    def dicts(compile_with: Callable[[Step], Step]) -> tuple[Any, Any]:
        torch.manual_seed(SEED)
        model = WithUnusedLayer()
        optimizer = adamw(model)
        step = compile_with(make_clearing_last(model, optimizer))
        for _ in range(3):
            step(*vectors())
        return model.state_dict(), optimizer.state_dict()

    eager_model, eager_optimizer = dicts(lambda step: step)
    model, optimizer = dicts(cotrain(policy=policy))
    torch.testing.assert_close(model, eager_model)
    assert optimizer["param_groups"] == eager_optimizer["param_groups"]
    assert list(optimizer["state"]) == list(eager_optimizer["state"]) == [0, 1]
    torch.testing.assert_close(optimizer["state"], eager_optimizer["state"])


@pytest.mark.parametrize("policy", EACH_POLICY)
def test_a_run_can_go_on_in_eager_and_come_back(policy: str) -> None:
    def make_switching(model: nn.Module, optimizer: Optimizer) -> Step:
        plain = make_clearing_last(model, optimizer)
        compiled = cotrain(policy=policy)(plain)
        turns = iter([compiled, plain, plain, compiled, plain, compiled])
        return lambda *batch: next(turns)(*batch)

    eager, eager_tensors = run(make_clearing_last, make_optimizer=adamw, steps=6)
    ours, our_tensors = run(make_switching, make_optimizer=adamw, steps=6)
    torch.testing.assert_close(ours, eager)
    torch.testing.assert_close(our_tensors, eager_tensors)
    assert graphs() == 1


def test_steps_of_one_factory_are_compiled_and_inspected_apart() -> None:
    models = [nn.Linear(12, 4), nn.Linear(12, 4, bias=False)]
    steps = [cotrain()(make_clearing_last(model, sgd(model))) for model in models]
    for _ in range(2):
        for step in steps:
            step(*vectors())
    first, second = (cotrain_compile.inspect(step) for step in steps)
    assert set(first.plan.placement.updates) == {"weight", "bias"}
    assert set(second.plan.placement.updates) == {"weight"}
    assert (first.steps, second.steps) == (2, 2)
    assert graphs() == 2


@pytest.mark.parametrize("policy", EACH_POLICY)
def test_batches_of_other_sizes_give_eagers_numbers(policy: str) -> None:
    def make_shrinking(
        compile_with: Callable[[Step], Step], after_step: Callable[[Step], None]
    ) -> MakeStep:
        def make(model: nn.Module, optimizer: Optimizer) -> Step:
            step = compile_with(make_clearing_last(model, optimizer))
            sizes = iter([8, 5, 3, 8])

            def shrinking(x: Tensor, y: Tensor) -> Any:
                size = next(sizes)
                result = step(x[:size], y[:size])
                after_step(step)
                return result

            return shrinking

        return make

    eager, eager_tensors = run(make_shrinking(lambda step: step, lambda step: None), steps=4)
    ours, our_tensors = run(make_shrinking(cotrain(policy=policy), check_peak), steps=4)
    torch.testing.assert_close(ours, eager)
    torch.testing.assert_close(our_tensors, eager_tensors)


class NamedLikeOps(nn.Module):
    """A model whose parameters and batch have the names that torch gives to ops of its graph."""

    def __init__(self) -> None:
        super().__init__()
        self.mm = nn.Parameter(torch.randn(12, 4))
        self.sum_1 = nn.Parameter(torch.zeros(4))

    def forward(self, t: Tensor) -> Tensor:
        return t @ self.mm + self.sum_1


@pytest.mark.parametrize("policy", EACH_POLICY)
def test_parameters_may_be_called_like_ops(policy: str) -> None:
    def train_once(compile_with: Callable[[Step], Step]) -> dict[str, Tensor]:
        torch.manual_seed(SEED)
        model = NamedLikeOps()
        optimizer = adamw(model)

        def step(t: Tensor, mean: Tensor) -> Tensor:
            loss = loss_of(model, t, mean)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        compiled = compile_with(step)
        for _ in range(2):
            compiled(*vectors())
        return all_tensors(model, [optimizer])

    torch.testing.assert_close(train_once(cotrain(policy=policy)), train_once(lambda s: s))
