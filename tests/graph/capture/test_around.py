"""Around the step: what a training loop does between steps leaves eager's numbers and few graphs.

Each loop runs twice, in eager and with our backend, and leaves the same tensors.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import cotrain_compile
from cotrain_compile.backends.lifecycle import per_shape
from cotrain_compile.backends.lifecycle.compiled_step import CompiledStep
from tests.support.loops import EACH_POLICY
from tests.support.steps import SEED, Step, all_tensors, cotrain, make_step

CompileWith = Callable[[Step], Step]
Loop = Callable[[CompileWith], Any]


class Net(nn.Module):
    """Float64, so that eager and captured differ by next to nothing; with BatchNorm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 24, bias=False)
        self.norm = nn.BatchNorm1d(24)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(24, 4)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(F.gelu(self.norm(self.first(x)))))  # type: ignore[no-any-return]


def batch(size: int = 8) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 12, dtype=torch.float64), torch.randint(0, 4, (size,))


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def sgd(params: Any) -> Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.01, foreach=False)


def start() -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(SEED)
    model = Net()
    return model, sgd(model.parameters())


def graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


def evaluating(compile_with: CompileWith) -> Any:
    """Evaluates the model in eager between steps, train() and eval() in turn."""
    model, optimizer = start()
    step = compile_with(make_step(model, [optimizer], loss_of))
    found = []
    for _ in range(4):
        model.train()
        found.append(step(*batch()))
        model.eval()
        with torch.no_grad():
            found.append(loss_of(model, *batch()))
    return found, all_tensors(model, [optimizer])


def averaging(compile_with: CompileWith) -> Any:
    """Keeps an exponential moving average, and logs the norm of the parameters."""
    model, optimizer = start()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    step = compile_with(make_step(model, [optimizer], loss_of))
    found = []
    for _ in range(4):
        found.append(step(*batch()))
        average.update_parameters(model)
        found.append(torch.stack([p.detach().norm() for p in model.parameters()]))
    return found, all_tensors(model, [optimizer]), average.state_dict()


