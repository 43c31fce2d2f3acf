"""What a step does beside the optimizer is done on the host, too, whichever kernel runs there."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import cotrain_compile
from cotrain_compile.graph import StepGraph
from cotrain_compile.machine import MEMORIES
from cotrain_compile.runtime.host.fused_kernel import FusedKernel, HostKernel
from cotrain_compile.runtime.host.kernels import host_kernels
from cotrain_compile.runtime.meter import MemoryMeter
from cotrain_compile.runtime.task_nodes import region_calls
from tests.support.examples import examples
from tests.support.idioms import (
    EDITS_AFTER,
    EDITS_BEFORE,
    IDIOMS,
    OPTIMIZERS,
    Edit,
    Idiom,
    IdiomStep,
    in_turn,
)
from tests.support.steps import cotrain

STEPS = 4


@functools.cache
def trained(optimizer: str) -> tuple[IdiomStep, IdiomStep, StepGraph]:
    """All idioms, in eager and with updates on the host."""
    eager, ours = IdiomStep(IDIOMS, optimizer), IdiomStep(IDIOMS, optimizer)
    torch._dynamo.reset()
    compiled = cotrain(policy="zero-offload")(ours)
    torch.manual_seed(1)
    batches = [torch.randn(8, 6) for _ in range(STEPS)]
    for run in (eager, compiled):
        torch.manual_seed(2)
        for batch in batches:
            run(batch)
    return eager, ours, cotrain_compile.inspect(compiled).graph


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("idiom", IDIOMS)
def test_an_idiom_trains_as_in_eager(idiom: str, optimizer: str) -> None:
    eager, ours, _ = trained(optimizer)
    torch.testing.assert_close(ours.params[idiom], eager.params[idiom], rtol=1e-4, atol=1e-5)
    expected = eager.optimizer.state[eager.params[idiom]]
    found = ours.optimizer.state[ours.params[idiom]]
    assert found.keys() == expected.keys()
    for name, state in expected.items():
        torch.testing.assert_close(found[name], state, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_fused_loop_does_the_optimizers_part_where_nothing_stands_within_it(
    optimizer: str,
) -> None:
    _, ours, placed = trained(optimizer)
    kernels = host_kernels(placed, "fused")
    fused = {
        name
        for number, name in enumerate(ours.params)
        if isinstance(kernels[f"update.{number}"], FusedKernel)
    }
    assert fused == {name for name, idiom in IDIOMS.items() if idiom.is_fused}


def updated(kernel: HostKernel, inputs: Sequence[Any]) -> list[Any]:
    """What an update leaves of `inputs`; noise is drawn alike."""
    left = [value.clone() if isinstance(value, Tensor) else value for value in inputs]
    torch.manual_seed(3)
    with torch.no_grad():
        kernel(left, MemoryMeter(dict.fromkeys(MEMORIES, 1 << 30)))
    return left


def drawn(value: Any) -> Any:
    """A step count or coefficient of one element, else values of both signs."""
    if not isinstance(value, Tensor):
        return 1e-3
    return torch.full((), 3.0, dtype=value.dtype) if not value.dim() else torch.randn(value.shape)


def some(edits: Sequence[Edit]) -> st.SearchStrategy[list[Edit]]:
    return st.lists(st.sampled_from(edits), max_size=2)


@examples(3)
@given(
    st.lists(st.tuples(some(EDITS_BEFORE), some(EDITS_AFTER)), min_size=4, max_size=4),
    st.sampled_from(sorted(OPTIMIZERS)),
)
def test_random_edits_leave_what_the_captured_ops_do(edits: Any, optimizer: str) -> None:
    idioms = {
        str(number): Idiom(in_turn(before), in_turn(after))
        for number, (before, after) in enumerate(edits)
    }
    torch._dynamo.reset()
    compiled = cotrain(policy="zero-offload", host_kernels="captured")(IdiomStep(idioms, optimizer))
    compiled(torch.randn(8, 6))
    placed = cotrain_compile.inspect(compiled).graph
    fused, captured = (host_kernels(placed, choice) for choice in ("fused", "captured"))
    for _, call in region_calls(placed.module.graph):
        region = call.subgraph(placed.module)
        inputs = [drawn(node.meta["val"]) for node in region.graph.find_nodes(op="placeholder")]
        for position, node in enumerate(region.graph.find_nodes(op="placeholder")):
            item = placed.input_of_node.get(node.name)
            if item is not None and item.name.endswith(("exp_avg_sq", "sum")):
                inputs[position] = inputs[position].abs()
        found = updated(fused[call.launch.task], inputs)
        expected = updated(captured[call.launch.task], inputs)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, equal_nan=True)


def test_what_needs_the_old_weight_after_the_update_finds_it() -> None:
    """Half a step back: a loop would have overwritten the weight that it goes back to."""

    def trained(compile_with: Callable[[Any], Any]) -> tuple[Tensor, Any]:
        torch.manual_seed(0)
        weight = torch.nn.Parameter(torch.randn(4, 6))
        optimizer = torch.optim.AdamW([weight], lr=0.1)

        def step(x: Tensor) -> None:
            optimizer.zero_grad()
            (x @ weight).square().mean().backward()
            before = weight.detach().clone()
            optimizer.step()
            with torch.no_grad():
                weight.lerp_(before, 0.5)

        run = compile_with(step)
        for _ in range(3):
            run(torch.randn(8, 4))
        return weight.detach(), run

    expected, _ = trained(lambda step: step)
    found, compiled = trained(cotrain(policy="zero-offload"))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    kernels = host_kernels(cotrain_compile.inspect(compiled).graph, "fused")
    assert not any(isinstance(kernel, FusedKernel) for kernel in kernels.values())
