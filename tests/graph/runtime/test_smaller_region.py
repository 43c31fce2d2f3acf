"""A host region on fewer elements: the same ops, laid out alike, or none."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import cotrain_compile
from cotrain_compile.runtime.host import kernels, trial
from cotrain_compile.runtime.host.smaller_region import MOST_ELEMENTS, smaller_region


def region_of(ops: Callable[..., object], *inputs: Tensor) -> fx.GraphModule:
    """What a host region is: the ops of `ops`, with what each node is noted on it."""
    return make_fx(ops)(*inputs)


def shapes(region: fx.GraphModule) -> list[tuple[int, ...]]:
    return [tuple(node.meta["val"].shape) for node in region.graph.find_nodes(op="placeholder")]


def targets(region: fx.GraphModule) -> list[object]:
    return [node.target for node in region.graph.nodes if node.op == "call_function"]


def decayed(param: Tensor, gradient: Tensor, state: Tensor, rate: Tensor) -> None:
    new = state.mul(0.9).add(gradient.t().to(torch.float32))
    state.copy_(new)
    param.copy_(param - rate * new)


def flat(param: Tensor, gradient: Tensor) -> None:
    """The gradient comes as a row, and is made what the parameter is."""
    param.copy_(param - gradient.view(param.shape) - torch.zeros(param.shape))


def in_a_bucket(param: Tensor, bucket: Tensor) -> None:
    param.copy_(param - bucket[5 : 5 + param.numel()].view(param.shape))


def test_all_sizes_are_small_and_those_that_differ_still_do() -> None:
    gradient = torch.randn(600, 1000, dtype=torch.bfloat16)
    large = torch.randn(1000, 600)
    region = region_of(decayed, large, gradient, large.clone(), torch.tensor(0.1))
    small = smaller_region(region)
    assert small is not None
    rows, columns = shapes(small)[0]
    assert rows != columns
    assert rows * columns <= MOST_ELEMENTS
    assert shapes(small) == [(rows, columns), (columns, rows), (rows, columns), ()]
    assert targets(small) == targets(region)
    dtypes = [node.meta["val"].dtype for node in small.graph.find_nodes(op="placeholder")]
    assert dtypes[:2] == [torch.float32, torch.bfloat16]


def test_sizes_that_ops_name_are_small_too() -> None:
    region = region_of(flat, torch.randn(800, 3, 500), torch.randn(800 * 3 * 500))
    small = smaller_region(region)
    assert small is not None
    param, gradient = shapes(small)
    assert param[1] == 3
    assert gradient == (math.prod(param),)
    assert math.prod(param) <= MOST_ELEMENTS
    given = [torch.randn(shape) for shape in (param, gradient)]
    expected = given[0] - given[1].view(param)
    small(*given)
    torch.testing.assert_close(given[0], expected, rtol=0, atol=0)


def test_dimensions_lie_in_memory_as_they_did() -> None:
    weight = torch.randn(300, 200, 3, 3).to(memory_format=torch.channels_last)
    region = region_of(lambda param, gradient: param.copy_(param - gradient), weight, weight)
    small = smaller_region(region)
    assert small is not None
    for node in small.graph.find_nodes(op="placeholder"):
        assert node.meta["val"].is_contiguous(memory_format=torch.channels_last)


def test_what_names_a_place_in_a_bucket_has_none() -> None:
    region = region_of(in_a_bucket, torch.randn(300, 400), torch.randn(300 * 400 + 77))
    assert smaller_region(region) is None


def test_a_region_of_few_elements_is_its_own() -> None:
    region = region_of(flat, torch.randn(8, 4), torch.randn(32))
    assert smaller_region(region) is region


def test_no_trial_takes_what_a_large_parameter_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials come before the first step, and no budget counts what they take."""
    tried: list[int] = []
    agree = trial.agree

    def watched(region: fx.GraphModule, *kernel: object, **how: object) -> bool:
        tried.extend(math.prod(shape) for shape in shapes(region))
        return bool(agree(region, *kernel, **how))  # type: ignore[arg-type]

    monkeypatch.setattr(kernels, "agree", watched)
    model = nn.Linear(520, 510)
    optimizer = torch.optim.AdamW(model.parameters())

    def step(x: Tensor) -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    placed = {"policy": "zero-offload", "memory_budget": "64MiB", "machine": "rtx4090"}
    options: dict[str, Any] = {**placed, "plan_cache": False}
    compiled = torch.compile(step, backend="cotrain", options=options)
    compiled(torch.randn(2, 520))
    assert cotrain_compile.inspect(compiled).plan.placement.updates
    assert max(tried) in range(MOST_ELEMENTS // 2, MOST_ELEMENTS + 1)
