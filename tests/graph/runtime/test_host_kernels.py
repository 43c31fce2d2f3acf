"""A fused kernel gives the same update however it goes through the gradient."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cotrain_compile
from cotrain_compile.dataflow import Role
from cotrain_compile.graph import StepGraph
from cotrain_compile.machine import MEMORIES, Tier
from cotrain_compile.passes import run_passes
from cotrain_compile.placement.policies import zero_offload
from cotrain_compile.placement.schedule.schedule import schedule
from cotrain_compile.runtime.host import captured_kernels
from cotrain_compile.runtime.host import gradient_prologue as gradient_part
from cotrain_compile.runtime.host.captured_kernels import CapturedKernel
from cotrain_compile.runtime.host.fused_kernel import FusedKernel
from cotrain_compile.runtime.host.fused_loops import FUSED_LOOPS
from cotrain_compile.runtime.host.kernels import host_kernels
from cotrain_compile.runtime.host.trial import rounds_once
from cotrain_compile.runtime.meter import MemoryMeter, MeteredGraph
from cotrain_compile.runtime.task_nodes import region_calls
from tests.support.captured_steps import captured
from tests.support.steps import cotrain, make_step


def placed_on_host(training: str) -> StepGraph:
    step = captured(training)
    return run_passes(step.step, schedule(step.problem(), zero_offload(step.dataflow)))


def kernels_of(training: str) -> list[tuple[CapturedKernel, FusedKernel, list[Any]]]:
    """For each parameter its kernels, and random inputs for them."""
    placed = placed_on_host(training)
    fused = host_kernels(placed, "fused")
    found = []
    for _, call in region_calls(placed.module.graph):
        region = call.subgraph(placed.module)
        kernel = fused[call.launch.task]
        assert isinstance(kernel, FusedKernel)
        values = [node.meta["val"] for node in region.graph.find_nodes(op="placeholder")]
        found.append(
            (
                CapturedKernel(MeteredGraph(region, Tier.HOST)),
                kernel,
                [random_like(value) for value in values],
            )
        )
    return found


def random_like(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return 1e-3
    if not value.dim():
        return torch.full((), 3.0, dtype=value.dtype)
    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    return made.copy_(torch.rand(value.shape) + 0.1)


def updated(kernel: Any, inputs: list[Any]) -> tuple[list[Any], int]:
    """The inputs after the update, and the most memory that it needed."""
    copies = [value.clone() if isinstance(value, Tensor) else value for value in inputs]
    meter = MemoryMeter(dict.fromkeys(MEMORIES, 1 << 30))
    with torch.no_grad():
        kernel(copies, meter)
    return copies, meter.peak_bytes[Tier.HOST]


@pytest.mark.parametrize("training", ["clipped", "unclipped", "autocast", "autocast-unclipped"])
def test_an_update_in_pieces_is_the_update(training: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    for captured_kernel, kernel, inputs in kernels_of(training):
        exact, _ = updated(captured_kernel, inputs)
        whole, whole_bytes = updated(kernel, inputs)
        monkeypatch.setattr(gradient_part, "PIECE_ELEMENTS", 40)
        pieces, piece_bytes = updated(kernel, inputs)
        most = gradient_part.piece_elements()
        monkeypatch.undo()
        torch.testing.assert_close(pieces, exact, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(pieces, whole, rtol=1e-6, atol=1e-9)
        needs_less = kernel.gradient.ops and inputs[kernel.positions["param"]].numel() > most
        assert piece_bytes < whole_bytes if needs_less else piece_bytes == whole_bytes


@pytest.mark.parametrize(("threads", "pieces"), [(1, 48), (2, 24), (16, 3), (64, 3)])
def test_more_threads_share_a_larger_piece(
    threads: int, pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They wait for one another after each op of a piece, so there are to be few of them."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    source = torch.empty(48 * 1024, 256, device="meta")
    rows = gradient_part.cache_rows(source)
    assert source.shape[0] == pieces * rows
    assert gradient_part.is_one_piece(source[:rows])
    assert not gradient_part.is_one_piece(source[: rows + 1])
    assert 4 * source[:rows].numel() < 32 << 20  # glibc would give it back each time


def test_a_state_is_known_by_its_key_whatever_it_is_called() -> None:
    placed = placed_on_host("clipped")
    called = [
        replace(item, name=f"state {number}") if item.role is Role.OPTIMIZER_STATE else item
        for number, item in enumerate(placed.inputs)
    ]
    kernels = host_kernels(replace(placed, inputs=tuple(called)), "fused").values()
    assert kernels
    assert {type(kernel) for kernel in kernels} == {FusedKernel}


def test_a_gradient_that_is_laid_out_otherwise_is_read_right() -> None:
    torch.manual_seed(0)
    seen = 0
    for captured_kernel, kernel, inputs in kernels_of("unclipped"):
        turned = list(inputs)
        for position, value in enumerate(inputs):
            if position not in kernel.positions.values() and value.dim() == 2:
                turned[position] = value.t().contiguous().t()
                seen += 1
        exact, _ = updated(captured_kernel, turned)
        torch.testing.assert_close(updated(kernel, turned)[0], exact, rtol=1e-5, atol=1e-7)
    assert seen


def test_states_in_another_precision_are_updated_by_the_captured_ops() -> None:
    """ATen's fused Adagrad refuses them; they come from `model.float()` after the optimizer."""
    torch.manual_seed(0)
    model = nn.Linear(6, 5).bfloat16()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    model.float()

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    expected_model, expected_optimizer = copy.deepcopy((model, optimizer))
    compiled = torch.compile(step, backend="cotrain", options={"policy": "zero-offload"})
    x = torch.randn(4, 6)
    for _ in range(3):
        compiled(x)
        expected_optimizer.zero_grad()
        expected_model(x).square().mean().backward()
        expected_optimizer.step()
    torch.testing.assert_close(model.state_dict(), expected_model.state_dict())


