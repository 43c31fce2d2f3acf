"""Wrap: a model becomes what a layout says, on a mesh of all ranks.

Layers are split along `tensor` first, then what is left of each is sharded or replicated over the
other dimensions, as torch wants it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from cotrain_compile.cluster.model.layout import Layout
from cotrain_compile.distribute.ranks import require_dtensor_steps


def mesh_of(layout: Layout, device: torch.device) -> DeviceMesh:
    """A mesh of all ranks: the dimensions of `layout` that divide anything.

    Replicas of split layers are those of one shard each, which `fully_shard` knows.
    """
    sizes = dict(layout.mesh)
    if layout.replicate > 1 and layout.tensor > 1:
        sizes = {name: size for name, size in layout.sizes.items() if size > 1 or name == "shard"}
    sizes = sizes or {"replicate": 1}
    return init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def wrapped(
    model: nn.Module, layout: Layout, mesh: DeviceMesh, splits: Mapping[str, ParallelStyle]
) -> nn.Module:
    """`model`, changed in place, or what wraps it; `splits` has styles of layers or of experts."""
    names = mesh.mesh_dim_names or ()
    for dimension in ("tensor", "experts"):
        if layout.sizes[dimension] > 1:
            require_dtensor_steps()
            parallelize_module(model, mesh[dimension], dict(splits))
    if "shard" in names:
        require_dtensor_steps()
        over = mesh["replicate", "shard"] if "replicate" in names else mesh["shard"]
        for layer in layers_of(model):
            fully_shard(layer, mesh=over)
        fully_shard(model, mesh=over)
        return model
    return DistributedDataParallel(model) if layout.replicate > 1 else model


def layers_of(model: nn.Module) -> Iterator[nn.Module]:
    """The members of lists of modules, which are what models repeat; the outermost ones."""
    for module in model.children():
        if isinstance(module, nn.ModuleList):
            yield from (layer for layer in module if next(layer.parameters(), None) is not None)
        else:
            yield from layers_of(module)


def begin_alike(model: nn.Module) -> None:
    """Give parameters and buffers of all ranks the values of rank 0."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if not tensor.is_meta:
                dist.broadcast(tensor.detach(), 0)
