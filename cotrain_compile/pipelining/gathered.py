"""Gathered: parameters of stages that rest in parts, one on each rank of a shard, and are whole
during a step.

A step gathers what a stage has once, before its first turn, and scatters its gradients once, behind
all of its turns, whatever the number of micro-batches. The module of a stage has the whole
parameters, whose memory is there during a step alone; the model has the parts, which an optimizer
updates and a checkpoint has. What layers split over other ranks have of a parameter is gathered as
that: parts of parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard


@dataclass
class _Parameter:
    """One of a stage, and its part at `home`, along `dim`; None where every rank has all of it.

    `coming` has all parts, one behind the other, when it is waited for.
    """

    home: nn.Parameter
    whole: nn.Parameter
    dim: int | None
    coming: torch.Tensor | None = None


@dataclass
class GatheredStages:
    """The parameters of this rank's stages, over the ranks of `group`.

    `sent_bytes` counts what this rank has sent for them.
    """

    group: Any
    homes: dict[int, nn.Parameter] = field(default_factory=dict)
    sent_bytes: float = 0.0
    _stages: list[list[_Parameter]] = field(default_factory=list)

    @property
    def _name(self) -> str:
        return str(self.group.group_name)

    @property
    def ranks(self) -> int:
        """How many have a part each."""
        return dist.get_world_size(self.group)

    def add(self, module: nn.Module, mesh: DeviceMesh) -> int:
        """Take the parameters of `module`; the number of the stage. `homes` has their parts then,
        by the ids of parameters.

        `mesh` is one of all ranks, with the dimension "shard". Parts have the values of the first
        rank of a shard.
        """
        taken: dict[int, _Parameter] = {}
        for part in module.modules():
            for name, param in part.named_parameters(recurse=False):
                if id(param) not in taken:
                    taken[id(param)] = self._take(param, mesh)
                setattr(part, name, taken[id(param)].whole)
        self.homes |= {id(one.whole): one.home for one in taken.values()}
        self._stages.append(list(taken.values()))
        return len(self._stages) - 1

    def begin(self) -> None:
        """All parameters begin to come, and gradients to add to are zero."""
        for one in self._all():
            _allocate(one.whole)
            if one.dim is None:
                _own(one.whole).copy_(_own(one.home))
            else:
                part = _own(one.home).detach().contiguous()
                one.coming = _gather(part, self.ranks, self._name)
                self.sent_bytes += (self.ranks - 1) * part.nbytes
            if one.whole.grad is not None:
                _allocate(one.whole.grad)
                _own(one.whole.grad).zero_()

    def arrive(self, number: int) -> None:
        """The parameters of that stage are there after it."""
        for one in self._stages[number]:
            if one.coming is not None and one.dim is not None:
                parts = _awaited(one.coming).chunk(self.ranks)
                torch.cat(parts, one.dim, out=_own(one.whole))
                one.coming = None

    def scatter(self) -> None:
        """Each rank has the mean gradients of its parts after it, and nothing is whole."""
        summed = []
        for one in self._all():
            if one.whole.grad is None or one.home.grad is None:
                continue
            own, part = _own(one.whole.grad).mul_(1.0 / self.ranks), _own(one.home.grad)
            if one.dim is None:
                summed.append((part, _sum(own, self._name)))
                self.sent_bytes += 2 * (self.ranks - 1) * part.nbytes / self.ranks
            else:
                chunks = torch.cat(own.chunk(self.ranks, one.dim))
                summed.append((part, _scatter(chunks, self.ranks, self._name)))
                self.sent_bytes += (self.ranks - 1) * part.nbytes
        for part, made in summed:
            part.copy_(_awaited(made))
        self.leave()

    def bring(self, number: int) -> Callable[[bool], None]:
        """What a turn of that stage calls, with or without a backward."""
        return lambda backward: self.arrive(number)

    def leave(self) -> None:
        """Nothing is whole after it."""
        for one in self._all():
            if one.coming is not None:
                _awaited(one.coming)
                one.coming = None
            _free(one.whole)
            if one.whole.grad is not None:
                _free(one.whole.grad)

    def _all(self) -> Iterator[_Parameter]:
        return (one for stage in self._stages for one in stage)

    def _take(self, param: nn.Parameter, mesh: DeviceMesh) -> _Parameter:
        """A DTensor rests as one of two dimensions, the shard first, along another dimension than
        what divides it over other ranks."""
        local = _own(param).clone(memory_format=torch.contiguous_format)
        dist.broadcast(local, dist.get_global_rank(self.group, 0), group=self.group)
        names, whole = ["shard"], local
        placements: Sequence[Placement] = ()
        if isinstance(param, DTensor):
            names += param.device_mesh.mesh_dim_names or ()
            placements = param.placements
            whole = DTensor.from_local(
                local, param.device_mesh, placements, run_check=False,
                shape=param.shape, stride=param.stride(),
            )  # fmt: skip
        dim = _divided_along(local, self.ranks, placements)
        part = local if dim is None else local.chunk(self.ranks, dim)[dist.get_rank(self.group)]
        home = DTensor.from_local(
            part.clone(memory_format=torch.contiguous_format),
            mesh[tuple(names)],
            [Replicate() if dim is None else Shard(dim), *placements],
            run_check=False,
            shape=param.shape,
            stride=param.stride(),
        )
        trained = param.requires_grad
        own = nn.Parameter(whole, trained)
        if trained:
            own.grad = torch.zeros_like(own)
        return _Parameter(nn.Parameter(home, trained), own, dim)


def _divided_along(local: torch.Tensor, ranks: int, placements: Sequence[Placement]) -> int | None:
    """The first dimension of which all ranks get equal parts, and that nothing else divides."""
    taken = {placement.dim for placement in placements if isinstance(placement, Shard)}
    for dim, size in enumerate(local.shape):
        if size and size % ranks == 0 and dim not in taken:
            return dim
    return None


def _gather(part: torch.Tensor, ranks: int, group_name: str) -> torch.Tensor:
    made: torch.Tensor = torch.ops._c10d_functional.all_gather_into_tensor(part, ranks, group_name)
    return made


def _scatter(chunks: torch.Tensor, ranks: int, group_name: str) -> torch.Tensor:
    made: torch.Tensor = torch.ops._c10d_functional.reduce_scatter_tensor(
        chunks, "sum", ranks, group_name
    )
    return made


def _sum(tensor: torch.Tensor, group_name: str) -> torch.Tensor:
    made: torch.Tensor = torch.ops._c10d_functional.all_reduce(tensor, "sum", group_name)
    return made


def _awaited(tensor: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = torch.ops._c10d_functional.wait_tensor(tensor)
    return made


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of it; it shares memory with it."""
    own = tensor.detach()
    return own.to_local() if isinstance(own, DTensor) else own


def _allocate(tensor: torch.Tensor) -> None:
    own = _own(tensor)
    own.untyped_storage().resize_(own.nbytes)


def _free(tensor: torch.Tensor) -> None:
    _own(tensor).untyped_storage().resize_(0)
