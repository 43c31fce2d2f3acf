"""Known values: what a model's constructor reads of small constants, under fake tensors.

Rates of stochastic depth are often `[x.item() for x in torch.linspace(0, rate, depth)]`. Fake
tensors have no values, so those of small tensors that are made of constants are computed beside
them, on the CPU. What is drawn at random, or left as memory was, stays unknown.

Private torch API used: `fake_tensor.unset_fake_temporarily`. Reason: values are computed for real.
Tried on torch 2.13.0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

aten = torch.ops.aten

LARGEST = 4096  # elements whose values are computed
_HAVE_NO_VALUES = "empty"  # in the name of an op whose result is memory as it was


class KnownValues(TorchDispatchMode):
    """Within it, and within a fake mode, small tensors that are made of constants have values."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._values = WeakTensorKeyDictionary()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [v for v in tree_leaves((args, kwargs)) if isinstance(v, torch.Tensor)]
        known = _is_determined(func) and all(self._is_known(t) for t in tensors)
        if known and func is aten._local_scalar_dense.default:
            return self._computed(func, args, kwargs)
        made = func(*args, **kwargs)
        results = [value for value in tree_leaves(made) if isinstance(value, torch.Tensor)]
        if known and all(map(_is_small, results)):
            values = tree_leaves(self._computed(func, args, kwargs))
            values = [value for value in values if isinstance(value, torch.Tensor)]
            for result, value in zip(results, values, strict=True):
                self._values[result] = value
        elif func._schema.is_mutable:
            self.forget(*tensors)
        return made

    def forget(self, *tensors: torch.Tensor) -> None:
        """Know no values of these any more, nor of what shares their memory."""
        written = {tensor.untyped_storage()._cdata for tensor in tensors}
        for known in list(self._values):
            if known.untyped_storage()._cdata in written:
                del self._values[known]

    def _is_known(self, tensor: torch.Tensor) -> bool:
        return type(tensor) is torch.Tensor or tensor in self._values

    def _computed(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """What an op makes of values, on the CPU."""

        def value_of(tensor: torch.Tensor) -> torch.Tensor:
            value: torch.Tensor = self._values.get(tensor, tensor)
            return value

        asked = tree_map_only(torch.device, lambda _: torch.device("cpu"), (args, kwargs))
        real_args, real_kwargs = tree_map_only(torch.Tensor, value_of, asked)
        with unset_fake_temporarily(), torch.no_grad():
            return func(*real_args, **real_kwargs)


def _is_determined(func: Any) -> bool:
    """Whether what `func` makes hangs on its arguments alone."""
    return torch.Tag.nondeterministic_seeded not in func.tags and (
        _HAVE_NO_VALUES not in func._schema.name
    )


def _is_small(result: torch.Tensor) -> bool:
    return (
        result.device.type != "meta"
        and result.layout is torch.strided
        and all(isinstance(size, int) for size in result.shape)
        and result.numel() <= LARGEST
    )
