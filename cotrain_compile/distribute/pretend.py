"""Pretended ranks: a step of many ranks is traced in one process, which exchanges nothing.

Private torch API used: `torch.testing._internal.distributed.fake_pg`, and what the constructor of
`DistributedDataParallel` exchanges. Reason: a trace has tensors without values, of which there is
nothing to compare or to send. Tried on torch 2.13.0.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch.nn.parallel import distributed as of_ddp

from cotrain_compile.errors import DistributeError

_AT_CONSTRUCTION = ("_verify_param_shape_across_processes", "_sync_module_states")


@contextmanager
def pretended(ranks: int) -> Iterator[None]:
    """Within it, this process is the first of so many ranks, none of which exchanges anything.

    Raises `DistributeError` where it is one of several already.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore  # pulls in much of testing

    if dist.is_initialized():
        raise DistributeError(
            "ranks=... traces a step as one of so many ranks, but a process group is initialised "
            "already; leave ranks out, or trace in a process of its own"
        )
    instead: dict[str, Any] = dict.fromkeys(_AT_CONSTRUCTION, _nothing)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        with mock.patch.multiple(of_ddp, **instead):
            yield
    finally:
        dist.destroy_process_group()


def _nothing(*args: Any, **kwargs: Any) -> None:
    """In place of an exchange."""
