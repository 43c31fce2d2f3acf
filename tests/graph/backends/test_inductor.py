"""Steps lowered with Inductor: numbers of eager within rounding, equal layers compiled once.

The tolerance: Inductor orders sums differently and fuses roundings away. Three steps of float32
stay below 1e-4 of a value, and 1e-5 where it is small; under bfloat16 autocast 2e-2.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.utils import fresh_cache

import cotrain_compile
from cotrain_compile.backends.inductor import lower as lowering
from cotrain_compile.backends.inductor.compile_graph import compile_graph
from cotrain_compile.backends.inductor.lower import lower, segments_of
from cotrain_compile.backends.lifecycle.compiled_step import CompiledStep
from cotrain_compile.entry.tracing import trace_graph
from cotrain_compile.errors import LoweringError, OptionError, OutOfDeviceMemory, StepFailed
from cotrain_compile.extract.extract import extract
from cotrain_compile.graph import StepGraph
from cotrain_compile.machine import Tier
from cotrain_compile.passes import run_passes
from cotrain_compile.placement.recompute.recomputable import recomputable
from cotrain_compile.plan import Plan
from cotrain_compile.runtime.emulated import EmulatedDevice
from cotrain_compile.runtime.host.kernels import host_kernels
from tests.graph.backends.test_segments_of_steps import Interpreted
from tests.support.captured_steps import captured, reference
from tests.support.plans.random_plans import random_plan
from tests.support.steps import CASES, OPTIMIZERS, Case, Step, cotrain, make_step, train

# (relative, absolute)
ROUNDING = {"clipped": (1e-4, 1e-5), "autocast": (2e-2, 2e-3)}
# Bytes that the device has beyond what the plan needs op by op: oneDNN's scratch for a product of
# two bfloat16 matrices, some 6 KiB however small they are, and 4 KiB for one that runs again at the
# peak. No plan knows of it before its dry run.
SCRATCH_BYTES = {"clipped": 0, "autocast": 8 << 10}


def place_lowered(name: str, plan: Plan) -> CompiledStep:
    problem, step = captured(name).problem(), captured(name).step
    placed = run_passes(step, plan)
    scratch_bytes = SCRATCH_BYTES[name] or (4160 if plan.placement.recomputed else 0)
    budgets = {**plan.budgets, Tier.DEVICE: plan.budgets[Tier.DEVICE] + scratch_bytes}
    device = EmulatedDevice(problem.machine, budgets, host_kernels(placed, "captured"))
    lowered = lower(step, placed, problem.under(plan.placement).dataflow, {}, ())
    return CompiledStep(problem, plan, placed, device, lowered)


@pytest.mark.long  # compiles C++
@pytest.mark.parametrize("share", [0.0, 0.7])
@pytest.mark.parametrize(
    ("name", "seed"),
    [
        ("clipped", 1),
        ("autocast", 1),
        *((name, seed) for name in ROUNDING for seed in range(2, 6)),
    ],
)
def test_a_random_plan_trains_the_same_in_the_memory_of_its_dry_run(
    name: str, seed: int, share: float
) -> None:
    """With nothing made again, and with a `share` of what may be."""
    problem, rng = captured(name).problem(), random.Random(f"{name} {seed}")
    again = [n for n in sorted(recomputable(problem.dataflow)) if rng.random() < share]
    plan = random_plan(problem.recomputing(again), rng)
    step = place_lowered(name, plan)

    def run(inputs: list[Any]) -> Any:
        if step.dry_run_device_bytes is None:
            step.dry_run(inputs)
        outputs = step(inputs)
        assert step.measured is not None
        assert step.dry_run_device_bytes is not None
        assert step.measured.peak_bytes[Tier.DEVICE] <= step.dry_run_device_bytes
        return outputs

    rtol, atol = ROUNDING[name]
    for found, expected in zip(captured(name).train(run), reference(name), strict=True):
        if isinstance(expected, Tensor):
            torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)


def compiled_and_trained(case: Case, **options: Any) -> tuple[CompiledStep, list[Tensor]]:
    steps: list[Step] = []

    def compile_with(step: Step) -> Step:
        steps.append(cotrain(policy="resident", **options)(step))
        return steps[0]

    run = train(case, OPTIMIZERS["adamw"], compile_with, steps=5)
    return cotrain_compile.inspect(steps[0]), run.losses


@functools.cache
def mlp_in_segments() -> tuple[CompiledStep, list[Tensor]]:
    return compiled_and_trained(CASES["mlp"], lowering="inductor")


# Segments as they are, and in a long run compiled: that takes seconds.
BOTH = (False, pytest.param(True, marks=pytest.mark.long))


@contextmanager
def code_of(is_compiled: bool) -> Iterator[None]:
    """Within it, segments are compiled by Inductor, or run as they are."""
    if is_compiled:
        yield
    else:
        with mock.patch.object(lowering, "compile_graph", Interpreted):
            yield


def test_a_resident_step_with_dropout_trains_as_in_eager() -> None:
    """Random numbers are eager's, so that dropout can be compared."""
    eager = train(CASES["mlp"], OPTIMIZERS["adamw"], steps=5)
    step, losses = mlp_in_segments()
    torch.testing.assert_close(losses, eager.losses, rtol=1e-4, atol=1e-5)
    assert step.lowered is not None
    assert step.measured is not None
    assert step.measured.peak_bytes[Tier.DEVICE] == step.dry_run_device_bytes
    assert step.measured.peak_bytes[Tier.DEVICE] <= step.predicted.peak_bytes[Tier.DEVICE]


