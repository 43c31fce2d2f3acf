"""Python floats that change from step to step: what the step reads is an input, what it writes a
result, and neither is compiled for its value.

torch's pass `tensorify_python_scalars` makes tensors of float inputs, and compiles again for every
value of those that it did not see in an op of a tensor.

- Of a float that the step writes back (a running weight that an optimizer keeps in its settings),
  Dynamo returns `scalar_tensor(number)`, which the pass has no rule for. As `1 * number` it has.
- Before torch 2.13 the pass sees `lr` in `x * lr` but not in `x * -lr`. So each float input gets a
  multiplication of its own, which nobody reads and the pass removes.

What the pass cannot make a tensor of is still compiled for its value.

Private torch API used: `tensorify_python_scalars` in `_functorch._aot_autograd.graph_compile`.
Tried on torch 2.11.0, 2.13.0 and 2.15.0; floats that are written back on 2.13.0 alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch._functorch._aot_autograd import graph_compile
from torch.utils._sympy.reference import TensorReferenceAnalysis

aten = torch.ops.aten

INPUTS_ARE_HIDDEN = torch.__version__ < "2.13"


@contextmanager
def floats_stay_inputs() -> Iterator[None]:
    """Within it, torch keeps float inputs that an expression hides, and floats as results."""
    tensorify: Any = graph_compile.tensorify_python_scalars  # type: ignore[attr-defined]

    def with_floats_in_sight(module: fx.GraphModule, shapes: Any, fake_mode: Any) -> None:
        if INPUTS_ARE_HIDDEN:
            multiply_float_inputs(module.graph)
        multiply_float_results(module.graph, fake_mode)
        before = set(module.graph.nodes)
        tensorify(module, shapes, fake_mode)
        _annotate_as_users([node for node in module.graph.nodes if node not in before])

    with (
        mock.patch.object(graph_compile, "tensorify_python_scalars", with_floats_in_sight),
        mock.patch.object(TensorReferenceAnalysis, "int_truediv", staticmethod(_divide)),
    ):
        yield


def _annotate_as_users(nodes: Sequence[fx.Node]) -> None:
    """Annotate nodes that the pass has added as what reads them, where all of that agrees."""
    for node in reversed(nodes):
        notes = [user.meta.get("custom") for user in node.users]
        if notes and notes[0] and all(note == notes[0] for note in notes):
            node.meta["custom"] = notes[0]


def _divide(a: Any, b: Any) -> Any:
    """`a / b` of integers, as Python divides those that a float64 holds."""
    as_float = torch.ops.prims.convert_element_type.default
    return aten.div.Tensor(as_float(a, torch.float64), as_float(b, torch.float64))


def multiply_float_results(graph: fx.Graph, fake_mode: Any) -> None:
    """For every tensor that `graph` makes of a float expression, the product of 1 and that.

    Dynamo returns such a tensor for each float that the step writes.
    """
    for made in graph.find_nodes(op="call_function", target=aten.scalar_tensor.default):
        number = made.args[0]
        if isinstance(number, fx.Node) and isinstance(number.meta["val"], torch.SymFloat):
            with graph.inserting_before(made), fake_mode:
                one = graph.call_function(made.target, (1.0,), made.kwargs)
                product = graph.call_function(aten.mul.Tensor, (one, number))
                one.meta["val"] = aten.scalar_tensor.default(1.0, **made.kwargs)
                product.meta = made.meta
            made.replace_all_uses_with(product)
            graph.erase_node(made)


def multiply_float_inputs(graph: fx.Graph) -> None:
    """For every number that `graph` takes out of an input, a product that nobody reads."""
    items = graph.find_nodes(op="call_function", target=aten._local_scalar_dense.default)
    for item in items:
        tensor = item.args[0]
        if tensor.meta["val"].dtype.is_floating_point:
            with graph.inserting_after(item):
                product = graph.call_function(aten.mul.Tensor, (tensor, item))
            product.meta["val"] = tensor.meta["val"]
