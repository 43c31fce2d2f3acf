"""Scalar factors of fused ops (`alpha=`, `value=`) as ops of their own, where they change.

A learning rate that a scheduler changes is an input of the graph. torch carries such a float as a
tensor through plain arithmetic; where it is an op's keyword, as in `add(p, g, alpha=-lr)`, torch
bakes it in and compiles again for every new value. Written out, the op rounds once more.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

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
