"""A step that cannot run as asked is refused with one clear error, and nothing has changed.

The error of a step that cannot be captured names the line of the user's own file and the way on.
"""

from __future__ import annotations

import copy
import inspect
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

import cotrain_compile
from cotrain_compile.capture.aten.prepare import prepare
from cotrain_compile.errors import (
    CaptureError,
    CotrainError,
    FormatError,
    OptionError,
    OutOfDeviceMemory,
    PlacementError,
)
from cotrain_compile.files import save
from cotrain_compile.graph import StepGraph
from cotrain_compile.machine import Tier
from cotrain_compile.presets import find
from tests.support.steps import Step, cotrain, make_step, vectors


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def adamw(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def make_printing(model: nn.Module, optimizer: Optimizer) -> Step:
    def step(x: Tensor, y: Tensor) -> None:
        loss = loss_of(model, x, y)
        loss.backward()
        print(loss)  # breaks
        optimizer.step()

    return step


def make_branching(model: nn.Module, optimizer: Optimizer) -> Step:
    def step(x: Tensor, y: Tensor) -> None:
        loss = loss_of(model, x, y)
        if loss > 1:  # breaks
            loss = loss * 2
        loss.backward()
        optimizer.step()

    return step


def make_with_closure(model: nn.Module, optimizer: Optimizer) -> Step:
    def step(x: Tensor, y: Tensor) -> None:
        def closure() -> Any:
            loss = loss_of(model, x, y)
            loss.backward()
            return loss

        optimizer.step(closure)  # breaks

    return step


def make_plain(model: nn.Module, optimizer: Optimizer) -> Step:
    def step(x: Tensor, y: Tensor) -> None:
        loss_of(model, x, y).backward()
        optimizer.step()  # breaks

    return step


def make_lbfgs(model: nn.Module, optimizer: Optimizer) -> Step:
    return make_plain(model, torch.optim.LBFGS(model.parameters()))


def make_step_replaced(model: nn.Module, optimizer: Optimizer) -> Step:
    optimizer.step = lambda closure=None: None  # type: ignore[method-assign, assignment]
    return make_plain(model, optimizer)


def make_without_backward(model: nn.Module, optimizer: Optimizer) -> Step:
    def step(x: Tensor, y: Tensor) -> Tensor:  # breaks
        optimizer.step()
        return loss_of(model, x, y)

    return step


REFUSED: dict[str, tuple[Callable[[nn.Module, Optimizer], Step], str]] = {
    # what the step does, and a word of the way on
    "print": (make_printing, "print"),
    "branch on the loss": (make_branching, "torch.where"),
    "closure": (make_with_closure, "without"),
    "lbfgs": (make_lbfgs, "use an optimizer without"),
    "step replaced": (make_step_replaced, "override it in a subclass"),
    "no backward": (make_without_backward, "compile the function that calls"),
}


def lines_that_break(make: Callable[..., Any]) -> set[int]:
    """Lines of this file that `# breaks` marks in `make`, or in `make_plain` where it uses that."""
    found = set()
    for function in (make, make_plain):
        source, first = inspect.getsourcelines(function)
        found |= {first + i for i, line in enumerate(source) if "# breaks" in line}
        if found:
            break
    return found


def everything(model: nn.Module, optimizer: Optimizer) -> Any:
    """All that a refused step must leave alone."""
    flags = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    grads = {n: p.grad for n, p in model.named_parameters()}
    states = optimizer.state_dict()["state"]
    return copy.deepcopy((model.state_dict(), states, flags, grads))


@pytest.mark.parametrize("make_optimizer", [sgd, adamw])
@pytest.mark.parametrize("what", REFUSED)
def test_the_error_names_the_users_line_and_the_way_on(
    what: str, make_optimizer: Callable[[nn.Module], Optimizer]
) -> None:
    make, way_on = REFUSED[what]
    model = nn.Linear(12, 4)
    optimizer = make_optimizer(model)
    step = cotrain()(make(model, optimizer))
    before = everything(model, optimizer)
    with pytest.raises(CaptureError) as caught:
        step(*vectors())
    message = str(caught.value)
    assert way_on in message
    place = re.match(rf"{re.escape(__file__)}:(\d+) in step", message)
    assert place, message
    assert int(place[1]) in lines_that_break(make)
    assert not optimizer.state
    torch.testing.assert_close(everything(model, optimizer), before, rtol=0, atol=0)


def test_on_break_warn_says_so_once_and_runs_in_eager(capsys: pytest.CaptureFixture[str]) -> None:
    def losses(compile_with: Callable[[Step], Step]) -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = nn.Linear(12, 4)
        optimizer = adamw(model)
        step = compile_with(make_printing(model, optimizer))
        for _ in range(3):
            step(*vectors())
        return model.state_dict(), optimizer.state_dict()

    eager = losses(lambda step: step)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours = losses(cotrain(on_break="warn"))
    (told,) = [str(warning.message) for warning in caught]
    assert told.startswith("cotrain: the step runs in eager, without a budget. ")
    assert "on_break" not in told
    assert "Nothing was updated" not in told
    torch.testing.assert_close(ours, eager, rtol=0, atol=0)
    printed = capsys.readouterr().out.splitlines()
    assert printed[:3] == printed[3:]


def test_a_graph_without_an_update_that_eager_makes_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def lose_one_update(module: Any) -> None:
        prepare(module)
        write = module.graph.find_nodes(
            op="call_function", target=torch.ops.aten.copy_.default, sort=False
        )[0]
        write.replace_all_uses_with(write.args[1])
        module.graph.erase_node(write)

    monkeypatch.setattr("cotrain_compile.capture.prepare", lose_one_update)
    model = nn.Linear(12, 4, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = everything(model, optimizer)
    with pytest.raises(CaptureError, match=r"1 parameters get a gradient but no update .*weight"):
        cotrain()(make_step(model, [optimizer], loss_of))(*vectors())
    torch.testing.assert_close(everything(model, optimizer), before, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"memory_buget": 1}, OptionError, r"did you mean 'memory_budget'.*options are .*policy"),
        ({"policy": "magic"}, OptionError, "one of auto, resident, zero-offload"),
        ({"memory_budget": "20 bananas"}, OptionError, "20GiB"),
        ({"machine": "no-such-machine"}, OptionError, "this-machine"),
        ({"machine": __file__}, FormatError, "not a whole JSON document"),
        ({"plan": "no-such-plan"}, OptionError, "'plan' is 'no-such-plan': No such file"),
        ({"plan": __file__}, FormatError, "not a whole JSON document"),
        ({"profile": "no-such-profile"}, OptionError, "'profile' is .*: No such file"),
        pytest.param(
            {"device": "cuda"},
            OptionError,
            "torch sees no CUDA device",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is one here"),
        ),
    ],
)
@pytest.mark.parametrize("fullgraph", [True, False])
def test_options_and_the_files_they_name_are_checked_when_torch_compile_is_called(
    options: dict[str, Any], error: type[CotrainError], says: str, fullgraph: bool
) -> None:
    with pytest.raises(error, match=says):
        torch.compile(never_called, backend="cotrain", options=options, fullgraph=fullgraph)


