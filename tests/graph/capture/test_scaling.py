"""A captured `GradScaler` skips, scales and counts as in eager, and the step stays one graph.

Batches with an inf in them make gradients that are not finite: eager then skips the update.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

import cotrain_compile
from cotrain_compile.backends.lifecycle.compiled_step import CompiledStep
from cotrain_compile.errors import CaptureError
from cotrain_compile.plan import UpdateMode
from cotrain_compile.runtime.host import kernels as kernels
from cotrain_compile.runtime.host.captured_kernels import CapturedKernel
from cotrain_compile.runtime.host.kernels import FusedKernel, host_kernels
from cotrain_compile.runtime.host.match_update import Match, match_update
from tests.support.captured_steps import make_two_layers
from tests.support.loops import EACH_POLICY
from tests.support.steps import OPTIMIZERS, SEED, Batch, Step, all_tensors, check_peak, cotrain

SKIPPED_OFTEN = ("sgd", "adagrad", "adafactor", "muon")
MakeStep = Callable[[nn.Module, Sequence[Optimizer], GradScaler], Step]

LossOf = Callable[[nn.Module, Tensor, Tensor], Tensor]

# In float64 what differs is torch's compiled Adam: it takes bias corrections in float32.
ROUNDING = (1e-5, 2e-6)
# One ulp of a float16 activation or gradient, which a rounding of a parameter can flip.
FP16_ROUNDING = (1e-3, 1e-5)

# Which of the batches hold an inf; the scale grows after two good ones.
SKIPPED = (False, False, True, False, True, True, False, False)


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def fp16_loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.float16):
        return loss_of(model, x.float(), y)


def make_clipping(
    model: nn.Module, optimizers: Sequence[Optimizer], scaler: GradScaler, loss_of: LossOf = loss_of
) -> Step:
    def step(x: Tensor, y: Tensor) -> Tensor:
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = loss_of(model, x, y)
        scaler.scale(loss).backward()
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        return loss

    return step


def make_in_fp16(model: nn.Module, optimizers: Sequence[Optimizer], scaler: GradScaler) -> Step:
    model.float()  # autocast leaves float64 alone
    return make_clipping(model, optimizers, scaler, fp16_loss_of)


def make_accumulating(
    model: nn.Module, optimizers: Sequence[Optimizer], scaler: GradScaler
) -> Step:
    """Two micro-batches; the update unscales; gradients are cleared last."""

    def step(x: Tensor, y: Tensor) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for half in (slice(None, 4), slice(4, None)):
            loss = loss_of(model, x[half], y[half]) / 2
            scaler.scale(loss).backward()
            total = total + loss.detach()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        for optimizer in optimizers:
            optimizer.zero_grad()
        return total

    return step


def make_one_of_two(model: nn.Module, optimizers: Sequence[Optimizer], scaler: GradScaler) -> Step:
    """Two optimizers, of which only the first meets the inf: the other one still steps."""
    first = torch.optim.Adam(list(model.parameters())[:2], lr=1e-2, foreach=False)
    second = torch.optim.SGD(list(model.parameters())[2:], lr=1e-2, momentum=0.9, foreach=False)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(model, x.nan_to_num(posinf=1.0), y)
        scaler.scale(loss).backward()
        for param in first.param_groups[0]["params"]:
            param.grad.mul_(x.sum())
        for optimizer in (first, second):
            scaler.step(optimizer)
        scaler.update()
        first.zero_grad()
        second.zero_grad()
        return loss

    return step


MAKERS: dict[str, MakeStep] = {
    "clipping": make_clipping,
    "fp16": make_in_fp16,
    "accumulating": make_accumulating,
    "one of two": make_one_of_two,
}


def batches() -> list[Batch]:
    found: list[Batch] = []
    for skipped in SKIPPED:
        x, y = torch.randn(8, 12, dtype=torch.float64), torch.randint(0, 4, (8,))
        if skipped:
            x[0, 0] = math.inf
        found.append((x, y))
    return found


def graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


def train(
    make: MakeStep,
    optimizer: str = "adamw",
    compile_with: Callable[[Step], Step] = lambda step: step,
    after_step: Callable[[Step], None] = lambda step: None,
    enabled: bool = True,
) -> dict[str, Any]:
    """Everything that training leaves, of every step; and the scaler's own state."""
    torch.manual_seed(SEED)
    model = make_two_layers().double()
    optimizers = OPTIMIZERS[optimizer](model)
    scaler = GradScaler("cpu", init_scale=2.0**10, growth_interval=2, enabled=enabled)
    step = compile_with(make(model, optimizers, scaler))
    left: dict[str, Any] = {}
    for number, batch in enumerate(batches()):
        left[f"{number} loss"] = step(*batch)
        after_step(step)
        left[f"{number} scaler"] = scaler.state_dict()
        for name, value in all_tensors(model, optimizers).items():
            left[f"{number} {name}"] = value
    left["pending"] = dict(scaler._per_optimizer_states) if enabled else {}
    return left


