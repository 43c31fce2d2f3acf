"""CalledStep: the step of a call, told apart from others that run the same code.

It is what `torch.compile` was called with, what the function closes over, and the object that it is
a method of. Dynamo tells code alone apart.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch

# What a function closes over: "object" or "cell", and its id.
FrameObjects = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class CalledStep:
    """The step of a call: two that one function has made, or two objects have, are two."""

    code: CodeType
    compiler_fn: object
    objects: FrameObjects
    owner: weakref.ref[Any] | None

    def is_same(self, other: CalledStep) -> bool:
        """Whether both are of one step, which is still there."""
        if self.compiler_fn is not other.compiler_fn or self.objects != other.objects:
            return False
        if self.owner is None or other.owner is None:
            return self.owner is other.owner
        return self.owner() is other.owner()


def called_step(
    code: CodeType, compiler_fn: object, objects: FrameObjects, values: Mapping[str, Any]
) -> CalledStep:
    """The step of a frame with these local `values`."""
    return CalledStep(code, compiler_fn, objects, _owner(code, values))


def _owner(code: CodeType, values: Mapping[str, Any]) -> weakref.ref[Any] | None:
    """What the code is a method of, or None."""
    first = values.get(code.co_varnames[0]) if code.co_argcount else None
    if isinstance(first, torch.Tensor) or not hasattr(type(first), code.co_name):
        return None
    try:
        return weakref.ref(first)
    except TypeError:  # of a class that allows none
        return None
