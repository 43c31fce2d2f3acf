"""Kernel strides: results lie in memory as the kernels of the CPU make them, also in the trace.

What Inductor compiles lays its results out as the trace says; what it calls in ATen does not.
In: a call in fake tensors and what fake tensors make of it. Out: the same values, whose strides are
those of the kernel. A trace decides by strides whether a `view` shows memory or has to copy it, and
so do the user's own lines; corrected afterwards, they would have decided otherwise. So this is done
while the step is traced. Which ops differ is found by `test_kernel_strides.py`, which runs the ops
of training over inputs in many layouts. There are three kinds:

- `_PLAIN`: the kernel makes a contiguous result, whatever it is given.
- `_AS_SUGGESTED`: the result is contiguous, or channels last where an argument is.
- `_AS_SUMS`: the kernel lays the result out as the sum of two arguments.

Private torch API used: `FakeTensorMode.dispatch`, `torch._prims_common.suggest_memory_format`.
Reason: a fake kernel of torch's own cannot be registered again. Tried on torch 2.11.0 and
2.13.0.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten

# Which results.
_PLAIN: Mapping[object, Sequence[int]] = {
    aten._log_softmax_backward_data.default: (0,),
    aten.log_sigmoid_forward.default: (0, 1),
    aten.native_layer_norm_backward.default: (0, 1, 2),
    aten.huber_loss_backward.default: (0,),
    aten.mse_loss_backward.default: (0,),
    aten.pow.Scalar: (0,),
    aten.smooth_l1_loss_backward.default: (0,),
}
# By the position of which argument the first result is laid out.
_AS_SUGGESTED: Mapping[object, int] = {
    aten.native_batch_norm.default: 0,
    aten._native_batch_norm_legit.default: 0,
    aten._native_batch_norm_legit.no_stats: 0,
    aten._native_batch_norm_legit_functional.default: 0,
    aten._batch_norm_with_update.default: 0,
    aten._batch_norm_with_update_functional.default: 0,
    aten._batch_norm_no_update.default: 0,
    aten.native_batch_norm_backward.default: 1,
    aten.batch_norm_backward.default: 1,
    aten.reflection_pad2d.default: 0,  # torch 2.11
    aten.replication_pad2d.default: 0,  # torch 2.11
    aten.reflection_pad3d.default: 0,
    aten.replication_pad3d.default: 0,
    aten.reflection_pad2d_backward.default: 1,
    aten.reflection_pad3d_backward.default: 1,
    aten.replication_pad2d_backward.default: 1,
    aten.replication_pad3d_backward.default: 1,
    aten.channel_shuffle.default: 0,
    aten.max_unpool2d.default: 0,
}
# By the positions of the two arguments.
_AS_SUMS: Mapping[object, tuple[int, int]] = {
    aten.copysign.Tensor: (0, 1),
    aten.div.Tensor_mode: (0, 1),
    aten.elu_backward.default: (0, 1),
    aten.floor_divide.default: (0, 1),
    aten.hardsigmoid_backward.default: (0, 1),
    aten.hardswish_backward.default: (0, 1),
    aten.hardtanh_backward.default: (0, 1),
    aten.logit_backward.default: (0, 1),
    aten.native_dropout_backward.default: (0, 1),
    aten.softplus_backward.default: (0, 1),
    aten.xlogy.Tensor: (0, 1),
    # In training; else it is a leaky ReLU's, whose fake kernel does as the kernel does.
    aten.rrelu_with_noise_backward.default: (2, 0),
}
_LEAKY = aten.rrelu_with_noise_backward.default  # its sixth argument: whether in training
DIFFERENT = {*_PLAIN, *_AS_SUGGESTED, *_AS_SUMS}


@contextmanager
def strides_of_kernels() -> Iterator[None]:
    """Within it, fake tensors on the CPU have the strides that kernels make."""
    dispatch = FakeTensorMode.dispatch
    with mock.patch.object(FakeTensorMode, "dispatch", _corrected(dispatch)):
        yield


def _corrected(dispatch: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(dispatch)
    def dispatch_corrected(
        self: FakeTensorMode, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        value = dispatch(self, func, types, args, kwargs or {})
        if func not in DIFFERENT:
            return value
        with self:
            return _as_kernels_do(func, args, value)

    return dispatch_corrected


def _as_kernels_do(func: Any, args: Sequence[Any], value: Any) -> Any:
    if any(leaf.device.type != "cpu" for leaf in _tensors(value)):
        return value
    if func in _AS_SUMS:
        if func is _LEAKY and not args[5]:
            return value
        first, second = (args[position] for position in _AS_SUMS[func])
        return _laid_out(value, torch.add(first, second).stride())
    if func in _PLAIN:
        several = value if isinstance(value, tuple) else (value,)
        made = [
            _in_format(item, torch.contiguous_format) if position in _PLAIN[func] else item
            for position, item in enumerate(several)
        ]
        return tuple(made) if isinstance(value, tuple) else made[0]
    memory_format = suggest_memory_format(args[_AS_SUGGESTED[func]])
    if not isinstance(value, tuple):
        return _in_format(value, memory_format)
    return (_in_format(value[0], memory_format), *value[1:])


def _in_format(value: Any, memory_format: torch.memory_format) -> Any:
    if not isinstance(value, torch.Tensor) or value.is_contiguous(memory_format=memory_format):
        return value
    return torch.empty_like(value, memory_format=memory_format)


def _laid_out(value: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    if value.stride() == strides:
        return value
    return torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
