"""How near two runs are: by the largest element of each tensor, however small that is.

An absolute tolerance takes second moments of 1e-9 for zeros. In: what two runs leave. Out: nothing
where each tensor is near, else an `AssertionError` that names the one that is not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path


def gap(a: Tensor, b: Tensor) -> float:
    """The largest difference of two elements.

    Infinite where one is a number and the other is not, or is another infinity.
    """
    a, b = a.detach().double(), b.detach().double()
    differ = (a != b) & ~(a.isnan() & b.isnan())
    if not differ.any():
        return 0.0
    if not (a[differ].isfinite() & b[differ].isfinite()).all():
        return math.inf
    return float((a - b)[differ].abs().max())


def magnitude(a: Tensor) -> float:
    """The largest element that is a number, without its sign; 0 where there is none."""
    finite = a.detach().double()[a.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def relative_gap(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """The largest `gap` of all tensors, each relative to the `magnitude` of its expected one."""
    assert found.keys() == expected.keys()
    return max(_relative(gap(value, found[name]), value) for name, value in expected.items())


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have one dtype and the same bits."""
    return a.dtype == b.dtype and torch.equal(_bits(a), _bits(b))


def as_tensor(value: Any) -> Tensor:
    """A number of Python's is as wide as there."""
    if isinstance(value, float):
        return torch.tensor(value, dtype=torch.float64)
    return torch.as_tensor(value)


def assert_near(found: Any, expected: Any, relative: float, smallest: float = 0.0) -> None:
    """Each tensor and number of `found` is within `relative` of the largest of its `expected`.

    Whole numbers and truth values are the same. `smallest` is how far roundings alone lead a tensor
    whose exact value is zero.
    """
    found_leaves, found_tree = tree_flatten_with_path(found)
    expected_leaves, tree = tree_flatten_with_path(expected)
    assert found_tree == tree
    for (path, ours), (_, theirs) in zip(found_leaves, expected_leaves, strict=True):
        if not isinstance(theirs, Tensor | float):
            assert ours == theirs, f"{keystr(path)} is {ours}, not {theirs}"
            continue
        a, b = as_tensor(theirs), as_tensor(ours)
        assert (a.dtype, a.shape) == (b.dtype, b.shape), keystr(path)
        if not a.is_floating_point():
            assert same_bits(a, b), f"{keystr(path)} differs"
            continue
        apart, size = gap(a, b), magnitude(a)
        assert apart <= max(relative * size, smallest), (
            f"{keystr(path)} is {apart:.2g} apart, its largest element is {size:.2g}"
        )


def _relative(apart: float, expected: Tensor) -> float:
    if not apart:
        return 0.0
    largest = magnitude(expected)
    return apart / largest if largest else math.inf


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)
