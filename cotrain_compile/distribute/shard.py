"""Shard: a model whose parameters rest in parts, one on each rank, and are whole where used.

In: a model and a device mesh. Out: the same model. Its parameters are DTensors, and its classes
have a property for each. Inside a forward, the property gathers the parameter from all ranks, and
its backward leaves each rank the mean gradient of its own part. Outside it is the DTensor: that is
what initialisation, optimizers, `state_dict` and checkpoints see.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

from cotrain_compile.distribute.ranks import require_dtensor_steps
from cotrain_compile.errors import DistributeError

# Where recurrent layers keep their parameters once more.
_FLAT = "_flat_weights"

Model = TypeVar("Model", bound=nn.Module)


def shard(model: Model, mesh: DeviceMesh | None = None) -> Model:
    """Shard the parameters of `model` over the ranks of `mesh`, in place, and return it.

    Every rank calls it, after the process group was initialised and before an optimizer is made.
    Parameters and buffers begin with the values of rank 0. A parameter is split along its first
    dimension of which all ranks get equal parts; one that has none rests whole on every rank. Its
    gradient is the mean over all ranks. A mesh of two dimensions replicates over the first and
    shards over the second; without a `mesh`, all ranks share the shards.

    Raises `DistributeError` where the model is distributed already, where the mesh has more than
    two dimensions, and where there is no process group.
    """
    require_dtensor_steps()
    _refuse_distributed(model)
    _refuse_held_elsewhere(model)
    mesh = _mesh_of_all(model) if mesh is None else mesh
    if mesh.ndim > 2:
        raise DistributeError(
            f"the mesh has {mesh.ndim} dimensions, and shard() takes one (shards) or two "
            "(replicas, then shards); pass a part of it, such as mesh['replicas', 'shards']"
        )
    _distribute(model, mesh)
    uses = _Uses()
    for module in model.modules():
        if next(module.parameters(), None) is not None:
            module.__class__ = _gathering_class(module, uses)
    return model


def gathered(
    param: DTensor,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The whole of `param`, whose gradient is the mean of what all ranks give it, in parts.

    It is gathered in `param_dtype`, and its gradient reduced in `reduce_dtype`; None for its own.
    """
    dimensions = param.device_mesh.ndim
    whole = param.redistribute(
        placements=[Replicate()] * dimensions,
        forward_dtype=param_dtype,
        backward_dtype=reduce_dtype,
    )
    return whole.to_local(grad_placements=[Partial("avg")] * dimensions)


def gathered_part(
    param: DTensor,
    data: DeviceMesh,
    tensor: DeviceMesh,
    shape: torch.Size,
    stride: tuple[int, ...],
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
) -> DTensor:
    """What a rank's layer works on, of a `param` whose parts for `tensor` are sharded over `data`.

    `gathered` over the mesh `data` alone: `shape` and `stride` are those of the part of this rank's
    layer, and the result is a DTensor of `tensor`, as before it was sharded.
    """
    over_data = [
        Replicate() if placement.is_replicate() else Shard(placement.dim)  # type: ignore[attr-defined]
        for placement in param.placements[: data.ndim]
    ]
    own = DTensor.from_local(
        param.to_local(), data, over_data, run_check=False, shape=shape, stride=stride
    )
    return DTensor.from_local(
        gathered(own, param_dtype, reduce_dtype),
        tensor,
        param.placements[data.ndim :],
        run_check=False,
        shape=param.shape,
        stride=param.stride(),
    )


class _Uses:
    """Whether a forward of a sharded model is running."""

    def __init__(self) -> None:
        self.running = False


def _refuse_distributed(model: nn.Module) -> None:
    for name, param in model.named_parameters():
        if isinstance(param, DTensor):
            raise DistributeError(
                f"{name} is a DTensor already (by fully_shard, parallelize_module or an earlier "
                "shard()); leave shard() out: such a model is trained as it is"
            )
    for name, module in model.named_modules():
        if type(module).__name__ in ("DistributedDataParallel", "FullyShardedDataParallel"):
            raise DistributeError(
                f"{name or 'the model'} is a {type(module).__name__}; give shard() the module that "
                "it wraps"
            )


