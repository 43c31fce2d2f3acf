"""Accumulation across calls: gradients stay in `p.grad` until a later call updates from them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count, cycle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

import cotrain_compile
from cotrain_compile.dataflow import Role
from cotrain_compile.errors import CaptureError
from tests.support.captured_steps import make_lean_mlp
from tests.support.loops import EACH_POLICY
from tests.support.steps import SEED, Step, all_tensors, check_peak, cotrain, cross_entropy, vectors

MICRO_BATCHES = 3
CALLS = 7

CompileWith = Callable[[Step], Step]
# Makes what runs one micro-batch; its argument says whether that is the last of an update.
MakeCalls = Callable[[nn.Module, Optimizer, CompileWith], Step]


def with_a_flag(model: nn.Module, optimizer: Optimizer, compile_with: CompileWith) -> Step:
    def step(x: Tensor, y: Tensor, is_last: bool) -> Tensor:
        loss = cross_entropy(model, x, y) / MICRO_BATCHES
        loss.backward()
        if is_last:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return loss

    return compile_with(step)


def with_a_count(model: nn.Module, optimizer: Optimizer, compile_with: CompileWith) -> Step:
    def step(x: Tensor, y: Tensor, count: int) -> Tensor:
        if count % MICRO_BATCHES == 0:
            optimizer.zero_grad()
        loss = cross_entropy(model, x, y) / MICRO_BATCHES
        loss.backward()
        if count % MICRO_BATCHES == MICRO_BATCHES - 1:
            optimizer.step()
        return loss

    compiled, counted = compile_with(step), count()
    return lambda x, y, is_last: compiled(x, y, next(counted))


def with_two_functions(model: nn.Module, optimizer: Optimizer, compile_with: CompileWith) -> Step:
    def micro_step(x: Tensor, y: Tensor) -> Tensor:
        loss = cross_entropy(model, x, y) / MICRO_BATCHES
        loss.backward()
        return loss

    def update() -> Tensor:
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return norm

    return joined(compile_with(micro_step), compile_with(update))


def with_a_scaler(model: nn.Module, optimizer: Optimizer, compile_with: CompileWith) -> Step:
    scaler = GradScaler("cpu", init_scale=1024.0, growth_interval=1)

    def micro_step(x: Tensor, y: Tensor) -> Tensor:
        loss = cross_entropy(model, x, y) / MICRO_BATCHES
        scaler.scale(loss).backward()
        return loss

    def update() -> None:
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return joined(compile_with(micro_step), compile_with(update))


def with_the_update_first(
    model: nn.Module, optimizer: Optimizer, compile_with: CompileWith
) -> Step:
    """Each call updates from the gradient of the one before, then makes the next."""

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.step()
        optimizer.zero_grad()
        loss = cross_entropy(model, x, y)
        loss.backward()
        return loss

    compiled, calls = compile_with(step), iter([step])
    return lambda x, y, is_last: next(calls, compiled)(x, y)


def joined(micro_step: Step, update: Step) -> Step:
    def run(x: Tensor, y: Tensor, is_last: bool) -> Any:
        loss = micro_step(x, y)
        return (loss, update()) if is_last else loss

    return run


def train(make: MakeCalls, compile_with: CompileWith = lambda step: step) -> list[Any]:
    """What each call returns and leaves, and whether the gradients stayed the same tensors."""
    torch.manual_seed(SEED)
    model = make_lean_mlp().double()
    # SGD keeps rounding small; Adam in the compiled step takes bias corrections in float32.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=False)
    run = make(model, optimizer, compile_with)
    left: list[Any] = []
    before: Tensor | None = None
    for call in range(CALLS):
        is_last = call % MICRO_BATCHES == MICRO_BATCHES - 1
        x, y = vectors()
        left.append(run(x.double(), y, is_last))
        gradient = next(model.parameters()).grad
        left += [gradient is before, all_tensors(model, [optimizer])]
        left += [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        before = gradient
    return left


def checked(**options: Any) -> CompileWith:
    """Compile with our backend; after each call the peak is the planned one."""

    def compile_with(step: Step) -> Step:
        compiled = cotrain(**options)(step)

        def run(*args: Any) -> Any:
            result = compiled(*args)
            check_peak(compiled)
            return result

        return run

    return compile_with


@pytest.mark.parametrize("policy", EACH_POLICY)
@pytest.mark.parametrize(
    ("make", "graphs"),
    # The first micro-batch finds no gradient, later ones do, and the last one updates.
    # A number that changes is an input from its second value on.
    [
        pytest.param(with_a_flag, 3, marks=pytest.mark.long),
        (with_a_count, 4),
        (with_two_functions, 3),
        (with_a_scaler, 3),
        (with_the_update_first, 1),
    ],
)
def test_gradients_add_up_across_calls(make: MakeCalls, graphs: int, policy: str) -> None:
    ours = train(make, checked(policy=policy))
    torch.testing.assert_close(ours, train(make))
    assert counters["stats"]["unique_graphs"] == graphs


def test_kept_gradients_are_counted_as_memory_of_the_step() -> None:
    model = make_lean_mlp()

    def micro_step(x: Tensor, y: Tensor) -> None:
        cross_entropy(model, x, y).backward()

    step = cotrain()(micro_step)
    for _ in range(2):
        step(*vectors())
        check_peak(step)
    dataflow = cotrain_compile.inspect(step).problem.dataflow
    gradients = {b.name: b.nbytes for b in dataflow.buffers if b.role is Role.GRADIENT}
    assert gradients == {f"{n}.grad": p.nbytes for n, p in model.named_parameters()}


def zeroing_every_other_time(
    model: nn.Module, optimizer: Optimizer, compile_with: CompileWith
) -> Step:
    def step(x: Tensor, y: Tensor, clears: bool) -> Tensor:
        if clears:
            optimizer.zero_grad()
        loss = cross_entropy(model, x, y)
        loss.backward()
        optimizer.step()
        return loss

    compiled, flags = compile_with(step), cycle([True, False])
    return lambda x, y, is_last: compiled(x, y, next(flags))


def test_gradients_that_one_call_drops_and_another_adds_to_are_refused() -> None:
    """The first call clears them before all else, so that nobody was to need them after it."""
    with pytest.raises(CaptureError, match=r"adds to gradients .*not kept.*\"keep_grads\": True"):
        train(zeroing_every_other_time, cotrain())
    torch._dynamo.reset()
    ours = train(zeroing_every_other_time, cotrain(keep_grads=True))
    torch.testing.assert_close(ours, train(zeroing_every_other_time))


def test_a_call_makes_no_state_of_an_optimizer_that_it_does_not_step() -> None:
    """Not for one that it only clears, nor where the step finds no gradient."""
    model = make_lean_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.step()
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()

    compiled = cotrain()(step)
    compiled(*vectors())
    assert not optimizer.state
    compiled(*vectors())
    assert len(optimizer.state) == len(list(model.parameters()))


def test_an_update_that_finds_no_gradient_is_refused() -> None:
    model = make_lean_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def update() -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    with pytest.raises(CaptureError, match=r"no parameter has a gradient.*after a backward\(\)"):
        cotrain()(update)()


@pytest.mark.parametrize("policy", ["resident", "zero-offload"])
def test_tensors_are_swapped_under_their_names_as_in_eager(policy: str) -> None:
    """`module.to` and `load_state_dict` do so where torch is told to; a weak reference forbids it.

    The first graph drops the gradients, of which we keep a note.
    """

    def losses(compile_with: CompileWith) -> list[Tensor]:
        torch.manual_seed(SEED)
        model = make_lean_mlp()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

        def step(x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = cross_entropy(model, x, y)
            loss.backward()
            optimizer.step()
            return loss.detach()

        compiled = compile_with(step)
        found = [compiled(*vectors())]
        optimizer.zero_grad()
        for param in model.parameters():
            torch.utils.swap_tensors(param, nn.Parameter(param.detach() * 0.7))
        return [*found, *(compiled(*vectors()) for _ in range(2))]

    torch.testing.assert_close(losses(cotrain(policy=policy)), losses(lambda step: step))
