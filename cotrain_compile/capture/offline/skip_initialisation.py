"""Skip initialisation: a model is built without values, so there is nothing to fill it with.

Some of torch's functions look at the values they have drawn (`trunc_normal_` draws again what lies
outside), which fake tensors have not. A context in which those leave their tensor as it is.

Private torch API used: the functions of `torch.nn.init` named `_no_grad_...`, which do the work of
the public ones, also of those that a library has kept by another name. Tried on torch 2.13.0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch


@contextmanager
def skip_initialisation(would_draw: Callable[[torch.Tensor], object]) -> Iterator[None]:
    """Within it `torch.nn.init` draws no values; `would_draw` is told of tensors it would fill."""

    def as_it_is(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        would_draw(tensor)
        return tensor

    with ExitStack() as patches:
        for name in [name for name in vars(torch.nn.init) if name.startswith("_no_grad_")]:
            patches.enter_context(mock.patch.object(torch.nn.init, name, as_it_is))
        yield
