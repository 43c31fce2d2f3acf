"""Between two calls a gradient on the host is the user's: to read, change, save, and go on from.

Every loop runs in half to three quarters of the memory that it takes with everything on the device.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cotrain_compile
from cotrain_compile.dataflow import Role
from cotrain_compile.machine import Tier
from tests.support.captured_steps import make_lean_mlp
from tests.support.steps import (
    CASES,
    SEED,
    Batch,
    Case,
    Step,
    check_peak,
    cotrain,
    cross_entropy,
    in_float64,
    vectors,
)

CALLS = 9
MICRO_BATCHES = 3

CompileWith = Callable[[Step], Step]


PLAIN = in_float64(Case(make_lean_mlp, vectors, cross_entropy))
LLAMA = in_float64(CASES["llama"])


class Loop:
    """Accumulates over calls: a micro-step each, and every third time an update."""

    def __init__(
        self,
        compile_with: CompileWith = lambda step: step,
        case: Case = PLAIN,
        *,
        set_to_none: bool = True,
    ) -> None:
        torch.manual_seed(SEED)
        self.case = case
        self.model = case.make_model()
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), lr=0.05, momentum=0.9, foreach=False
        )
        self.set_to_none = set_to_none
        self.micro_step = compile_with(self._micro_step)
        self.update = compile_with(self._update)

    def _micro_step(self, x: Tensor, y: Tensor) -> Tensor:
        loss = self.case.loss_of(self.model, x, y) / MICRO_BATCHES
        loss.backward()
        return loss

    def _update(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=self.set_to_none)

    def run(self, calls: range, between: Callable[[Loop], Any] = lambda loop: None) -> list[Any]:
        """What `calls` return, and what `between` finds after each."""
        left: list[Any] = []
        for call, (x, y) in zip(calls, batches(self.case)[calls.start :], strict=False):
            left += [self.micro_step(x, y).detach(), between(self)]
            if call % MICRO_BATCHES == MICRO_BATCHES - 1:
                self.update()
        return left

    def tensors(self) -> list[Tensor]:
        """Parameters, and momentum where there is any."""
        states = [s["momentum_buffer"] for s in self.optimizer.state.values()]
        return [tensor.detach().clone() for tensor in (*self.model.parameters(), *states)]


def batches(case: Case) -> list[Batch]:
    torch.manual_seed(SEED)
    return [case.make_batch() for _ in range(CALLS)]


class OnTheHost:
    """Compiles for a budget in which gradients rest on the host, and counts those that do."""

    def __init__(self, budget_bytes: int = 20_000, *, meters: bool = True, **options: Any) -> None:
        self.meters = meters  # whether the device counts the bytes of a plan and no others
        self.options = {
            "keep_grads": True,
            "host_kernels": "captured",
            "memory_budget": budget_bytes,
            **options,
        }
        self.on_host = 0

    def __call__(self, step: Step) -> Step:
        compiled = cotrain(**self.options)(step)

        def run(*args: Any) -> Any:
            returned = compiled(*args)
            if self.meters:
                check_peak(compiled)
            found = cotrain_compile.inspect(compiled)
            buffers, homes = found.problem.dataflow.buffer, found.plan.placement.homes
            self.on_host += sum(
                buffers[name].role is Role.GRADIENT and tier is Tier.HOST
                for name, tier in homes.items()
            )
            return returned

        return run


def assert_same(ours: Any, eager: Any) -> None:
    torch.testing.assert_close(ours, eager, rtol=0, atol=0)


@pytest.mark.parametrize("set_to_none", [pytest.param(True, marks=pytest.mark.long), False])
def test_gradients_that_are_cleared_in_the_step_leave_the_home_in_order(set_to_none: bool) -> None:
    host = OnTheHost()
    ours, eager = Loop(host, set_to_none=set_to_none), Loop(set_to_none=set_to_none)
    assert_same(ours.run(range(CALLS), gradients), eager.run(range(CALLS), gradients))
    assert_same(ours.tensors(), eager.tensors())
    assert host.on_host


def gradients(loop: Loop) -> list[Tensor]:
    return [param.grad.clone() for param in loop.model.parameters() if param.grad is not None]


def test_eager_code_between_calls_reads_and_changes_gradients_on_the_host() -> None:
    def halve_and_log(loop: Loop) -> Any:
        norm = nn.utils.clip_grad_norm_(loop.model.parameters(), 0.05)
        for param in loop.model.parameters():
            assert param.grad is not None
            param.grad.mul_(0.5)
        return norm

    host = OnTheHost()
    ours, eager = Loop(host), Loop()
    assert_same(ours.run(range(CALLS), halve_and_log), eager.run(range(CALLS), halve_and_log))
    assert_same(ours.tensors(), eager.tensors())
    assert host.on_host


def test_an_eager_update_takes_the_gradients_that_compiled_calls_have_left() -> None:
    host = OnTheHost()
    ours, eager = Loop(host), Loop()
    ours.update = ours._update
    assert_same(ours.run(range(CALLS)), eager.run(range(CALLS)))
    assert_same(ours.tensors(), eager.tensors())
    assert host.on_host


def test_a_checkpoint_between_micro_steps_has_the_gradients_and_goes_on() -> None:
    whole = Loop()
    expected = whole.run(range(CALLS))
    first = Loop(OnTheHost())
    found = first.run(range(4))
    file = io.BytesIO()
    saved = {"model": first.model.state_dict(), "optimizer": first.optimizer.state_dict()}
    named = {n: p.grad for n, p in first.model.named_parameters()}
    torch.save({**saved, "gradients": named}, file)
    file.seek(0)
    loaded = torch.load(file)
    torch._dynamo.reset()
    host = OnTheHost()
    second = Loop(host)
    second.model.load_state_dict(loaded["model"])
    second.optimizer.load_state_dict(loaded["optimizer"])
    for name, param in second.model.named_parameters():
        param.grad = loaded["gradients"][name]
    assert_same([*found, *second.run(range(4, CALLS))], expected)
    assert_same(second.tensors(), whole.tensors())
    assert host.on_host


@pytest.mark.long
def test_a_llama_accumulates_over_calls_in_less_than_its_weights_and_gradients_take() -> None:
    """Eager rounds some of its ops otherwise; what was captured leaves the same bits anywhere."""
    eager = Loop(case=LLAMA)
    kept_bytes = 2 * sum(param.nbytes for param in eager.model.parameters())
    resident = Loop(cotrain(keep_grads=True, policy="resident"), LLAMA)
    expected = resident.run(range(CALLS), gradients)
    torch.testing.assert_close(expected, eager.run(range(CALLS), gradients))
    torch._dynamo.reset()
    host = OnTheHost(int(0.9 * kept_bytes), verify=1)
    ours = Loop(host, LLAMA)
    assert_same(ours.run(range(CALLS), gradients), expected)
    assert_same(ours.tensors(), resident.tensors())
    assert host.on_host
