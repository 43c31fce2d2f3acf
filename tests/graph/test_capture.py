"""What a training step may look like: each way of writing one gives eager's numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.optim import Optimizer

import cotrain_compile
from tests.graph.steps import (
    CASES,
    OPTIMIZERS,
    SEED,
    Step,
    all_tensors,
    check_peak,
    cotrain,
    make_mlp,
    make_step,
    train,
    vectors,
)

MakeStep = Callable[[nn.Module, Optimizer], Step]

POLICIES = ("resident", "zero-offload")
EACH_OPTIMIZER = [("resident", "adamw"), *(("zero-offload", name) for name in OPTIMIZERS)]


def sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=False)


def adamw(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def run(
    make: MakeStep,
    compile_with: Callable[[Step], Step] = lambda step: step,
    make_optimizer: Callable[[nn.Module], Optimizer] = sgd,
    steps: int = 3,
) -> tuple[list[Any], dict[str, Tensor]]:
    """What the step returned each time, and every tensor afterwards, gradients too."""
    torch.manual_seed(SEED)
    model = make_mlp()
    optimizer = make_optimizer(model)
    batches = [vectors() for _ in range(steps)]
    step = compile_with(make(model, optimizer))
    results = [step(*batch) for batch in batches]
    tensors = all_tensors(model, [optimizer])
    grads = {f"{n}.grad": p.grad for n, p in model.named_parameters() if p.grad is not None}
    return results, {**tensors, **grads}


def assert_as_eager(make: MakeStep, **options: Any) -> dict[str, Tensor]:
    """Both policies return and leave what eager does. Returns the tensors they leave."""
    results, tensors = run(make)
    for policy in POLICIES:
        torch._dynamo.reset()
        ours, our_tensors = run(make, cotrain(policy=policy, **options))
        torch.testing.assert_close(ours, results)
        torch.testing.assert_close(our_tensors, tensors)
    return tensors


def graphs() -> int:
    """How many graphs Dynamo has compiled in this test."""
    return int(counters["stats"]["unique_graphs"])


@pytest.mark.parametrize(
    "result_of",
    [
        lambda loss: loss,
        lambda loss: loss.item(),
        lambda loss: loss.detach(),
        lambda loss: {"loss": loss, "double": loss * 2, "count": 3},
        lambda loss: (loss, loss.item(), 3),
    ],
    ids=["tensor", "item", "detached", "dict", "tuple"],
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


def make_clearing_first(model: nn.Module, optimizer: Optimizer) -> Step:
    return make_step(model, [optimizer], loss_of)


def make_clearing_last(model: nn.Module, optimizer: Optimizer) -> Step:
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(model, x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def make_never_clearing(model: nn.Module, optimizer: Optimizer) -> Step:
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(model, x, y)
        loss.backward()
        optimizer.step()
        return loss

    return step


def make_clearing_the_module_first(model: nn.Module, optimizer: Optimizer) -> Step:
    def step(x: Tensor, y: Tensor) -> Tensor:
        model.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()
        optimizer.step()
        return loss

    return step


@pytest.mark.parametrize("make", [make_clearing_first, make_clearing_the_module_first])
def test_gradients_are_gone_after_a_step_that_clears_them_first(make: MakeStep) -> None:
    _, eager = run(make)
    for policy in POLICIES:
        torch._dynamo.reset()
        counters.clear()
        _, ours = run(make, cotrain(policy=policy))
        assert graphs() == 1
        assert not any(name.endswith(".grad") for name in ours)
        torch.testing.assert_close(ours, {n: eager[n] for n in ours})


def test_an_optimizers_own_zero_grad_is_called() -> None:
    class Halving(torch.optim.SGD):
        def zero_grad(self, set_to_none: bool = True) -> None:
            for group in self.param_groups:
                for param in group["params"]:
                    if param.grad is not None:
                        param.grad.mul_(0.5)

    def make(model: nn.Module, _: Optimizer) -> Step:
        return make_step(model, [Halving(model.parameters(), lr=0.1)], loss_of)

    assert_as_eager(make, keep_grads=True)


def test_keep_grads_leaves_the_gradients_of_eager() -> None:
    tensors = assert_as_eager(make_clearing_first, keep_grads=True)
    assert any(name.endswith(".grad") for name in tensors)


def test_two_optimizers_take_turns_in_one_step() -> None:
    """The second half reads what the first has just updated, as with a GAN."""

    def train(compile_with: Callable[[Step], Step]) -> tuple[list[Any], dict[str, Tensor]]:
        torch.manual_seed(0)
        maker, judge = (
            nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, width)) for width in (4, 1)
        )
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
    for policy in (*POLICIES, "coarse", "fraction:0.5"):
        torch._dynamo.reset()
        torch.testing.assert_close(train(cotrain(policy=policy)), expected)


def test_kept_gradients_share_no_memory() -> None:
    """Both parameters get the same gradient; in eager each has its own tensor."""
    first, second = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(8))
    optimizer = torch.optim.SGD([first, second], lr=0.1)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = ((first + second) * x).sum()
        loss.backward()
        optimizer.step()
        return loss

    for policy in POLICIES:
        torch._dynamo.reset()
        cotrain(policy=policy, keep_grads=True)(step)(torch.ones(8))
        assert first.grad is not None
        assert second.grad is not None
        first.grad.zero_()
        torch.testing.assert_close(second.grad, torch.ones(8))


def test_clearing_last_leaves_no_gradients() -> None:
    tensors = assert_as_eager(make_clearing_last)
    assert not any(name.endswith(".grad") for name in tensors)


def test_gradients_that_are_never_cleared_add_up() -> None:
    tensors = assert_as_eager(make_never_clearing)
    assert any(name.endswith(".grad") for name in tensors)


def test_gradients_changed_in_place_and_never_cleared_add_up() -> None:
    def make(model: nn.Module, optimizer: Optimizer) -> Step:
        def step(x: Tensor, y: Tensor) -> Tensor:
            loss = loss_of(model, x, y)
            loss.backward()
            for param in model.parameters():
                if param.grad is not None:
                    param.grad.mul_(0.5)
            optimizer.step()
            return loss

        return step

    tensors = assert_as_eager(make)
    assert any(name.endswith(".grad") for name in tensors)


def test_zeroed_gradients_stay_tensors() -> None:
    def make(model: nn.Module, optimizer: Optimizer) -> Step:
        def step(x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad(set_to_none=False)
            loss = loss_of(model, x, y)
            loss.backward()
            optimizer.step()
            return loss

        return step

    assert_as_eager(make)


@pytest.mark.parametrize("clip", [nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_])
def test_gradients_are_clipped(clip: Callable[[Any, float], Any]) -> None:
    def make(model: nn.Module, optimizer: Optimizer) -> Step:
        def step(x: Tensor, y: Tensor) -> tuple[Tensor, Any]:
            loss = loss_of(model, x, y)
            loss.backward()
            norm = clip(model.parameters(), 0.01)
            optimizer.step()
            optimizer.zero_grad()
            return loss, norm

        return step

    assert_as_eager(make)


def test_micro_batches_add_their_gradients_in_one_step() -> None:
    def make(model: nn.Module, optimizer: Optimizer) -> Step:
        def step(x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            total = torch.zeros(())
            for half_x, half_y in zip(x.chunk(2), y.chunk(2), strict=True):
                loss = loss_of(model, half_x, half_y) / 2
                loss.backward()
                total += loss.detach()
            optimizer.step()
            return total

        return step

    assert_as_eager(make, keep_grads=True)


def test_autocast_to_bfloat16() -> None:
    def make(model: nn.Module, optimizer: Optimizer) -> Step:
        # In bfloat16 eager's dropout rounds 1 / (1 - p), the captured one does not.
        model[3].p = 0.0  # type: ignore[index]

        def step(x: Tensor, y: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = loss_of(model, x, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return step

    assert_as_eager(make)


def test_dropout_drops_the_same_elements_as_in_eager() -> None:
    def make(model: nn.Module, optimizer: Optimizer) -> Step:
        model[3].p = 0.5  # type: ignore[index]
        return make_clearing_last(model, optimizer)

    assert_as_eager(make)


@pytest.mark.parametrize(("policy", "optimizer"), EACH_OPTIMIZER)
def test_a_run_of_one_shape_compiles_once(policy: str, optimizer: str) -> None:
    train(CASES["mlp"], OPTIMIZERS[optimizer], cotrain(policy=policy), check_peak, steps=3)
    assert graphs() == 1


@pytest.mark.parametrize(("policy", "optimizer"), EACH_OPTIMIZER)
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


@pytest.mark.parametrize("policy", POLICIES)
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


@pytest.mark.parametrize("policy", POLICIES)
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


@pytest.mark.parametrize("policy", POLICIES)
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


@pytest.mark.parametrize("policy", POLICIES)
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
