"""Floats that occur only within expressions, as a rate in `-lr`, stay inputs before torch 2.13.

torch's pass `tensorify_python_scalars` makes tensors of float inputs, and compiles again for every
value of those that it did not see in an op. Before 2.13 it sees `lr` in `x * lr` but not in
`x * -lr`. So each float input gets a multiplication of its own, which nobody reads and the pass
removes. What the pass cannot make a tensor of is still compiled for its value.

Private torch API used: `tensorify_python_scalars` in `_functorch._aot_autograd.graph_compile`.
Tried on torch 2.11.0; 2.13.0 and 2.15.0 need none of this.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch._functorch._aot_autograd import graph_compile

aten = torch.ops.aten

IS_NEEDED = torch.__version__ < "2.13"


@contextmanager
def floats_stay_inputs() -> Iterator[None]:
    """Within it, torch keeps a float input that an expression hides."""
    if not IS_NEEDED:
        yield
        return
    tensorify: Any = graph_compile.tensorify_python_scalars  # type: ignore[attr-defined]

    def with_inputs_in_sight(module: fx.GraphModule, *modes: Any) -> None:
        multiply_float_inputs(module.graph)
        tensorify(module, *modes)

    with mock.patch.object(graph_compile, "tensorify_python_scalars", with_inputs_in_sight):
        yield


def multiply_float_inputs(graph: fx.Graph) -> None:
    """For every number that `graph` takes out of an input, a product that nobody reads."""
    items = graph.find_nodes(op="call_function", target=aten._local_scalar_dense.default)
    for item in items:
        tensor = item.args[0]
        if tensor.meta["val"].dtype.is_floating_point:
            with graph.inserting_after(item):
                product = graph.call_function(aten.mul.Tensor, (tensor, item))
            product.meta["val"] = tensor.meta["val"]