def logging_norms(compile_with: CompileWith) -> Any:
    """Returns the norm of the gradients from the step."""
    model, optimizer = start()

    def plain(x: Tensor, y: Tensor) -> dict[str, Tensor]:
        loss = loss_of(model, x, y)
        loss.backward()
        norms = {n: p.grad.norm() for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
        return {"loss": loss, **norms}

    step = compile_with(plain)
    return [step(*batch()) for _ in range(4)], all_tensors(model, [optimizer])


def averaging_inside(compile_with: CompileWith) -> Any:
    """The moving average is part of the step."""
    model, optimizer = start()
    average = copy.deepcopy(model)

    def plain(x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(model, x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for kept, param in zip(average.parameters(), model.parameters(), strict=False):
                kept.lerp_(param, 0.1)
        return loss

    step = compile_with(plain)
    results = [step(*batch()) for _ in range(4)]
    return results, all_tensors(model, [optimizer]), average.state_dict()


def freezing_batchnorm(compile_with: CompileWith) -> Any:
    """A part of the model is switched to eval() after two steps, and back after four."""
    model, optimizer = start()
    step = compile_with(make_step(model, [optimizer], loss_of))
    found = []
    for number in range(6):
        model.norm.train(not 2 <= number < 4)  # type: ignore[union-attr]
        found.append(step(*batch()))
    return found, all_tensors(model, [optimizer])


def unfreezing(compile_with: CompileWith) -> Any:
    """The first layer is frozen at the start; later it gets a parameter group of its own."""
    torch.manual_seed(SEED)
    model = Net()
    model.first.requires_grad_(False)
    optimizer = sgd([p for p in model.parameters() if p.requires_grad])
    step = compile_with(make_step(model, [optimizer], loss_of))
    found = []
    for number in range(6):
        if number == 3:
            model.first.requires_grad_(True)
            optimizer.add_param_group({"params": [model.first.weight], "lr": 0.01})
        found.append(step(*batch()))
    return found, all_tensors(model, [optimizer])


def alternating(compile_with: CompileWith) -> Any:
    """Two objectives on one model and one optimizer, each with a step of its own."""
    model, optimizer = start()
    steps = [
        compile_with(make_step(model, [optimizer], objective))
        for objective in (loss_of, lambda m, x, y: m(x).square().mean())
    ]
    found = [steps[number % 2](*batch()) for number in range(6)]
    return found, all_tensors(model, [optimizer])


def two_players(compile_with: CompileWith) -> Any:
    """A GAN: two models, two optimizers, two compiled steps that read each other's parameters."""
    torch.manual_seed(SEED)
    maker, judge = (
        nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, width)).double() for width in (4, 1)
    )
    making, judging = sgd(maker.parameters()), sgd(judge.parameters())

    def judge_step(real: Tensor, noise: Tensor) -> Tensor:
        judging.zero_grad()
        loss = (F.softplus(-judge(real)) + F.softplus(judge(maker(noise).detach()))).mean()
        loss.backward()
        judging.step()
        return loss

    def maker_step(noise: Tensor) -> Tensor:
        making.zero_grad()
        loss = F.softplus(-judge(maker(noise))).mean()
        loss.backward()
        making.step()
        return loss

    steps = compile_with(judge_step), compile_with(maker_step)
    found = []
    for _ in range(4):
        real, noise = torch.randn(2, 8, 4, dtype=torch.float64)
        found += [steps[0](real, noise), steps[1](noise)]
    return found, all_tensors(nn.ModuleList([maker, judge]), [making, judging])


LOOPS: dict[str, tuple[Loop, int]] = {
    # what happens between steps, and how many graphs that takes
    "evaluating": (evaluating, 1),
    "averaging": (averaging, 1),
    "logging norms": (logging_norms, 1),
    "averaging inside": (averaging_inside, 1),
    "freezing batchnorm": (freezing_batchnorm, 2),
    "unfreezing": (unfreezing, 2),
    "alternating": (alternating, 2),
    "two players": (two_players, 2),
}


# What they do between steps the others do, too.
SIMPLER = ("averaging", "logging norms", "freezing batchnorm", "alternating")


@pytest.mark.parametrize("policy", EACH_POLICY)
@pytest.mark.parametrize(
    "loop", [pytest.param(x, marks=pytest.mark.long if x in SIMPLER else ()) for x in LOOPS]
)
def test_a_loop_gives_eagers_numbers(loop: str, policy: str) -> None:
    run, expected_graphs = LOOPS[loop]
    torch.testing.assert_close(run(cotrain(policy=policy)), run(lambda step: step))
    assert graphs() == expected_graphs


def test_another_compile_of_the_model_evaluates_between_steps() -> None:
    def run(compile_with: CompileWith, compile_model: Callable[[nn.Module], Any]) -> Any:
        model, optimizer = start()
        step, evaluate = compile_with(make_step(model, [optimizer], loss_of)), compile_model(model)
        found = []
        for _ in range(3):
            found.append(step(*batch()))
            model.eval()
            with torch.no_grad():
                found.append(evaluate(batch()[0]))
            model.train()
        return found, all_tensors(model, [optimizer])

    ours = run(cotrain(policy="zero-offload"), lambda m: torch.compile(m, backend="aot_eager"))
    torch.testing.assert_close(ours, run(lambda step: step, lambda model: model))
    assert graphs() == 2


def test_many_batch_sizes_and_lengths_share_two_graphs_and_few_plans(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first size has a graph of its own; the second makes sizes symbols for all others."""

    limit = 3
    monkeypatch.setattr(per_shape, "LIMIT", limit)

    def run(compile_with: CompileWith, inspect: Callable[[Step], None]) -> Any:
        torch.manual_seed(SEED)
        model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16)).double()
        optimizer = sgd(model.parameters())
        step = compile_with(
            make_step(model, [optimizer], lambda m, x, y: F.cross_entropy(m(x).mT, y))
        )
        found = []
        for number in range(limit + 4):
            tokens = torch.randint(0, 16, (2 + number % 5, 4 + number))
            found.append(step(tokens, tokens))
            inspect(step)
        return found, all_tensors(model, [optimizer])

    plans, alive = weakref.WeakSet[CompiledStep](), []

    def count(step: Step) -> None:
        plans.add(cotrain_compile.inspect(step))
        gc.collect()
        alive.append(len(plans))

    ours = run(cotrain(policy="zero-offload"), count)
    torch.testing.assert_close(ours, run(lambda step: step, lambda step: None))
    assert graphs() <= 3
    assert limit <= alive[-1] <= limit + 2
    gc.collect()
    assert not plans  # with the model and the step go their plans


def test_a_new_parameter_group_trains_from_the_next_step_on() -> None:
    model, optimizer = start()
    extra = nn.Parameter(torch.zeros(4, dtype=torch.float64))
    step = cotrain()(
        make_step(model, [optimizer], lambda m, x, y: F.cross_entropy(m(x) + extra, y))
    )
    step(*batch())
    assert torch.equal(extra, torch.zeros_like(extra))
    optimizer.add_param_group({"params": [extra]})
    step(*batch())
    assert not torch.equal(extra, torch.zeros_like(extra))
    assert set(optimizer.state[extra]) == {"momentum_buffer"}