@pytest.mark.parametrize("optimizer", ["AdamW", "RMSprop", "NAdam", "Adadelta"])
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float64, marks=pytest.mark.long)]
)
def test_captured_ops_in_parts_leave_the_same_bits(
    optimizer: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No loop of ATen's rounds as the ops do in bfloat16, and most optimizers have none at all."""
    monkeypatch.setattr(captured_kernels, "CHUNK_ELEMENTS", 64)
    torch.manual_seed(0)
    model = nn.Linear(40, 13, dtype=dtype)
    maker = getattr(torch.optim, optimizer)
    step = make_step(model, [maker(model.parameters())], lambda model, x: model(x).square().mean())
    compiled = cotrain(policy="zero-offload", host_kernels="captured")(step)
    compiled(torch.randn(4, 40, dtype=dtype))
    placed = cotrain_compile.inspect(compiled).graph
    region: Any = placed.module.get_submodule(region_of(placed, "update.weight"))
    kernel = captured_kernels.chunked_kernel(region)
    assert kernel is not None
    values = [node.meta["val"] for node in region.graph.find_nodes(op="placeholder")]
    inputs = [random_like(value) for value in values]
    exact, whole_bytes = updated(CapturedKernel(MeteredGraph(region, Tier.HOST)), inputs)
    found, part_bytes = updated(kernel, inputs)
    assert all(map(torch.equal, found, exact))
    assert part_bytes < whole_bytes
    if dtype is torch.bfloat16 or optimizer != "AdamW":
        chosen = host_kernels(placed, "fused")["update.weight"]
        assert isinstance(chosen, captured_kernels.ChunkedKernel)


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.AdamW])
def test_a_fused_optimizer_of_narrow_weights_leaves_eagers_bits(
    optimizer: type[torch.optim.Adam],
) -> None:
    """Eager's loop computes in float32 and rounds once; op by op each result is rounded."""

    def trained(compile_with: Any, fused: bool) -> tuple[list[Tensor], Any]:
        torch.manual_seed(0)
        model = nn.Linear(16, 64, bias=False, dtype=torch.bfloat16)
        made = optimizer(model.parameters(), lr=1e-2, weight_decay=0.1, fused=fused)

        def step(x: Tensor) -> None:
            made.zero_grad()
            (model(x) * x.sum()).sum().backward()
            made.step()

        run = compile_with(step)
        for _ in range(5):
            run(torch.randn(4, 16, dtype=torch.bfloat16))
        (state,) = made.state.values()
        return [model.weight.detach(), state["exp_avg"], state["exp_avg_sq"]], run

    compile_with = cotrain(policy="zero-offload", lowering="eager", verify=1)
    found, compiled = trained(compile_with, fused=True)
    (kernel,) = host_kernels(cotrain_compile.inspect(compiled).graph, "fused").values()
    assert isinstance(kernel, FusedKernel)
    expected, _ = trained(lambda step: step, fused=True)
    assert all(map(torch.equal, found, expected))
    op_by_op, compiled = trained(compile_with, fused=False)
    (kernel,) = host_kernels(cotrain_compile.inspect(compiled).graph, "fused").values()
    assert not isinstance(kernel, FusedKernel)
    assert not torch.equal(op_by_op[0], expected[0])  # the two differ, so the test can fail