def assert_close(ours: object, eager: object, rounding: tuple[float, float] = ROUNDING) -> None:
    rtol, atol = rounding
    torch.testing.assert_close(ours, eager, rtol=rtol, atol=atol, equal_nan=True)


def assert_as_eager(
    make: MakeStep, optimizer: str = "adamw", enabled: bool = True, **options: Any
) -> None:
    eager = train(make, optimizer, enabled=enabled)
    ours = train(make, optimizer, cotrain(**options), check_peak, enabled=enabled)
    rounding = FP16_ROUNDING if make is make_in_fp16 else ROUNDING
    assert_close(ours, eager, rounding)
    assert graphs() == 1


@functools.cache
def placed(make: MakeStep, optimizer: str, policy: str) -> tuple[dict[str, Any], int, CompiledStep]:
    """What training leaves, the number of graphs that it takes, and what was compiled."""
    steps: list[Step] = []

    def compile_with(step: Step) -> Step:
        steps.append(cotrain(policy=policy)(step))
        return steps[0]

    before = graphs()
    left = train(make, optimizer, compile_with, check_peak)
    return left, graphs() - before, cotrain_compile.inspect(steps[0])


@pytest.mark.parametrize("policy", EACH_POLICY)
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_scaled_step_is_one_graph_with_eagers_numbers(make: MakeStep, policy: str) -> None:
    left, compiles, compiled = placed(make, "adamw", policy)
    assert_close(left, train(make), FP16_ROUNDING if make is make_in_fp16 else ROUNDING)
    assert compiles == 1
    if policy == "zero-offload":
        assert set(compiled.plan.placement.updates.values()) == {UpdateMode.HOST}


@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param(name, marks=() if name in SKIPPED_OFTEN else pytest.mark.long)
        for name in OPTIMIZERS
        if name != "adamw"
    ],
)
def test_every_optimizer_can_be_skipped(optimizer: str) -> None:
    left, compiles, _ = placed(make_clipping, optimizer, "zero-offload")
    assert_close(left, train(make_clipping, optimizer))
    assert compiles == 1


@pytest.mark.parametrize("policy", EACH_POLICY)
def test_a_skipped_step_changes_no_bit_but_the_scale(policy: str) -> None:
    left, *_ = placed(make_clipping, "adamw", policy)
    names = [name.partition(" ")[2] for name in left if name.startswith("0 ")]
    for number, skipped in enumerate(SKIPPED[1:], start=1):
        if skipped:
            scale = left[f"{number} scaler"]["scale"]
            assert scale == left[f"{number - 1} scaler"]["scale"] / 2
            for name in set(names) - {"loss", "scaler"}:
                assert torch.equal(left[f"{number} {name}"], left[f"{number - 1} {name}"])


def test_a_disabled_scaler_changes_nothing() -> None:
    assert_as_eager(make_accumulating_finite, enabled=False)


def make_accumulating_finite(
    model: nn.Module, optimizers: Sequence[Optimizer], scaler: GradScaler
) -> Step:
    plain = make_accumulating(model, optimizers, scaler)

    def step(x: Tensor, y: Tensor) -> Any:
        return plain(x.nan_to_num(posinf=1.0), y)

    return step


def test_the_scale_can_be_updated_outside_the_step() -> None:
    def make(model: nn.Module, optimizers: Sequence[Optimizer], scaler: GradScaler) -> Step:
        (optimizer,) = optimizers

        def step(x: Tensor, y: Tensor) -> Tensor:
            loss = loss_of(model, x, y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            optimizer.zero_grad()
            return loss

        return step

    def run(compile_with: Callable[[Step], Step]) -> Any:
        torch.manual_seed(SEED)
        model = make_two_layers().double()
        optimizers = OPTIMIZERS["adamw"](model)
        scaler = GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        step = compile_with(make(model, optimizers, scaler))
        scales = []
        for batch in batches():
            step(*batch)
            scaler.update()
            scales.append(scaler.get_scale())
        return scales, all_tensors(model, optimizers)

    assert_close(run(cotrain()), run(lambda step: step))
    assert graphs() == 1


def test_a_fused_optimizer_is_unscaled_before_its_update() -> None:
    """In eager the fused kernel divides by the scale; the captured step does it beforehand."""

    def make(model: nn.Module, _: Sequence[Optimizer], scaler: GradScaler) -> Step:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        return make_accumulating(model, [optimizer], scaler)

    assert_as_eager(make)


def kernels_of(optimizer: str) -> set[type]:
    """What runs the host updates of a scaled step."""
    *_, compiled = placed(make_clipping, optimizer, "zero-offload")
    return {type(kernel) for kernel in host_kernels(compiled.graph, "fused").values()}


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "adagrad"])
def test_scaled_updates_on_the_host_run_fused_loops(optimizer: str) -> None:
    assert kernels_of(optimizer) == {FusedKernel}


