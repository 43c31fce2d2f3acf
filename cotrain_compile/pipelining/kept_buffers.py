"""Kept buffers: what a module counts and averages, as it was before a run that is not to count."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def kept_buffers(module: nn.Module) -> Iterator[None]:
    """Give the buffers of `module` the values again that they have at the beginning."""
    before = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)
