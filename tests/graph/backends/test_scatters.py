"""Compiled segments compute what ATen does where a segment reads what it partition."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from cotrain_compile.backends.inductor import compile_graph as inductor
from cotrain_compile.backends.inductor import partition

aten = torch.ops.aten
ROWS, WIDTH = 6, 4

# What takes values and indices of one shape and leaves that shape: there is a loop for all of it.
SCATTERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "scatter": lambda g, i: torch.zeros_like(g).scatter(-1, i, g),
    "scatter_add": lambda g, i: torch.zeros_like(g).scatter_add(-1, i, g),
    "index_put": lambda g, i: torch.zeros_like(g).index_put((i[:, 0],), g, accumulate=True),
    "index_add": lambda g, i: torch.zeros_like(g).index_add(0, i[:, 0], g),
    "index_copy": lambda g, i: (2 * g).index_copy(0, i[:, 0].argsort(), g),
    "embedding": lambda g, i: aten.embedding_dense_backward(g, i[:, 0], ROWS, -1, False),
    "unfold": lambda g, i: aten.unfold_backward(g.view(ROWS, 2, 2), [ROWS, WIDTH], 1, 2, 2),
}
IN_EVERY_RUN = ("scatter",)


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in IN_EVERY_RUN else pytest.mark.long) for n in SCATTERS],
)
def test_what_is_scattered_is_read_when_it_is_all_there(name: str) -> None:
    def read(g: Tensor, index: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        total = g + SCATTERS[name](g, index)
        return total, total * mask

    torch.manual_seed(0)
    inputs = (
        torch.randn(ROWS, WIDTH),
        torch.randn(ROWS, WIDTH).argsort(-1),
        torch.arange(WIDTH) % 3 > 0,
    )
    graph = make_fx(read, tracing_mode="fake")(*inputs)
    fakes = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
    code = inductor.compile_graph(graph, fakes, {})
    torch.testing.assert_close(tuple(code(list(inputs))), read(*inputs))


def test_only_a_graph_that_reads_what_it_scatters_goes_without_fusion(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def scattered_last(g: Tensor, i: Tensor) -> Tensor:
        return (2 * g + 1).scatter(-1, i, g)

    def scattered_and_read(g: Tensor, i: Tensor) -> Tensor:
        return 2 * scattered_last(g, i)

    inputs = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH).argsort(-1)
    last, read = (make_fx(f)(*inputs).graph for f in (scattered_last, scattered_and_read))
    monkeypatch.setattr(partition, "ARE_FUSED", True)
    assert partition.settings_for(read) == partition.EACH_OP_ALONE
    assert partition.settings_for(last) == {}
    monkeypatch.setattr(partition, "ARE_FUSED", False)
    assert partition.settings_for(read) == {}