def _refuse_held_elsewhere(model: nn.Module) -> None:
    """A module that keeps its parameters in a list as well would go on with the whole ones."""
    params = set(map(id, model.parameters()))
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if attribute in ("_parameters", _FLAT) or not isinstance(value, list | tuple | dict):
                continue
            held = value.values() if isinstance(value, dict) else value
            if any(id(item) in params for item in held):
                raise DistributeError(
                    f"{name or 'the model'}.{attribute} holds parameters beside the module's own; "
                    "shard() would not see their use. Read them as attributes of the module, or "
                    "hold them in an nn.ParameterList"
                )


def _mesh_of_all(model: nn.Module) -> DeviceMesh:
    if not (dist.is_available() and dist.is_initialized()):
        raise DistributeError(
            "shard() needs a process group: start the script by torchrun, and call "
            "torch.distributed.init_process_group() before"
        )
    kinds = {param.device.type for param in model.parameters()} - {"meta"}
    if len(kinds) > 1:
        raise DistributeError(
            f"the model has parameters on {' and '.join(sorted(kinds))}; move it to one device, or "
            "pass a mesh"
        )
    default = "cuda" if torch.cuda.is_available() else "cpu"
    return init_device_mesh(kinds.pop() if kinds else default, (dist.get_world_size(),))


def _distribute(model: nn.Module, mesh: DeviceMesh) -> None:
    """Make every parameter of `model` a DTensor, one that several modules share one DTensor."""
    made: dict[int, nn.Parameter] = {}
    whole = [Replicate()] * mesh.ndim
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None:
                if id(param) not in made:
                    parts = distribute_tensor(param.detach(), mesh, _placements(param, mesh))
                    made[id(param)] = nn.Parameter(parts, param.requires_grad)
                module._parameters[name] = made[id(param)]
    with torch.no_grad():
        for buffer in model.buffers():
            if not buffer.is_meta:
                buffer.copy_(distribute_tensor(buffer.detach(), mesh, whole).to_local())


def _placements(param: torch.Tensor, mesh: DeviceMesh) -> list[Placement]:
    """Replicated over all dimensions of `mesh` but the last, sharded over that one."""
    ranks = mesh.size(mesh.ndim - 1)
    equal = [place for place, size in enumerate(param.shape) if size and size % ranks == 0]
    last: Placement = Shard(equal[0]) if equal else Replicate()
    return [*[Replicate()] * (mesh.ndim - 1), last]


def _gathering_class(module: nn.Module, uses: _Uses) -> type[nn.Module]:
    """The class of `module`, which gathers the parameters that are its own while it is used."""
    base = type(module)
    own = [name for name, param in module._parameters.items() if param is not None]
    members: dict[str, Any] = {name: _gathering_property(name, uses) for name in own}
    members["forward"] = _counted(base.forward, uses)
    if isinstance(module, nn.RNNBase):
        members[_FLAT] = property(_flat_weights, lambda module, value: None)
    members["__module__"], members["__qualname__"] = base.__module__, base.__qualname__
    return type(base.__name__, (base,), members)


def _gathering_property(name: str, uses: _Uses) -> property:
    def read(module: nn.Module) -> Any:
        param = module._parameters[name]
        return gathered(param) if uses.running and isinstance(param, DTensor) else param

    return property(read)


def _flat_weights(module: nn.RNNBase) -> list[Any]:
    return [getattr(module, name, None) for name in module._flat_weights_names]


def _counted(forward: Callable[..., Any], uses: _Uses) -> Callable[..., Any]:
    """`forward` of a class, during which parameters of the model are whole."""

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if uses.running:  # Dynamo allows no write within a checkpoint
            return forward(*args, **kwargs)
        uses.running = True
        try:
            return forward(*args, **kwargs)
        finally:
            uses.running = False

    return run
