"""Where Dynamo's graph would compute otherwise than eager, the captured step does not."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import cycle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from cotrain_compile.errors import CaptureError
from tests.support.loops import MakeStep, adamw, assert_as_eager, loss_of, run
from tests.support.steps import SEED, Step, cotrain


def test_a_gradient_that_is_returned_or_kept_in_a_list_is_given() -> None:
    kept: list[Any] = []

    def make(model: nn.Module, optimizer: Optimizer) -> Step:
        weight, bias, *_ = model.parameters()

        def step(x: Tensor, y: Tensor) -> Any:
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            optimizer.step()
            kept.clear()
            kept.append(bias.grad)
            return weight.grad

        return step

    results, _ = run(make)
    in_eager = list(kept)
    torch._dynamo.reset()
    ours, left = run(make, cotrain(policy="zero-offload"))
    torch.testing.assert_close((ours, kept), (results, in_eager))
    # All others are dropped, as ever.
    assert [name for name in left if name.endswith(".grad")] == ["0.weight.grad", "0.bias.grad"]


def test_one_tensor_as_the_gradient_of_two_parameters_is_scaled_twice() -> None:
    def make(model: nn.Module, optimizer: Optimizer) -> Step:
        both: Any = [model.get_submodule("1").weight, model.get_submodule("1").bias]

        def step(x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, x, y)
            loss.backward()
            both[0].grad = both[1].grad
            nn.utils.clip_grad_norm_(both, 1e-3, foreach=True)
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return step

    assert_as_eager(make)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        square = x.square()
        ctx.save_for_backward(x)
        return square * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return 3 * x.square() * grad


def cube_penalty(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """What asks for the second derivative of a function of the user's."""
    x = x.clone().requires_grad_()
    cubes: Tensor = Cube.apply(model(x))  # type: ignore[no-untyped-call]
    (slope,) = torch.autograd.grad(cubes.sum(), x, create_graph=True)
    return slope.square().mean() + loss_of(model, x, y)


