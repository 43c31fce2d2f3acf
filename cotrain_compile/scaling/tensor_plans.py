"""Tensor plans: which layers of a model `parallelize_module` splits, and how.

A user gives one, or the model is of Hugging Face, whose models carry theirs in words.

Experts: of a layer that has several each rank has some, and tokens go where their expert is.

In: a module of experts, whose parameters have one row for each, and which maps rows of tokens
`(experts, tokens, width)` to as many, those of an expert by its own parameters. It does so for the
experts of its rank then, and for the tokens of all ranks (GShard: Lepikhin et al., ICLR 2021).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from cotrain_compile.distribute.ddp import take_mean
from cotrain_compile.errors import DistributeError
from cotrain_compile.pipelining.grid import is_called
from cotrain_compile.scaling.by_tokens import by_tokens


def _style(word: str) -> ParallelStyle | None:
    match word:
        case "colwise":
            return ColwiseParallel()
        case "rowwise":
            return RowwiseParallel()
        case "colwise_rep" | "colwise_gather_output":
            return ColwiseParallel(output_layouts=Replicate())
        case "embedding_rowwise" | "rowwise_rep":
            return RowwiseParallel(input_layouts=Replicate())
    return None


def tensor_plan_of(
    model: nn.Module, given: Mapping[str, ParallelStyle] | None, *, sequence: bool
) -> dict[str, ParallelStyle]:
    """By name of module, with wildcards, how it is split: what is `given`, or the model's own.

    Raises `DistributeError` where there is neither, where tokens are to be divided too and nothing
    is given, where a name is that of no module, and where a split layer shares its weight with
    another one.
    """
    if given is not None:
        _refuse_unknown(model, given)
        _refuse_shared(model, given)
        return dict(given)
    plan = {name: style for name, style in _own_plan(model).items() if not _shared_in(model, name)}
    if not plan:
        raise DistributeError(
            f"the plan divides layers, and {type(model).__name__} does not say which (only models "
            "of Hugging Face with a _tp_plan do); pass tensor_plan=, such as "
            '{"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}'
        )
    return by_tokens(model, plan) if sequence else plan


def expert_plan_of(model: nn.Module, experts: Sequence[str]) -> dict[str, ParallelStyle]:
    """By name of module of experts how it is divided; names may have wildcards.

    Raises `DistributeError` where there are none, or no such modules, or they share a weight.
    """
    if not experts:
        raise DistributeError(
            "the plan divides experts, and nobody knows which modules have them; pass experts=, "
            'such as ["layers.*.experts"]: modules that map rows of tokens (experts, tokens, '
            "width), with parameters of a row for each expert"
        )
    plan: dict[str, ParallelStyle] = {name: ExpertParallel() for name in experts}
    _refuse_unknown(model, plan)
    _refuse_shared(model, plan)
    return plan


def _own_plan(model: nn.Module) -> dict[str, ParallelStyle]:
    """Of the outermost modules that have one."""
    found: dict[str, ParallelStyle] = {}
    done: list[str] = []
    for prefix, module in model.named_modules():
        words = getattr(module, "_tp_plan", None)
        if not words or any(prefix.startswith(outer) for outer in done):
            continue
        done.append(f"{prefix}." if prefix else "")
        for name, word in words.items():
            style = _style(word)
            if style is None:
                raise DistributeError(
                    f"{type(module).__name__} splits {name} as {word!r}, which no style of torch's "
                    "is known for; pass tensor_plan="
                )
            found[f"{done[-1]}{name}"] = style
    return found


def _refuse_unknown(model: nn.Module, plan: Mapping[str, ParallelStyle]) -> None:
    known = [name for name, _ in model.named_modules()]
    for pattern in plan:
        if not any(is_called(name, pattern) for name in known):
            raise DistributeError(
                f"{pattern} is to be split, and {type(model).__name__} has no such module; "
                "take names as in model.named_modules(), with * for any one part of a name"
            )


def _refuse_shared(model: nn.Module, plan: Mapping[str, ParallelStyle]) -> None:
    for pattern in plan:
        for name, other in _shared_in(model, pattern):
            raise DistributeError(
                f"{name} is to be split and shares its weight with {other}, which would train one "
                "of its own; untie them (tie_word_embeddings=False in a configuration of Hugging "
                f"Face), or leave {pattern} whole"
            )


def _shared_in(model: nn.Module, pattern: str) -> list[tuple[str, str]]:
    """Parameters in modules of that name that are elsewhere too, each with the other name."""
    names: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    return [
        (name, next(other for other in all_names if other != name))
        for all_names in names.values()
        if len(all_names) > 1
        for name in all_names
        if is_called(name.rpartition(".")[0], pattern)
    ]


class ExpertParallel(ParallelStyle):
    """The style of a module of experts, beside torch's, along `dimension` of a mesh.

    `module(rows)` is as before for rows of all experts. Its parameters are DTensors, whose
    gradients are sums over the losses of all ranks.
    """

    dimension = "experts"

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
        if param.grad is None:
            continue
        if not isinstance(param.grad, DTensor):
            take_mean(param, group_name, ranks)
        elif "experts" in (param.grad.device_mesh.mesh_dim_names or ()):
            with torch.no_grad():
                param.grad.mul_(1.0 / ranks)
        else:
            _take_mean_of_part(param.grad, group_name, ranks)


def _take_mean_of_part(gradient: DTensor, group_name: str, ranks: int) -> None:
    """Of a parameter in parts: ranks of the group have the same one."""
    with torch.no_grad():
        part = (gradient.to_local() * (1.0 / ranks)).contiguous()
        total = torch.ops._c10d_functional.all_reduce(part, "sum", group_name)
        mean = torch.ops._c10d_functional.wait_tensor(total)
        whole = DTensor.from_local(
            mean,
            gradient.device_mesh,
            gradient.placements,
            run_check=False,
            shape=gradient.shape,
            stride=gradient.stride(),
        )
        gradient.copy_(whole)


def _dispatching(module: nn.Module, group_name: str, ranks: int) -> type[nn.Module]:
    """The class of `module`, whose forward exchanges rows and works on this rank's parts."""
    base = type(module)
    members: dict[str, Any] = {"forward": _exchanging(base.forward, group_name, ranks)}
    members["__module__"], members["__qualname__"] = base.__module__, base.__qualname__
    return type(base.__name__, (base,), members)


class _OwnParts:
    """A module as its forward sees it: of its parameters the parts that this rank has.

    They are read as attributes of the module, as what shards them further expects.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        return value.to_local() if isinstance(value, DTensor) else value


def _exchanging(
    forward: Callable[..., torch.Tensor], group_name: str, ranks: int
) -> Callable[..., torch.Tensor]:
    @functools.wraps(forward)
    def run(self: nn.Module, rows: torch.Tensor) -> torch.Tensor:
        # By owner of the expert, then by rank whose tokens they are, and back.
        received = _exchange(rows, group_name, ranks).unflatten(0, (ranks, -1))
        made = forward(_OwnParts(self), received.transpose(0, 1).flatten(1, 2))
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