def test_options_that_went_bad_are_refused_before_tracing(tmp_path: Path) -> None:
    machine = tmp_path / "machine.json"
    save(find("rtx4090"), machine)
    step = cotrain(machine=str(machine))(never_called)
    machine.unlink()
    with pytest.raises(OptionError, match="no machine named"):
        step()


def never_called() -> None:
    raise AssertionError("this step was traced or called")


def test_a_mode_of_inductor_is_refused_with_the_option_that_takes_its_place() -> None:
    step = torch.compile(
        make_plain(model := nn.Linear(12, 4), adamw(model)), backend="cotrain", mode="max-autotune"
    )
    with pytest.raises(OptionError, match=r'options=\{"inductor": \{"max_autotune": True\}\}'):
        step(*vectors())


@pytest.mark.parametrize(
    "options",
    [
        {"memory_budget": 1000, "policy": "resident"},
        {"memory_budget": 400, "policy": "zero-offload"},
        {"memory_budget": 400},
        {"host_memory_budget": 300, "policy": "zero-offload"},
    ],
)
def test_a_budget_that_does_not_fit_is_refused_with_the_bytes_missing(
    options: dict[str, Any],
) -> None:
    model = nn.Linear(12, 4)
    optimizer = adamw(model)
    before = everything(model, optimizer)
    told = r"needs .*B .*budget is \d+ B \(did you mean '\d+GiB'\?\): .* short; .*raise"
    with pytest.raises(PlacementError, match=told) as e:
        cotrain(**options)(make_plain(model, optimizer))(*vectors())
    assert e.value.shortfall_bytes > 0
    torch.testing.assert_close(everything(model, optimizer), before, rtol=0, atol=0)


@pytest.mark.parametrize(
    "policy", [pytest.param("resident", marks=pytest.mark.long), "zero-offload"]
)
def test_out_of_memory_while_running_leaves_the_parameters(policy: str) -> None:
    model = nn.Sequential(nn.Linear(12, 4), nn.GELU(), nn.Linear(4, 4))  # no plan takes less
    optimizer = adamw(model)
    step = cotrain(policy=policy)(make_step(model, [optimizer], loss_of))
    step(*vectors())
    compiled = cotrain_compile.inspect(step)
    before = everything(model, optimizer)
    meter = compiled._device.meter
    planned = meter.budgets[Tier.DEVICE]
    inputs = sum(p.untyped_storage().nbytes() for p in model.parameters())
    meter.budgets[Tier.DEVICE] = inputs + (2 * inputs if policy == "resident" else 0) + 700
    with pytest.raises(OutOfDeviceMemory, match=r"out of memory on the device at \w+: .* budget"):
        step(*vectors())
    torch.testing.assert_close(everything(model, optimizer), before, rtol=0, atol=0)
    meter.budgets[Tier.DEVICE] = planned
    assert step(*vectors()).isfinite()


def test_inspecting_a_step_that_never_ran_says_how() -> None:
    with pytest.raises(CotrainError, match="call it once before inspecting it"):
        cotrain_compile.inspect(lambda: None)


def test_a_placed_graph_is_a_step_graph_again() -> None:
    model = nn.Linear(12, 4)
    step = cotrain(policy="zero-offload")(make_plain(model, adamw(model)))
    step(*vectors())
    assert isinstance(cotrain_compile.inspect(step).graph.verify(), StepGraph)
