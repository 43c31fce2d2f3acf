"""Pretended ranks: a step of many ranks is traced in one process, which exchanges nothing.

Private torch API used: `torch.testing._internal.distributed.fake_pg`, what the constructor of
`DistributedDataParallel` exchanges, and `_disable_current_modes`. Reason: a trace has tensors
without values, of which there is nothing to compare or to send; but a mesh of devices is made of
the numbers in a tensor. Tried on torch 2.13.0.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch.distributed import device_mesh
from torch.nn.parallel import distributed as of_ddp
from torch.utils._python_dispatch import _disable_current_modes

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
        with mock.patch.multiple(of_ddp, **instead), _meshes_with_values():
            yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _meshes_with_values() -> Iterator[None]:
    """Within it, meshes are made of tensors with values, by whichever name of what makes them."""
    real = device_mesh.init_device_mesh
    with ExitStack() as stack:
        for module in list(sys.modules.values()):
            if getattr(module, "__dict__", {}).get(real.__name__) is real:
                made = mock.patch.object(module, real.__name__, _with_values(real))
                stack.enter_context(made)
        init = _with_values(device_mesh.DeviceMesh.__init__)
        stack.enter_context(mock.patch.object(device_mesh.DeviceMesh, "__init__", init))
        yield


def _with_values(make: Callable[..., Any]) -> Callable[..., Any]:
    """`make` with tensors that have values, whatever is traced around it."""

    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return make(*args, **kwargs)

    return made


def _nothing(*args: Any, **kwargs: Any) -> None:
    """In place of an exchange."""
