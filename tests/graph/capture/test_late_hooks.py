"""Hooks that come, go or change after the first call: followed as eager does, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules import module as all_modules
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

import cotrain_compile
from cotrain_compile.errors import CaptureError
from tests.support.steps import cotrain

Register = Callable[[nn.Sequential], Any]


def _more(module: nn.Module, given: tuple[torch.Tensor, ...]) -> Any:
    return (given[0] * 1.02,)


_CALLED = {"with_kwargs": True, "always_call": True}

FOLLOWED: dict[str, Register] = {
    "forward": lambda m: m[0].register_forward_hook(lambda _, given, out: out * 1.02),
    "forward pre": lambda m: m.get_submodule("1.0").register_forward_pre_hook(
        lambda _, given: given[0] * 1.02
    ),
    "with kwargs": lambda m: m.register_forward_hook(lambda _, a, k, out: out * 1.02, **_CALLED),
    "of all": lambda m: all_modules.register_module_forward_hook(lambda _, a, out: out * 1.02),
    "of all, before": lambda m: all_modules.register_module_forward_pre_hook(_more),
}
REFUSED: dict[str, Register] = {
    "backward": lambda m: m[0].register_full_backward_hook(lambda _, i, o: None),
    "backward pre": lambda m: m[0].register_full_backward_pre_hook(lambda _, o: None),
    "of all": lambda m: all_modules.register_module_full_backward_hook(lambda _, i, o: None),
}


def losses(register: Register, *, compiled: bool) -> list[float]:
    """Of three calls before the hook is there, one with it, one without and one with another."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 4))).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(3, 4).double(), torch.randn(3, 4).double()

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    if compiled:
        options: dict[str, Any] = {"policy": "resident", "quiet": True}
        step = torch.compile(step, backend="cotrain", options=options)
    found = [step().item()]
    for _ in range(2):
        handle = register(model)
        try:
            found.append(step().item())
        finally:
            handle.remove()
        found.append(step().item())
    return found


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.long if name in ("forward", "of all") else ())
        for name in FOLLOWED
    ],
)
def test_a_late_hook_is_followed(name: str) -> None:
    eager = losses(FOLLOWED[name], compiled=False)
    assert losses(FOLLOWED[name], compiled=True) == pytest.approx(eager, rel=1e-9)


@pytest.mark.parametrize("name", REFUSED)
def test_a_late_hook_that_no_step_may_have_is_refused(name: str) -> None:
    with pytest.raises(CaptureError, match="hook"):
        losses(REFUSED[name], compiled=True)


class Around:
    """A context around the call, entered as if it were a hook."""

    def __init__(self, context: Any) -> None:
        self.context = context
        context.__enter__()

    def remove(self) -> None:
        self.context.__exit__(None, None, None)


@pytest.mark.parametrize(
    ("context", "told"),
    [
        (lambda: torch.autograd.graph.save_on_cpu(), "leave out the hooks on saved tensors"),
        (lambda: torch.autograd.set_detect_anomaly(True), "set_detect_anomaly"),
        (lambda: torch.no_grad(), r"torch\.no_grad\(\).*around the call of the step"),
    ],
    ids=["saved tensors", "anomaly", "no gradients"],
)
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_what_lies_around_a_later_call_is_refused(context: Any, told: str) -> None:
    with pytest.raises(CaptureError, match=told):
        losses(lambda _: Around(context()), compiled=True)


def test_a_step_under_vmap_is_refused() -> None:
    model = nn.Linear(4, 2)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(x).sum()
        loss.backward()
        return loss.detach()

    options: dict[str, Any] = {"policy": "resident", "quiet": True}
    compiled = torch.compile(step, backend="cotrain", options=options)
    with pytest.raises(CaptureError, match="and vmap in the step, of the function"):
        torch.vmap(compiled)(torch.ones(2, 3, 4))


class Doubled(TorchFunctionMode):
    """Twice what a square is."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.Tensor.square else result


MODES: dict[str, Callable[[], Any]] = {
    "mutation": torch.autograd.graph.allow_mutation_on_saved_tensors,
    "flops": lambda: FlopCounterMode(display=False),
    "functions": Doubled,
}
KINDS = {"mutation": "dispatch", "flops": "dispatch", "functions": r"functions \(Doubled\)"}


@pytest.mark.parametrize("name", MODES)
@pytest.mark.parametrize("calls_before", [0, 1])
def test_a_step_under_a_mode_is_refused_and_compiled_in_the_next_call(
    name: str, calls_before: int
) -> None:
    """Dynamo would leave it to eager without a word, in this call and in all that follow.

    A mode of functions would be asked for each op of the plan, and fail in the middle of the step.
    """
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    compiled = cotrain(policy="resident", quiet=True)(step)
    x = torch.ones(3, 4)
    for _ in range(calls_before):
        compiled(x)
    before = model.weight.detach().clone()
    with (
        pytest.raises(CaptureError, match=rf"test_late_hooks\.py.* mode of {KINDS[name]}"),
        MODES[name](),
    ):
        compiled(x)
    assert torch.equal(model.weight, before)
    compiled(x)
    assert cotrain_compile.inspect(compiled).measured is not None
    assert not torch.equal(model.weight, before)


@pytest.mark.parametrize(("name", "factor"), [("flops", 1), ("functions", 2)])
def test_a_step_under_a_mode_runs_in_eager_where_that_is_asked_for(name: str, factor: int) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    compiled = cotrain(on_break="warn", quiet=True)(step)
    x = torch.ones(3, 4)
    before, expected = model.weight.detach().clone(), model(x).square().mean() * factor
    with (
        pytest.warns(UserWarning, match=rf"in eager.* mode of {KINDS[name]}"),
        MODES[name](),
    ):
        loss = compiled(x)
    assert loss.item() == pytest.approx(expected.item())
    assert not torch.equal(model.weight, before)
    compiled(x)  # without the mode there is nothing that a graph would pass over
    assert cotrain_compile.inspect(compiled).measured is not None


def test_a_default_device_around_the_call_may_come_change_and_go() -> None:
    """It is a mode of functions too, torch's own, and moves nothing that the plan makes."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.device]:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach(), torch.ones(2).device

    compiled = cotrain(policy="zero-offload", quiet=True)(step)
    x = torch.ones(3, 4)
    found = []
    for device in ("cpu", None, "cpu"):
        torch.set_default_device(device)
        try:
            found.append(compiled(x))
        finally:
            torch.set_default_device(None)
    with torch.device("cpu"):
        found.append(compiled(x))
    losses_found = [loss.item() for loss, _ in found]
    assert losses_found == sorted(losses_found, reverse=True)
    assert {str(device) for _, device in found} == {"cpu"}
