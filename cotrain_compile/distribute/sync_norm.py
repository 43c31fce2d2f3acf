"""SyncBatchNorm: what a step traces in place of its forward, whose statistics are of all ranks.

torch's own forward has kernels for cards alone and drops ranks without rows by their values, which
no graph can hold. Here the ranks gather what each knows of its batch, as ops of the graph; the
backward of the gathering adds up what all ranks' losses say of these statistics.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd


def group_of(norm: nn.SyncBatchNorm) -> tuple[str, int]:
    """The name and the size of the process group over which `norm` takes its statistics."""
    group: Any = norm.process_group or torch.distributed.group.WORLD
    return str(group.group_name), int(group.size())


def takes_statistics(norm: nn.SyncBatchNorm) -> bool:
    """Whether its forward takes them from the batch, in place of the running ones."""
    return norm.training or norm.running_mean is None


def forward(self: Any, group_name: str, ranks: int, x: torch.Tensor) -> torch.Tensor:
    """`SyncBatchNorm.forward` on a batch of which every rank has some rows."""
    around = [dim for dim in range(x.dim()) if dim != 1]
    rows = x.numel() // x.size(1)
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    own = torch.cat(
        [
            wide.mean(around),
            wide.var(around, correction=0),
            torch.full((1,), float(rows), dtype=wide.dtype, device=wide.device),
        ]
    )
    name: Any = group_name  # a type of its own for checkers
    found = all_gather_tensor_autograd(own.unsqueeze(0), 0, name)
    means, variances, counts = found.split([x.size(1), x.size(1), 1], dim=1)
    total = counts.sum()
    share = counts / total
    mean = (share * means).sum(0)
    variance = (share * (variances + (means - mean) ** 2)).sum(0)
    if self.training and self.track_running_stats:
        with torch.no_grad():
            self.num_batches_tracked.add_(1)
            momentum = self.momentum
            if momentum is None:
                momentum = 1.0 / self.num_batches_tracked.float()
            unbiased = variance.detach() * (total / (total - 1))
            of_running = self.running_mean.dtype
            self.running_mean.lerp_(mean.detach().to(of_running), momentum)
            self.running_var.lerp_(unbiased.to(of_running), momentum)
    shape = [1, -1, *[1] * (x.dim() - 2)]
    normal = (wide - mean.view(shape)) * torch.rsqrt(variance + self.eps).view(shape)
    if self.affine:
        normal = normal * self.weight.view(shape) + self.bias.view(shape)
    result: torch.Tensor = normal.to(x.dtype)
    return result