def test_narrow_weights_under_a_scaler_are_updated_by_the_captured_ops() -> None:
    """Eager's loop takes the scale off before it rounds; ours would find a rounded gradient."""
    torch.manual_seed(0)
    model = nn.Linear(8, 8, bias=False, dtype=torch.bfloat16)
    made = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)

    def step(x: Tensor) -> None:
        made.zero_grad()
        scaler.scale(model(x).square().mean()).backward()
        scaler.step(made)
        scaler.update()

    compiled = cotrain(policy="zero-offload", lowering="eager")(step)
    compiled(torch.randn(4, 8, dtype=torch.bfloat16))
    (kernel,) = host_kernels(cotrain_compile.inspect(compiled).graph, "fused").values()
    assert not isinstance(kernel, FusedKernel)


def test_a_loop_that_does_not_round_once_is_found_out() -> None:
    settings = torch.optim.AdamW([torch.zeros(1)]).defaults
    dtypes = {"param": torch.bfloat16, "exp_avg": torch.bfloat16, "exp_avg_sq": torch.bfloat16}
    dtypes["step"] = torch.float32
    loop = FUSED_LOOPS[torch.optim.AdamW](settings)
    assert rounds_once(loop, dtypes, settings)

    def twice(of: Any, gradients: Any, now: Any) -> None:
        loop(of, gradients, now)
        of[0]["param"].mul_(1.01).mul_(0.99)

    assert not rounds_once(twice, dtypes, settings)


def region_of(placed: StepGraph, task: str) -> str:
    calls = region_calls(placed.module.graph)
    return next(str(call.region.target) for _, call in calls if call.launch.task == task)


def test_a_parameter_that_is_not_only_worked_on_element_by_element_is_not_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A norm over the new parameter needs all of it."""
    monkeypatch.setattr(captured_kernels, "CHUNK_ELEMENTS", 8)
    optimizer = torch.optim.RMSprop((weight := nn.Parameter(torch.ones(4, 8)),))

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        (x @ weight).square().sum().backward()
        optimizer.step()
        with torch.no_grad():
            weight.div_(weight.norm())

    compiled = cotrain(policy="zero-offload")(step)
    compiled(torch.randn(2, 4))
    (kernel,) = host_kernels(cotrain_compile.inspect(compiled).graph, "fused").values()
    assert isinstance(kernel, CapturedKernel)
    torch.testing.assert_close(weight.norm().item(), 1.0)


def test_every_setting_of_a_fused_optimizer_keeps_its_loop() -> None:
    """What torch's own implementation computes is what the loop's rule says."""
    settings: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
        (torch.optim.AdamW, {"capturable": True}),
        (torch.optim.Adam, {"capturable": True, "amsgrad": True, "weight_decay": 0.1}),
        (torch.optim.AdamW, {"maximize": True, "amsgrad": True, "fused": True}),
        (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.1, "maximize": True}),
        (torch.optim.SGD, {"weight_decay": 0.1}),
        (torch.optim.Adagrad, {"lr_decay": 0.1, "weight_decay": 0.1, "maximize": True}),
    ]
    model = nn.ParameterList(nn.Parameter(torch.randn(4, 6)) for _ in settings)
    optimizers = [
        maker([param], lr=0.1, **kept)  # type: ignore[call-arg]
        for param, (maker, kept) in zip(model, settings, strict=True)
    ]

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return torch.stack([(x @ param.t()).square().mean() for param in model.parameters()]).sum()

    compiled = cotrain(policy="zero-offload")(make_step(model, optimizers, loss))
    for _ in range(2):  # with dampening, the first step of SGD is another one
        compiled(torch.randn(8, 6))
    kernels = host_kernels(cotrain_compile.inspect(compiled).graph, "fused")
    assert len(kernels) == len(settings)
    assert all(isinstance(kernel, FusedKernel) for kernel in kernels.values())
