"""Grid: the ranks of a pipeline, with stages along one dimension and replicas along the other.

Replicas have the same stages and other samples. What they exchange is what
`DistributedDataParallel` would: values of the first one when they begin, its buffers before each
step, and sums of gradients after the last micro-batch, in place.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from cotrain_compile.errors import DistributeError

STAGES = "pipeline"


class Grid:
    """`rank` of `ranks` is this rank's place among the stages, `replica` that of its samples.

    Without a mesh all ranks of the process group are one pipeline. `group` is that of the ranks
    of this pipeline.
    """

    def __init__(self, mesh: DeviceMesh | None) -> None:
        """Raises `DistributeError` for a mesh that is not one of stages, or stages and replicas."""
        self._replicas_group: Any = None
        self.group: Any = dist.group.WORLD
        self.replica, self.replicas = 0, 1
        self._of_first = list(range(dist.get_world_size()))
        if mesh is not None:
            self._read(mesh)
        self.rank, self.ranks = dist.get_rank(self.group), dist.get_world_size(self.group)

    def _read(self, mesh: DeviceMesh) -> None:
        names = mesh.mesh_dim_names or ()
        if STAGES not in names or mesh.ndim > 2 or mesh.size() != dist.get_world_size():
            raise DistributeError(
                f"a pipeline of {dist.get_world_size()} ranks has a mesh of all of them, with the "
                f"dimension {STAGES!r} and at most one of replicas, not {mesh}; "
                'init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "replicate")) has '
                "two stages, twice"
            )
        along = names.index(STAGES)
        self.group = mesh.get_group(along)
        if mesh.ndim == 2:
            self._of_first = mesh.mesh.select(1 - along, 0).tolist()
            self._replicas_group = mesh.get_group(1 - along)
            self.replica, self.replicas = mesh.get_local_rank(1 - along), mesh.size(1 - along)

    def of_one_replica(self, numbers: Sequence[float]) -> list[float]:
        """Of the numbers of all ranks, those of the first pipeline: of each stage one."""
        return [numbers[rank] for rank in self._of_first]

    def send_first(self, tensors: Iterable[torch.Tensor]) -> None:
        """Give `tensors` the values that the first replica has."""
        if self.replicas > 1:
            source = dist.get_global_rank(self._replicas_group, 0)
            with torch.no_grad():
                works = [
                    dist.broadcast(tensor.detach(), source, self._replicas_group, async_op=True)
                    for tensor in tensors
                ]
                _await(works)

    def add_up(self, gradients: Iterable[torch.Tensor]) -> None:
        """Make `gradients` their sums over all replicas."""
        if self.replicas > 1:
            _await(
                [
                    dist.all_reduce(gradient, group=self._replicas_group, async_op=True)
                    for gradient in gradients
                ]
            )


def _await(works: Iterable[Any]) -> None:
    for work in works:
        work.wait()
