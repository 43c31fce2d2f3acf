"""Clipping by the norm of a whole model, whose parameters may be shared over ranks in several ways.

torch takes a norm of DTensors of one mesh, or of plain tensors; a model whose layers are tensor
parallel has both, and one that is sharded besides has DTensors of two meshes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor


def clip_grad_norm(
    parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
) -> torch.Tensor:
    """Clip the gradients of `parameters` by the norm of all of them; that norm.

    As `torch.nn.utils.clip_grad_norm_`, and the same on every rank, within a captured step and in
    eager; for plain parameters and DTensors of any meshes together. What is plain has to be the
    same on all ranks: stages of a pipeline have a `clip_grad_norm` of their own.
    """
    params = [param for param in parameters if param.grad is not None]
    whole = norm_of_gradients(params, norm_type)
    clip_by_norm(params, max_norm, whole)
    return whole


def norm_of_gradients(parameters: Iterable[torch.Tensor], norm_type: float = 2.0) -> torch.Tensor:
    """The norm of the gradients of `parameters`; 0 where there are none."""
    norms = [_norm(group, norm_type) for group in _alike(parameters)]
    if not norms:
        return torch.zeros(())
    whole: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    return whole


def clip_by_norm(parameters: Iterable[torch.Tensor], max_norm: float, whole: torch.Tensor) -> None:
    """Clip the gradients of `parameters`, whose norm is `whole`."""
    for group in _alike(parameters):
        nn.utils.clip_grads_with_norm_(group, max_norm, whole)


def _alike(parameters: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Parameters with gradients that torch takes together."""
    found: dict[Any, list[torch.Tensor]] = {}
    for param in parameters:
        if param.grad is not None:
            found.setdefault(_mesh_of(param.grad), []).append(param)
    return list(found.values())


def _norm(params: list[torch.Tensor], norm_type: float) -> torch.Tensor:
    gradients = [param.grad for param in params if param.grad is not None]
    norm = nn.utils.get_total_norm(gradients, norm_type)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _mesh_of(gradient: torch.Tensor) -> Any:
    """Equal for DTensors of one mesh. A trace knows a mesh by what it is made of."""
    if not isinstance(gradient, DTensor):
        return None
    mesh = gradient.device_mesh
    return mesh.mesh_dim_names, tuple(mesh.shape)
