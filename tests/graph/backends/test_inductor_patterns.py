"""Compiled segments compute what ATen does where Inductor's own patterns do not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from cotrain_compile.backends.inductor import compile_graph as inductor
from cotrain_compile.capture.nodes.kernel_strides import strides_of_kernels

SCALED: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "decay added to a gradient": lambda a, b, c: torch.add(a @ b, c, alpha=0.05),
    "scaled product": lambda a, b, c: torch.add(c, a @ b, alpha=0.05),
    "views between": lambda a, b, c: torch.add((a @ b).t().t(), c, alpha=0.05),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if "decay" in n else pytest.mark.long) for n in SCALED]
)
def test_a_scaled_sum_with_a_matrix_product_keeps_its_scale(name: str) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(4, 8), torch.randn(8, 8), torch.randn(4, 8)

    def total(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor]:
        return (SCALED[name](a, b, c),)

    graph = make_fx(total, tracing_mode="fake")(*inputs)
    fakes = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
    (found,) = inductor.compile_graph(graph, fakes, {})(list(inputs))
    torch.testing.assert_close(found, total(*inputs)[0])


aten = torch.ops.aten


def _padded(x: Tensor) -> tuple[Tensor, ...]:
    volume = x.view(2, 2, 3, 4, 4).contiguous(memory_format=torch.channels_last_3d)
    wide = torch.nn.functional.pad(volume, (1,) * 6, mode="replicate")
    return wide, aten.replication_pad3d_backward(wide * 2, volume, (1,) * 6)


# Of a tensor whose last two dimensions lie in memory the other way round.
LAID_OUT: dict[str, Callable[[Tensor], tuple[Tensor, ...]]] = {
    "two results of a decomposition": aten.log_sigmoid_forward,
    "leaks and the noise": lambda x: aten.rrelu_with_noise_functional(x, x * 0, training=False),
    "kernels of ATen": _padded,
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if "ATen" in n else pytest.mark.long) for n in LAID_OUT]
)
def test_results_of_compiled_code_lie_in_memory_as_the_trace_says(name: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 8, 12).mT if name != "kernels of ATen" else torch.randn(2, 8, 12)
    with strides_of_kernels():
        graph = make_fx(lambda x: tuple(LAID_OUT[name](x)), tracing_mode="fake")(x)
    fakes = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
    (output,) = graph.graph.find_nodes(op="output")
    strides = tuple(result.meta["val"].stride() for result in output.args[0])
    code = inductor.compile_graph(graph, fakes, {}, strides)
    found, expected = code([x]), LAID_OUT[name](x)
    torch.testing.assert_close(tuple(found), tuple(expected))
    assert tuple(value.stride() for value in found) == strides