def test_a_fused_loop_that_does_not_skip_fails_its_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    def never_skips(*given: Any) -> Match | None:
        match = match_update(*given)
        return replace(match, skip=None) if match is not None else None

    monkeypatch.setattr(kernels, "match_update", never_skips)
    assert kernels_of("adamw") == {CapturedKernel}


def test_a_fused_loop_that_always_skips_fails_its_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(self: FusedKernel, inputs: Sequence[Any], meter: Any) -> None: ...

    monkeypatch.setattr(FusedKernel, "__call__", never)
    assert kernels_of("adamw") == {CapturedKernel}


@pytest.mark.parametrize("count", [1, 2])
def test_parameters_of_one_element_are_scaled_and_skipped(count: int) -> None:
    """The flag has one element too. Of a single parameter, the inverse scale is part of its update,
    and the scale has changed by the time that runs on the host."""
    weights = [nn.Parameter(torch.tensor([2.0])) for _ in range(count)]
    optimizer = torch.optim.Adam(weights, lr=0.1, eps=1.0)  # the size of a gradient matters
    scaler = GradScaler("cpu", init_scale=4.0, growth_interval=1)

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        scaler.scale((sum(weights) * x).sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    compiled = cotrain(policy="zero-offload")(step)
    compiled(torch.full((3,), math.inf))
    assert weights == [2.0] * count
    compiled(torch.ones(3))
    for weight in weights:
        torch.testing.assert_close(weight.detach(), torch.tensor([2.0 - 0.1 * 3 / (3 + 1)]))
    if count > 1:
        placed = cotrain_compile.inspect(compiled).graph
        assert {type(k) for k in host_kernels(placed, "fused").values()} == {FusedKernel}


def test_a_scaler_goes_on_in_eager_and_comes_back() -> None:
    def make_switching(
        model: nn.Module, optimizers: Sequence[Optimizer], scaler: GradScaler
    ) -> Step:
        plain = make_clipping(model, optimizers, scaler)
        compiled = cotrain()(plain)
        turns = iter([compiled, plain, plain, compiled] * 2)
        return lambda *batch: next(turns)(*batch)

    ours, eager = train(make_switching), train(make_clipping)
    assert_close(ours, eager)
    assert graphs() == 1


# Refusals.


class CountingInPython(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        for param in self.param_groups[0]["params"]:
            self.state[param]["count"] = 0

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.state[param]["count"] += 1
                    param.sub_(param.grad, alpha=group["lr"] / self.state[param]["count"])


def lazy_sgd(params: Any) -> Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.5)


@pytest.mark.parametrize(
    ("make_optimizer", "says"),
    [(CountingInPython, "keep them in tensors"), (lazy_sgd, "run the first step in eager")],
)
def test_an_optimizer_that_cannot_be_skipped_is_refused(
    make_optimizer: Callable[..., Optimizer], says: str
) -> None:
    model = make_two_layers().double()
    optimizer = make_optimizer(model.parameters())
    scaler = GradScaler("cpu")
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"]))
    with pytest.raises(CaptureError, match=says):
        cotrain()(make_clipping(model, [optimizer], scaler))(*batches()[0])
    after = (model.state_dict(), optimizer.state_dict()["state"])
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert scaler._scale is None


def test_the_first_step_in_eager_is_the_way_on_for_lazy_state() -> None:
    def make_switching(
        model: nn.Module, _: Sequence[Optimizer], scaler: GradScaler, ours: bool = True
    ) -> Step:
        plain = make_clipping(model, [lazy_sgd(model.parameters())], scaler)
        turns = iter([plain, *[cotrain()(plain) if ours else plain] * (len(SKIPPED) - 1)])
        return lambda *batch: next(turns)(*batch)

    def make_eager(model: nn.Module, _: Sequence[Optimizer], scaler: GradScaler) -> Step:
        return make_switching(model, _, scaler, ours=False)

    assert_close(train(make_switching), train(make_eager))
    assert graphs() == 1
