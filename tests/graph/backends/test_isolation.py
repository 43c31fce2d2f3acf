"""Our changes to torch hold only while a step is traced for us: all else behaves as without us."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch._dynamo.convert_frame as convert_frame
from torch import Tensor, fx, nn
from torch._dynamo import config, guards
from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.utils import counters
from torch._dynamo.variables import ConstantVariable, OptimizerVariable, builder
from torch._dynamo.variables.tensor import TensorVariable
from torch.optim import Optimizer

from cotrain_compile.capture.aten.prepare import prepare
from cotrain_compile.capture.dynamo.session import current_session
from cotrain_compile.errors import CaptureError
from tests.support.steps import Step, all_tensors, cotrain, cross_entropy, make_mlp, vectors

# Stock Dynamo looks at the gradient of the loss after its graph break.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

SETTINGS = ("trace_autograd_ops", "capture_scalar_outputs", "recompile_limit")


def make_training() -> tuple[nn.Module, Optimizer, Step]:
    torch.manual_seed(0)
    model = make_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = cross_entropy(model, x, y)
        loss.backward()
        optimizer.step()
        return loss

    return model, optimizer, step


def use_our_backend() -> None:
    _, _, step = make_training()
    compiled = cotrain(policy="zero-offload")(step)
    for _ in range(2):
        compiled(*vectors())
    torch._dynamo.reset()
    counters.clear()


def fail_in_our_backend() -> None:
    model, optimizer, _ = make_training()

    def step(x: Tensor, y: Tensor) -> None:
        loss = cross_entropy(model, x, y)
        loss.backward()
        print(loss)
        optimizer.step()

    with pytest.raises(CaptureError):
        cotrain()(step)(*vectors())
    torch._dynamo.reset()
    counters.clear()


def patched_things() -> dict[str, Any]:
    """Everything of torch's that a trace for us changes."""
    return {
        "OptimizerVariable": vars(builder)["OptimizerVariable"],
        "aliasing": vars(guards)["is_from_optimizer_source"],
        "validate": OutputGraph._validate_outputs_safe_for_autograd_nodes,
        **{f"TensorVariable.{name}": value for name, value in vars(TensorVariable).items()},
        **{name: getattr(config, name) for name in SETTINGS},
        # One None for all traces: a source left on it would be loaded by the next trace.
        "source of None": ConstantVariable.create(None).source,
        "session": current_session(),
    }


@pytest.mark.parametrize("use", [use_our_backend, fail_in_our_backend])
def test_nothing_stays_patched(use: Callable[[], None]) -> None:
    before = patched_things()
    use()
    assert patched_things() == before
    assert vars(builder)["OptimizerVariable"] is OptimizerVariable
    # The one thing that stays: a hook that passes the frames of other backends on.
    assert hasattr(convert_frame._compile, "_cotrain_hook")


def train_with(backend: str) -> tuple[dict[str, Tensor], dict[str, int], int]:
    """What another backend's compile of a whole step leaves: tensors, graph breaks, graphs."""
    torch._dynamo.reset()
    counters.clear()
    model, optimizer, step = make_training()
    compiled = torch.compile(step, backend=backend)
    for _ in range(2):
        compiled(*vectors())
    breaks = {reason.splitlines()[0]: n for reason, n in counters["graph_break"].items()}
    return all_tensors(model, [optimizer]), breaks, counters["stats"]["unique_graphs"]


@pytest.mark.parametrize(
    "backend",
    ["aot_eager", *(pytest.param(b, marks=pytest.mark.long) for b in ("eager", "inductor"))],
)
def test_other_backends_see_stock_dynamo(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as stock:
        stock.setattr(convert_frame, "_compile", convert_frame._compile.__wrapped__)  # type: ignore[attr-defined]
        tensors, breaks, graphs = train_with(backend)
    use_our_backend()
    fail_in_our_backend()
    tensors_after, breaks_after, graphs_after = train_with(backend)
    assert breaks_after == breaks
    assert breaks  # a stock trace breaks at backward() or step(): ours would not
    assert graphs_after == graphs
    torch.testing.assert_close(tensors_after, tensors, rtol=0, atol=0)


def test_eager_steps_still_run_their_hooks_and_keep_their_flags() -> None:
    use_our_backend()
    _, optimizer, step = make_training()
    flags = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    step(*vectors())
    assert calls == ["before", "after"]
    after = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    assert after == flags


def test_capture_leaves_the_optimizers_flags() -> None:
    _, optimizer, step = make_training()
    optimizer.param_groups[0]["foreach"] = True
    cotrain()(step)(*vectors())
    assert optimizer.param_groups[0]["foreach"] is True
    assert optimizer.param_groups[0]["fused"] is None


def test_a_thread_that_traces_for_us_does_not_change_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One thread is held inside a trace for us while another runs and compiles its own steps."""
    inside, go_on = threading.Event(), threading.Event()

    def prepare_when_told(module: fx.GraphModule) -> None:
        inside.set()
        assert go_on.wait(60)
        prepare(module)

    monkeypatch.setattr("cotrain_compile.capture.prepare", prepare_when_told)
    hooks: list[str] = []
    _, hooked_optimizer, eager_step = make_training()
    hooked_optimizer.register_step_post_hook(lambda *_: hooks.append("after"))
    our_step = cotrain()(make_training()[2])
    their_step = torch.compile(make_training()[2], backend="eager")
    with ThreadPoolExecutor(2) as threads:
        ours = threads.submit(our_step, *vectors())
        assert inside.wait(60)
        assert current_session() is None
        eager_step(*vectors())
        assert hooks == ["after"]
        theirs = threads.submit(their_step, *vectors())  # waits for Dynamo's lock, which we hold
        go_on.set()
        assert ours.result(60).isfinite()
        assert theirs.result(60).isfinite()
    # Stock Dynamo broke the other thread's graph, as it does without us.
    assert counters["graph_break"]
