"""Offload and reload: the card is free for something else between two phases of a training.

In: a compiled step. `offload` takes what it keeps on the card between two calls to the host, as
before text is generated with another engine; `reload`, or its next call, brings it back.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from cotrain_compile.backends.lifecycle.compiled_step import CompiledStep
from cotrain_compile.entry.compiled import inspect, owners_of
from cotrain_compile.machine import Tier

# Of each step that was offloaded, which tensors: by identity, so that none is kept alive.
_offloaded: weakref.WeakKeyDictionary[CompiledStep, frozenset[int]] = weakref.WeakKeyDictionary()


def offload(step: Callable[..., Any], *, keep_parameters: bool = False) -> int:
    """Move parameters, buffers, gradients and optimizer states of a compiled step to the host.

    With `keep_parameters` only gradients and states, to go on with the model on the card. Returns
    the bytes that have left the card, which the allocator has given back to it; what libraries and
    compiled kernels hold stays. On the emulated device nothing moves, and 0 is returned.

    Raises `CotrainError` as `inspect` does, `HostMemoryError` where the host has no room: the next
    call then goes on as if nothing had been asked.
    """
    compiled = inspect(step)
    moved = compiled.rest_on(Tier.HOST, list(_kept(compiled, keep_parameters=keep_parameters)))
    _offloaded[compiled] = _offloaded.get(compiled, frozenset()) | frozenset(map(id, moved))
    return _nbytes(moved)


def reload(step: Callable[..., Any]) -> int:
    """Bring back what `offload` has moved, where it still belongs to the step; the bytes of it.

    Not needed before the next call of the step, which does so itself. Raises `CotrainError` as
    `inspect` does, and torch's out-of-memory error where the card has no room by now.
    """
    compiled = inspect(step)
    moved = _offloaded.pop(compiled, frozenset())
    back = [each for each in _kept(compiled, keep_parameters=False) if id(each) in moved]
    return _nbytes(compiled.rest_on(Tier.DEVICE, back))


def _nbytes(tensors: Iterable[torch.Tensor]) -> int:
    """Of the storages of `tensors`, each once."""
    storages = (each.untyped_storage() for each in tensors)
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def _kept(compiled: CompiledStep, *, keep_parameters: bool) -> Iterator[torch.Tensor]:
    """What the modules and optimizers of the step keep between two calls, each tensor once."""
    seen: set[int] = set()
    for each in _tensors(compiled, keep_parameters=keep_parameters):
        if id(each) not in seen:
            seen.add(id(each))
            yield each


def _tensors(compiled: CompiledStep, *, keep_parameters: bool) -> Iterator[torch.Tensor]:
    for owner in owners_of(compiled):
        if isinstance(owner, torch.nn.Module):
            parameters = list(owner.parameters(recurse=False))
            if not keep_parameters:
                yield from (*parameters, *owner.buffers(recurse=False))
            yield from (p.grad for p in parameters if p.grad is not None)
        else:
            for state in owner.state.values():
                yield from (each for each in state.values() if isinstance(each, torch.Tensor))
