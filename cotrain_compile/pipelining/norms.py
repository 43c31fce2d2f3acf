"""Norms: torch's functions refuse to take that of the gradients of some stages alone.

torch's functions take the norm of what they are given: of a rank's own part it is another one than
without the pipeline, and each stage would be clipped by its own. They are refused by name.

Private torch API used: `torch.nn.utils.clip_grad._get_total_norm`, and that it is a closure over
the function that does the work. Reason: every function of torch's that takes such a norm calls it,
and so do names that a script has imported before. Tried on torch 2.13.0; where a torch has no such
function, nothing is refused.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad

from cotrain_compile.errors import DistributeError

_of_stages: weakref.WeakSet[nn.Parameter] = weakref.WeakSet()
_takes = False


def refuse_norms_of_parts(parameters: Iterable[nn.Parameter]) -> None:
    """From here on torch's functions refuse to take the norm of the gradients of `parameters`."""
    _of_stages.update(parameters)
    _put_in_place()


@contextmanager
def torch_takes_norms() -> Iterator[None]:
    """Within it they take it: of what a pipeline adds up over its stages."""
    global _takes
    _takes = True
    try:
        yield
    finally:
        _takes = False


@functools.cache
def _put_in_place() -> None:
    for cell in getattr(getattr(clip_grad, "_get_total_norm", None), "__closure__", None) or ():
        if callable(cell.cell_contents):
            cell.cell_contents = _refusing(cell.cell_contents)


def _refusing(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def norm(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        # A step that is compiled has all of its model.
        if _takes or torch.compiler.is_compiling():
            return original(tensors, *args, **kwargs)
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        known = {id(param.grad) for param in _of_stages if param.grad is not None}
        if any(id(tensor) in known for tensor in tensors):
            raise DistributeError(
                "clip_grad_norm_ on a rank of a pipeline would clip by the norm of this rank's "
                "part alone, and every rank by another one; call clip_grad_norm(max_norm) of what "
                "pipeline() returned, on every rank: it takes the norm of the whole model"
            )
        return original(tensors, *args, **kwargs)

    return norm
