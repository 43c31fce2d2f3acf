"""Experts: of a layer that has several each rank has some, and tokens go where their expert is.

In: a module of experts, whose parameters have one row for each, and which maps rows of tokens
`(experts, tokens, width)` to as many, those of an expert by its own parameters. It does so for the
experts of its rank then, and for the tokens of all ranks (GShard: Lepikhin et al., ICLR 2021).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from cotrain_compile.distribute.ddp import take_mean
from cotrain_compile.errors import DistributeError


class ExpertParallel(ParallelStyle):
    """The style of a module of experts, beside torch's.

    `module(rows)` is as before for rows of all experts. Its parameters are DTensors, whose
    gradients are sums over the losses of all ranks.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Raises `DistributeError` where the parameters are not one row for each expert."""
        ranks = device_mesh.size()
        counts = {len(param) if param.dim() else 0 for param in module.parameters(recurse=False)}
        is_nested = any([*child.parameters()] for child in module.children())
        if is_nested or len(counts) != 1 or min(counts) % ranks or not min(counts):
            within = ", and more in modules within it" if is_nested else ""
            raise DistributeError(
                f"{type(module).__name__} is to be divided by experts over {ranks} ranks, and has "
                f"parameters of {sorted(counts)} rows{within}; have one parameter for each matrix, "
                "in the module itself, with a row for each expert, of which each rank gets as many"
            )
        for name, param in module._parameters.items():
            if param is not None:
                part = distribute_tensor(param.detach(), device_mesh, [Shard(0)])
                module.register_parameter(name, nn.Parameter(part, param.requires_grad))
        module.__class__ = _dispatching(module, str(device_mesh.get_group().group_name), ranks)
        return module


def take_means(params: Iterable[torch.Tensor], group_name: str, ranks: int) -> None:
    """Make the gradients of `params` means over the losses of all ranks, of experts and others."""
    for param in params:
        if param.grad is not None and isinstance(param.grad, DTensor):
            with torch.no_grad():
                param.grad.mul_(1.0 / ranks)
        elif param.grad is not None:
            take_mean(param, group_name, ranks)


def _dispatching(module: nn.Module, group_name: str, ranks: int) -> type[nn.Module]:
    """The class of `module`, whose forward exchanges rows and works on this rank's parts."""
    base = type(module)
    names = [name for name, param in module._parameters.items() if param is not None]
    members: dict[str, Any] = {name: _own_part(name) for name in names}
    members["forward"] = _exchanging(base.forward, group_name, ranks)
    members["__module__"], members["__qualname__"] = base.__module__, base.__qualname__
    return type(base.__name__, (base,), members)


def _own_part(name: str) -> property:
    def read(module: nn.Module) -> Any:
        param = module._parameters[name]
        return param.to_local() if isinstance(param, DTensor) else param

    return property(read)


def _exchanging(
    forward: Callable[..., torch.Tensor], group_name: str, ranks: int
) -> Callable[..., torch.Tensor]:
    @functools.wraps(forward)
    def run(self: nn.Module, rows: torch.Tensor) -> torch.Tensor:
        # By owner of the expert, then by rank whose tokens they are, and back.
        received = _exchange(rows, group_name, ranks).unflatten(0, (ranks, -1))
        made = forward(self, received.transpose(0, 1).flatten(1, 2))
        back = made.unflatten(1, (ranks, -1)).transpose(0, 1).flatten(0, 1)
        return _exchange(back, group_name, ranks)

    return run


def _exchange(rows: torch.Tensor, group_name: str, ranks: int) -> torch.Tensor:
    """Equal parts of `rows` to all ranks, and theirs from them."""
    splits = [len(rows) // ranks] * ranks
    sent = torch.ops._c10d_functional.all_to_all_single(
        rows.contiguous(), splits, splits, group_name
    )
    found: torch.Tensor = torch.ops._c10d_functional.wait_tensor(sent)
    return found