def penalty_by_hand(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """What differentiates `.grad` itself."""
    loss_of(model, x, y).backward(create_graph=True)
    slopes: Any = [param.grad for param in model.parameters()]
    pairs = zip(slopes, model.parameters(), strict=True)
    penalty = torch.stack([(slope + param).square().sum() for slope, param in pairs]).sum()
    model.zero_grad()
    return penalty


OF_ITS_OWN_INPUT = pytest.param(
    cube_penalty,
    marks=pytest.mark.skipif(
        torch.__version__ < "2.13", reason="x.requires_grad_() is not traced before 2.13"
    ),
)


# Dynamo itself makes an object of the class, which torch warns of.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
# As eager's own words on create_graph go.
@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True:UserWarning")
@pytest.mark.parametrize("loss", [OF_ITS_OWN_INPUT, penalty_by_hand])
def test_second_derivatives_go_through_a_users_function_and_through_grad(loss: Any) -> None:
    def make(model: nn.Module, optimizer: Optimizer) -> Step:
        def step(x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            value: Tensor = loss(model, x, y)
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            return value

        return step

    assert_as_eager(make)


class EveryOther(SGD):
    """Counts its steps, as a lookahead does."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.05, foreach=False)
        self.count = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.count += 1
        if self.count % 2 == 0:
            for param in self.param_groups[0]["params"]:
                param.mul_(0.5)


def test_what_an_optimizer_counts_in_its_step_is_counted() -> None:
    made: list[EveryOther] = []

    def make_optimizer(model: nn.Module) -> Optimizer:
        made.append(EveryOther(list(model.parameters())))
        return made[-1]

    def make(model: nn.Module, optimizer: Optimizer) -> Step:
        def step(x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, x, y)
            loss.backward()
            with torch.no_grad():
                optimizer.step()
            optimizer.zero_grad()
            return loss

        return step

    expected = run(make, make_optimizer=make_optimizer, steps=5)
    torch._dynamo.reset()
    found = run(make, cotrain(policy="zero-offload"), make_optimizer, steps=5)
    torch.testing.assert_close(found, expected)
    assert [optimizer.count for optimizer in made] == [5, 5]


# Of torch's own, on the way to the decompositions of forward mode.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_zeros_without_memory_in_forward_mode_are_zeros() -> None:
    def make(model: nn.Module, optimizer: Optimizer) -> Step:
        def step(x: Tensor, y: Tensor) -> Tensor:
            weights = {name: p.detach() for name, p in model.named_parameters()}

            def loss(values: Any) -> Tensor:
                return F.cross_entropy(torch.func.functional_call(model, values, (x,)), y)

            differentiate: Any = torch.func.jvp
            slopes, curves = differentiate(torch.func.grad(loss), (weights,), (weights,))
            for name, param in model.named_parameters():
                param.grad = slopes[name] + 0.01 * curves[name].clone()
            optimizer.step()
            optimizer.zero_grad()
            return loss(weights)

        return step

    def without_dropout(make_step: MakeStep) -> MakeStep:
        return lambda model, optimizer: make_step(model.eval(), optimizer)

    assert_as_eager(without_dropout(make))


def test_a_bounded_deque_holds_no_more_than_its_bound() -> None:
    made: list[deque[Tensor]] = []

    def make(model: nn.Module, optimizer: Optimizer) -> Step:
        losses: deque[Tensor] = deque(maxlen=2)
        made.append(losses)

        def step(x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, x, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
            return torch.stack(list(losses)).sum() / len(losses)

        return step

    expected = run(make, steps=4)
    torch._dynamo.reset()
    found = run(make, cotrain(policy="zero-offload"), steps=4)
    torch.testing.assert_close(found, expected)
    in_eager, ours = made
    torch.testing.assert_close(list(ours), list(in_eager))
    assert ours.maxlen == 2


def autocast_step(cache_enabled: bool) -> tuple[Step, nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(SEED)
    model = nn.Linear(4, 2)
    optimizer = adamw(model)

    def step(x: Tensor, y: Tensor) -> Any:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache_enabled):
            loss = F.mse_loss(model(x).float(), y)
            loss.backward()
            optimizer.step()
            return loss, F.mse_loss(model(x).float(), y)

    return step, model, (torch.randn(8, 4), torch.randn(8, 2))


def test_a_cast_that_autocast_keeps_from_before_an_update_is_refused_and_the_way_on_works() -> None:
    step, _, batch = autocast_step(cache_enabled=True)
    with pytest.raises(CaptureError, match=r"test_as_eager.*cast from before.*cache_enabled=False"):
        cotrain()(step)(*batch)
    torch._dynamo.reset()
    step, model, batch = autocast_step(cache_enabled=False)
    expected = [step(*batch) for _ in range(3)], model.weight
    step, model, batch = autocast_step(cache_enabled=False)
    compiled = cotrain(policy="zero-offload")(step)
    torch.testing.assert_close(([compiled(*batch) for _ in range(3)], model.weight), expected)


def test_a_layer_that_is_taken_out_and_put_back_is_trained_again() -> None:
    """The graph for another layer would take it, too, and leave what the optimizer has alone."""

    def make(model: nn.Module, optimizer: Optimizer) -> Step:
        layer, other = model.get_submodule("0"), nn.Linear(12, 24)
        layers = cycle([other, layer])

        def step(x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, x, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        def swapping(x: Tensor, y: Tensor) -> Tensor:
            loss: Tensor = compiled(x, y)
            model.register_module("0", next(layers))
            return loss

        compiled = wrap(step)
        return swapping

    wrap: Any = cotrain(policy="zero-offload")
    found = run(make, steps=4)
    wrap = torch.compiler.disable
    torch.testing.assert_close(found, run(make, steps=4))


def test_a_jacobian_of_each_row_is_penalised() -> None:
    """Tensors within a transform of torch.func have no storage that can be asked for."""

    def make(model: nn.Module, optimizer: Optimizer) -> Step:
        layer = model.get_submodule("4")

        def step(x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            slopes = torch.func.vmap(torch.func.jacrev(lambda row: layer(row).tanh()))(
                x.repeat(1, 2)
            )
            loss: Tensor = loss_of(model, x, y) + slopes.square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return step

    assert_as_eager(make)


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")  # torch's own
def test_hessians_of_each_row_are_refused_and_the_way_on_works() -> None:
    """Torch cannot trace a backward through forward-mode derivatives of gradients under vmap."""

    def with_second(derivative: Callable[[Any], Any]) -> Any:
        def make(model: nn.Module, optimizer: Optimizer) -> Step:
            layer = model.get_submodule("4")

            def step(x: Tensor, y: Tensor) -> Tensor:
                optimizer.zero_grad()
                curves = torch.func.vmap(derivative(lambda row: layer(row).tanh().sum()))(
                    x.repeat(1, 2)
                )
                loss: Tensor = loss_of(model, x, y) + curves.square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                return loss

            return step

        return make

    hessian, jacrev = torch.func.hessian, torch.func.jacrev
    with pytest.raises(CaptureError, match=r"under vmap.*jacrev\(torch.func.jacrev\(f\)\)"):
        run(with_second(hessian), cotrain())
    assert_as_eager(with_second(lambda f: jacrev(jacrev(f))))
