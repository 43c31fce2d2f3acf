"""FSDP2 as it is set up: what `fully_shard` has made of a model, as far as a captured step goes.

In eager, hooks of FSDP gather the parameters of a module before its forward and its backward, and
reduce gradients after it. Here is how each parameter is gathered, what a trace runs in place of
the hooks, and what of a set-up it cannot do. The model is not changed: it still runs in eager.

Private torch API used: `FSDPState`, `FSDPParamGroup` and `FSDPParam` (`torch.distributed.fsdp.
_fully_shard`), their policies and flags. Reason: nothing public says how a model was sharded.
Tried on torch 2.13.0, 2.14.1 and 2.15.0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._pytree import tree_map


@dataclass(frozen=True)
class LayerPart:
    """The part of a tensor parallel layer's parameter that `fully_shard` has sharded further.

    It is gathered over `data`, has this `shape` then, and is a DTensor of `tensor`.
    """

    data: DeviceMesh
    tensor: DeviceMesh
    shape: torch.Size
    stride: tuple[int, ...]


@dataclass(frozen=True)
class Gathering:
    """The dtypes in which a parameter is gathered and its gradient reduced; None for its own.

    `part` is None where the whole of it is gathered.
    """

    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    part: LayerPart | None = None


@dataclass
class ShardedTrace:
    """What one trace has met: `gatherings` by the ids of parameters, and the forwards that run.

    `graph` is what it belongs to: Dynamo may begin again with a new one. `gathered` has what stands
    for whole parameters, until the outermost forward ends.
    """

    graph: object = None
    gatherings: dict[int, Gathering] = field(default_factory=dict)
    running: int = 0
    gathered: dict[object, Any] = field(default_factory=dict)


def states_in(module: nn.Module) -> Iterator[tuple[FSDPModule, FSDPState]]:
    """The modules within `module` that `fully_shard` was called on, with their states."""
    for inner in module.modules():
        if isinstance(inner, FSDPModule):
            yield inner, inner._get_fsdp_state()


def gatherings(state: FSDPState) -> dict[int, Gathering]:
    """How the parameters of `state` are gathered, by the id of what rests."""
    found = {}
    for group in state._fsdp_param_groups:
        for held in group.fsdp_params:
            policy = held.mp_policy
            own = held.sharded_param.dtype
            low = policy.param_dtype if own.is_floating_point else None
            gathering = Gathering(low, policy.reduce_dtype or low, _layer_part(held))
            found[id(held.sharded_param)] = gathering
    return found


def _layer_part(held: Any) -> LayerPart | None:
    """None for what is not tensor parallel as well."""
    layer = held._unsharded_dtensor_spec
    if layer is None or getattr(held.mesh_info, "is_spmd_mesh", False):
        return None
    size, stride = held._orig_size, held._contiguous_orig_stride
    return LayerPart(held.mesh_info.mesh, layer.mesh, size, tuple(stride))


def keep_sharded(module: nn.Module) -> bool:
    """Have `module` shard its parameters after every forward; whether some were whole till now.

    By default those of a root stay whole after a forward without backward. A step would then find
    other parameters than the optimizer has.
    """
    were_whole = False
    for inner, state in states_in(module):
        for group in state._fsdp_param_groups:
            were_whole |= not group.is_sharded
        if all(isinstance(group.mesh_info, FSDPMeshInfo) for group in state._fsdp_param_groups):
            inner.set_reshard_after_forward(True, recurse=False)
        inner.reshard()
    return were_whole


def why_refused(module: nn.Module) -> str | None:
    """What of a sharded `module` a captured step cannot do, with the way on; None for nothing."""
    managed: set[int] = set()
    for _, state in states_in(module):
        managed.update(gatherings(state))
        why = _why_state_refused(state)
        if why is not None:
            return why
    for name, param in module.named_parameters():
        if id(param) not in managed and param.requires_grad:
            return (
                f"{name} is trained and not sharded (ignored_params of fully_shard, or a parameter "
                "added later), so that each rank would train one of its own; leave ignored_params "
                "out, or freeze it (requires_grad_(False))"
            )
    return None


def _why_state_refused(state: FSDPState) -> str | None:
    for group in state._fsdp_param_groups:
        custom = (
            type(group._all_gather_comm).__name__ != "DefaultAllGather"
            or type(group._reduce_scatter_comm).__name__ != "DefaultReduceScatter"
            or group._all_reduce_hook is not None
        )
        if custom:
            return (
                "the model has communication of its own (set_custom_all_gather, "
                "set_custom_reduce_scatter or set_all_reduce_hook), which a captured step would "
                "skip; leave it out"
            )
        if group.gradient_divide_factor is not None or group.reduce_scatter_unused_params:
            return (
                "set_gradient_divide_factor and set_reduce_scatter_unused_params change what a "
                "gradient is, and a captured step takes the mean over all ranks; leave them out, "
                "and scale the loss in place of the gradient"
            )
        policies = [held.mp_policy for held in group.fsdp_params]
        if any(torch.float16 in (each.param_dtype, each.reduce_dtype) for each in policies):
            return (
                "MixedPrecisionPolicy reduces gradients in float16, whose sums may overflow; use "
                "torch.bfloat16, or torch.autocast in the step"
            )
        for held in group.fsdp_params:
            why = _why_param_refused(held)
            if why is not None:
                return why
    return None


def _why_param_refused(held: Any) -> str | None:
    param = held.sharded_param
    where = f"{type(held._module_info.module).__name__}.{held._module_info.param_name}"
    if not isinstance(param, DTensor) or getattr(held.mesh_info, "is_spmd_mesh", False):
        return (
            f"{where} was a DTensor of the whole mesh before fully_shard (dp_mesh_dims), which is "
            "not captured; call parallelize_module on the tensor dimension of the mesh, and "
            "fully_shard on the others"
        )
    if not all(type(each) in (Replicate, Shard, _StridedShard) for each in param.placements):
        return f"{where} is placed as {param.placements}; use the default placement, or a Shard"
    if param.to_local().device.type != param.device_mesh.device_type:
        return (
            f"{where} rests on {param.to_local().device} by CPUOffloadPolicy; leave offload_policy "
            "out: the plan decides what rests on the host, by the option memory_budget"
        )
    if hasattr(param.to_local(), "fsdp_pre_all_gather"):
        return f"{where} changes how it is gathered (fsdp_pre_all_gather), which is not captured"
    return None


def enter(state: FSDPState, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """What is traced for the hook before a forward."""
    return args, kwargs


def enter_with_cast(
    dtype: torch.dtype, state: FSDPState, module: nn.Module, args: Any, kwargs: Any
) -> tuple[Any, Any]:
    """`enter`, where the policy casts what a forward is given."""
    return _cast(dtype, args), _cast(dtype, kwargs)


def leave(state: FSDPState, module: nn.Module, args: Any, output: Any) -> Any:
    """What is traced for the hook after a forward."""
    return output


def leave_with_cast(
    dtype: torch.dtype, state: FSDPState, module: nn.Module, args: Any, output: Any
) -> Any:
    """`leave`, where the policy casts what a forward returns."""
    return _cast(dtype, output)


def _cast(dtype: torch.dtype, values: Any) -> Any:
    def cast(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return value.to(dtype)
        return value

    return tree_map(cast, values)


def nothing(module: FSDPModule, *args: Any, **kwargs: Any) -> None:
    """What is traced for methods that say when to communicate, which the graph and the plan say."""
