"""Inputs that share memory, where the step writes it: which they are, and the way on.

AOTAutograd makes one input of them all, so that none has a home of its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

from cotrain_compile.dataflow import Role
from cotrain_compile.errors import CaptureError
from cotrain_compile.graph import StepInput

_FLAT = (
    "Let each have its own (p.grad = None before the first call; clip_grad_norm_ takes many "
    "tensors), or train the one flat buffer that they are parts of: torch.func.functional_call("
    "model, {name: flat[a:b].view(shape), ...}, inputs)"
)


def shared_memory(inputs: Sequence[StepInput], values: Sequence[object]) -> CaptureError:
    """The refusal of a step of which some `inputs`, with these `values`, share what it writes."""
    groups: dict[int, list[tuple[StepInput, torch.Tensor]]] = defaultdict(list)
    for item, value in zip(inputs, values, strict=True):
        if isinstance(value, torch.Tensor):
            groups[value.untyped_storage()._cdata].append((item, value))
    shared = [group for group in groups.values() if len(group) > 1]
    names = "; ".join(_listed([item.name for item, _ in group]) for group in shared)
    told = f"inputs of the step share memory that it writes: {names or 'parts of one buffer'}. "
    if shared and all(_is_batch(group) for group in shared):
        return CaptureError(told + "Pass in a .clone() of one of them")
    if shared and all(_is_tied(group) for group in shared):
        return CaptureError(
            told + "To tie parameters, have them be one: a.weight = b.weight, not "
            "a.weight.data = b.weight.data, and make the optimizer after that"
        )
    return CaptureError(told + _FLAT)


def _is_batch(group: Sequence[tuple[StepInput, torch.Tensor]]) -> bool:
    """Whether all but one of these that share memory are arguments, such as views of a batch."""
    return sum(item.role is not Role.BATCH for item, _ in group) <= 1


def _is_tied(group: Sequence[tuple[StepInput, torch.Tensor]]) -> bool:
    """Whether these are parameters that are the same memory from end to end."""
    places = {(value.data_ptr(), value.shape, value.stride()) for _, value in group}
    return len(places) == 1 and all(item.role is Role.PARAM for item, _ in group)


def _listed(names: Sequence[str]) -> str:
    first, more = names[:4], len(names) - 4
    return ", ".join(first) + (f" and {more} more" if more > 0 else "")