def test_what_is_allocated_inside_a_segment_counts_against_the_budget() -> None:
    step, _ = mlp_in_segments()
    assert step.dry_run_device_bytes is not None
    less = {Tier.DEVICE: step.dry_run_device_bytes - 1}
    placeholders = step.graph.module.graph.find_nodes(op="placeholder")
    values = [node.meta["val"] for node in placeholders]
    with (
        mock.patch.dict(step._device.meter.budgets, less),
        pytest.raises((OutOfDeviceMemory, StepFailed), match="out of memory on the device at"),
    ):
        step([torch.zeros(v.shape, dtype=v.dtype) for v in values])


@pytest.mark.parametrize("is_compiled", BOTH)
def test_what_code_holds_beyond_the_plan_is_told_after_the_dry_run(
    is_compiled: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A convolution in float64 unfolds its input, inside a kernel: no plan knows of that."""
    model = nn.Sequential(nn.Conv1d(2, 2, 3, padding=1), nn.Flatten(), nn.Linear(16, 4)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = make_step(model, [optimizer], lambda model, x: model(x).square().mean())
    compiled = cotrain(policy="resident", lowering="inductor", dump=str(tmp_path))(step)
    for _ in range(3):
        with code_of(is_compiled):
            compiled(torch.randn(4, 2, 8, dtype=torch.float64))
        found = cotrain_compile.inspect(compiled)
        assert found.measured is not None
        assert found.measured.peak_bytes[Tier.DEVICE] == found.dry_run_device_bytes
        assert found.measured.peak_bytes[Tier.DEVICE] > found.predicted.peak_bytes[Tier.DEVICE]
    told = "a dry run took"
    assert [told in note for note in found.plan.notes] == [True]
    assert told in (tmp_path / "summary.txt").read_text()
    assert told in capfd.readouterr().err


@functools.cache
def deep_step(layers: int) -> StepGraph:
    def build() -> tuple[Step, tuple[Any, ...]]:
        blocks = [nn.Sequential(nn.Linear(12, 12), nn.GELU()) for _ in range(layers)]
        model = nn.Sequential(*blocks, nn.Linear(12, 4))
        optimizers = OPTIMIZERS["sgd"](model)
        return make_step(model, optimizers, CASES["mlp"].loss_of), CASES["mlp"].make_batch()

    torch._dynamo.reset()
    return trace_graph(build)


def test_deeper_models_have_more_segments_but_no_more_kinds() -> None:
    def kinds(layers: int) -> tuple[int, int]:
        step = deep_step(layers)
        segments = segments_of(step, step, extract(step)).segments.values()
        return len(segments), len({segment.key for segment in segments})

    (few, kinds_of_few), (many, kinds_of_many) = kinds(4), kinds(6)
    assert many > few
    assert kinds_of_many == kinds_of_few


def test_segments_of_one_kind_share_their_code() -> None:
    compiled: list[str] = []

    def count(module: Any, inputs: Any, settings: Any, strides: Any) -> Any:
        compiled.append(str(module.graph))
        return lambda arguments: ()

    step = deep_step(4)
    with mock.patch.object(lowering, "compile_graph", count):
        lowered = lower(step, step, extract(step), {}, ())
    assert len(compiled) == lowered.kinds < len(lowered.code)


@pytest.mark.long
def test_code_compiled_before_comes_from_the_cache_on_disk() -> None:
    step = deep_step(0)
    with fresh_cache():
        kinds = lower(step, step, extract(step), {}, ()).kinds
        compiled = counters["inductor"]["fxgraph_cache_miss"]
        again = lower(step, step, extract(step), {}, ()).kinds
    assert again == kinds == compiled == counters["inductor"]["fxgraph_cache_hit"]
    assert counters["inductor"]["fxgraph_cache_bypass"] == 0


def test_a_failure_of_inductor_names_the_lines_and_the_way_on() -> None:
    def fail_on_gelu(module: Any, inputs: Any, settings: Any, strides: Any) -> Any:
        if "gelu_backward" in str(module.graph):
            raise NotImplementedError("no lowering for gelu_backward")
        return compile_graph(module, inputs, settings, strides)

    with mock.patch.object(lowering, "compile_graph", fail_on_gelu):
        with pytest.raises(LoweringError) as refusal:
            compiled_and_trained(CASES["mlp"], lowering="inductor")
        message = str(refusal.value)
        assert "no lowering for gelu_backward" in message
        assert "loss = loss_of(model, *batch)" in message
        assert f'options={{"eager_segments": [{refusal.value.segment!r}]}}' in message
        torch._dynamo.reset()
        step, losses = compiled_and_trained(
            CASES["mlp"], lowering="inductor", eager_segments=[refusal.value.segment]
        )
    names = {node.name for node in step.lowered.segmented.step.nodes} if step.lowered else set()
    assert "gelu_backward" in names
    eager = train(CASES["mlp"], OPTIMIZERS["adamw"], steps=5)
    torch.testing.assert_close(losses, eager.losses, rtol=1e-4, atol=1e-5)


def test_a_setting_that_inductor_does_not_have_is_refused() -> None:
    with pytest.raises(OptionError, match="'max_autotone'"):
        compiled_and_trained(CASES["mlp"], lowering="inductor", inductor={"max_autotone": True})


def test_cuda_graphs_are_refused_and_stay_off_where_the_process_has_them_on() -> None:
    cuda_graphs = {"triton.cudagraphs": True}
    with pytest.raises(OptionError, match="a CUDA graph needs its tensors"):
        compiled_and_trained(CASES["mlp"], lowering="inductor", inductor=cuda_graphs)
    torch._dynamo.reset()
    seen: list[bool] = []

    def note(module: Any, inputs: Any, **settings: Any) -> Any:
        seen.append(inductor_config.triton.cudagraphs)
        return compile_fx_inner(module, inputs, **settings)

    with (
        inductor_config.patch(cuda_graphs),
        mock.patch("torch._inductor.compile_fx.compile_fx_inner", note),
    ):
        compiled_and_trained(CASES["mlp"], lowering="inductor")
    assert seen
    assert not any(seen)


@pytest.mark.parametrize("is_compiled", BOTH)
def test_a_batch_whose_strides_change_too_is_compiled_for_them(is_compiled: bool) -> None:
    """A stride that has changed is a number of its own, which no size of the step tells."""

    def losses(*, placed: bool) -> list[float]:
        torch.manual_seed(0)
        model = nn.Linear(8, 4).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = model(x.flip(1)).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        run = cotrain(lowering="inductor")(step) if placed else step
        x = torch.randn(6, 8, dtype=torch.float64)
        batches = [x, x.T.contiguous().T, x[:5].T.contiguous().T, x]
        return [run(batch).item() for batch in batches]

    with code_of(is_compiled):
        found = losses(placed=True)
    assert found == pytest.approx(losses(placed=False), rel=1e-9)
