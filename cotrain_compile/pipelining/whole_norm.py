"""The norm of a whole model's gradients, of which each rank of a pipeline has a part.

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
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad

from cotrain_compile.errors import DistributeError

_of_stages: weakref.WeakSet[nn.Parameter] = weakref.WeakSet()


def total_norm(
    gradients: Sequence[torch.Tensor],
    norm_type: float,
    of_ranks: Callable[[float], Sequence[float]],
) -> torch.Tensor:
    """The norm of `gradients` and of those of all other ranks, the same on each of them.

    `of_ranks` exchanges one number of each rank.
    """
    norms = [torch.linalg.vector_norm(gradient, norm_type) for gradient in gradients]
    own = torch.linalg.vector_norm(torch.stack(norms), norm_type) if norms else torch.zeros(())
    found = torch.tensor(of_ranks(float(own)), dtype=torch.float64)
    whole: torch.Tensor = torch.linalg.vector_norm(found, norm_type).to(own)
    return whole


def refuse_norms_of_parts(parameters: Iterable[nn.Parameter]) -> None:
    """From here on torch's functions refuse to take the norm of the gradients of `parameters`."""
    _of_stages.update(parameters)
    _put_in_place()


@functools.cache
def _put_in_place() -> None:
    for cell in getattr(getattr(clip_grad, "_get_total_norm", None), "__closure__", None) or ():
        if callable(cell.cell_contents):
            cell.cell_contents = _refusing(cell.cell_contents)


def _refusing(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def norm(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # of a step, which has all of its model
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
