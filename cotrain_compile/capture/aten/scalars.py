"""Scalars: what changes from step to step is an input, and ops of lists are ops of their items.

Scalar factors of fused ops (`alpha=`, `value=`) as ops of their own, where they change.

A learning rate that a scheduler changes is an input of the graph. torch carries such a float as a
tensor through plain arithmetic; where it is an op's keyword, as in `add(p, g, alpha=-lr)`, torch
bakes it in and compiles again for every new value. Written out, the op rounds once more.

`_foreach_*` ops as one op per tensor: a placement needs each parameter's update on its own.

Python floats that change from step to step: what the step reads is an input, what it writes a
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

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx
from torch._functorch._aot_autograd import graph_compile
from torch.utils._sympy.reference import TensorReferenceAnalysis

aten = torch.ops.aten

Scalar = float | torch.SymFloat


def scalar_decompositions() -> dict[Any, Callable[..., Any]]:
    """For each op with a scalar factor: the same by plain arithmetic if the factor is an input."""
    table: dict[Any, Callable[..., Any]] = {
        aten.add.Tensor: _add,
        aten.sub.Tensor: _sub,
        aten.addcmul.default: _addcmul,
        aten.addcdiv.default: _addcdiv,
        aten.lerp.Scalar: _lerp,
        aten.pow.Scalar: _pow,
    }
    if hasattr(torch.ops.prims, "fma"):  # what torch from 2.12 on makes of `addcmul(value=)`
        table[torch.ops.prims.fma.default] = _fma
    return table


def _add(x: Tensor, y: Tensor, *, alpha: Scalar = 1) -> Any:
    return _written_out(lambda x, y: x + y * alpha, alpha, x, y)


def _sub(x: Tensor, y: Tensor, *, alpha: Scalar = 1) -> Any:
    return _written_out(lambda x, y: x - y * alpha, alpha, x, y)


def _addcmul(x: Tensor, a: Tensor, b: Tensor, *, value: Scalar = 1) -> Any:
    return _written_out(lambda x, a, b: x + a * value * b, value, x, a, b)


def _addcdiv(x: Tensor, a: Tensor, b: Tensor, *, value: Scalar = 1) -> Any:
    return _written_out(lambda x, a, b: x + a * value / b, value, x, a, b)


def _lerp(start: Tensor, end: Tensor, weight: Scalar) -> Any:
    return _written_out(lambda x, y: x + (y - x) * weight, weight, start, end)


def _pow(base: Scalar, exponent: Tensor) -> Any:
    if not isinstance(base, torch.SymFloat):
        return NotImplemented
    dtype = torch.result_type(exponent, 1.0)
    zero: Any = torch.zeros((), dtype=dtype, device=exponent.device)
    return torch.pow(zero + base, exponent)


def _fma(x: Tensor, factor: Scalar | Tensor, y: Tensor) -> Any:
    if not isinstance(factor, torch.SymFloat):
        return NotImplemented
    return _written_out(lambda x, y: x * factor + y, factor, x, y)


def _written_out(compute: Callable[..., Tensor], factor: Scalar, *tensors: Tensor) -> Any:
    """`compute(*tensors)` in the precision of ATen's kernels: at least float32 inside an op."""
    if not isinstance(factor, torch.SymFloat):
        return NotImplemented
    dtype = functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
    inside = torch.promote_types(dtype, torch.float32)
    return compute(*(tensor.to(inside) for tensor in tensors)).to(dtype)


# Foreach ops whose single-tensor op has another name.
_OTHER_NAMES = {"norm": "linalg_vector_norm"}


@cache
def foreach_decompositions() -> dict[Any, Callable[..., Any]]:
    """A decomposition for every functional `aten._foreach_*` overload that maps over its lists."""
    table: dict[Any, Callable[..., Any]] = {}
    for name in dir(aten):
        base = name.removeprefix("_foreach_")
        if base == name or base.endswith("_"):
            continue
        single = getattr(aten, _OTHER_NAMES.get(base, base), None)
        packet = getattr(aten, name)
        if single is None:
            continue
        for overload in packet.overloads():
            op = getattr(packet, overload)
            if not op._schema.is_mutable and "out" not in overload:
                table[op] = _map_over_lists(single)
    return table


def _map_over_lists(single: Callable[..., Any]) -> Callable[..., list[Any]]:
    def decomposed(first: list[torch.Tensor], *args: Any, **kwargs: Any) -> list[Any]:
        def pick(value: Any, index: int) -> Any:
            return value[index] if isinstance(value, list | tuple) else value

        return [
            single(
                tensor,
                *(pick(arg, i) for arg in args),
                **{key: pick(value, i) for key, value in kwargs.items()},
            )
            for i, tensor in enumerate(first)
        ]

    return decomposed


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
