"""A process group whose other ranks are not there: its collectives return what they are given."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def ranks(count: int) -> Iterator[None]:
    """Within it, this process is rank 0 of `count`."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    try:
        yield
    finally:
        dist.destroy_process_group()
