"""Compiled segments compute what ATen does where Inductor's own patterns do not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from cotrain_compile.backends.inductor import compile_graph as inductor

SCALED: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "decay added to a gradient": lambda a, b, c: torch.add(a @ b, c, alpha=0.05),
    "scaled product": lambda a, b, c: torch.add(c, a @ b, alpha=0.05),
    "views between": lambda a, b, c: torch.add((a @ b).t().t(), c, alpha=0.05),
}


@pytest.mark.parametrize("name", SCALED)
def test_a_scaled_sum_with_a_matrix_product_keeps_its_scale(name: str) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(4, 8), torch.randn(8, 8), torch.randn(4, 8)

    def total(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor]:
        return (SCALED[name](a, b, c),)

    graph = make_fx(total, tracing_mode="fake")(*inputs)
    fakes = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
    (found,) = inductor.compile_graph(graph, fakes, {})(list(inputs))
    torch.testing.assert_close(found, total(*inputs)[0])
