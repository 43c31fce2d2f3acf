"""A refusal names what the user wrote that cannot be, and what it says to do trains."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from cotrain_compile.capture.dynamo.diagnose import refuse_sizes_from_data
from cotrain_compile.errors import CaptureError, OptionError

Loss = Callable[[Any, Tensor], Tensor]
X = torch.ones(2, 4)


def losses(step: Callable[..., Tensor], *args: Tensor) -> list[float]:
    step = torch.compile(step, backend="cotrain", options={"quiet": True})
    return [float(step(*args)) for _ in range(2)]


def trained(loss_of: Loss, model: nn.Module | None = None) -> list[float]:
    torch.manual_seed(0)
    model = model or nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, x)
        loss.backward()
        optimizer.step()
        return loss.detach()

    found = losses(step, X.clone())
    assert found[1] < found[0]
    return found


@contextmanager
def anomalies_detected() -> Iterator[None]:
    torch.autograd.set_detect_anomaly(True)
    try:
        yield
    finally:
        torch.autograd.set_detect_anomaly(False)


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_the_detection_of_anomalies_is_named() -> None:
    with (
        anomalies_detected(),
        pytest.raises(CaptureError, match=r"set_detect_anomaly\(True\) is on"),
    ):
        trained(lambda model, x: model(x).square().mean())


def test_the_line_of_a_mask_is_named_where_a_later_line_needs_the_size() -> None:
    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        kept = x[x[:, 0] > 0]
        return torch.cat([model(part) for part in kept.split(1)]).square().mean()

    with pytest.raises(CaptureError, match=r"`kept = x\[x.*ignore_index=-100"):
        trained(loss_of)


def test_graph_layers_are_told_of_their_self_loops() -> None:
    graph = torch.fx.Graph()
    node = graph.placeholder("rows")
    with torch._subclasses.FakeTensorMode(
        shape_env=torch.fx.experimental.symbolic_shapes.ShapeEnv(
            allow_dynamic_output_shape_ops=True
        )
    ) as mode:
        node.meta["example_value"] = torch.nonzero(mode.from_tensor(torch.ones(3)))
    line = 'File "/lib/torch_geometric/utils/loop.py", line 3, in add\n    x[mask]\n'
    node.meta["stack_trace"] = line
    graph.output(node)
    with pytest.raises(CaptureError, match="add_self_loops=False"):
        refuse_sizes_from_data(torch.fx.GraphModule({}, graph))


def test_arguments_that_share_what_is_written_are_named() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(whole: Tensor, part: Tensor) -> Tensor:
        optimizer.zero_grad()
        whole.add_(1)
        loss = (model(whole) + part.sum()).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()  # type: ignore[no-any-return]

    batch = torch.zeros(4, 4)
    with pytest.raises(CaptureError, match=r"writes: whole, part\. Pass in a \.clone\(\)"):
        losses(step, batch, batch[:2])
    losses(step, batch, batch[:2].clone())


def test_parameters_are_tied_by_being_one() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight.data = model[0].weight.data
    with pytest.raises(CaptureError, match=r"0\.weight, 1\.weight\. .*a\.weight = b\.weight"):
        trained(lambda m, x: m(x).square().mean(), model)
    model[1].weight = model[0].weight
    trained(lambda m, x: m(x).square().mean(), model)


def test_a_ctc_loss_cannot_be_captured() -> None:
    targets, of_rows, of_targets = torch.tensor([[1, 2]]), torch.tensor([4]), torch.tensor([2])

    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        rows = model(x.repeat(2, 1))[:, None].log_softmax(-1)
        return nn.functional.ctc_loss(rows, targets, of_rows, of_targets)

    with pytest.raises(CaptureError, match=r"No captured step can have the CTC loss") as refused:
        trained(loss_of)
    assert "capture_dynamic_output_shape_ops" not in str(refused.value)


def test_a_nested_tensor_is_no_sparse_one() -> None:
    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        nested = torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 1, 2]))
        return model(nested).values().square().mean()  # type: ignore[no-any-return]

    with pytest.raises(CaptureError, match=r"is nested .*to_padded_tensor"):
        trained(loss_of)


def test_a_discriminator_stays_out_of_a_loss_by_inputs() -> None:
    maker, judge = nn.Linear(4, 4), nn.Linear(4, 1)

    def froze(model: Any, x: Tensor) -> Tensor:
        judge.requires_grad_(False)
        return judge(model(x)).square().mean()  # type: ignore[no-any-return]

    with pytest.raises(CaptureError, match=r"backward\(inputs=list\(model\.parameters\(\)\)\)"):
        trained(froze, maker)
    optimizer = torch.optim.SGD(maker.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = judge(maker(x)).square().mean()
        loss.backward(inputs=list(maker.parameters()))
        optimizer.step()
        return loss.detach()  # type: ignore[no-any-return]

    first, second = losses(step, X)
    assert second < first
    assert judge.weight.grad is None


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        with torch.enable_grad():
            x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
            product = x @ weight
        torch.autograd.backward(product, gradient)
        return x.grad, weight.grad


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by Dynamo
def test_the_backward_of_an_own_function_may_call_autograd_backward() -> None:
    expected = trained(lambda model, x: (x @ model.weight).square().mean())
    product: Any = _Product.apply
    found = trained(lambda model, x: product(x, model.weight).square().mean())
    assert found == pytest.approx(expected, rel=1e-6)


def test_a_base_on_meta_that_functional_call_fills_is_no_model_on_meta() -> None:
    models = [nn.Linear(4, 4) for _ in range(3)]
    base = copy.deepcopy(models[0]).to("meta")
    stacked, _ = stack_module_state(models)
    ensemble = nn.ParameterDict({k: nn.Parameter(v.detach()) for k, v in stacked.items()})

    def loss_of(model: Any, x: Tensor) -> Tensor:
        found: Tensor = vmap(lambda p: functional_call(base, p, (x,)))(
            {name: model[name] for name in stacked}
        )
        return found.square().mean()

    trained(loss_of, ensemble)
    with pytest.raises(OptionError, match="on meta"):
        trained(lambda model, x: base(x).sum() + model["weight"].sum(), ensemble)
