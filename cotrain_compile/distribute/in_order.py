"""In order: exchanges that a backward begins, in one order on all ranks.

Autograd makes gradients in an order of its own, and ranks have to issue their exchanges alike: each
waits for its own gradients, and for the exchange before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch


@contextmanager
def calls_in_order(
    groups: Sequence[Sequence[torch.Tensor]], begin_next: Callable[[], None]
) -> Iterator[None]:
    """Within it, `begin_next` is called for each of `groups` of parameters, one after the other.

    It is when a backward has made the gradients of the group and of those before it; not for those
    whose gradients it does not make.
    """
    missing = [{id(param) for param in group} for group in groups]
    begun = 0

    def note(param: torch.Tensor) -> None:
        nonlocal begun
        for group in missing:
            group.discard(id(param))
        while begun < len(missing) and not missing[begun]:
            begun += 1
            begin_next()

    params = dict.fromkeys(param for group in groups for param in group)
    handles = [param.register_post_accumulate_grad_hook(note) for param in params]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
